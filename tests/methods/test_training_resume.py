"""A training can be stopped anywhere, and depends on its own seed alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import Task
from methods.optimisation import TrainConfig
from methods.selection import Selection
from methods.training import Batch, CrossEntropy, Training

MakeContext = Callable[..., RunContext]
QUICK = TrainConfig(epochs=4, batch_size=16, lr=0.05)


def one_layer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))


class Killed(BaseException):
    """What ends a process between two epochs."""


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 2), nn.BatchNorm1d(2)
    )


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("adam", {"scheduler": "plateau", "plateau_patience": 0}),
        ("sgd", {"scheduler": "step", "milestones": (2, 4)}),
        ("adamw", {"scheduler": "cosine"}),
    ],
)
def test_resumed_training_is_bit_identical(
    toy_task: Task, make_context: MakeContext, stop: int, optimizer: Any, schedule: dict[str, Any]
) -> None:
    config = TrainConfig(
        epochs=6, batch_size=16, lr=0.01, optimizer=optimizer, patience=5, **schedule
    )

    def train(name: str, kill_after: int | None = None) -> tuple[Any, ...]:
        ctx, model, executed = make_context(name), with_dropout(), []
        training = Training(model, toy_task, config, ctx, where={"phase": 2})
        save = ctx.save

        def save_or_die(name: str, state: dict[str, Any]) -> None:
            save(name, state)
            executed.append(name)
            if len(executed) == kill_after:
                raise Killed

        ctx.save = save_or_die  # type: ignore[method-assign]
        trained = training.run()
        table = [{k: v for k, v in row.items() if k != "seconds"} for row in ctx.account.history()]
        for row in table:
            del row["record"]
        return trained, model.state_dict(), table, ctx.account.image_passes, len(executed)

    whole = train("whole")
    with pytest.raises(Killed):
        train("stopped", kill_after=stop)
    resumed = train("stopped")
    assert resumed[0] == whole[0]
    assert all(torch.equal(resumed[1][name], value) for name, value in whole[1].items())
    assert resumed[2:4] == whole[2:4]
    assert (whole[4], resumed[4]) == (6, 6 - stop)


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_model_of_the_last_epoch_is_the_one_it_was_scored_by(
    toy_task: Task, make_context: MakeContext, stop: int, average: float
) -> None:
    """Of a resumed training too; the first epoch is kept, by a score that only falls."""

    def train(name: str, kill_after: int | None = None) -> tuple[Any, ...]:
        ctx, ended, scored = make_context(name), [], []
        falling = Selection("falling", lambda outputs: float(next(scores)))
        scores = iter(range(9, 0, -1))
        training = Training(
            *(with_dropout(), toy_task, QUICK, ctx),
            select=falling,
            average=average,
            at_end=lambda model: ended.append(copy.deepcopy(model)),
        )
        save, evaluated_model = ctx.save, Training._evaluated_model

        def save_or_die(name: str, state: dict[str, Any]) -> None:
            save(name, state)
            if state["progress"][0] == kill_after:
                raise Killed

        def noted(self: Training) -> nn.Module:
            scored.append(copy.deepcopy(evaluated_model(self)))
            return scored[-1]

        ctx.save = save_or_die  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Training, "_evaluated_model", noted)
            selected = training.run()
        assert kill_after is not None or selected.epoch == 0
        return training.model.state_dict(), [model.state_dict() for model in ended], scored

    kept, (last,), scored = train("whole")
    assert same(last, scored[-1].state_dict()) and same(kept, scored[0].state_dict())
    assert not same(last, kept)
    with pytest.raises(Killed):
        train("stopped", kill_after=stop)
    resumed_kept, (resumed_last,), _ = train("stopped")
    assert same(resumed_last, last) and same(resumed_kept, kept)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_objective_state_survives_a_resume(toy_task: Task, make_context: MakeContext) -> None:
    class Counting(CrossEntropy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, model: nn.Module, batch: Batch) -> Tensor:
            self.steps += 1
            return super().forward(model, batch)

    config = TrainConfig(epochs=2, batch_size=30, lr=0.01)
    first, again = Counting(), Counting()
    for objective in (first, again):
        Training(one_layer(), toy_task, config, make_context(), objective=objective).run()
    assert float(again.steps) == float(first.steps) == 4


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_weights_kept_after_some_epochs_survive_a_resume(
    toy_task: Task, make_context: MakeContext, stop: int
) -> None:
    """As early models are, which a method compares with the last: before the stop and after it."""

    def train(name: str, kill_after: int | None = None) -> dict[int, dict[str, Tensor]]:
        ctx = make_context(name)
        training = Training(with_dropout(), toy_task, QUICK, ctx, keep_after=(1, 3))
        save = ctx.save

        def save_or_die(name: str, state: dict[str, Any]) -> None:
            save(name, state)
            if state["progress"][0] == kill_after:
                raise Killed

        ctx.save = save_or_die  # type: ignore[method-assign]
        training.run()
        return training.kept

    whole = train("whole")
    assert list(whole) == [1, 3] and not same(whole[1], whole[3])
    with pytest.raises(Killed):
        train("stopped", kill_after=stop)
    resumed = train("stopped")
    assert list(resumed) == [1, 3] and all(same(resumed[epoch], whole[epoch]) for epoch in whole)


def test_global_randomness_is_left_alone(toy_task: Task, make_context: MakeContext) -> None:
    def train(name: str) -> dict[str, Tensor]:
        model = with_dropout()
        torch.manual_seed(seeds.pop())
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        Training(model, toy_task, QUICK, make_context(name)).run()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
        assert random.getstate() == before[2]
        return model.state_dict()

    seeds = [1, 2]
    one, two = train("one"), train("two")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_seed_of_the_run_matters(toy_task: Task, make_context: MakeContext) -> None:
    models = [one_layer(), one_layer()]
    for seed, model in enumerate(models):
        Training(model, toy_task, QUICK, make_context(f"seed_{seed}", seed=seed)).run()
    assert not torch.equal(models[0][1].weight, models[1][1].weight)
