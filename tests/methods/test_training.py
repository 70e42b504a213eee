"""The training loop: what it learns, what it keeps, and that it can be stopped anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from bench.context import RunContext
from datasets.base import Task
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.selection import Selection
from methods.training import Batch, CrossEntropy, NonFiniteLoss, Selected, Training

MakeContext = Callable[..., RunContext]
QUICK = TrainConfig(epochs=4, batch_size=16, lr=0.05)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def rows(ctx: RunContext, column: str) -> list[Any]:
    return [row[column] for row in ctx.account.history()]


def scripted(values: list[float]) -> Selection:
    """A rule that gives one value after another, whatever the model says."""
    remaining = iter(values)
    return Selection("scripted", lambda outputs: next(remaining))


class Recording(CrossEntropy):
    """Cross-entropy that keeps the batches it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Batch] = []

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        self.batches.append(batch)
        return super().forward(model, batch)


def test_loss_goes_down(toy_task: Task, make_context: MakeContext) -> None:
    ctx = make_context()
    config = TrainConfig(epochs=12, batch_size=16, lr=0.02)
    trained = Training(linear(), toy_task, config, ctx).run()
    losses = rows(ctx, "loss")
    assert len(losses) == trained.epochs_run == 12
    assert losses[-1] < 0.5 * losses[0]
    assert trained.value > 90
    assert ctx.account.image_passes == 12 * (len(toy_task.train) + len(toy_task.val))


def test_non_finite_loss_names_epoch_and_rate(toy_task: Task, make_context: MakeContext) -> None:
    class Poisoned(nn.Module):
        calls = 0

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            self.calls += 1
            return CrossEntropy()(model, batch) * (float("nan") if self.calls == 7 else 1.0)

    training = Training(
        linear(), toy_task, QUICK, make_context(), name="stage_one", objective=Poisoned()
    )
    with pytest.raises(
        NonFiniteLoss, match=r"nan in epoch 1 of 'stage_one' \(lr 0\.05\)"
    ) as raised:
        training.run()
    assert raised.value.kind == "non_finite_loss"
    assert "learning rate" in raised.value.remedy


def test_patience_stops_early_and_keeps_the_best(toy_task: Task, make_context: MakeContext) -> None:
    model, seen = linear(), []
    remaining = iter([1.0, 3.0, 2.0, 3.0, 2.5, 9.0])

    def score(outputs: Tensor) -> float:
        seen.append(outputs)
        return next(remaining)

    config = TrainConfig(epochs=6, batch_size=16, lr=0.05, patience=3)
    trained = Training(
        model, toy_task, config, make_context(), select=Selection("scripted", score)
    ).run()
    assert trained == Selected("scripted", 3.0, epoch=1, epochs_run=5)
    assert torch.equal(outputs_of(model, toy_task), seen[1])
    assert not torch.equal(seen[1], seen[4])


def test_last_keeps_the_last(toy_task: Task, make_context: MakeContext) -> None:
    model, seen = linear(), []

    def falling(outputs: Tensor) -> float:
        seen.append(outputs)
        return -float(len(seen))

    rule = Selection("last", falling, always_last=True)
    trained = Training(model, toy_task, QUICK, make_context(), select=rule).run()
    assert (trained.epoch, trained.value) == (3, -4.0)
    assert torch.equal(outputs_of(model, toy_task), seen[-1])


def outputs_of(model: nn.Module, task: Task) -> Tensor:
    return predict_with(model, EvalImages(task.val.images, task.eval_transform))


def test_selection_observes_the_model_in_training(
    toy_task: Task, make_context: MakeContext
) -> None:
    """SpuCo's JTT asked an evaluator that still held the network of stage one."""
    first = linear()
    Training(first, toy_task, QUICK, make_context("one")).run()
    second, asked = normalised(), []

    def score(outputs: Tensor) -> float:
        assert torch.equal(outputs, outputs_of(second, toy_task))
        asked.append(outputs)
        return 0.0

    Training(second, toy_task, QUICK, make_context("two"), select=Selection("checked", score)).run()
    assert len(asked) == 4
    assert all(not torch.equal(a, b) for a, b in pairwise(asked))


VALUES = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"scheduler": "none"}, lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1.0)),
        (
            {"scheduler": "step", "milestones": (2, 5), "decay": 0.5},
            lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
        ),
        ({"scheduler": "cosine"}, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8)),
        (
            {"scheduler": "plateau", "plateau_patience": 2, "decay": 0.2},
            lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", factor=0.2, patience=2),
        ),
    ],
    ids=lambda part: part["scheduler"] if isinstance(part, dict) else "",
)
def test_schedule_is_the_one_of_torch(
    toy_task: Task, make_context: MakeContext, settings: dict[str, Any], own: Callable[[Any], Any]
) -> None:
    ctx = make_context()
    config = TrainConfig(epochs=8, batch_size=30, lr=0.05, **settings)
    Training(linear(), toy_task, config, ctx, select=scripted(VALUES)).run()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05)
    schedule, expected = own(optimizer), []
    for value in VALUES:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step(*([value] if settings["scheduler"] == "plateau" else []))
    assert rows(ctx, "lr") == expected
    assert (len(set(expected)) > 1) == (settings["scheduler"] != "none")


def test_last_batch_of_one_joins_its_neighbour(toy_task: Task, make_context: MakeContext) -> None:
    objective = Recording()
    config = TrainConfig(epochs=1, batch_size=4, lr=0.01)
    sampler = lambda epoch, generator: torch.arange(9)  # noqa: E731
    Training(
        normalised(), toy_task, config, make_context(), sampler=sampler, objective=objective
    ).run()
    assert [len(batch.y) for batch in objective.batches] == [4, 5]
    assert torch.cat([batch.index for batch in objective.batches]).tolist() == list(range(9))


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_batches_are_one_larger_batch(
    toy_task: Task, make_context: MakeContext, accumulate: int
) -> None:
    """60 samples in batches of 5: twelve gradients, averaged two or three at a time."""
    unaugmented = replace(toy_task, train_transform=toy_task.eval_transform)
    states = []
    for name, size, together in (("parts", 5, accumulate), ("whole", 5 * accumulate, 1)):
        model, config = linear(), replace(QUICK, batch_size=size)
        training = Training(
            model, unaugmented, config, make_context(name), name="net", accumulate=together
        )
        training.run()
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)


def test_gradients_left_over_at_the_end_of_an_epoch_are_applied(
    toy_task: Task, make_context: MakeContext
) -> None:
    """Four batches, five to a step: the one step of the epoch comes at its end."""
    model = linear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Training(model, toy_task, replace(QUICK, epochs=1), make_context(), accumulate=5).run()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sampler_may_repeat(toy_task: Task, make_context: MakeContext) -> None:
    objective, ctx, epochs = Recording(), make_context(), []

    def sampler(epoch: int, generator: torch.Generator) -> Tensor:
        epochs.append(epoch)
        return torch.tensor([3, 3, 3, 10, 10, 59])

    config = TrainConfig(epochs=2, batch_size=4, lr=0.01)
    Training(linear(), toy_task, config, ctx, sampler=sampler, objective=objective).run()
    assert epochs == [0, 1]
    assert [batch.index.tolist() for batch in objective.batches[:2]] == [[3, 3, 3, 10], [10, 59]]
    for batch in objective.batches:
        assert torch.equal(batch.y, toy_task.train.y[batch.index])
    # Each repetition is augmented anew.
    first = objective.batches[0].images
    assert not torch.equal(first[0], first[1]) or not torch.equal(first[1], first[2])
    assert ctx.account.image_passes == 2 * (6 + len(toy_task.val))


def test_every_sample_is_visited_once_in_another_order(
    toy_task: Task, make_context: MakeContext
) -> None:
    objective = Recording()
    config = TrainConfig(epochs=2, batch_size=60, lr=0.01)
    Training(linear(), toy_task, config, make_context(), objective=objective).run()
    first, second = (batch.index for batch in objective.batches)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(60))
    assert not torch.equal(first, second)


def test_parameter_groups_bring_their_own_rates(toy_task: Task, make_context: MakeContext) -> None:
    model = normalised()
    before = {name: value.clone() for name, value in model.named_parameters()}
    groups = [{"params": model[1].parameters(), "lr": 0.0}, {"params": model[3].parameters()}]
    config = TrainConfig(epochs=1, batch_size=16, lr=0.05)
    Training(model, toy_task, config, make_context(), parameters=groups).run()
    changed = {name for name, value in model.named_parameters() if not value.equal(before[name])}
    assert changed == {"3.weight", "3.bias"}


def test_set_mode_can_keep_parts_frozen(toy_task: Task, make_context: MakeContext) -> None:
    modes: list[tuple[bool, bool]] = []

    class Watching(CrossEntropy):
        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            modes.append((model.training, model[2].training))
            return super().forward(model, batch)

    def keep_statistics(model: nn.Module) -> None:
        model.train()
        model[2].eval()

    def train(name: str, **options: Any) -> Tensor:
        model = normalised()
        Training(model, toy_task, QUICK, make_context(name), objective=Watching(), **options).run()
        statistics: Tensor = model[2].running_mean
        return statistics

    assert not train("frozen", set_mode=keep_statistics).any()
    assert set(modes) == {(True, False)}
    modes.clear()
    assert train("free").any()
    assert set(modes) == {(True, True)}


class TestProgress:
    CONFIG = TrainConfig(epochs=2, batch_size=20, lr=0.01)  # three steps an epoch

    def reports(self, task: Task, ctx: RunContext, **where: object) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        ctx._progress = lambda values: seen.append(dict(values))
        Training(linear(), task, self.CONFIG, ctx, name="net", where=where).run()
        return seen

    def test_short_epochs_report_their_end_alone(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        seen = self.reports(toy_task, make_context(), phase=2)
        assert [(row["stage"], row["epoch"], row["epochs"], row["phase"]) for row in seen] == [
            ("net", 1, 2, 2),
            ("net", 2, 2, 2),
        ]
        assert all("step" not in row and row["rule"] == "val_avg" for row in seen)

    def test_long_epochs_report_their_steps(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inside an epoch `epoch` counts those that are finished."""
        clock = iter(range(0, 1000, 6))  # six seconds between two looks at it
        monkeypatch.setattr("methods.training.time.monotonic", lambda: next(clock))
        seen = self.reports(toy_task, make_context())
        within = [(row["epoch"], row["step"], row["steps"]) for row in seen if "step" in row]
        assert within == [(0, 2, 3), (0, 3, 3), (1, 2, 3), (1, 3, 3)]
        doing = [row["activity"] for row in seen]
        assert doing == ["training", "validating", "training"] * 2
        assert {row["images_per_second"] for row in seen if row.get("step") == 2} == {2 * 20 / 12}
        assert all("selection" not in row for row in seen if "step" in row)


def test_no_step_waits_for_the_device(toy_task: Task, make_context: MakeContext) -> None:
    """Reading a number off a tensor stalls a GPU; an epoch does it once, not once a batch."""

    class CountReads(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func.overloadpacket in WAITING:
                self.reads += 1
            return func(*args, **(kwargs or {}))

    aten = torch.ops.aten
    WAITING = (
        aten._local_scalar_dense,
        aten.nonzero,
        aten.equal,
        aten.masked_select,
        aten._unique2,
    )

    def reads(batch_size: int) -> int:
        config = TrainConfig(epochs=1, batch_size=batch_size, lr=0.05)
        training = Training(linear(), toy_task, config, make_context(f"by_{batch_size}"))
        training._prepare()
        with CountReads() as counter:
            training._steps()
        return counter.reads

    assert reads(60) == reads(5) == 1
