"""Rows of features go the way of images: through every method that asks for nothing of an image."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.audit import Auditor
from bench.context import RunContext, RunSettings, StageAccount
from bench.evaluation import predict_splits
from datasets.base import BackboneSpec, LabelledSplit, Labels, LoadedData
from datasets.errors import UsageError
from datasets.features import FeatureRows, MappedRows, RowTransform
from datasets.pixels import pixel_digest
from methods import backbones
from methods.backbones import Classifier, Standardise, backbone_for, build_backbone, check_input
from methods.base import NetworkSpec, Supervision, get_method, load_methods
from methods.exmap import heatmaps
from methods.prediction import EvalImages, predict
from methods.presets import preset_config

LENGTH = 6
SIZES = {"train": 240, "val": 320, "test": 120}


def rows_split(size: int, generator: torch.Generator) -> LabelledSplit:
    """Rows whose first number says the class, in units far from each other; one never varies."""
    y = torch.arange(size) % 2
    coin = (torch.rand(size, generator=generator) < 0.3).long()
    rows = torch.randn(size, LENGTH, generator=generator)
    rows[:, 0] += 3 * y
    rows[:, 1] += 2 * (y ^ coin)
    rows = 50 + rows * torch.tensor([1.0, 100.0, 0.01, 1.0, 1.0, 0.0])
    return LabelledSplit(Labels(torch.arange(size), y, 2 * y + coin), FeatureRows(rows))


@pytest.fixture(scope="module")
def row_data(toy_data: LoadedData) -> LoadedData:
    generator = torch.Generator().manual_seed(11)
    transform = RowTransform(length=LENGTH)
    facts = replace(
        toy_data.facts,
        channels=LENGTH,
        backbone="mlp",
        counts=SIZES,
        train_transform=transform,
        eval_transform=transform,
    )
    splits = {name: rows_split(size, generator) for name, size in SIZES.items()}
    return LoadedData(facts, splits)


def brief(config: Any) -> Any:
    """Return settings with which 240 rows are learnt in a second."""
    config = config.quick() if hasattr(config, "quick") else config
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    wanted = {"lr": 0.02, "epochs": 10, "batch_size": 16}
    # A tree has an epoch number for each iteration, and rates of other names.
    changed = {n: v for n, v in wanted.items() if n in known and not isinstance(known[n], tuple)}
    inner = {name: brief(value) for name, value in known.items() if is_dataclass(value)}
    return replace(config, **changed, **inner)


def context(data: LoadedData, shown: Supervision, folder: Path) -> RunContext:
    settings = RunSettings("run", 0, torch.device("cpu"), {}, folder / "stages", shown)
    account = StageAccount("run", folder / "run")
    return RunContext(settings, account, [], audit=Auditor(data, folder / "audit").look)


@pytest.mark.parametrize("backbone", ["linear", "mlp"])
@pytest.mark.parametrize("name", sorted(load_methods()))
def test_methods_learn_from_rows_and_load_again(
    name: str, backbone: str, row_data: LoadedData, tmp_path: Path
) -> None:
    method, spec = get_method(name), BackboneSpec(backbone)
    config = brief(preset_config(method, "nothing"))
    shown = method.supervision(config)
    task = row_data.task(spec, train_groups=shown.train_groups, val_groups=shown.val_groups)
    fitted = method.fit(task, config, context(row_data, shown, tmp_path))
    table, metrics = predict_splits(fitted, row_data)
    assert metrics["test"].values["avg"] > 75
    weights = copy.deepcopy(fitted.module.state_dict())
    again = method.load_fitted(NetworkSpec(spec, LENGTH, task.codes), config, weights)
    images = EvalImages(row_data.splits["test"].images, row_data.facts.eval_transform)
    scores = predict(again.logits, images)
    assert scores.argmax(1).tolist() == table.query("split == 'test'")["pred"].tolist()


def test_networks_scale_rows_by_the_training_split_alone(row_data: LoadedData) -> None:
    task = row_data.task(BackboneSpec("linear"), train_groups=False, val_groups=False)
    rows = row_data.splits["train"].images.batch(torch.arange(SIZES["train"])).pixels
    scaled = backbone_for(task)(rows)
    assert torch.allclose(scaled.mean(0), torch.zeros(LENGTH), atol=1e-4)
    assert torch.allclose(scaled.std(0, correction=0)[:5], torch.ones(5), atol=1e-3)
    assert (scaled[:, 5] == 0).all()  # the number that never varies
    # Without a task the network does not know any rows; their scale comes with the weights.
    empty = build_backbone(BackboneSpec("linear"), LENGTH)
    assert torch.equal(empty(rows), rows[:, :, 0, 0])


def test_rows_are_gathered_cut_down_and_digested(row_data: LoadedData) -> None:
    images = FeatureRows(torch.arange(12.0).view(4, 3))
    batch = images.subset(torch.tensor([2, 0])).batch(torch.tensor([1, 0]))
    assert batch.pixels.shape == (2, 3, 1, 1)
    assert batch.pixels[:, :, 0, 0].tolist() == [[0, 1, 2], [6, 7, 8]]
    changed = copy.deepcopy(row_data.splits["val"])
    changed.images.rows[0, 2] += 1e-3  # type: ignore[attr-defined]
    before = pixel_digest({"val": row_data.splits["val"]}, whole=True)
    assert before != pixel_digest({"val": changed}, whole=True)
    with pytest.raises(ValueError, match="float32"):
        FeatureRows(torch.zeros(3, 2, dtype=torch.float64))


def test_rows_in_a_file_travel_as_its_path(tmp_path: Path) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    (tmp_path / "rows.f32").write_bytes(rows.numpy().tobytes())
    mapped = MappedRows(tmp_path / "rows.f32", 5, 3)
    assert torch.equal(mapped.rows, rows)
    sent = pickle.dumps(mapped)
    assert len(sent) < 400 and torch.equal(pickle.loads(sent).rows, rows)
    assert mapped.to(torch.device("cpu")) is mapped
    cut = mapped.subset(torch.tensor([4, 1]))
    assert type(cut) is FeatureRows and torch.equal(cut.rows, rows[[4, 1]])
    cut.rows.zero_()  # a copy: the file and what is mapped of it stay
    assert torch.equal(MappedRows(tmp_path / "rows.f32", 5, 3).rows, rows)
    assert len(MappedRows(tmp_path / "rows.f32", 0, 3)) == 0


def test_scale_is_measured_a_few_numbers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 3 + 1
    whole, parts = Standardise(7), Standardise(7)
    whole.measure(rows)
    monkeypatch.setattr(backbones, "MEASURED", 100)  # two numbers of each row
    parts.measure(rows)
    assert torch.allclose(whole.mean, parts.mean) and torch.allclose(whole.scale, parts.scale)
    assert torch.allclose(whole(rows).std(0, correction=0), torch.ones(7), atol=1e-5)


def test_relevance_of_a_row_is_what_each_number_said_for_the_class(row_data: LoadedData) -> None:
    """For a linear head: number times weight, as a share of their sum, the class's score."""
    network = Classifier(build_backbone(BackboneSpec("linear"), LENGTH), 2)
    part = network.backbone.body[1]  # type: ignore[index]
    assert isinstance(part, Standardise)
    part.measure(row_data.splits["train"].images.rows)  # type: ignore[attr-defined]
    torch.nn.init.zeros_(network.head.bias)
    images = EvalImages(row_data.splits["val"].images, row_data.facts.eval_transform)
    (batch,) = list(images)
    (found,) = list(heatmaps(network, images, gamma=4.0, side=32))
    scaled = network.backbone(batch)
    score, predicted = network(batch).max(dim=1)
    said = scaled * network.head.weight[predicted] * score.sign()[:, None]
    expected = said / said.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(found, expected.detach(), atol=1e-3)


def test_a_network_is_refused_what_it_does_not_take() -> None:
    check_input("mlp", rows=True, data="words")
    check_input("resnet18", rows=False, data="cats")
    with pytest.raises(UsageError, match="'resnet18' does not take rows"):
        check_input("resnet18", rows=True, data="words")
    with pytest.raises(UsageError, match="'linear' does not take images"):
        check_input("linear", rows=False, data="cats")
    check_input("lenet5", rows=False, data="cats", shape=(32, 32))
    check_input("lenet5_tall", rows=False, data="cats", shape=(64, 32))
    with pytest.raises(UsageError, match=r"lenet5 takes images of 32 x 32, .* have 64 x 32") as no:
        check_input("lenet5", rows=False, data="cats", shape=(64, 32))
    assert no.value.remedy == "--resolution 32, or another --backbone"
    with pytest.raises(UsageError, match=r"takes images of 64 x 32, .* have 32 x 32") as no:
        check_input("lenet5_tall", rows=False, data="cats", shape=(32, 32))
    assert no.value.remedy == "another --backbone"
