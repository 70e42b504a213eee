"""RWY, SUBY, RWG, SUBG: what is drawn, how often, and from which random stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.context import RunContext
from datasets.base import GroupLabelsHidden, Task
from methods.backbones import Classifier
from methods.balanced import (
    BalancedConfig,
    Rwg,
    Rwy,
    Subg,
    Suby,
    shuffled_subset,
    smallest_subset,
)
from methods.base import Supervision
from methods.groupdro import RobustLoss, group_balanced_sampler
from methods.selection import Selection
from methods.training import Batch, Training

MakeContext = Callable[..., RunContext]
CONFIG = BalancedConfig(epochs=3, batch_size=16, lr=0.02)
CELLS = torch.tensor([0] * 40 + [1] * 9 + [3] * 25)  # cell 2 is empty, as in ISIC


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The samplers of the trainings of a test."""
    samplers: list[Any] = []
    run = Training.run

    def noted(self: Training) -> Any:
        samplers.append(self.sampler)
        return run(self)

    monkeypatch.setattr(Training, "run", noted)
    return samplers


class TestDraws:
    def test_every_group_is_met_equally_often(self) -> None:
        """Weights are proportional to 1 / n_g, so that N / G samples are expected of a group."""
        draw = group_balanced_sampler(CELLS)
        epochs = torch.cat([draw(epoch, seeded(epoch)) for epoch in range(200)])
        counts = torch.bincount(CELLS[epochs], minlength=4).double() / 200
        assert len(epochs) == 200 * len(CELLS)
        assert counts[2] == 0
        assert counts[[0, 1, 3]].tolist() == pytest.approx([74 / 3] * 3, rel=0.03)

    def test_one_group_makes_a_bootstrap_of_all(self) -> None:
        index = group_balanced_sampler(torch.zeros(5_000, dtype=torch.long))(0, seeded(0))
        distinct = len(index.unique()) / 5_000
        assert len(index) == 5_000 and distinct == pytest.approx(0.632, abs=0.02)

    def test_a_subset_has_as_many_of_each_as_the_smallest_that_occurs(self) -> None:
        positions = smallest_subset(CELLS, seeded(3))
        assert torch.bincount(CELLS[positions], minlength=4).tolist() == [9, 9, 0, 9]
        assert len(positions.unique()) == 27

    def test_a_subset_is_the_same_in_every_epoch_in_another_order(self) -> None:
        draw = shuffled_subset(smallest_subset(CELLS, seeded(3)))
        first, second = (draw(epoch, seeded(epoch)) for epoch in (0, 1))
        assert torch.equal(first.sort().values, second.sort().values)
        assert not torch.equal(first, second)

    def test_balanced_groups_and_hardly_moving_weights_are_groupdro(self) -> None:
        """With eta to 0 and equally many of each group in a batch, both gradients are one."""
        groups = torch.tensor([0, 1, 2, 3] * 6)
        y = groups // 2
        logits = torch.randn(24, 2, generator=seeded(1), requires_grad=True)
        functional.cross_entropy(logits, y).backward()
        plain = logits.grad
        logits.grad = None
        robust = RobustLoss(groups, torch.eye(4), eta=1e-9, adjustment=0.0)
        batch = Batch(torch.zeros(24, 1), y, torch.arange(24))
        robust(Given(logits), batch).backward()
        assert plain is not None and logits.grad is not None
        torch.testing.assert_close(logits.grad, plain)


class Given(torch.nn.Module):
    """Returns the logits it was given."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.values = logits

    def forward(self, images: Tensor) -> Tensor:
        return self.values


@pytest.mark.usefixtures("small_networks")
class TestFit:
    @pytest.mark.parametrize("method", [Rwy(), Suby()])
    def test_class_balancing_reads_no_training_groups(
        self, method: Any, selecting_task: Task, make_context: MakeContext
    ) -> None:
        fitted = method.fit(selecting_task, CONFIG, make_context())
        assert fitted.selection is not None and fitted.selection.rule == "val_wga"
        assert fitted.selection.epoch is not None  # which one was kept is said

    @pytest.mark.parametrize("method", [Rwg(), Subg()])
    def test_group_balancing_does(
        self, method: Any, selecting_task: Task, granted_task: Task, make_context: MakeContext
    ) -> None:
        with pytest.raises(GroupLabelsHidden, match="train split"):
            method.fit(selecting_task, CONFIG, make_context("hidden"))
        method.fit(granted_task, CONFIG, make_context("granted"))

    def test_subsets_differ_between_seeds_and_are_recorded(
        self, granted_task: Task, make_context: MakeContext, drawn: list[Any]
    ) -> None:
        fitted = [Subg().fit(granted_task, CONFIG, make_context(f"s{s}", s)) for s in (0, 1)]
        subsets = [draw(0, seeded(0)).sort().values for draw in drawn]
        assert not torch.equal(*subsets)
        sizes = torch.bincount(granted_task.train.groups)
        facts = {"sizes": sizes.tolist(), "samples_per_epoch": 4 * int(sizes.min())}
        assert fitted[0].details["balanced"] == facts

    @pytest.mark.parametrize("method", [Rwy(), Suby(), Rwg(), Subg()])
    def test_the_last_of_equally_good_epochs_is_kept(
        self,
        method: Any,
        granted_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As by the authors: where the worst group is 0 in every epoch, the first is no model."""
        flat = Selection("val_wga", lambda outputs: 0.0)
        monkeypatch.setattr("methods.balanced.selection", lambda rule, task: flat)
        fitted = method.fit(granted_task, CONFIG, make_context())
        assert fitted.selection is not None
        assert (fitted.selection.epoch, fitted.selection.rule) == (2, "val_wga")

    def test_groups_that_are_classes_make_rwg_and_rwy_the_same(
        self, granted_task: Task, make_context: MakeContext, drawn: list[Any]
    ) -> None:
        Rwy().fit(granted_task, CONFIG, make_context("y"))
        split = granted_task.train
        same = type(split)("train", split.images, split.y, split.ids, split.y)
        Rwg().fit(replace(granted_task, train=same), CONFIG, make_context("g"))
        by_class, by_group = (draw(0, seeded(5)) for draw in drawn)
        assert torch.equal(by_class, by_group)


def test_tiers_are_those_of_the_paper_and_of_its_group_free_use() -> None:
    free = replace(CONFIG, selection="val_worst_class")
    for method, train in ((Rwy(), False), (Suby(), False), (Rwg(), True), (Subg(), True)):
        assert method.supervision(CONFIG) == Supervision(train_groups=train, val_groups=True)
        assert method.supervision(free) == Supervision(train_groups=train)


def test_the_classifier_is_an_ordinary_one(
    granted_task: Task, make_context: MakeContext, small_networks: Callable[..., Classifier]
) -> None:
    fitted = Rwg().fit(granted_task, CONFIG, make_context())
    assert isinstance(fitted.module, Classifier) and fitted.partition is None
