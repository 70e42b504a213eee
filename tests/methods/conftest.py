"""A toy task of 8 x 8 images, and the harness's real context around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.audit import Auditor
from bench.context import RunContext, RunSettings, StageAccount
from datasets.base import BackboneSpec, Facts, LabelledSplit, Labels, LoadedData, Task
from datasets.images import MemoryImages
from datasets.transforms import PaddedRandomCrop, ResizedCentreCrop, Transform
from methods.backbones import Backbone, Classifier
from methods.base import Context, Supervision, load_methods
from methods.training import isolated_randomness

SIDE = 8
SIZES = {"train": 60, "val": 40, "test": 30}


def toy_split(size: int, generator: torch.Generator) -> LabelledSplit:
    """Bright images against dark ones; the group is the class and a coin."""
    y = torch.arange(size) % 2
    coin = torch.randint(0, 2, (size,), generator=generator)
    noise = torch.randint(0, 160, (size, 1, SIDE, SIDE), generator=generator)
    pixels = (noise + 80 * y[:, None, None, None]).to(torch.uint8)
    return LabelledSplit(Labels(torch.arange(size), y, 2 * y + coin), MemoryImages(pixels))


@pytest.fixture(scope="session")
def toy_data() -> LoadedData:
    generator = torch.Generator().manual_seed(7)
    facts = Facts(
        name="toy",
        protocol="toy",
        task="brightness",
        spurious="a coin",
        classes=("dark", "bright"),
        groups=("dark_0", "dark_1", "bright_0", "bright_1"),
        metric="wga",
        counts=SIZES,
        group_counts={},
        backbone="lenet4",
        channels=1,
        train_transform=Transform(PaddedRandomCrop(1), SIDE, (0.5,), (0.25,), hflip=True),
        eval_transform=Transform(ResizedCentreCrop(SIDE), SIDE, (0.5,), (0.25,)),
    )
    splits = {name: toy_split(size, generator) for name, size in SIZES.items()}
    return LoadedData(facts, splits)


@pytest.fixture
def toy_task(toy_data: LoadedData) -> Task:
    return toy_data.task(BackboneSpec("lenet4"), train_groups=False, val_groups=False)


@pytest.fixture
def selecting_task(toy_data: LoadedData) -> Task:
    return toy_data.task(BackboneSpec("lenet4"), train_groups=False, val_groups=True)


@pytest.fixture
def granted_task(toy_data: LoadedData) -> Task:
    return toy_data.task(BackboneSpec("lenet4"), train_groups=True, val_groups=True)


@pytest.fixture
def make_context(tmp_path: Path, toy_data: LoadedData) -> Callable[..., RunContext]:
    """Contexts of the real kind; the same name is the same folder, and so resumes."""
    auditor = Auditor(toy_data, tmp_path / "audit")

    def make(name: str = "run", seed: int = 0) -> RunContext:
        settings = RunSettings(
            run_id=name,
            seed=seed,
            device=torch.device("cpu"),
            scope={},
            stages=tmp_path / "stages",
            supervision=Supervision(train_groups=True, val_groups=True),  # the task decides
        )
        account = StageAccount(name, tmp_path / name)
        return RunContext(settings, account, [], audit=auditor.look)

    return make


def small_classifier(task: Task, ctx: Context, name: str) -> Classifier:
    """A linear network for the toy's 8 x 8 images, which no LeNet could take."""
    with isolated_randomness(ctx.seed(name, "init"), ctx.device):
        return Classifier(Backbone(nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 8)), 8), 2)


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Classifier]:
    """Let every method build the small network, and hand it to the test as well."""
    for method in load_methods().values():
        module = sys.modules[type(method).__module__]
        if hasattr(module, "build_classifier"):
            monkeypatch.setattr(module, "build_classifier", small_classifier)
    return small_classifier
