"""Beside the main table: how sure its worst groups and differences are, and what training costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.cost import divided_cpu, timing_of
from bench.reporting import names
from bench.reporting.collection import Collection, ReportInput, Run, metric_by_seed, metric_values
from bench.reporting.main_table import by_method, method_table, reference_cell, seeds_note, tiers
from bench.reporting.statistics import compare_with, worst_group_interval
from bench.reporting.table import (
    OVER_SAMPLES,
    OVER_SEEDS,
    Cell,
    CellKey,
    Column,
    Row,
    Table,
    mark_best,
)

TRAINING_TIME = "training_time"
ALL = "all"
COSTS = (
    CellKey(metric="cpu_seconds"),
    CellKey(metric="cpu_seconds", variant="shared stages divided"),
    CellKey(metric="million_image_passes"),
    CellKey(metric="minutes"),
)
"""What is shown of a run's cost, in the order of the columns."""


def worst_group_uncertainty(given: ReportInput) -> Table:
    """Put the spread over seeds beside the one over test samples, for every worst group."""
    datasets = names.dataset_names()
    return method_table(
        label="worst_group_uncertainty",
        title="Uncertainty of the worst group",
        caption=(
            "Mean worst-group accuracy on the test sets: how well the seeds fix it and, with the "
            "seeds at hand, how much it moves with the test samples."
        ),
        columns=names.dataset_columns(datasets, "Seeds", "Samples"),
        rows=by_method(given, datasets, _intervals),
        uncertainty=(
            f"{OVER_SEEDS}; {OVER_SAMPLES} (percentiles, stratified by group, every seed on the "
            "same resample)"
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
    for key, (low, high), what, reason in (
        (seeds, (mean.ci_low, mean.ci_high), OVER_SEEDS, "one seed has no spread"),
        (samples, _sample_interval(found), OVER_SAMPLES, "no predictions kept"),
    ):
        if low is None or high is None:
            cells.append(key.empty(reason))
        else:
            label = f"{low:.1f} to {high:.1f}"
            bounds = replace(mean, ci_low=low, ci_high=high, interval=what)
            cells.append(replace(bounds, key=key, std=None, label=label))
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
    """Compare every method with each baseline on the seeds they share, dataset by dataset."""
    datasets, baselines = names.dataset_names(), given.reference.baselines
    methods = [tier.method for tier in tiers(given.reference)]
    cells: dict[CellKey, Cell] = {}
    for name in datasets:
        cells |= _differences(given.runs, methods, name, baselines)
    rows = []
    for second in baselines:
        for first in methods:
            keys = [CellKey(first, d, names.headline(d), f"minus {second}") for d in datasets]
            if not cells.keys().isdisjoint(keys):
                own = tuple(cells.get(key) or key.empty("no shared seeds") for key in keys)
                section = f"Minus {names.method_title(second)}"
                rows.append(Row((names.method_title(first),), own, section))
    others = names.headline_exceptions().items()
    exceptions = "".join(f"{metric} for {title}, else " for title, metric in others)
    titles = " and with ".join(map(names.method_title, baselines)) or "none"
    return method_table(
        label="paired_tests",
        title="Planned comparisons",
        caption=(
            f"Every method compared with {titles} on shared seeds, in the headline metric "
            f"({exceptions}worst-group accuracy): the mean difference with its 95% t-interval, "
            "then the p-value of a paired t-test. No other pair was planned, and none is tested."
        ),
        columns=names.dataset_columns(datasets),
        rows=tuple(rows),
        uncertainty=(
            "95% t-interval of the paired difference over seeds, each by itself; p-values are "
            "corrected for all comparisons on a dataset by Holm's method"
        ),
        notes=() if rows else ("No method shares a seed with one of these in this store yet.",),
    )


def _differences(
    runs: Collection, methods: Sequence[str], dataset: str, baselines: Sequence[str]
) -> dict[CellKey, Cell]:
    """Return what the published runs of a dataset say of each comparison."""
    metric = names.headline(dataset)
    found = {name: runs.published(name, dataset) for name in methods}
    values = {name: metric_by_seed(own, metric) for name, own in found.items()}
    cells = {}
    for one in compare_with(values, baselines):
        key = CellKey(one.first, dataset, metric, f"minus {one.second}")
        shared = values[one.first].keys() & values[one.second].keys()
        both = (*found[one.first], *found[one.second])
        ids = tuple(sorted(run.run_id for run in both if run.job.seed in shared))
        plain = key.difference(one, "one seed" if one.n == 1 else "the same on every seed", ids)
        if one.p_corrected is not None and one.low is not None and one.high is not None:
            bounds = f"{plain.number(one.low)} to {plain.number(one.high)}"
            label = f"{plain.number(one.difference)} ({bounds})"
            tested = f"p {one.p_corrected:.3f}" if one.p_corrected >= 0.001 else "p < 0.001"
            plain = replace(plain, label=label, note=tested)
        cells[key] = plain
    return cells


def training_time(given: ReportInput) -> Table:
    """Put what runs cost beside a paper's minutes; the machines differ, so only ratios compare."""
    reference = given.reference
    rows: list[Row] = []
    machines = []
    made = {name: _on_one_machine(given.runs, name) for name in names.dataset_names()}
    for name in sorted(made, key=lambda name: not made[name][0]):  # those without runs last
        runs, kind, elsewhere = made[name]
        measured = _costs(given.runs, name, runs)
        paper = [
            reference_cell(reference, CellKey(method, name, "minutes"), "not in the paper")
            for method in measured
        ]
        table = [(*own, beside) for own, beside in zip(measured.values(), paper, strict=True)]
        if not runs and not any(cell.mean is not None for cell in paper):
            continue
        title = names.dataset_title(name)
        marked = [mark_best(column, lowest=True) for column in zip(*table, strict=True)]
        for method, cells in zip(measured, zip(*marked, strict=True), strict=True):
            if runs or cells[-1].mean is not None:
                rows.append(Row((title, names.method_title(method)), cells, title))
        if runs:
            total = CellKey(ALL, name, "minutes").empty("of other methods", "paper")
            rows.append(Row((title, "All of them"), (*_together(name, runs), total), title))
            machines.append(f"{title}: {kind}" + (f", without {elsewhere}" if elsewhere else ""))
    return Table(
        label=TRAINING_TIME,
        title="Training time",
        caption=(
            "What a training run costs, the audit and the final evaluation left out: processor "
            "seconds by itself, and with every stage that several methods share divided among "
            "them; image passes (millions); and minutes by the wall, by itself and without the "
            "warm-up of its trainings' first epochs. Bold: the least of a dataset."
        ),
        row_headers=("Dataset", "Method"),
        columns=(
            *(Column("CPU-s, by itself"), Column("CPU-s, stages shared")),
            *(Column("Image passes (M)"), Column("Minutes"), Column("Paper: minutes")),
        ),
        rows=tuple(rows),
        notes=(
            *reference.notes.get(TRAINING_TIME, ()),
            "All of them: the sum over the methods that have a run, on the seeds that each has.",
            "A busy machine lengthens minutes, and processor seconds by far less.",
            f"Measured on: {'; '.join(machines) or 'nothing yet'}.",
            seeds_note(cell for row in rows for cell in row.cells),
        ),
        in_paper=bool(reference),
    )


def _on_one_machine(runs: Collection, dataset: str) -> tuple[list[Run], str, str]:
    """Return the published runs made on the kind of machine that made most; times do not mix.

    Also the kind, and how many runs others made.
    """
    found = [run for run in runs.of_main_table() if run.job.dataset == dataset]
    counted = Counter(run.record.provenance.hardware() for run in found)
    if not counted:
        return [], "", ""
    ((kind, count),) = counted.most_common(1)
    rest = len(found) - count
    chosen = sorted(run for run in found if run.record.provenance.hardware() == kind)
    return chosen, kind, f"{rest} on other machines" if rest else ""


def _run_costs(runs: Sequence[Run]) -> dict[str, tuple[float | None, ...]]:
    """Return, by run id, what each run cost, in the order of `COSTS`."""
    divided = divided_cpu([run.record for run in runs])
    costs: dict[str, tuple[float | None, ...]] = {}
    for run, share in zip(runs, divided, strict=True):
        timing = timing_of(run.record, run.history())
        alone = None if timing.cpu_minutes is None else 60 * timing.cpu_minutes
        passes = timing.image_passes / 1e6
        costs[run.run_id] = (alone, share, passes, timing.minutes_standalone)
    return costs


def _costs(runs: Collection, dataset: str, made: Sequence[Run]) -> dict[str, list[Cell]]:
    """Return the mean costs of every method on a dataset."""
    costs = _run_costs(made)
    cells: dict[str, list[Cell]] = {}
    for method in names.methods_in_order():
        own = [run for run in made if run.job.method == method]
        cells[method] = []
        for place, column in enumerate(COSTS):
            key = replace(column, method=method, dataset=dataset)
            known = [(costs[run.run_id][place], run.run_id) for run in own]
            values = [(value, run_id) for value, run_id in known if value is not None]
            missing = "not recorded" if own else runs.absence(method, dataset)
            cells[method].append(_averaged(key, values) if values else key.empty(missing))
    return cells


def _averaged(key: CellKey, values: Sequence[tuple[float, str]]) -> Cell:
    return key.averaged(values, {"cpu_seconds": 0, "million_image_passes": 2}.get(key.metric))


def _together(dataset: str, runs: Sequence[Run]) -> list[Cell]:
    """Add up the methods on each seed that all have: one that some lack would cost less."""
    by_seed: dict[int, list[Run]] = {}
    for run in runs:
        by_seed.setdefault(run.job.seed, []).append(run)
    methods = len({run.job.method for run in runs})
    whole = {seed: own for seed, own in by_seed.items() if len(own) == methods}
    costs, cells = _run_costs([run for own in whole.values() for run in own]), []
    for place, column in enumerate(COSTS):
        key = replace(column, method=ALL, dataset=dataset)
        sums = []
        for own in whole.values():
            parts = [costs[run.run_id][place] for run in own]
            if None not in parts:
                sums.append((sum(part for part in parts if part is not None), ""))
        if not whole or not sums:
            cells.append(key.empty("not recorded" if whole else "no seed that every method has"))
        else:
            ids = tuple(sorted(costs))
            cells.append(replace(_averaged(key, sums), run_ids=ids, note=f"{methods} methods"))
    return cells
