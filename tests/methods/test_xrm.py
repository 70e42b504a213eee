"""XRM: when labels flip and by what, the twins' loss, and the environments that come out."""

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
from methods.backbones import Classifier
from methods.base import Supervision
from methods.groupdro import train_groupdro
from methods.training import Batch, Training
from methods.xrm import (
    CrossRisk,
    TwinConfig,
    Twins,
    Xrm,
    XrmConfig,
    class_balanced_sum,
    flip_probability,
    is_degenerate,
    mistaken,
)

MakeContext = Callable[..., RunContext]
TWIN = TwinConfig(epochs=2, batch_size=16, lr=0.02)
CONFIG = XrmConfig(epochs=2, batch_size=16, lr=0.02, twins=TWIN)


class Fixed(nn.Module):
    """Twin outputs that are parameters, so that a loss has gradients in them."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.first, self.second], dim=2).flatten(1)


def one_hot_logits(answers: list[int], classes: int = 3, size: float = 50.0) -> Tensor:
    return size * functional.one_hot(torch.tensor(answers), classes).float()


def batch_of(y: Tensor) -> Batch:
    return Batch(torch.zeros(len(y), 1), y, torch.arange(len(y)))


@pytest.mark.parametrize("classes", [2, 5])
def test_a_guess_never_flips_and_certainty_always_does(classes: int) -> None:
    chances = flip_probability(torch.tensor([1 / classes, 1.0, (1 + 1 / classes) / 2]), classes)
    assert chances.tolist() == pytest.approx([0.0, 1.0, 0.5], abs=1e-6)


class TestLoss:
    def test_it_is_the_sum_over_classes_of_means_by_the_labels_as_they_are(self) -> None:
        logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([0, 0, 0, 2, 2])  # class 1 has no sample in this batch
        losses = functional.cross_entropy(logits, labels, reduction="none")
        expected = losses[:3].mean() + losses[3:].mean()
        torch.testing.assert_close(class_balanced_sum(logits, labels, 3), expected)

    def test_each_twin_learns_from_its_own_samples_alone(self) -> None:
        y = torch.tensor([0, 1, 2, 1])
        loss = CrossRisk(y, torch.tensor([0, 0, 1, 1]), 3)
        twins = Fixed(torch.zeros(4, 3), torch.zeros(4, 3))
        loss(twins, batch_of(y)).backward()
        assert twins.first.grad is not None and twins.second.grad is not None
        assert twins.first.grad.abs().sum(dim=1).gt(0).tolist() == [True, True, False, False]
        assert twins.second.grad.abs().sum(dim=1).gt(0).tolist() == [False, False, True, True]

    def test_labels_become_what_the_other_twin_is_sure_of(self) -> None:
        """Sample 0 belongs to the first twin, and so the second decides; sample 1 vice versa."""
        y = torch.tensor([0, 0])
        loss = CrossRisk(y, torch.tensor([0, 1]), 3)
        loss(Fixed(one_hot_logits([1, 1]), one_hot_logits([2, 2])), batch_of(y))
        assert loss.labels.tolist() == [2, 1]
        loss(Fixed(one_hot_logits([0, 0]), one_hot_logits([0, 0])), batch_of(y))
        assert loss.labels.tolist() == [0, 0], "a label can return to what it was"

    def test_a_label_that_was_flipped_stays_so_and_is_learnt(self) -> None:
        """Of two samples of one class the second pass makes two classes, each with its mean."""
        y = torch.tensor([0, 0])
        loss = CrossRisk(y, torch.tensor([0, 1]), 3)
        loss(Fixed(one_hot_logits([1, 1]), one_hot_logits([2, 2])), batch_of(y))
        guesses = torch.zeros(2, 3)
        value = loss(Fixed(guesses, guesses), batch_of(y))
        assert loss.labels.tolist() == [2, 1]
        assert float(value.detach()) == pytest.approx(2 * torch.tensor(3.0).log().item())

    def test_flips_go_by_the_outputs_before_the_step(self) -> None:
        """The loss of a batch is of the labels before its flips; no second pass is made."""
        y = torch.tensor([0, 1])
        calls: list[int] = []

        class Counted(Fixed):
            def forward(self, images: Tensor) -> Tensor:
                calls.append(1)
                return super().forward(images)

        loss = CrossRisk(y, torch.tensor([0, 0]), 2)
        twins = Counted(torch.zeros(2, 2), one_hot_logits([1, 0], 2))
        value = loss(twins, batch_of(y))
        assert loss.labels.tolist() == [1, 0] and calls == [1]
        assert float(value.detach()) == pytest.approx(2 * torch.tensor(2.0).log().item())

    def test_confident_twins_that_are_right_flip_nothing(self) -> None:
        y = torch.tensor([0, 1, 2])
        loss = CrossRisk(y, torch.tensor([0, 1, 0]), 3)
        right = Fixed(one_hot_logits([0, 1, 2]), one_hot_logits([0, 1, 2]))
        loss(right, batch_of(y))
        assert torch.equal(loss.labels, y)
        found = mistaken(right(torch.zeros(3, 1)), y)
        assert found.tolist() == [0, 0, 0] and is_degenerate([(found, y)], 3)

    def test_its_labels_are_part_of_a_checkpoint(self) -> None:
        loss = CrossRisk(torch.tensor([0, 1]), torch.tensor([0, 1]), 2)
        assert set(loss.state_dict()) == {"labels", "owner"}


def test_environments_are_where_either_twin_errs_whichever_is_called_first() -> None:
    y = torch.tensor([0, 0, 0, 0])
    first, second = one_hot_logits([0, 1, 0, 1]), one_hot_logits([0, 0, 1, 1])
    images = torch.zeros(4, 1)
    found = mistaken(Fixed(first, second)(images), y)
    assert found.tolist() == [0, 1, 1, 1]
    assert torch.equal(mistaken(Fixed(second, first)(images), y), found)


def test_outputs_are_class_by_class_as_the_audit_reads_them() -> None:
    twins = Twins(nn.Identity(), nn.ReLU())
    assert twins(torch.tensor([[-1.0, 2.0]])).tolist() == [[-1.0, 0.0, 2.0, 2.0]]


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_groups_are_class_by_environment_and_no_group_label_is_read(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Tensor] = []

        def noted(task: Task, groups: Tensor, *rest: Any, **more: Any) -> Any:
            seen.append(groups)
            return train_groupdro(task, groups, *rest, **more)

        monkeypatch.setattr("methods.xrm.train_groupdro", noted)
        fitted = Xrm().fit(toy_task, CONFIG, make_context())
        assert fitted.partition is not None and fitted.val_partition is not None
        assert torch.equal(seen[0], 2 * fitted.partition + toy_task.train.y)
        facts = fitted.details["xrm"]
        assert facts["environment_sizes"] == torch.bincount(fitted.partition, minlength=2).tolist()
        assert sum(facts["val_environment_sizes"]) == len(toy_task.val)
        assert 0 <= facts["flipped_labels"] <= 60
        assert fitted.selection is not None and fitted.selection.rule == "worst_environment"

    @pytest.mark.parametrize("frozen", [False, True])
    def test_environments_are_by_the_original_labels(
        self,
        toy_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        frozen: bool,
    ) -> None:
        """Also where every label was flipped: they are told by what the task says."""
        given: list[Tensor] = []

        def noted(outputs: Tensor, y: Tensor) -> Tensor:
            given.append(y)
            return mistaken(outputs, y)

        monkeypatch.setattr("methods.xrm.mistaken", noted)
        monkeypatch.setattr("methods.xrm.flip_probability", lambda p, classes: torch.ones_like(p))
        config = replace(CONFIG, twins=replace(TWIN, frozen=frozen))
        fitted = Xrm().fit(toy_task, config, make_context())
        assert fitted.details["xrm"]["flipped_labels"] > 0
        assert torch.equal(given[0], toy_task.train.y) and torch.equal(given[1], toy_task.val.y)

    def test_a_fair_coin_of_the_seed_gives_each_sample_to_a_twin(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owners: list[Tensor] = []

        class Noted(CrossRisk):
            def __init__(self, y: Tensor, owner: Tensor, classes: int) -> None:
                owners.append(owner)
                super().__init__(y, owner, classes)

        monkeypatch.setattr("methods.xrm.CrossRisk", Noted)
        for seed in (0, 1):
            Xrm().fit(toy_task, CONFIG, make_context(f"s{seed}", seed))
        for owner in owners:
            assert float(owner.double().mean()) == pytest.approx(0.5, abs=0.2)
        assert not torch.equal(*owners)

    def test_linear_twins_start_from_zero(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: list[Tensor] = []

        def noted(outputs: Tensor, y: Tensor) -> Tensor:
            given.append(outputs)
            return mistaken(outputs, y)

        monkeypatch.setattr("methods.xrm.mistaken", noted)
        hardly_moved = replace(TWIN, frozen=True, epochs=1, lr=1e-9)
        Xrm().fit(toy_task, replace(CONFIG, twins=hardly_moved), make_context())
        assert all(float(outputs.abs().max()) < 1e-5 for outputs in given)

    @pytest.mark.parametrize("wrong", [0, 60])
    def test_one_environment_is_reported_and_trained_on(
        self,
        toy_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        wrong: int,
    ) -> None:
        def all_alike(outputs: Tensor, y: Tensor) -> Tensor:
            return torch.full_like(y, int(wrong > 0))

        monkeypatch.setattr("methods.xrm.mistaken", all_alike)
        fitted = Xrm().fit(toy_task, CONFIG, make_context())
        facts = fitted.details["xrm"]
        assert facts["degenerate"] and sorted(facts["environment_sizes"]) == [0, 60]

    def test_the_last_of_equally_good_epochs_is_kept(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rules: list[Any] = []
        run = Training.run

        def noted(self: Training) -> Any:
            rules.append(self.select)
            return run(self)

        monkeypatch.setattr(Training, "run", noted)
        Xrm().fit(toy_task, CONFIG, make_context())
        twins, second = rules
        assert twins.always_last and second.latest_of_equals

    @pytest.mark.parametrize("lacking", [False, True])
    def test_both_environments_of_validation_count(
        self,
        toy_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        lacking: bool,
    ) -> None:
        """The epoch goes by the worst class in an environment; a lacking one is degenerate too."""
        rules: list[Any] = []
        run, held_out = Training.run, len(toy_task.val)

        def noted(self: Training) -> Any:
            rules.append(self.select)
            return run(self)

        def in_turn(outputs: Tensor, y: Tensor) -> Tensor:
            found = torch.arange(len(y)) // 2 % 2
            return found * 0 if lacking and len(y) == held_out else found

        monkeypatch.setattr(Training, "run", noted)
        monkeypatch.setattr("methods.xrm.mistaken", in_turn)
        fitted = Xrm().fit(toy_task, CONFIG, make_context())
        assert fitted.details["xrm"]["degenerate"] == lacking
        y = toy_task.val.y
        wrong = (torch.arange(held_out) // 2 % 2 == 1) & (y == 1)
        outputs = functional.one_hot(torch.where(wrong, 1 - y, y), 2).float()
        assert rules[1].score(outputs) == (50.0 if lacking else 0.0)

    def test_the_backbone_can_stay_as_it_is(
        self,
        toy_task: Task,
        make_context: MakeContext,
        small_networks: Callable[..., Classifier],
    ) -> None:
        ctx = make_context()
        fresh = small_networks(toy_task, ctx, "xrm")
        fitted = Xrm().fit(toy_task, replace(CONFIG, head_only=True), ctx)
        trained = fitted.module
        assert isinstance(trained, Classifier)
        for mine, other in zip(
            trained.backbone.parameters(), fresh.backbone.parameters(), strict=True
        ):
            assert torch.equal(mine, other)
        assert not torch.equal(trained.head.weight, fresh.head.weight)


def test_no_group_is_ever_asked_for() -> None:
    assert Xrm().supervision(CONFIG) == Supervision()
