"""Two tables about how sure the main table is: of its worst groups, and of its differences."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.names import DATASETS, HEADLINE, dataset_name, method_name
from bench.report.statistics import Comparison, compare_pairs, worst_group_interval
from bench.report.table import OWN_RULE, Column, Row, Table
from bench.report.tiers import tiers


def worst_group_uncertainty(runs: Collection) -> Table:
    """Put the spread over seeds beside the one over test samples, for every worst group."""
    rows = []
    for tier in tiers():
        cells: list[Cell] = []
        for name in DATASETS:
            cells += _both(runs, tier.method, name)
        rows.append(Row((method_name(tier.method),), tuple(cells), section=tier.section))
    return Table(
        label="worst_group_uncertainty",
        title="Uncertainty of the worst group",
        caption=(
            "95% intervals of mean worst-group accuracy on the test sets, by bootstrap over seeds "
            "and, with the seeds at hand, over test samples."
        ),
        stub=("Method",),
        columns=tuple(
            Column(title, dataset_name(name)) for name in DATASETS for title in ("Seeds", "Samples")
        ),
        rows=tuple(rows),
        uncertainty=(
            "percentile bootstrap of the mean: over seeds, and stratified by group over test "
            "samples, every seed on the same resample"
        ),
        selection=OWN_RULE,
        in_paper=False,
        section_titles=True,
    )


def _both(runs: Collection, method: str, dataset: str) -> list[Cell]:
    found = runs.published(method, dataset)
    seeds, samples = (About(method, dataset, "wga", over) for over in ("seeds", "samples"))
    values = [
        (value, run.run_id)
        for run in found
        if (value := run.record["metrics"]["test"].get("wga")) is not None
    ]
    if not values:
        reason = runs.absence(method, dataset)
        return [empty(seeds, reason), empty(samples, reason)]
    mean = averaged(values, seeds)
    over_samples = _sample_interval(found)
    return [
        _interval(mean, seeds, (mean.ci_low, mean.ci_high), "one seed has no spread"),
        _interval(mean, samples, over_samples, "no predictions kept"),
    ]


def _interval(
    mean: Cell, about: About, bounds: tuple[float | None, float | None], reason: str
) -> Cell:
    low, high = bounds
    if low is None or high is None:
        return empty(about, reason)
    return Cell(
        "measured",
        about,
        mean=mean.mean,
        n=mean.n,
        ci_low=low,
        ci_high=high,
        label=f"{low:.1f} to {high:.1f}",
        run_ids=mean.run_ids,
    )


def _sample_interval(found: list[Run]) -> tuple[float | None, float | None]:
    """Read the seeds' predictions, align them by sample, and resample them together."""
    right, groups = [], None
    for run in found:
        table = run.predictions(["id", "split", "y", "group", "pred"])
        if table is None:
            return None, None
        test = table[table["split"] == "test"].sort_values("id")
        right.append((test["y"] == test["pred"]).to_numpy())
        groups = test["group"].to_numpy()
    if groups is None or len({len(row) for row in right}) != 1:
        return None, None
    return worst_group_interval(np.stack(right), groups)


def paired_tests(runs: Collection) -> Table:
    """Compare every two methods on the seeds they share, dataset by dataset."""
    methods = [tier.method for tier in tiers()]
    results: dict[tuple[str, str, str], Comparison] = {}
    for name, metric in HEADLINE.items():
        values = {
            method: {
                int(run.record["seed"]): float(run.record["metrics"]["test"][metric])
                for run in found
                if run.record["metrics"]["test"].get(metric) is not None
            }
            for method in methods
            if (found := runs.published(method, name))
        }
        for one in compare_pairs(values):
            results[name, one.first, one.second] = one
    pairs = [
        pair
        for pair in combinations(methods, 2)
        if any((name, *pair) in results for name in HEADLINE)
    ]
    rows = tuple(
        Row(
            (f"{method_name(first)} minus {method_name(second)}",),
            tuple(
                _difference(results.get((name, first, second)), name, first, second)
                for name in HEADLINE
            ),
        )
        for first, second in pairs
    )
    return Table(
        label="paired_tests",
        title="Paired comparisons",
        caption=(
            "Mean difference between two methods on shared seeds, in the headline metric (overall "
            "AUROC for ISIC, else worst-group accuracy), and the p-value of a paired t-test."
        ),
        stub=("Methods",),
        columns=tuple(Column(dataset_name(name)) for name in HEADLINE),
        rows=rows,
        uncertainty=(
            "two-sided paired t-test over seeds, Holm-corrected within each dataset; the 95% "
            "t-interval of each difference, in the CSV, is not corrected"
        ),
        selection=OWN_RULE,
        notes=() if rows else ("No two methods share a seed in this store yet.",),
        in_paper=False,
    )


def _difference(result: Comparison | None, dataset: str, first: str, second: str) -> Cell:
    metric = HEADLINE[dataset]
    about = About(first, dataset, metric, f"minus {second}")
    if result is None:
        return empty(about, "no shared seeds")
    p = result.p_corrected
    return Cell(
        "measured",
        about,
        mean=result.difference,
        n=result.n,
        ci_low=result.low,
        ci_high=result.high,
        note="not testable" if p is None else f"p {p:.3f}",
        digits=3 if metric == "auroc" else 1,
        signed=True,
    )
