"""Uncertainty: checked against scipy, against brute force, and against worked examples."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from bench.reporting.statistics import (
    compare_pairs,
    holm,
    seed_interval,
    worst_group_interval,
)
from bench.reporting.table import CellKey

VALUES = st.lists(st.floats(0, 100), min_size=2, max_size=6)


def test_a_mean_over_seeds_has_the_papers_standard_deviation() -> None:
    cell = CellKey(metric="wga").averaged([(90.0, "b"), (92.0, "a"), (97.0, "c")])
    assert (cell.mean, cell.n, cell.run_ids) == (93.0, 3, ("a", "b", "c"))
    assert cell.std == pytest.approx(statistics.stdev([90.0, 92.0, 97.0]))


def test_one_seed_has_neither_spread_nor_interval() -> None:
    cell = CellKey(metric="wga").averaged([(90.0, "a")])
    assert (cell.std, cell.ci_low, cell.ci_high) == (None, None, None)


@settings(max_examples=20, deadline=None)
@given(VALUES)
def test_a_seed_interval_lies_around_the_mean_within_the_values(values: list[float]) -> None:
    low, high = seed_interval(values)
    assert low is not None and high is not None
    slack = 1e-9
    assert min(values) - slack <= low <= statistics.fmean(values) + slack
    assert statistics.fmean(values) - slack <= high <= max(values) + slack
    assert (low, high) == seed_interval(values)


def test_a_sample_interval_agrees_with_drawing_samples_one_by_one() -> None:
    draws = np.random.default_rng(1)
    groups = np.repeat([0, 1, 2], [400, 300, 60])
    chance = np.array([0.95, 0.9, 0.8])[groups]
    correct = draws.random((3, len(groups))) < chance
    low, high = worst_group_interval(correct, groups)
    worst = []
    for _ in range(2000):
        by_group = []
        for group in range(3):
            members = np.flatnonzero(groups == group)
            drawn = draws.choice(members, len(members))
            by_group.append(correct[:, drawn].mean(axis=1))
        worst.append(100 * np.min(by_group, axis=0).mean())
    expected = np.quantile(worst, [0.025, 0.975])
    assert (low, high) == pytest.approx(expected, abs=1.0)


def test_a_sample_interval_narrows_with_the_group() -> None:
    correct = np.tile([True, True, True, False], (1, 1000))
    few = worst_group_interval(correct[:, :40], np.zeros(40, int))
    many = worst_group_interval(correct, np.zeros(4000, int))
    assert many[1] - many[0] < few[1] - few[0]
    assert few[0] < 75 < few[1]


def test_holm_corrects_a_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_a_paired_comparison_is_scipys_on_shared_seeds_only() -> None:
    first = {0: 91.0, 1: 93.0, 2: 92.5, 7: 50.0}
    second = {0: 90.0, 1: 91.0, 2: 92.0, 8: 10.0}
    (found,) = compare_pairs({"a": first, "b": second})
    expected = ttest_rel([91.0, 93.0, 92.5], [90.0, 91.0, 92.0]).pvalue
    assert (found.first, found.second, found.n) == ("a", "b", 3)
    assert found.difference == pytest.approx(3.5 / 3)
    assert found.p_value == pytest.approx(expected)
    assert found.p_corrected == pytest.approx(expected)


def test_comparisons_are_corrected_for_their_number() -> None:
    base = {seed: float(seed) for seed in range(5)}
    above = {seed: seed + 5.0 + 0.1 * (seed % 2) for seed in range(5)}
    far = {seed: seed + 9.0 + 0.2 * (seed % 3) for seed in range(5)}
    found = compare_pairs({"a": base, "b": above, "c": far})
    assert len(found) == 3
    plain = [one.p_value for one in found if one.p_value is not None]
    assert [one.p_corrected for one in found] == pytest.approx(holm(plain))


def test_methods_without_shared_seeds_are_not_compared() -> None:
    assert compare_pairs({"a": {0: 1.0}, "b": {1: 2.0}}) == []


def test_differences_without_spread_have_no_p_value() -> None:
    (found,) = compare_pairs({"a": {0: 1.0, 1: 2.0}, "b": {0: 0.0, 1: 1.0}})
    assert (found.difference, found.p_value, found.p_corrected) == (1.0, None, None)
