"""Seeds stacked into one model: the same networks, samples and results as seeds one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.context import RunContext
from bench.perf.subject import Effort, Subject, context
from datasets.base import BackboneSpec, Task
from datasets.errors import UsageError
from methods.backbones import Classifier, build_backbone, build_classifier
from methods.base import get_method
from methods.optimisation import TrainConfig
from methods.selection import Selection
from methods.stacking import StackedLeNet, check_stackable, side_by_side, train_stacked
from methods.training import Batch, Trained, Training

EFFORT = Effort(split=200, trained=200, evaluated=64, grown=64)
RECIPES = {
    "umnist": TrainConfig(epochs=3, batch_size=32, optimizer="adam", lr=2e-3, weight_decay=1e-5),
    "cmnist": TrainConfig(
        epochs=3, batch_size=32, lr=0.02, weight_decay=1e-4, scheduler="step", milestones=(2,)
    ),
}
ROUNDING = {"rtol": 1e-3, "atol": 1e-5}  # float32, after a few dozen steps


class Noting(nn.Module):
    """Cross-entropy that notes the samples and the images that it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.pixels: list[Tensor] = []

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        self.seen.append(batch.index)
        self.pixels.append(batch.images.clone())
        return functional.cross_entropy(model(batch.images), batch.y)


@pytest.fixture(params=list(RECIPES), scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param, EFFORT)


class Bench:
    """Makes trainings of one task, each with its own seed and its own folder."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.task: Task = subject.task()
        self.config, self.folder = RECIPES[subject.dataset], folder

    def context(self, seed: int, where: str) -> RunContext:
        plain = context(self.folder / where / str(seed))
        plain.part.folder.mkdir(parents=True, exist_ok=True)
        return RunContext(replace(plain.scope, seed=seed), plain.part, [])

    def training(self, seed: int, where: str, **options: Any) -> Training:
        ctx, config = self.context(seed, where), options.pop("config", self.config)
        options = {"objective": Noting(), "select": by_loss(self.task), **options}
        model = build_classifier(self.task, ctx, "erm")
        return Training(model, self.task, config, ctx, name="erm", **options)

    def stack(self, where: str, *seeds: int, **options: Any) -> list[Training]:
        trainings = [self.training(seed, where, **options) for seed in seeds]
        train_stacked(trainings)
        return trainings


def by_loss(task: Task) -> Selection:
    y = task.val.y
    return Selection("loss", lambda logits: float(functional.cross_entropy(logits, y)), False)


@pytest.fixture
def bench(subject: Subject, tmp_path: Path) -> Bench:
    return Bench(subject, tmp_path)


def weights(training: Training) -> Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


@pytest.mark.parametrize(("name", "channels"), [("lenet4", 1), ("lenet5", 3)])
@pytest.mark.parametrize("seeds", [1, 3])
def test_stack_computes_what_its_networks_compute(name: str, channels: int, seeds: int) -> None:
    generator = torch.Generator().manual_seed(3)
    spec = BackboneSpec(name)
    models = [Classifier(build_backbone(spec, channels), 5).double() for _ in range(seeds)]
    shape = (seeds, 6, channels, 32, 32)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (seeds, 6), generator=generator)
    stack = StackedLeNet(models)
    logits = stack(side_by_side(list(images)))
    functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").backward()
    exact = {"rtol": 1e-10, "atol": 1e-12}
    for place, model in enumerate(models):
        alone = model.train()(images[place])
        torch.testing.assert_close(logits[place], alone, **exact)
        functional.cross_entropy(alone, y[place], reduction="sum").backward()
        for own, stacked in zip(model.parameters(), stack.stacks, strict=True):
            assert own.grad is not None and stacked.grad is not None
            torch.testing.assert_close(stacked.grad[place], own.grad, **exact)


def test_networks_come_back_out_of_the_stack() -> None:
    models = [Classifier(build_backbone(BackboneSpec("lenet4"), 1), 2) for _ in range(2)]
    copy = Classifier(build_backbone(BackboneSpec("lenet4"), 1), 2)
    for place, model in enumerate(models):
        StackedLeNet(models).write_to(copy, place)
        for name, value in model.state_dict().items():
            assert torch.equal(value, copy.state_dict()[name])


def test_a_stacked_seed_is_trained_as_if_alone(bench: Bench) -> None:
    stacked = bench.stack("stacked", 100, 101)
    for seed, training in zip((100, 101), stacked, strict=True):
        alone = bench.training(seed, "alone")
        ended = alone.run()
        assert isinstance(alone.loss, Noting) and isinstance(training.loss, Noting)
        assert len(alone.loss.seen) == 3 * 7
        for here, there in (
            (training.loss.seen, alone.loss.seen),
            (training.loss.pixels, alone.loss.pixels),
        ):
            assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
        torch.testing.assert_close(weights(training), weights(alone), **ROUNDING)
        assert (training.best_epoch, training.epoch) == (ended.epoch, ended.epochs_run)
        assert training.best_value == pytest.approx(ended.value, rel=1e-3)
        assert training.ctx.part.image_passes == alone.ctx.part.image_passes
        state = zip(_moments(training), _moments(alone), strict=True)
        assert all(torch.allclose(a, b, **ROUNDING) for a, b in state)


def _moments(training: Training) -> list[Tensor]:
    states = training.optimizer.state.values()
    return [value for state in states for _, value in sorted(state.items())]


def test_a_seed_does_not_depend_on_its_mates(bench: Bench) -> None:
    """To the last bit in stacks of one size, at the same place; else but for rounding."""
    _, first, _ = bench.stack("one", 100, 101, 102)
    _, second, _ = bench.stack("two", 107, 101, 105)
    assert torch.equal(weights(first), weights(second))
    assert first.best_value == second.best_value
    elsewhere, _ = bench.stack("three", 101, 102)
    torch.testing.assert_close(weights(elsewhere), weights(first), **ROUNDING)


def test_a_seed_that_stops_early_leaves_the_others_alone(bench: Bench) -> None:
    config = replace(bench.config, epochs=5, patience=2)
    script = iter([3.0, 2.0, 1.0, 0.0, 0.0])
    falling = Selection("falling", lambda logits: next(script))
    stops = bench.training(100, "stops", config=config, select=falling)
    goes_on = bench.training(101, "stops", config=replace(config, patience=0))
    stopped, ended = train_stacked([stops, goes_on])
    assert (stopped.epochs_run, ended.epochs_run) == (3, 5)
    _, undisturbed = bench.stack("all", 100, 101, config=replace(config, patience=0))
    assert torch.equal(weights(goes_on), weights(undisturbed))


def test_a_killed_stack_goes_on_and_ends_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.stack("whole", 100, 101)
    save: Callable[..., None] = RunContext.save
    saved: list[int] = []

    def killed(ctx: RunContext, name: str, state: dict[str, Any]) -> None:
        if len(saved) == 3:  # one seed's checkpoint of the second epoch is there, not the other's
            raise KeyboardInterrupt
        saved.append(ctx.scope.seed)
        save(ctx, name, state)

    monkeypatch.setattr(RunContext, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        bench.stack("killed", 100, 101)
    assert saved == [100, 101, 100]
    monkeypatch.setattr(RunContext, "save", save)
    resumed = bench.stack("killed", 100, 101)
    assert [len(training.loss.seen) for training in resumed] == [7, 14]
    for training, reference in zip(resumed, whole, strict=True):
        assert torch.equal(weights(training), weights(reference))


@pytest.mark.parametrize(
    ("method", "changes", "backbone", "parts"),
    [
        ("jtt", {}, "lenet5", ("seeds of jtt cannot be stacked", "erm, groupdro")),
        ("erm", {}, "resnet50", ("backbone resnet50", "lenet4 or lenet5")),
        ("erm", {"scheduler": "plateau"}, "lenet5", ("scheduler = plateau", "another scheduler")),
    ],
)
def test_what_cannot_be_stacked_is_refused(
    method: str, changes: dict[str, Any], backbone: str, parts: tuple[str, str]
) -> None:
    config = replace(get_method(method).config_type(), **changes)
    with pytest.raises(UsageError) as refused:
        check_stackable(get_method(method), config, backbone)
    assert parts[0] in refused.value.message
    assert "leave out --stack-seeds" in refused.value.remedy and parts[1] in refused.value.remedy


def test_groupdro_stacks_with_weights_of_its_own(subject: Subject, tmp_path: Path) -> None:
    method = get_method("groupdro")
    bench = Bench(subject, tmp_path)
    config = replace(method.config_type(), **_common(bench.config), selection="val_avg")
    task = _with_groups(subject)

    def training(seed: int, where: str) -> Training:
        return method.training(task, config, bench.context(seed, where))  # type: ignore[attr-defined, no-any-return]

    stacked = [training(seed, "stacked") for seed in (100, 101)]
    ended: list[Trained] = train_stacked(stacked)
    log_weights = [each.loss.log_weights for each in stacked]
    assert not torch.allclose(log_weights[0], log_weights[1])  # type: ignore[arg-type]
    for seed, each in zip((100, 101), stacked, strict=True):
        fitted = method.fit(task, config, bench.context(seed, "alone"))
        alone = torch.cat([p.detach().flatten() for p in fitted.module.parameters()])
        torch.testing.assert_close(weights(each), alone, **ROUNDING)
        facts = method.facts(task, ended[0])  # type: ignore[attr-defined]
        assert facts.keys() == fitted.facts.keys()


def _common(config: TrainConfig) -> dict[str, Any]:
    names = ("epochs", "batch_size", "optimizer", "lr", "weight_decay")
    return {name: getattr(config, name) for name in names}


def _with_groups(subject: Subject) -> Task:
    from datasets.base import LabelledSplit, Labels, LoadedData
    from datasets.images import MemoryImages

    everything = torch.arange(EFFORT.split)
    labels = Labels(everything, subject.y, everything % 3)
    part = LabelledSplit(labels, MemoryImages(subject.pixels))
    data = LoadedData(subject.facts, {"train": part, "val": part}, standin=True)
    spec = BackboneSpec(subject.facts.backbone)
    return data.task(spec, train_groups=True, val_groups=True)
