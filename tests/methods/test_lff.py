"""LfF: its moving averages, its weights, and the loss of the network that is biased on purpose."""

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
from methods.backbones import Classifier
from methods.base import Supervision
from methods.lff import (
    FailureLoss,
    Lff,
    LffConfig,
    LossAverages,
    generalised_cross_entropy,
)
from methods.training import Batch, Training

MakeContext = Callable[..., RunContext]
CONFIG = LffConfig(epochs=2, batch_size=16, lr=0.02)
Y = torch.tensor([0, 0, 0, 1, 1, 1])
ALL = torch.arange(6)


def averages(values: list[float]) -> LossAverages:
    kept = LossAverages(Y, 2)
    kept.update(ALL, torch.tensor(values))
    return kept


def loss_with(biased: list[float], debiased: list[float]) -> FailureLoss:
    loss = FailureLoss(nn.Linear(1, 2), Y, 2, 0.7)  # type: ignore[arg-type]
    loss.biased_losses, loss.debiased_losses = averages(biased), averages(debiased)
    return loss


class TestAverages:
    def test_after_one_epoch_they_are_the_losses(self) -> None:
        kept = LossAverages(Y, 2)
        losses = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1, 0.2])
        for part in ALL.split(2):
            kept.update(part, losses[part])
        torch.testing.assert_close(kept.averages, losses)
        kept.update(ALL[:1], torch.tensor([1.5]))
        assert float(kept.averages[0]) == pytest.approx(0.7 * 0.5 + 0.3 * 1.5)

    def test_the_scale_is_the_largest_of_the_class_in_all_of_training_so_far(self) -> None:
        kept = LossAverages(Y, 2)
        kept.update(torch.tensor([0, 1, 3]), torch.tensor([0.5, 2.0, 8.0]))  # the rest is unseen
        assert kept.scaled(torch.tensor([0, 1, 3])).tolist() == pytest.approx([0.25, 1.0, 1.0])
        assert kept.scaled(torch.tensor([0])).tolist() == pytest.approx([0.25])  # not of the batch

    def test_they_and_what_was_visited_are_part_of_a_checkpoint(self) -> None:
        names = set(loss_with([1.0] * 6, [1.0] * 6).state_dict())
        for part in ("biased_losses", "debiased_losses"):
            assert {f"{part}.averages", f"{part}.visited"} <= names


class TestWeights:
    def test_they_are_between_zero_and_one_and_half_where_both_agree(self) -> None:
        values = [0.5, 1.0, 2.0, 3.0, 0.1, 0.2]
        assert loss_with(values, values).weights(ALL).tolist() == pytest.approx([0.5] * 6)
        found = loss_with(values, values[::-1]).weights(ALL)
        assert (found >= 0).all() and (found <= 1).all() and found.std() > 0.1

    def test_a_classs_losses_times_a_constant_leave_them_as_they_are(self) -> None:
        values = [0.5, 1.0, 2.0, 3.0, 0.1, 0.2]
        scaled = [10 * v if label == 0 else v for v, label in zip(values, Y.tolist(), strict=True)]
        expected = loss_with(values, [1.0] * 6).weights(ALL)
        torch.testing.assert_close(loss_with(scaled, [1.0] * 6).weights(ALL), expected)

    def test_what_only_the_biased_network_fails_on_counts_most(self) -> None:
        found = loss_with([0.1, 0.1, 4.0, 1.0, 1.0, 1.0], [1.0] * 6).weights(ALL)
        assert int(found[:3].argmax()) == 2


class TestGeneralisedCrossEntropy:
    def gradient(self, q: float, plain: bool = False) -> tuple[Tensor, Tensor]:
        logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(2), requires_grad=True)
        if plain:
            functional.cross_entropy(logits, Y, reduction="sum").backward()
        else:
            generalised_cross_entropy(logits, Y, q).sum().backward()
        assert logits.grad is not None
        return logits.grad, logits.detach().softmax(1).gather(1, Y[:, None])

    def test_its_gradient_is_p_to_the_q_times_cross_entropys_times_q(self) -> None:
        (mine, p), (plain, _) = self.gradient(0.7), self.gradient(0.7, plain=True)
        torch.testing.assert_close(mine, 0.7 * p**0.7 * plain)

    def test_it_is_q_times_that_of_the_papers_formula(self) -> None:
        """(1 - p^q) / q, differentiated by autograd."""
        logits = torch.randn(6, 2, generator=torch.Generator().manual_seed(2), requires_grad=True)
        p = logits.softmax(1).gather(1, Y[:, None])
        ((1 - p**0.7) / 0.7).sum().backward()
        assert logits.grad is not None
        torch.testing.assert_close(self.gradient(0.7)[0], 0.7 * logits.grad)

    def test_towards_q_zero_it_is_cross_entropy_but_for_the_factor(self) -> None:
        mine, plain = self.gradient(1e-6)[0], self.gradient(0.7, plain=True)[0]
        torch.testing.assert_close(mine / 1e-6, plain, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_of_weighted_losses_and_the_biased_networks_own() -> None:
    """Both networks are shown the images as they are; the authors' divides digits by 255 again."""
    images = torch.rand(6, 1)
    seen: list[Tensor] = []

    class Given(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.values = nn.Parameter(torch.randn(6, 2, generator=generator))

        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return self.values

    biased, model = Given(0), Given(1)
    loss = FailureLoss(biased, Y, 2, 0.7)  # type: ignore[arg-type]
    value = loss(model, Batch(images, Y, ALL))
    assert len(seen) == 2 and all(torch.equal(own, images) for own in seen)
    for network, kept in ((biased, loss.biased_losses), (model, loss.debiased_losses)):
        plain = functional.cross_entropy(network.values, Y, reduction="none")
        torch.testing.assert_close(kept.averages, plain.detach())
    losses = functional.cross_entropy(model.values, Y, reduction="none")
    own = generalised_cross_entropy(biased.values, Y, 0.7).mean()
    torch.testing.assert_close(value, (loss.weights(ALL) * losses).mean() + own)
    value.backward()  # weights have no gradient: each network is moved by its own loss alone
    expected = torch.autograd.grad((loss.weights(ALL) * losses).mean(), model.values)[0]
    assert model.values.grad is not None
    torch.testing.assert_close(model.values.grad, expected)


@pytest.fixture
def objectives(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The losses of the trainings of a test."""
    found: list[Any] = []
    run = Training.run

    def noted(self: Training) -> Any:
        found.append(self.objective)
        return run(self)

    monkeypatch.setattr(Training, "run", noted)
    return found


@pytest.mark.usefixtures("small_networks")
class TestFit:
    @pytest.mark.parametrize("head_only", [False, True])
    def test_the_biased_network_is_trained_as_the_classifier_is(
        self,
        toy_task: Task,
        make_context: MakeContext,
        small_networks: Callable[..., Classifier],
        objectives: list[Any],
        head_only: bool,
    ) -> None:
        """With `head_only` its backbone is left alone, statistics of batch-norms included."""
        ctx = make_context()
        Lff().fit(toy_task, replace(CONFIG, head_only=head_only), ctx)
        biased, fresh = objectives[0].biased, small_networks(toy_task, ctx, "lff-biased")
        assert not torch.equal(biased.head.weight, fresh.head.weight)
        both = zip(biased.backbone.parameters(), fresh.backbone.parameters(), strict=True)
        assert all(torch.equal(mine, other) == head_only for mine, other in both)
        assert biased.backbone.training == (not head_only)

    def test_both_networks_are_trained_and_the_classifier_is_what_is_kept(
        self, toy_task: Task, make_context: MakeContext, small_networks: Callable[..., Classifier]
    ) -> None:
        ctx = make_context()
        fitted = Lff().fit(toy_task, CONFIG, ctx)
        assert fitted.selection is not None and fitted.selection.rule == "last"
        assert 0 < fitted.details["lff"]["mean_weight"] < 1
        fresh = small_networks(toy_task, ctx, "lff").state_dict()
        moved = [not torch.equal(v, fresh[k]) for k, v in fitted.module.state_dict().items()]
        assert all(moved)

    def test_backbones_can_stay_as_they_are(
        self, toy_task: Task, make_context: MakeContext, small_networks: Callable[..., Classifier]
    ) -> None:
        ctx = make_context()
        fitted = Lff().fit(toy_task, replace(CONFIG, head_only=True), ctx)
        fresh = small_networks(toy_task, ctx, "lff")
        assert isinstance(fitted.module, Classifier)
        both = zip(fitted.module.backbone.parameters(), fresh.backbone.parameters(), strict=True)
        assert all(torch.equal(mine, other) for mine, other in both)
        assert not torch.equal(fitted.module.head.weight, fresh.head.weight)


def test_tiers() -> None:
    assert Lff().supervision(CONFIG) == Supervision()
    assert Lff().supervision(replace(CONFIG, selection="val_wga")) == Supervision(val_groups=True)


def test_q_must_be_in_its_range() -> None:
    with pytest.raises(UsageError, match="q must be"):
        replace(CONFIG, q=0.0)
