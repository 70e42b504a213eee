"""Comparing two sets of runs by what they share, the seeds: what `bench.compare` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.api import load_results
from bench.reporting.statistics import Comparison, compare_with
from datasets.catalogue import get_dataset
from datasets.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd


def compare(
    a: Any, b: Any, *, metric: str | None = None, results: Path | str = "published"
) -> Comparison:
    """Return by how much `a` is above `b` on the seeds that both have, with its t-interval.

    Args:
        a: runs: method and dataset as their ids begin (`"nct-cmnist"`; variants of a campaign are
            left out), a table of them as `load_results` returns it, or their figures by seed.
        b: the runs that they are compared with.
        metric: a column of that table, such as `test_avg`; by default the dataset's headline.
        results: where runs are looked for by their ids: `published`, or a results folder.

    >>> import bench
    >>> gap = bench.compare("nct-cmnist", "erm-cmnist")
    >>> print(gap.n >= 5, gap.low < gap.difference < gap.high)
    True True
    """
    ours, theirs = (_figures(given, metric, results) for given in (a, b))
    if ours.metric != theirs.metric and metric is None:
        raise UsageError(
            f"the two have different headlines, {ours.metric} and {theirs.metric}", "give metric="
        )
    if ours.data and theirs.data and ours.data != theirs.data:
        raise UsageError(
            f"the two are of different data, {ours.data} and {theirs.data}",
            "compare runs on the same data",
        )
    first, second = ours.name, theirs.name
    if first == second:
        first, second = f"{first} (a)", f"{second} (b)"
    found = compare_with({first: ours.by_seed, second: theirs.by_seed}, (second,))
    if not found:
        known = f"{sorted(ours.by_seed)} and {sorted(theirs.by_seed)}"
        raise UsageError(f"the two share no seed: {known}", "run both on the same seeds")
    return found[0]


class _Figures:
    """The figures of some runs by seed, and what they are of."""

    def __init__(self, name: str, by_seed: Mapping[int, float], metric: str, data: str) -> None:
        self.name = name
        self.by_seed = by_seed
        self.metric = metric
        self.data = data


def _figures(given: Any, metric: str | None, results: Path | str) -> _Figures:
    if isinstance(given, Mapping):
        return _Figures("given", {int(seed): float(v) for seed, v in given.items()}, "", "")
    table, name = (_found(given, results), given) if isinstance(given, str) else (given, "")
    if not {"seed", "run_id", "dataset", "protocol"} <= set(table):
        raise UsageError("the table is not one of runs", "give rows of bench.load_results(...)")
    kinds = table[["dataset", "protocol"]].drop_duplicates()
    if len(kinds) != 1:
        raise UsageError(f"the runs are of {len(kinds)} datasets or protocols", "give one of them")
    dataset, protocol = (str(value) for value in kinds.iloc[0])
    metric = metric or f"test_{get_dataset(dataset).table_metrics[0]}"
    if metric not in table:
        shown = ", ".join(str(n) for n in table if str(n).startswith(("test_", "val_")))
        raise UsageError(f"the runs have no {metric}", f"choose from {shown}")
    if (twice := table["seed"].duplicated(keep=False)).any():
        ids = ", ".join(table.loc[twice, "run_id"].astype(str).head(2))
        raise UsageError(
            f"there is more than one run of a seed: {ids}",
            "choose among the rows of bench.load_results(...), and give those",
        )
    figures = table[["seed", metric]].dropna()
    by_seed = {int(s): float(v) for s, v in figures.itertuples(index=False)}
    named = name or "+".join(sorted(set(table["method"].astype(str))))
    return _Figures(named, by_seed, metric, f"{dataset} ({protocol})")


def _found(prefix: str, results: Path | str) -> pd.DataFrame:
    """Return the finished runs of a method on a dataset, without a campaign's variants.

    Of several versions of the method, those of the one with most seeds; else of the latest.
    """
    table = load_results(results)
    begins = table["run_id"].str.startswith(f"{prefix}-s")
    own = table[begins & (table["status"] == "done") & (table["variant"].fillna("") == "")]
    if own.empty:
        near = ", ".join(sorted({str(i).rpartition("-s")[0] for i in table["run_id"]})[:12])
        raise UsageError(f"there are no finished runs '{prefix}' in {results}", f"there are {near}")
    seeds = own.groupby("version")["seed"].nunique()
    latest = seeds.index[seeds == seeds.max()].max()
    chosen: pd.DataFrame = own[own["version"] == latest]
    return chosen
