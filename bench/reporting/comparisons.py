"""Beside the main table: how sure its worst groups and differences are, and what training costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np

from bench.cost import minutes_together
from bench.reporting import names
from bench.reporting.collection import Collection, ReportInput, Run, metric_by_seed, metric_values
from bench.reporting.main_table import by_method, machines, method_table, reference_cell, tiers
from bench.reporting.statistics import compare_pairs, worst_group_interval
from bench.reporting.table import Cell, CellKey, Row, Table, paired_rows

TRAINING_TIME = "training_time"
ALL = "all"
TOGETHER = {
    "standalone": "All methods, each by itself",
    "shared": "All methods, shared stages once",
}


def worst_group_uncertainty(given: ReportInput) -> Table:
    """Put the spread over seeds beside the one over test samples, for every worst group."""
    datasets = names.dataset_names()
    return method_table(
        label="worst_group_uncertainty",
        title="Uncertainty of the worst group",
        caption=(
            "95% intervals of mean worst-group accuracy on the test sets, by bootstrap over seeds "
            "and, with the seeds at hand, over test samples."
        ),
        columns=names.dataset_columns(datasets, "Seeds", "Samples"),
        rows=by_method(given, datasets, _intervals),
        uncertainty=(
            "percentile bootstrap of the mean: over seeds, and stratified by group over test "
            "samples, every seed on the same resample"
        ),
    )


def _intervals(runs: Collection, method: str, dataset: str) -> list[Cell]:
    """Return the interval of a worst group over seeds and the one over test samples."""
    found = runs.published(method, dataset)
    seeds, samples = (CellKey(method, dataset, "wga", over) for over in ("seeds", "samples"))
    values = metric_values(found, "wga")
    if not values:
        return [key.empty(runs.absence(method, dataset)) for key in (seeds, samples)]
    mean = seeds.averaged(values)
    cells = []
    for key, (low, high), reason in (
        (seeds, (mean.ci_low, mean.ci_high), "one seed has no spread"),
        (samples, _sample_interval(found), "no predictions kept"),
    ):
        if low is None or high is None:
            cells.append(key.empty(reason))
        else:
            label = f"{low:.1f} to {high:.1f}"
            cells.append(replace(mean, key=key, std=None, ci_low=low, ci_high=high, label=label))
    return cells


def _sample_interval(found: list[Run]) -> tuple[float | None, float | None]:
    """Align the seeds' predictions by sample and resample them together."""
    right = []
    for run in found:
        table = run.predictions(["id", "split", "y", "group", "pred"])
        if table is None:
            return None, None
        test = table[table["split"] == "test"].sort_values("id")
        right.append((test["y"] == test["pred"]).to_numpy())
    if len({len(row) for row in right}) != 1:
        return None, None
    return worst_group_interval(np.stack(right), test["group"].to_numpy())


def paired_tests(given: ReportInput) -> Table:
    """Compare every two methods on the seeds they share, dataset by dataset."""
    datasets = names.dataset_names()
    methods = [tier.method for tier in tiers(given.reference)]
    cells: dict[CellKey, Cell] = {}
    for name in datasets:
        cells |= _differences(given.runs, methods, name)
    rows = []
    for first, second in combinations(methods, 2):
        keys = [CellKey(first, name, names.headline(name), f"minus {second}") for name in datasets]
        if not cells.keys().isdisjoint(keys):
            title = f"{names.method_title(first)} minus {names.method_title(second)}"
            own = (cells.get(key) or key.empty("no shared seeds") for key in keys)
            rows.append(Row((title,), tuple(own)))
    others = names.headline_exceptions().items()
    exceptions = "".join(f"{metric} for {title}, else " for title, metric in others)
    return Table(
        label="paired_tests",
        title="Paired comparisons",
        caption=(
            "Mean difference between two methods on shared seeds, in the headline metric "
            f"({exceptions}worst-group accuracy), and the p-value of a paired t-test."
        ),
        row_headers=("Methods",),
        columns=names.dataset_columns(datasets),
        rows=tuple(rows),
        uncertainty=(
            "two-sided paired t-test over seeds, Holm-corrected within each dataset; the 95% "
            "t-interval of each difference, in the CSV, is not corrected"
        ),
        notes=() if rows else ("No two methods share a seed in this store yet.",),
        in_paper=False,
    )


def _differences(runs: Collection, methods: list[str], dataset: str) -> dict[CellKey, Cell]:
    """Return the differences between all methods with published runs that share a seed."""
    metric = names.headline(dataset)
    values = {name: metric_by_seed(runs.published(name, dataset), metric) for name in methods}
    cells = {}
    for one in compare_pairs(values):
        key = CellKey(one.first, dataset, metric, f"minus {one.second}")
        tested = "not testable" if one.p_corrected is None else f"p {one.p_corrected:.3f}"
        cells[key] = key.difference(one, tested)
    return cells


def training_time(given: ReportInput) -> Table:
    """Put measured minutes above a paper's; the machines differ, so only ratios compare."""
    datasets, reference = names.dataset_names(), given.reference
    omitted = reference.omitted.get(TRAINING_TIME, ())
    known = names.methods_in_order([*names.methods_in_order(), *reference.methods])
    methods = [name for name in known if name not in omitted]
    rows: list[Row] = []
    for method in methods:
        keys = [CellKey(method, name, "minutes") for name in datasets]
        covered = method in reference.methods
        rows += paired_rows(
            (names.method_title(method),),
            {"measured": [_measured(given.runs, key) for key in keys]},
            [reference_cell(reference, key, "not in the paper") for key in keys if covered],
            method,
        )
    sums = [_together(given.runs, methods, name) for name in datasets]
    for way, title in TOGETHER.items():
        rows += paired_rows((title,), {"measured": [both[way] for both in sums]}, [], ALL)
    return Table(
        label=TRAINING_TIME,
        title="Training time",
        caption=(
            "Minutes of training by itself: stages shared with other runs are counted in full, "
            "the audit, the final evaluation and the warm-up of a training's first epoch are not. "
            "Below, all methods of one seed together, as such and with shared stages counted once."
        ),
        row_headers=("Method", "Source"),
        columns=names.dataset_columns(datasets),
        rows=tuple(rows),
        notes=(
            *reference.notes.get(TRAINING_TIME, ()),
            "Together are the methods that have a published run on the dataset, on the seeds that "
            "all of them have.",
            machines(given.runs),
        ),
        in_paper=bool(reference),
    )


def _measured(runs: Collection, key: CellKey) -> Cell:
    """Return what runs cost by themselves; a warm-up is known from a run's history alone."""
    found = runs.published(key.method, key.dataset)
    if not found:
        return key.empty(runs.absence(key.method, key.dataset))
    minutes = [(minutes_together([(run.record, run.history())]), run.run_id) for run in found]
    return key.averaged(minutes)


def _together(runs: Collection, methods: list[str], dataset: str) -> dict[str, Cell]:
    """Add up the methods, both ways, on each seed that all have: one that some lack costs less."""
    keys = {way: CellKey(ALL, dataset, "minutes", way) for way in TOGETHER}
    found = [runs.published(method, dataset) for method in methods]
    by_method = [{run.job.seed: run for run in own} for own in found if own]
    seeds = sorted(set.intersection(*map(set, by_method))) if by_method else []
    if not seeds:
        reason = "no seed that every method has" if by_method else "not run"
        return {way: key.empty(reason) for way, key in keys.items()}
    together = [[own[seed] for own in by_method] for seed in seeds]
    costs = [[(run.record, run.history()) for run in same] for same in together]
    sums = {
        "standalone": [sum(minutes_together([cost]) for cost in own) for own in costs],
        "shared": [minutes_together(own) for own in costs],
    }
    run_ids = tuple(sorted(run.run_id for same in together for run in same))
    means = {way: key.averaged([(one, "") for one in sums[way]]) for way, key in keys.items()}
    note = f"{len(by_method)} methods"
    return {way: replace(mean, note=note, run_ids=run_ids) for way, mean in means.items()}
