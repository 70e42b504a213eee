"""GroupDRO: its weights against the multiplicative rule, its loss by hand, its sampler."""

from __future__ import annotations

import math
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
from methods.backbones import Classifier
from methods.base import load_methods
from methods.groupdro import (
    GroupDro,
    GroupDroConfig,
    RobustLoss,
    _units,
    group_balanced_sampler,
    train_groupdro,
)
from methods.optimisation import TrainConfig
from methods.training import Batch, CrossEntropy, Training

MakeContext = Callable[..., RunContext]
BuildClassifier = Callable[..., Classifier]
CONFIG = GroupDroConfig(epochs=3, batch_size=16, lr=0.05)


class Logits(nn.Module):
    """Returns the logits it was given, whatever the images."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.values


def batch_of(y: Tensor) -> Batch:
    return Batch(torch.zeros(len(y), 1), y, torch.arange(len(y)))


def group_means(losses: Tensor, groups: Tensor, count: int) -> list[float]:
    """Mean loss of each group in the batch, 0 where it is absent."""
    return [float(losses[groups == g].mean()) if (groups == g).any() else 0.0 for g in range(count)]


class TestLoss:
    @pytest.mark.parametrize("adjustment", [0.0, 2.0])
    def test_weights_follow_the_multiplicative_rule(self, adjustment: float) -> None:
        """q_g grows by exp(eta (loss_g + C / sqrt(n_g))), then sums to one; ten batches."""
        generator = torch.Generator().manual_seed(1)
        groups = torch.tensor([0] * 12 + [1] * 5 + [2] * 3)
        loss = RobustLoss(groups, torch.eye(3), eta=0.5, adjustment=adjustment)
        q = [1 / 3] * 3
        for _ in range(10):
            index = torch.randperm(20, generator=generator)[:6]
            y = torch.randint(0, 2, (6,), generator=generator)
            model = Logits(torch.randn(6, 2, generator=generator))
            value = loss(model, Batch(torch.zeros(6, 1), y, index))
            each = functional.cross_entropy(model.values.detach(), y, reduction="none")
            means = group_means(each, groups[index], 3)
            grown = [
                q[g] * math.exp(0.5 * (means[g] + adjustment / math.sqrt((12, 5, 3)[g])))
                for g in range(3)
            ]
            q = [weight / sum(grown) for weight in grown]
            assert loss.log_weights.exp().tolist() == pytest.approx(q, rel=1e-5)
            expected = sum(weight * mean for weight, mean in zip(q, means, strict=True))
            assert float(value.detach()) == pytest.approx(expected, rel=1e-5)  # without C

    def test_gradient_takes_the_weights_as_given(self) -> None:
        groups, y = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
        model = Logits(torch.tensor([[1.0, 0.0], [0.5, 0.2], [2.0, -1.0]]))
        loss = RobustLoss(groups, torch.eye(2), eta=1.0, adjustment=0.0)
        loss(model, batch_of(y)).backward()
        found = model.values.grad
        weights = loss.log_weights.exp()
        model.values.grad = None
        each = functional.cross_entropy(model.values, y, reduction="none")
        (weights[0] * each[:2].mean() + weights[1] * each[2]).backward()
        assert model.values.grad is not None and found is not None
        torch.testing.assert_close(found, model.values.grad)

    def test_weights_stay_finite_where_products_would_overflow(self) -> None:
        loss = RobustLoss(torch.tensor([0, 1]), torch.eye(2), eta=100.0, adjustment=0.0)
        y = torch.tensor([0, 0])
        for _ in range(50):
            loss(Logits(torch.tensor([[-50.0, 50.0], [50.0, -50.0]])), batch_of(y))
        assert loss.log_weights.exp().tolist() == pytest.approx([1.0, 0.0])

    def test_no_group_is_left_without_adjustment_because_another_has_none(self) -> None:
        loss = RobustLoss(torch.tensor([0, 1, 1, 1, 1]), torch.eye(2), 0.01, adjustment=3.0)
        assert loss.offset.tolist() == pytest.approx([3.0, 1.5])

    def test_pairs_pool_the_losses_of_both_members(self, granted_task: Task) -> None:
        """Dark groups 0 and 1 are the negatives, bright 2 and 3 the positives: four pairs."""
        task_groups = granted_task.train.groups
        units, negatives = _units(granted_task, task_groups, pairs=True)
        assert negatives.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
        assert units.tolist() == [[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]]
        groups = torch.tensor([0, 0, 0, 1, 2, 3])
        y = (groups > 1).long()
        loss = RobustLoss(groups, units, eta=0.3, adjustment=0.0)
        logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
        value = loss(Logits(logits), batch_of(y))
        each = functional.cross_entropy(logits, y, reduction="none")
        pairs = [(0, 2), (0, 3), (1, 2), (1, 3)]
        means = torch.stack([each[(groups == a) | (groups == b)].mean() for a, b in pairs])
        weights = (0.3 * means).softmax(dim=0)
        torch.testing.assert_close(value.detach(), (weights * means).sum())

    def test_pairs_are_adjusted_by_their_negative_group(self) -> None:
        """As GEORGE's authors do, whose positives are one group: ISIC's malignant ones."""
        groups = torch.tensor([0] * 16 + [1] * 4 + [2] * 9)
        units = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
        negatives = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        loss = RobustLoss(groups, units, 0.01, 2.0, negatives)
        assert loss.offset.tolist() == pytest.approx([2 / math.sqrt(16), 2 / math.sqrt(4)])

    def test_trained_pairs_are_adjusted_so(
        self,
        granted_task: Task,
        make_context: MakeContext,
        small_networks: BuildClassifier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        offsets: list[Tensor] = []
        original = Training.run

        def noted(self: Training) -> Any:
            offsets.append(self.objective.offset)
            return original(self)

        monkeypatch.setattr(Training, "run", noted)
        config = replace(CONFIG, epochs=1, pairs=True, adjustment=3.0)
        groups = granted_task.train.groups
        train_groupdro(granted_task, groups, config, make_context(), "dro")
        dark = torch.bincount(groups)[:2].double().sqrt()
        expected = (3 / dark).repeat_interleave(2)
        torch.testing.assert_close(offsets[0].double(), expected, rtol=1e-6, atol=0)

    def test_pairs_need_groups_within_a_class(self, granted_task: Task) -> None:
        mixed = torch.zeros_like(granted_task.train.groups)
        with pytest.raises(UsageError, match="pairs = true needs two classes and groups within"):
            _units(granted_task, mixed, pairs=True)


class TestSampler:
    def test_groups_are_met_equally_often(self) -> None:
        groups = torch.tensor([0] * 9_000 + [1] * 900 + [2] * 100)
        drawn = group_balanced_sampler(groups)(0, torch.Generator().manual_seed(0))
        assert len(drawn) == 10_000
        shares = torch.bincount(groups[drawn]) / 10_000
        assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
        assert len(drawn[groups[drawn] == 2].unique()) == 100  # all of a small group is used

    def test_follows_its_generator(self) -> None:
        draw = group_balanced_sampler(torch.tensor([0, 0, 0, 1]))
        one, same, other = (draw(0, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


@pytest.mark.usefixtures("small_networks")
class TestTraining:
    def test_one_group_is_erm_step_for_step(
        self, granted_task: Task, make_context: MakeContext, small_networks: BuildClassifier
    ) -> None:
        steps: dict[str, list[Tensor]] = {"plain": [], "robust": []}
        for name, loss in (
            ("plain", CrossEntropy()),
            ("robust", RobustLoss(torch.zeros(60, dtype=torch.long), torch.eye(1), 0.01, 2.0)),
        ):
            ctx = make_context(name)
            model = small_networks(granted_task, ctx, "net")
            own = steps[name]

            def note(
                module: nn.Module, *_: object, own: list[Tensor] = own, model: nn.Module = model
            ) -> None:
                own.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())

            loss.register_forward_pre_hook(note)
            config = replace(CONFIG, selection="last")
            Training(model, granted_task, config, ctx, name="net", objective=loss).run()
            note(loss)
        assert len(steps["plain"]) == 3 * math.ceil(60 / 16) + 1
        assert all(map(torch.equal, steps["plain"], steps["robust"]))
        assert not torch.equal(steps["plain"][0], steps["plain"][-1])

    def test_empty_groups_are_left_out(self, granted_task: Task, make_context: MakeContext) -> None:
        groups = 5 * granted_task.train.y  # 0 and 5: the four between them have no samples
        config = replace(CONFIG, balanced=True, adjustment=1.0)
        fitted = train_groupdro(granted_task, groups, config, make_context(), "dro")
        assert fitted.details["robust_groups"] == [0, 5]
        assert all(value.isfinite().all() for value in fitted.module.state_dict().values())

    def test_weights_survive_a_resume(
        self, granted_task: Task, make_context: MakeContext, small_networks: BuildClassifier
    ) -> None:
        """Group weights are the objective's state: two epochs and one more are three."""
        losses, contexts = [], [make_context("whole"), make_context("parts"), make_context("parts")]
        for ctx, epochs in zip(contexts, (3, 2, 3), strict=True):
            loss = RobustLoss(granted_task.train.groups, torch.eye(4), 0.1, 0.0)
            model = small_networks(granted_task, ctx, "net")
            config: TrainConfig = replace(CONFIG, epochs=epochs)
            Training(model, granted_task, config, ctx, name="net", objective=loss).run()
            losses.append(loss.log_weights)
        assert torch.equal(losses[0], losses[2])
        assert not torch.equal(losses[0], losses[1])

    def test_model_is_chosen_by_the_validation_worst_group(
        self, granted_task: Task, make_context: MakeContext
    ) -> None:
        fitted = GroupDro().fit(granted_task, replace(CONFIG, balanced=True), make_context())
        assert fitted.selection.rule == "val_wga"
        assert fitted.partition is None


@pytest.mark.parametrize("name", ["groupdro", "george", "eiil"])
def test_version_2_is_of_adjusted_pairs_alone(name: str) -> None:
    """Every other run keeps its id."""
    method = load_methods()[name]
    config = replace(method.config_type(), pairs=True, adjustment=1.0)
    assert method.version_of(config) == 2
    for other in (replace(config, pairs=False), replace(config, adjustment=0.0)):
        assert method.version_of(other) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"eta": 0.0}, "eta must be positive"), ({"adjustment": -1.0}, "adjustment cannot be neg")],
)
def test_wrong_values_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **change)
