"""Uncertainty: checked against scipy, against brute force, and against worked examples."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm, ttest_1samp, ttest_ind_from_stats, ttest_rel

from bench.reporting.statistics import (
    Verdict,
    compare_with,
    holm,
    seed_interval,
    t_interval,
    verdict,
    welch_interval,
    worst_group_interval,
)
from bench.reporting.table import CellKey
from bench.resources import published_folder
from datasets.catalogue import get_dataset

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
def test_a_seed_interval_is_scipys(values: list[float]) -> None:
    low, high = seed_interval(values)
    assert low is not None and high is not None
    if len(set(values)) > 1:
        expected = ttest_1samp(values, 0).confidence_interval(0.95)
        assert (low, high) == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-6)
    else:
        assert low == pytest.approx(high)


def coverage(draws: npt.NDArray[np.float64]) -> float:
    """How many of 100 intervals, one a row of draws, hold the true mean, zero."""
    n = draws.shape[1]
    low, high = t_interval(draws.mean(axis=1), draws.std(axis=1, ddof=1), n)
    return 100 * float(((low <= 0) & (high >= 0)).mean())


@pytest.mark.parametrize("n", [5, 10])
def test_an_interval_over_seeds_holds_the_mean_as_often_as_it_says(n: int) -> None:
    draws = np.random.default_rng(0).normal(size=(50_000, n))
    assert 93 <= coverage(draws) <= 97
    narrow = norm.ppf(0.975) / np.sqrt(n) * draws.std(axis=1, ddof=1)
    with_normal_quantile = 100 * float((np.abs(draws.mean(axis=1)) <= narrow).mean())
    assert with_normal_quantile < 93  # what the simulation has to be able to tell


def stored_residuals() -> npt.NDArray[np.float64]:
    """The worst groups of all published main runs, each less its cell's mean, in its spread."""
    cells: dict[tuple[str, ...], list[float]] = {}
    with (published_folder() / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            config: Any = get_dataset(row["dataset"]).config_type()
            if not row["variant"] and row["protocol"] == config.protocol:
                key = (row["method"], row["dataset"], row["version"])
                cells.setdefault(key, []).append(float(row["test_wga"]))
    centred = [np.array(own) - np.mean(own) for own in cells.values() if len(own) >= 5]
    return np.concatenate([own / own.std() for own in centred if own.std() > 0])


@pytest.mark.parametrize("n", [5, 10])
def test_coverage_where_seeds_spread_as_the_published_ones(
    n: int, record_property: Callable[[str, object], None]
) -> None:
    """What is found stands in docs/protocol.md; `pytest -s` prints it."""
    residuals = stored_residuals()
    found = coverage(np.random.default_rng(0).choice(residuals, (50_000, n)))
    record_property("coverage", found)
    print(f"n = {n}: {found:.1f}%, from {len(residuals)} runs")
    assert len(residuals) > 90 and found > 88  # a percentile bootstrap over five has 84


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
    (found,) = compare_with({"a": first, "b": second}, ["b"])
    expected = ttest_rel([91.0, 93.0, 92.5], [90.0, 91.0, 92.0])
    assert (found.first, found.second, found.n) == ("a", "b", 3)
    assert found.difference == pytest.approx(3.5 / 3)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.p_corrected == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_comparisons_are_those_planned_and_corrected_for_their_number() -> None:
    base = {seed: float(seed) for seed in range(5)}
    above = {seed: seed + 5.0 + 0.1 * (seed % 2) for seed in range(5)}
    far = {seed: seed + 9.0 + 0.2 * (seed % 3) for seed in range(5)}
    off = {seed: seed + 1.0 + 0.3 * (seed % 4) for seed in range(5)}
    found = compare_with({"a": base, "b": above, "c": far, "d": off}, ["c", "a"])
    pairs = [(one.first, one.second) for one in found]
    # The two baselines are compared once; b and d, which are none, are not compared.
    assert pairs == [("a", "c"), ("b", "c"), ("d", "c"), ("b", "a"), ("d", "a")]
    plain = [one.p_value for one in found if one.p_value is not None]
    assert [one.p_corrected for one in found] == pytest.approx(holm(plain))


def test_methods_without_shared_seeds_are_not_compared() -> None:
    assert compare_with({"a": {0: 1.0}, "b": {1: 2.0}}, ["a", "unknown"]) == []


def test_differences_without_spread_have_no_p_value() -> None:
    (found,) = compare_with({"a": {0: 1.0, 1: 2.0}, "b": {0: 0.0, 1: 1.0}}, ["b"])
    assert (found.difference, found.p_value, found.p_corrected) == (1.0, None, None)


def test_welchs_interval_is_scipys() -> None:
    ours, theirs = (73.6, 5.8, 5), (72.9, 2.8, 3)
    expected = ttest_ind_from_stats(*ours, *theirs, equal_var=False)
    low, high = welch_interval(ours, theirs)
    assert (low + high) / 2 == pytest.approx(0.7)
    # The interval touches zero exactly where the test's p-value is 5%.
    for edge in (low, high):
        shifted = (ours[0] - edge, *ours[1:])
        pvalue = ttest_ind_from_stats(*shifted, *theirs, equal_var=False).pvalue
        assert pvalue == pytest.approx(0.05)
    assert expected.pvalue > 0.05 and low < 0 < high
    assert welch_interval((1.0, 0.0, 5), (2.0, 0.0, 5)) == (-1.0, -1.0)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.1, 9.0, "higher"),
        (-9.0, -0.1, "lower"),
        (-4.0, 6.0, "agrees"),
        (-4.1, 6.0, "cannot tell"),
        (None, None, "cannot tell"),
    ],
)
def test_a_verdict_needs_an_interval_narrow_enough(
    low: float | None, high: float | None, word: Verdict
) -> None:
    assert verdict(low, high, margin=5.0) == word
