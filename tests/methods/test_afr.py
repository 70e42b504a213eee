"""AFR: its weights, its descent from the base layer, and what the base model may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.context import RunContext
from datasets.base import Task
from datasets.errors import UsageError
from methods.afr import (
    Afr,
    AfrConfig,
    Head,
    descend,
    sample_weights,
    split_training,
    train_base,
)
from methods.base import Supervision
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.training import Training

MakeContext = Callable[..., RunContext]
BASE = TrainConfig(epochs=2, batch_size=16, lr=0.02, selection="last")
CONFIG = AfrConfig(base=BASE, gammas=(0.0, 4.0), penalties=(0.0, 0.1), head_steps=20)
Y = torch.tensor([0] * 6 + [1] * 3 + [2] * 3)


def some_features(samples: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, length, generator=torch.Generator().manual_seed(seed))


def some_head(classes: int = 3, length: int = 4) -> Head:
    return Head(some_features(classes, length, 7), some_features(1, classes, 8)[0])


class TestWeights:
    def test_at_gamma_zero_classes_count_alike(self) -> None:
        weights = sample_weights(torch.rand(12), Y, 0.0)
        expected = 1 / (3 * torch.bincount(Y)[Y])
        torch.testing.assert_close(weights, expected)

    @pytest.mark.parametrize("gamma", [1.0, 10.0, 20.0])
    def test_they_sum_to_one_and_fall_with_the_probability_of_the_true_class(
        self, gamma: float
    ) -> None:
        probability = torch.linspace(0.05, 0.95, 12)
        weights = sample_weights(probability, Y, gamma)
        assert float(weights.sum()) == pytest.approx(1.0)
        for label in range(3):
            assert (weights[label == Y].diff() < 0).all()
        first, second = weights[:2].tolist()
        assert first / second == pytest.approx(
            torch.exp(gamma * (probability[1] - probability[0])).item(), rel=1e-4
        )


class TestDescent:
    def fit(self, penalty: float, steps: int, lr: float = 0.1) -> Head:
        features, start = some_features(12, 4), some_head()
        weights = sample_weights(torch.rand(12), Y, 0.0)[None]
        heads = descend(features, Y, weights, torch.tensor([penalty]), start, lr, steps)
        last = list(heads)[-1]
        return Head(last.weight[0], last.bias[0])

    def test_one_step_without_penalty_is_the_clipped_weighted_gradient(self) -> None:
        """Against autograd and torch's own clipping and SGD, with a gradient that is clipped."""
        features, start = 20 * some_features(12, 4), some_head()
        weights = sample_weights(torch.rand(12), Y, 3.0)
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight.copy_(start.weight)
            layer.bias.copy_(start.bias)
        losses = functional.cross_entropy(layer(features), Y, reduction="none")
        (weights * losses).sum().backward()
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        assert float(norm) > 1
        torch.optim.SGD(layer.parameters(), lr=0.01).step()
        (head,) = descend(features, Y, weights[None], torch.zeros(1), start, 0.01, 1)
        torch.testing.assert_close(head.weight[0], layer.weight.detach())
        torch.testing.assert_close(head.bias[0], layer.bias.detach())

    def test_many_steps_with_a_penalty_are_autograds(self) -> None:
        features, start = some_features(12, 4), some_head()
        weights = sample_weights(torch.rand(12), Y, 1.0)
        weight, bias = (part.clone().requires_grad_() for part in (start.weight, start.bias))
        solver = torch.optim.SGD([weight, bias], lr=0.05)
        for _ in range(30):
            solver.zero_grad()
            losses = functional.cross_entropy(features @ weight.T + bias, Y, reduction="none")
            far = (weight - start.weight).square().sum() + (bias - start.bias).square().sum()
            ((weights * losses).sum() + 0.2 * far).backward()
            nn.utils.clip_grad_norm_([weight, bias], 1.0)
            solver.step()
        # Beside another weighting and penalty: fits in one batch do not see each other.
        both = torch.stack([weights.flip(0), weights])
        *_, last = descend(features, Y, both, torch.tensor([0.0, 0.2]), start, 0.05, 30)
        torch.testing.assert_close(last.weight[1], weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last.bias[1], bias.detach(), rtol=1e-4, atol=1e-5)

    def test_a_huge_penalty_leaves_the_base_layer(self) -> None:
        start, head = some_head(), self.fit(1e4, 100, lr=1e-5)
        torch.testing.assert_close(head.weight, start.weight, rtol=0, atol=1e-3)

    def test_it_begins_at_the_base_layer_and_not_at_random(self) -> None:
        start, head = some_head(), self.fit(0.0, 1, lr=1e-9)
        torch.testing.assert_close(head.weight, start.weight)
        torch.testing.assert_close(head.bias, start.bias)


def test_the_split_hangs_on_its_own_seed_alone() -> None:
    kept, held = split_training(100, 0.2, 21)
    assert (len(kept), len(held)) == (80, 20)
    assert torch.cat([kept, held]).sort().values.tolist() == list(range(100))
    assert torch.equal(split_training(100, 0.2, 21)[1], held)
    assert not torch.equal(split_training(100, 0.2, 22)[1], held)


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_the_base_model_never_sees_what_is_held_back(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Tensor] = []
        run = Training.run

        def noted(self: Training) -> Any:
            seen.append(self.task.train.ids)
            return run(self)

        monkeypatch.setattr(Training, "run", noted)
        fitted = Afr().fit(selecting_task, CONFIG, make_context())
        _, held = split_training(60, 0.2, 21)
        assert set(seen[0].tolist()).isdisjoint(selecting_task.train.ids[held].tolist())
        facts = fitted.details["afr"]
        assert facts["held_out"] == 12 and len(seen[0]) == 48
        assert 1 <= facts["effective_size"] <= 12 and 1 <= facts["step"] <= 20
        assert facts["gamma"] in CONFIG.gammas and facts["penalty"] in CONFIG.penalties

    def test_weights_are_by_the_base_models_probability_of_the_true_class(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[Tensor] = []

        def noted(probability: Tensor, y: Tensor, gamma: float) -> Tensor:
            given.append(probability)
            return sample_weights(probability, y, gamma)

        monkeypatch.setattr("methods.afr.sample_weights", noted)
        config = replace(CONFIG, base=replace(BASE, lr=1e-6))  # so that it errs
        facts = Afr().fit(selecting_task, config, make_context("run")).details["afr"]
        part = selecting_task.train.subset(split_training(60, 0.2, 21)[1])
        base = train_base(selecting_task, config, make_context("again"))
        logits = predict_with(base, EvalImages(part.images, selecting_task.eval_transform))
        expected = logits.softmax(dim=1).gather(1, part.y[:, None])[:, 0]
        for probability in given:
            torch.testing.assert_close(probability, expected)
        errors = int((logits.argmax(dim=1) != part.y).sum())
        assert facts["base_errors"] == errors > 0  # or the largest probability were the true one's
        weights = sample_weights(expected, part.y, facts["gamma"])
        size = float(1 / weights.square().sum())
        assert facts["effective_size"] == pytest.approx(size, rel=1e-4)

    def test_descent_begins_at_the_base_models_last_layer(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """The authors' notebook puts a second layer, with random values, behind it."""
        fitted = Afr().fit(selecting_task, replace(CONFIG, head_lr=1e-9), make_context("run"))
        base = train_base(selecting_task, CONFIG, make_context("again"))
        for mine, own in zip(fitted.module.head.parameters(), base.head.parameters(), strict=True):
            torch.testing.assert_close(mine, own)

    def test_the_split_is_the_same_for_every_seed_and_the_base_model_is_not(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """Runs that differ in how the last layer is fitted share the base model."""
        contexts = [make_context("a"), make_context("b"), make_context("c", 1)]
        for ctx, config in zip(
            contexts, (CONFIG, replace(CONFIG, head_steps=3), CONFIG), strict=True
        ):
            Afr().fit(selecting_task, config, ctx)
        (first,), (same,), (other,) = (ctx.stage_costs for ctx in contexts)
        assert first.key == same.key != other.key and same.reused

    def test_another_split_has_another_base_model(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """What the authors cache by folder is reused under another split, without a word."""
        contexts = [make_context("a"), make_context("b"), make_context("c")]
        configs = (CONFIG, replace(CONFIG, split_seed=22), replace(CONFIG, share=0.3))
        for ctx, config in zip(contexts, configs, strict=True):
            Afr().fit(selecting_task, config, ctx)
        assert len({ctx.stage_costs[0].key for ctx in contexts}) == 3

    def test_the_last_step_can_be_taken_whatever_validation_says(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, stopping="last")
        assert Afr().fit(selecting_task, config, make_context()).details["afr"]["step"] == 20

    def test_without_validation_groups_it_chooses_by_classes(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, selection="val_worst_class")
        fitted = Afr().fit(toy_task, config, make_context())
        assert fitted.selection is not None and fitted.selection.rule == "val_worst_class"


def test_tiers() -> None:
    assert Afr().supervision(CONFIG) == Supervision(val_groups=True)
    assert Afr().supervision(replace(CONFIG, selection="val_avg")) == Supervision()


@pytest.mark.parametrize(
    "wrong",
    [{"share": 1.0}, {"gammas": ()}, {"penalties": (-1.0,)}, {"head_lr": 0.0}, {"head_steps": 0}],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)


def test_the_rule_last_is_refused_with_the_knob_to_use() -> None:
    with pytest.raises(UsageError, match="stopping"):
        replace(CONFIG, selection="last")
