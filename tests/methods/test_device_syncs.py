"""A training step waits for no device: the real loop on tensors that have shapes but no data."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_syncs import DEVICE, DeviceContext, DeviceSyncs
from torch import Tensor, nn

from bench.context import RunSettings, StageAccount
from datasets.base import Split, Task
from datasets.images import Images, MappedImages
from datasets.photos import photo_transforms
from datasets.resident import ResidentImages
from methods.backbones import Backbone, Classifier
from methods.cnc import ROLES, TwoSidedLoss
from methods.groupdro import RobustLoss
from methods.jtt import ErrorTrackingCrossEntropy
from methods.nct.builder import NodeLoss, _new_heads_only
from methods.nct.tree import Tree
from methods.optimisation import TrainConfig
from methods.training import Batch, CrossEntropy, Training, shuffled

EPOCHS = TrainConfig(epochs=1, batch_size=16, lr=0.01)


class Reading(CrossEntropy):
    """Reads its loss, as loops do that print it."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().forward(model, batch)
        loss.item()
        return loss


class Fetching(CrossEntropy):
    """Copies what it was shown to the host."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        batch.index.cpu()
        return super().forward(model, batch)


class Selecting(CrossEntropy):
    """Takes the samples of a class, however many those are."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        chosen = batch.y == 1
        return nn.functional.cross_entropy(model(batch.images[chosen]), batch.y[chosen])


def network(side: int, channels: int) -> Classifier:
    layers = nn.Flatten(), nn.Linear(channels * side**2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
    return Classifier(Backbone(nn.Sequential(*layers), 8), 2)


@pytest.fixture
def on_device(tmp_path: Path) -> DeviceContext:
    settings = RunSettings("run", 0, DEVICE, scope={}, stages=tmp_path / "stages")
    return DeviceContext(settings, StageAccount("run", tmp_path / "run"), [])


def with_images(task: Task, images: Images) -> Task:
    own = task.train
    return replace(task, train=Split("train", images, own.y, own.ids, own._granted))


def photos(path: Path, count: int) -> ResidentImages:
    """Photos of two sizes, on the device."""
    sizes = torch.tensor([(40, 50), (50, 40)]).repeat(count // 2, 1)
    pixels = np.zeros(count * 6000, dtype=np.uint8)
    pixels.tofile(path)
    mapped = MappedImages(str(path), torch.arange(count) * 6000, sizes)
    return ResidentImages.load(mapped, DEVICE)


def waits(task: Task, ctx: DeviceContext, side: int, channels: int, **how: object) -> list[str]:
    """Take an epoch's steps, and return for what the processor would wait."""
    config = how.pop("config", EPOCHS)
    model = how.pop("model", None) or network(side, channels)
    training = Training(model, task, config, ctx, **how)  # type: ignore[arg-type]
    training._prepare()
    training._mean_loss = lambda total, images: 0.0  # type: ignore[method-assign]  # once an epoch
    for group in training._optimizer.param_groups:  # which needs a real device
        group["fused"] = False
    with DeviceSyncs() as syncs, suppress(RuntimeError, NotImplementedError):
        training._steps()
        syncs.calls.append("end")
    return syncs.calls


@pytest.mark.parametrize("name", ["erm", "averaged", "accumulated", "adamw"])
def test_no_step_on_digits_waits(toy_task: Task, on_device: DeviceContext, name: str) -> None:
    task = with_images(toy_task, toy_task.train.images.to(DEVICE))
    how: dict[str, dict[str, object]] = {
        "averaged": {"average": 0.9},
        "accumulated": {"accumulate": 2},
        "adamw": {"config": replace(EPOCHS, optimizer="adamw")},
    }
    assert waits(task, on_device, 8, 1, **how.get(name, {})) == ["end"]


@pytest.mark.parametrize("name", ["groupdro", "jtt", "cnc"])
def test_no_objective_waits(granted_task: Task, on_device: DeviceContext, name: str) -> None:
    objective: nn.Module = {
        "groupdro": RobustLoss(granted_task.train.groups, torch.eye(4), 0.01, 1.0),
        "jtt": ErrorTrackingCrossEntropy(60),
        "cnc": TwoSidedLoss(3, 2, 0.1, 0.75),
    }[name]
    config = replace(EPOCHS, batch_size=2 * ROLES * 3) if name == "cnc" else EPOCHS
    task = with_images(granted_task, granted_task.train.images.to(DEVICE))
    # Sets are drawn once an epoch, on the host.
    drawn = torch.arange(2 * 2 * ROLES * 3) % 60
    sampler = (lambda number, generator: drawn.to(DEVICE)) if name == "cnc" else shuffled(60)
    how = {"objective": objective, "config": config, "sampler": sampler}
    assert waits(task, on_device, 8, 1, **how) == ["end"]


@pytest.mark.parametrize("frozen", [True, False])
def test_no_step_of_a_tree_waits(toy_task: Task, on_device: DeviceContext, frozen: bool) -> None:
    """Of either phase of NCT's second iteration."""
    tree = Tree(network(8, 1).backbone, 2)
    tree.grow(4, 0.2, "asymmetric", first_mlp=False)
    tree.grow(4, 0.2, "asymmetric", first_mlp=False)
    task = with_images(toy_task, toy_task.train.images.to(DEVICE))
    labels = torch.arange(len(task.train)) % 4
    how = {
        "model": tree,
        "objective": NodeLoss(labels, torch.ones(4), 0.5, frozen),
        "average": 0.9,
        "set_mode": _new_heads_only if frozen else nn.Module.train,
    }
    assert waits(task, on_device, 8, 1, **how) == ["end"]


def test_no_step_on_photos_waits(toy_task: Task, on_device: DeviceContext, tmp_path: Path) -> None:
    train, _ = photo_transforms(32)
    task = replace(with_images(toy_task, photos(tmp_path / "pixels", 60)), train_transform=train)
    assert waits(task, on_device, 32, 3) == ["end"]


@pytest.mark.parametrize(
    ("objective", "call"),
    [
        (Reading(), "aten._local_scalar_dense"),
        (Fetching(), "aten._to_copy"),
        (Selecting(), "aten.index"),
    ],
)
def test_what_waits_is_found(
    toy_task: Task, on_device: DeviceContext, objective: nn.Module, call: str
) -> None:
    task = with_images(toy_task, toy_task.train.images.to(DEVICE))
    assert waits(task, on_device, 8, 1, objective=objective) == [call]
