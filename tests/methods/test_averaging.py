"""The moving average of weights: its arithmetic, its batch-norms, and its place in the loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import Task
from methods.averaging import WeightAverage
from methods.backbones import Classifier
from methods.optimisation import TrainConfig
from methods.training import Training

MakeContext = Callable[..., RunContext]


def weight_of(model: nn.Module) -> float:
    return float(next(model.parameters()).flatten()[0])


def set_weight(model: nn.Linear, value: float) -> None:
    model.weight.data.fill_(value)


def test_follows_by_the_decay_which_starts_low() -> None:
    model = nn.Linear(1, 1, bias=False)
    set_weight(model, 0.0)
    average = WeightAverage(model, 0.5)
    expected = 0.0
    for step, value in enumerate((10.0, 20.0, 0.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
        set_weight(model, value)
        average.update(model)
        assert weight_of(average.averaged_model) == pytest.approx(expected, rel=1e-6)
    assert weight_of(model) == 1.0  # the model itself is left alone


def test_first_steps_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    set_weight(model, 0.0)
    average = WeightAverage(model, 0.998)
    for value in (1.0, 2.0):
        set_weight(model, value)
        average.update(model)
    first = 0.9 * 1.0  # decay 1/10
    assert weight_of(average.averaged_model) == pytest.approx(2 / 11 * first + 9 / 11 * 2.0)


def test_statistics_are_those_of_the_averaged_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    average = WeightAverage(model, 0.9)
    linear, trained, frozen = average.averaged_model
    assert isinstance(linear, nn.Linear)
    assert isinstance(trained, nn.BatchNorm1d) and isinstance(frozen, nn.BatchNorm1d)
    model[2].running_mean.fill_(7.0)
    set_weight(model[0], 9.0)  # which the average has not followed

    def all_but_the_last(part: nn.Module) -> None:
        part.train()
        part[2].eval()  # type: ignore[index]

    batches = [torch.randn(8, 3) for _ in range(4)]
    settled = average.update_batch_norm(model, all_but_the_last, batches)
    assert settled is average.averaged_model
    seen = [linear(batch) for batch in batches]
    mean = torch.stack([values.mean(0) for values in seen]).mean(0)
    spread = torch.stack([values.var(0) for values in seen]).mean(0)
    assert trained.running_mean is not None and trained.running_var is not None
    torch.testing.assert_close(trained.running_mean, mean)
    torch.testing.assert_close(trained.running_var, spread)
    assert trained.momentum == 0.1
    assert frozen.running_mean is not None
    assert frozen.running_mean.tolist() == [7.0, 7.0]  # the model's own


def test_nothing_is_drawn_where_no_norm_trains() -> None:
    def never() -> Tensor:
        raise AssertionError("a batch was asked for")

    model = nn.Linear(2, 2)
    WeightAverage(model, 0.9).update_batch_norm(model, nn.Module.train, (never() for _ in range(1)))


class TestInTheLoop:
    CONFIG = TrainConfig(epochs=3, batch_size=16, lr=0.5, selection="last")

    def trained(self, task: Task, ctx: RunContext, build: Callable[..., Classifier], decay: float):
        model = build(task, ctx, "net")
        Training(model, task, self.CONFIG, ctx, name="net", average=decay).run()
        return model.state_dict()

    def test_averaged_weights_are_kept(
        self,
        toy_task: Task,
        make_context: MakeContext,
        small_networks: Callable[..., Classifier],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        plain = self.trained(toy_task, make_context("plain"), small_networks, 0.0)
        copies = []
        original = WeightAverage.update_batch_norm

        def noted(self: WeightAverage, model: nn.Module, *arguments: object) -> nn.Module:
            own = original(self, model, *arguments)  # type: ignore[arg-type]
            copies.append(
                (
                    {k: v.clone() for k, v in own.state_dict().items()},
                    {k: v.clone() for k, v in model.state_dict().items()},
                )
            )
            return own

        monkeypatch.setattr(WeightAverage, "update_batch_norm", noted)
        averaged = self.trained(toy_task, make_context("averaged"), small_networks, 0.9)
        own, model = copies[-1]
        assert len(copies) == 3
        for name, value in averaged.items():
            assert torch.equal(value, own[name])
            assert torch.equal(plain[name], model[name])  # the steps themselves are the same
            assert not torch.equal(value, plain[name])
