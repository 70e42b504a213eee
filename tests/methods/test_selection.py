"""Selection rules: what each reads, and which of two epochs it prefers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from datasets.base import GroupLabelsHidden, LoadedData, Task
from datasets.errors import UsageError
from methods.selection import RULES, Score, Selection, selection


@pytest.fixture
def logits(toy_data: LoadedData) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    y = toy_data.splits["val"].labels.y
    return (
        torch.randn(len(y), 2, generator=generator)
        + functional.one_hot(y)
        + torch.tensor([0.0, 0.3])
    )


def test_scores_by_hand(granted_task: Task, logits: Tensor) -> None:
    y, groups = granted_task.val.y, granted_task.val.groups
    right = (logits.argmax(1) == y).double()
    by_group = [100 * float(right[groups == g].mean()) for g in range(4)]
    margin = logits[:, 1] - logits[:, 0]

    def pairs_won(negatives: Tensor) -> float:
        return float((margin[y == 1][:, None] > margin[negatives][None]).double().mean())

    expected = {
        "val_avg": 100 * float(right.mean()),
        "last": 100 * float(right.mean()),
        "val_loss": float(functional.cross_entropy(logits, y)),
        "val_auroc": pairs_won(y == 0),
        "val_wga": min(by_group),
        "val_worst_class": min(100 * float(right[y == c].mean()) for c in range(2)),
        "val_worst_auroc": min(pairs_won(groups == 0), pairs_won(groups == 1)),
    }
    assert set(expected) == set(RULES)
    for rule, value in expected.items():
        assert selection(rule, granted_task).score(logits) == pytest.approx(value), rule
    assert len(set(expected.values())) == 6  # only `last` shares its score with another


@pytest.mark.parametrize("rule", RULES)
def test_only_group_rules_need_groups(toy_task: Task, logits: Tensor, rule: str) -> None:
    if rule in ("val_wga", "val_worst_auroc"):
        with pytest.raises(GroupLabelsHidden, match="val split"):
            selection(rule, toy_task)
    else:
        assert math.isfinite(selection(rule, toy_task).score(logits))


def test_unknown_rule_is_refused_under_every_tier(toy_task: Task, granted_task: Task) -> None:
    for task in (toy_task, granted_task):
        with pytest.raises(UsageError, match="unknown selection rule 'test_wga'"):
            selection("test_wga", task)


def test_direction(toy_task: Task) -> None:
    accuracy, loss = selection("val_avg", toy_task), selection("val_loss", toy_task)
    assert accuracy.better(2.0, 1.0) and not accuracy.better(1.0, 2.0)
    assert loss.better(1.0, 2.0) and not loss.better(2.0, 1.0)
    assert not accuracy.better(1.0, 1.0) and not loss.better(1.0, 1.0)  # the earlier epoch stays
    last = selection("last", toy_task)
    assert last.better(0.0, 1.0) and last.better(math.nan, 1.0)


def test_the_later_of_equal_epochs_may_win() -> None:
    rule = Selection("any", lambda outputs: 0.0, latest_of_equals=True)
    assert rule.better(1.0, 1.0) and rule.better(2.0, 1.0) and not rule.better(0.5, 1.0)
    assert not rule.better(math.nan, math.nan)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_undefined_values_never_win(higher_is_better: bool) -> None:
    rule = Selection("any", lambda outputs: 0.0, higher_is_better)
    assert not rule.better(math.nan, 1.0)
    assert rule.better(1.0, math.nan)
    assert not rule.better(math.nan, math.nan)


def test_worst_auroc_without_negatives_is_undefined(granted_task: Task, logits: Tensor) -> None:
    positive = granted_task.val.y == 1
    split = granted_task.val
    only = type(split)("val", split.images, split.y[positive], split.ids, split.groups[positive])
    task = dataclasses.replace(granted_task, val=only)
    assert math.isnan(selection("val_worst_auroc", task).score(logits[positive]))


def test_of_fits_with_equal_values_the_more_accurate_one_is_better(granted_task: Task) -> None:
    """Both are wrong on a whole group, and one is right elsewhere more often."""
    rule, y = selection("val_wga", granted_task), granted_task.val.y
    group = granted_task.val.groups == 0
    right = torch.where(group, 1 - y, y)
    good, poor = (functional.one_hot(one).float() for one in (right, 1 - y))
    first, second = (Score.of(rule, logits, y) for logits in (poor, good))
    assert first.value == second.value == 0.0 and first.average < second.average
    assert second.beats(first, rule) and not first.beats(second, rule)
    assert first.beats(None, rule) and not first.beats(first, rule)
    best = Score(1.0, 0.0)
    assert best.beats(second, rule) and not second.beats(best, rule)
