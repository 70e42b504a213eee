"""Paired differences of two sets of runs."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import bench
import bench.paired
from datasets.errors import UsageError

A = {0: 70.0, 1: 72.0, 2: 75.0, 9: 1.0}
B = {2: 70.0, 1: 71.0, 0: 66.0, 7: 99.0}


def test_examples_in_the_docstring_hold() -> None:
    found = doctest.testmod(bench.paired)
    assert found.attempted >= 3 and not found.failed


def test_difference_is_paired_by_seed_with_its_t_interval() -> None:
    found = bench.compare(A, B)
    gaps = [4.0, 1.0, 5.0]  # of seeds 0, 1 and 2, whatever their order
    interval = stats.ttest_1samp(gaps, 0).confidence_interval()
    assert (found.n, found.difference) == (3, pytest.approx(np.mean(gaps)))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    other = bench.compare(B, A)
    assert (other.difference, other.low) == pytest.approx((-found.difference, -interval.high))


def test_one_shared_seed_has_no_interval() -> None:
    found = bench.compare({3: 2.0}, {3: 1.0})
    assert (found.n, found.difference, found.low) == (1, 1.0, None)


def test_named_runs_are_those_of_the_table() -> None:
    table = bench.load_results("published")
    own = table[(table["dataset"] == "umnist") & (table["variant"] == "")]
    jtt, erm = (own[own["method"] == name] for name in ("jtt", "erm"))
    named = bench.compare("jtt-umnist", "erm-umnist")
    assert named.difference == bench.compare(jtt, erm).difference
    by_seed = [dict(zip(one["seed"], one["test_wga"], strict=True)) for one in (jtt, erm)]
    expected = np.mean([by_seed[0][s] - by_seed[1][s] for s in set(by_seed[0]) & set(by_seed[1])])
    assert named.difference == pytest.approx(expected)
    assert named.n >= 5


def rows(**conditions: Any) -> Any:
    table = bench.load_results("published")
    for name, value in conditions.items():
        table = table[table[name] == value]
    return table


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: bench.compare({1: 1.0}, {2: 1.0}), "share no seed"),
        (lambda: bench.compare("nct-nothing", "erm-cmnist"), "no finished runs 'nct-nothing'"),
        (lambda: bench.compare("nct-cmnist", "erm-umnist"), "different data"),
        (lambda: bench.compare("nct-cmnist", "erm-cmnist", metric="test_f1"), "have no test_f1"),
        (lambda: bench.compare(rows(method="nct"), "erm-cmnist"), "datasets or protocols"),
        (
            lambda: bench.compare(rows(dataset="cmnist", protocol="nominal"), "erm-cmnist"),
            "more than one run of a seed",
        ),
        (lambda: bench.compare(rows()[["seed"]], "erm-cmnist"), "not one of runs"),
    ],
)
def test_what_cannot_be_compared_says_why(wrong: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        wrong()


def test_of_versions_the_one_with_most_seeds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [("a", 1, 0, 70.0), ("a", 1, 1, 72.0), ("a", 2, 0, 80.0), ("b", 1, 0, 60.0)]
    runs += [("b", 1, 1, 60.0)]
    table = pd.DataFrame(
        {
            "run_id": [f"{name}-cmnist-s{seed}-{version}" for name, version, seed, _ in runs],
            "method": [name for name, *_ in runs],
            "version": [version for _, version, *_ in runs],
            "seed": [seed for *_, seed, _ in runs],
            "test_wga": [wga for *_, wga in runs],
        }
    ).assign(dataset="cmnist", protocol="nominal", status="done", variant="")
    monkeypatch.setattr(bench.paired, "load_results", lambda results: table)
    assert bench.compare("a-cmnist", "b-cmnist").difference == pytest.approx(11.0)
    table.loc[len(table)] = {**table.loc[2].to_dict(), "seed": 1, "test_wga": 82.0}
    assert bench.compare("a-cmnist", "b-cmnist").difference == pytest.approx(21.0)
