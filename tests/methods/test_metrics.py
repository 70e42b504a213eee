"""Metrics against scikit-learn, and by hand where it has none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, roc_auc_score

from methods.metrics import (
    accuracy,
    auroc,
    group_accuracy,
    margin_score,
    pairwise_auroc,
    worst_group,
)

SAMPLES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=60
)
SCORED = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60)
EXACT = st.floats(-1e3, 1e3, width=32)


@given(SAMPLES)
@settings(max_examples=100, deadline=None)
def test_accuracies_agree_with_scikit_learn(samples: list[tuple[int, int, int]]) -> None:
    pred, y, groups = torch.tensor(samples).T
    assert accuracy(pred, y) == pytest.approx(100 * accuracy_score(y, pred))
    values, sizes = group_accuracy(pred, y, groups, 6)
    assert sizes.tolist() == [int((groups == g).sum()) for g in range(6)]
    for group in range(6):
        mine = groups == group
        if mine.any():
            expected = 100 * accuracy_score(y[mine], pred[mine])
            assert float(values[group]) == pytest.approx(expected)
        else:
            assert values[group].isnan()
    assert worst_group(values) == pytest.approx(min(v for v in values.tolist() if v == v))


@given(SCORED)
@settings(max_examples=200, deadline=None)
def test_auroc_with_ties_agrees_with_scikit_learn(samples: list[tuple[int, bool]]) -> None:
    score = torch.tensor([s for s, _ in samples], dtype=torch.float32) / 3
    positive = torch.tensor([p for _, p in samples])
    if positive.all() or not positive.any():
        assert math.isnan(auroc(score, positive))
    else:
        assert auroc(score, positive) == pytest.approx(roc_auc_score(positive, score))


@given(st.lists(st.tuples(EXACT, st.booleans()), min_size=2, max_size=40))
@settings(max_examples=100, deadline=None)
def test_auroc_is_symmetric(samples: list[tuple[float, bool]]) -> None:
    score = torch.tensor([s for s, _ in samples])
    positive = torch.tensor([p for _, p in samples])
    if positive.any() and not positive.all():
        assert auroc(score, positive) + auroc(-score, positive) == pytest.approx(1)
        assert auroc(score, positive) == pytest.approx(auroc(-score, ~positive))


def test_pairwise_auroc_by_hand() -> None:
    #       negatives of group 0 | of group 1 | positives (groups 2 and 3)
    score = torch.tensor([0.1, 0.6, 0.8, 0.8, 0.5, 0.9])
    y = torch.tensor([0, 0, 0, 0, 1, 1])
    groups = torch.tensor([0, 0, 1, 1, 2, 3])
    # 0.5 > 0.1 only; 0.9 beats both: 3 of 4 pairs.  0.5 beats neither 0.8; 0.9 both: 2 of 4.
    assert pairwise_auroc(score, y, groups, 5) == {0: 0.75, 1: 0.5}


def test_pairwise_auroc_leaves_out_groups_with_positives() -> None:
    score, y = torch.tensor([0.1, 0.9, 0.2]), torch.tensor([0, 1, 1])
    assert pairwise_auroc(score, y, torch.tensor([0, 0, 1]), 2) == {}
    absent = pairwise_auroc(score[:1], y[:1], torch.tensor([0]), 2)
    assert list(absent) == [0] and math.isnan(absent[0])


def test_worst_group_ignores_empty_groups() -> None:
    nan = float("nan")
    assert worst_group(torch.tensor([nan, 80.0, 70.0, nan])) == 70.0
    assert math.isnan(worst_group(torch.tensor([nan, nan])))


def test_margin_score_orders_like_the_probability() -> None:
    logits = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(margin_score(logits).argsort(), logits.softmax(1)[:, 1].argsort())
