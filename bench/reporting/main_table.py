"""The main table, how far it is from a paper's, and the runs that no table shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap

from bench.job import DEFAULT_PRESET
from bench.provenance import Provenance
from bench.reporting import names
from bench.reporting.collection import (
    FIRST_PRESET,
    Collection,
    Reference,
    ReportInput,
    Run,
    grouped,
    metric_values,
)
from bench.reporting.statistics import verdict, welch_interval
from bench.reporting.table import (
    WELCH,
    Cell,
    CellKey,
    Column,
    Row,
    Table,
    mark_best,
    paired_rows,
)
from methods.base import load_methods
from methods.presets import preset_config

TIERS = (
    "Group labels in training and validation",
    "Group labels in validation",
    "No group labels",
    "Not implemented here",
)
SMOKE_METRICS = {"wga": "WGA", "avg": "Avg", "auroc": "AUROC"}
UNKNOWN_SEEDS = 3
UNKNOWN_SEEDS_NOTE = (
    f"Where a paper gives a spread and no number of seeds, {UNKNOWN_SEEDS} are assumed."
)
VERDICTS = (
    "Higher, lower: the Welch interval of our mean minus the paper's lies above or below zero; "
    "agrees: it contains zero and reaches at most 5 points (AUROC: 0.025) to each side; cannot "
    "tell: it is wider, or one of the two has no spread."
)
method_table = partial(Table, row_headers=("Method",), in_paper=False, section_titles=True)
"""A table of ours with a row for each method, tier by tier."""


@dataclass(frozen=True)
class Tier:
    """One method, the title of its tier, and its T, V and I columns."""

    method: str
    section: str
    marks: tuple[str, ...]


def tiers(reference: Reference) -> list[Tier]:
    """Return the main table's methods and a paper's, tier by tier, in the order of tables."""
    order = dict.fromkeys([*names.methods_in_order(), *reference.methods])
    return sorted(map(_tier, order), key=lambda tier: TIERS.index(tier.section))


def _tier(name: str) -> Tier:
    """Return a method with the most that it asks for under its presets, on any dataset."""
    method = load_methods().get(name)
    if method is None:
        return Tier(name, TIERS[3], ("", "", ""))
    configs = (preset_config(method, dataset) for dataset in names.dataset_names())
    asked = [method.supervision(config) for config in configs]
    facts = ("train_groups", "val_groups", "interpretable")
    marks = tuple("yes" if any(getattr(one, fact) for one in asked) else "no" for fact in facts)
    return Tier(name, TIERS[(*marks[:2], "yes").index("yes")], marks)


def by_method(
    given: ReportInput,
    datasets: Iterable[str],
    cells: Callable[[Collection, str, str], Iterable[Cell]],
) -> tuple[Row, ...]:
    """Return a row for each method, with the cells of each dataset."""
    return tuple(
        Row(
            (names.method_title(tier.method),),
            tuple(cell for name in datasets for cell in cells(given.runs, tier.method, name)),
            tier.section,
        )
        for tier in tiers(given.reference)
    )


def machines(shown: Iterable[Run]) -> str:
    """Return on what runs were made, and what that means for repeating them."""
    origins = [run.record.provenance for run in shown]
    counted = Counter(
        f"{one.hardware()}, torch {one.environment.libraries.get('torch') or 'unknown'}"
        for one in origins
    )
    if not counted:
        return "Nothing was measured yet."
    places = "; ".join(f"{name} ({count} runs)" for name, count in counted.most_common())
    return f"Measured on: {places}. {_repeating(origins)}"


def _repeating(origins: Sequence[Provenance]) -> str:
    """Return what it takes to get the same numbers again, by the arithmetic of each run."""
    arithmetic = [one.environment.numerics or {} for one in origins if one.device == "cpu"]
    pinned = sum(own.get("choice") == "pinned" for own in arithmetic)
    native = len(arithmetic) - pinned
    told = []
    if pinned:
        told.append(
            f"{_all_or(pinned, origins)} repeat exactly on every x86 processor with AVX2 that was "
            "tried"
        )
    if native:
        told.append(
            f"{_all_or(native, origins)} were made with native kernels and repeat exactly on the "
            "same processor type, with --numerics native"
        )
    if not told:
        return "Other machines agree within the seed spread."
    return (
        f"With the same libraries and thread count, {'; '.join(told)}. Elsewhere numbers agree "
        "within the seed spread."
    )


def _all_or(count: int, origins: Sequence[Provenance]) -> str:
    return "all" if count == len(origins) else str(count)


def seeds_note(cells: Iterable[Cell]) -> str:
    """Return how many seeds measured cells average, and which of them have another number."""
    counts: Counter[int] = Counter()
    of: dict[tuple[str, str], int] = {}
    for cell in cells:
        if cell.source == "measured" and cell.n:
            counts[cell.n] += 1
            of[cell.key.method, cell.key.dataset] = cell.n
    if not counts:
        return "No seed was measured yet."
    ((usual, _),) = counts.most_common(1)
    others = ", ".join(
        f"{names.method_title(method)} on {names.dataset_title(dataset)} (n = {n})"
        for (method, dataset), n in of.items()
        if n != usual
    )
    return f"Seeds: n = {usual} in every measured cell{f', but for {others}' if others else ''}."


def _main_keys(method: str = "") -> list[CellKey]:
    """Return what the columns of the main table are about: the metrics of every dataset."""
    return [
        CellKey(method, dataset, metric)
        for dataset in names.dataset_names()
        for metric in names.table_metrics(dataset)
    ]


def _main_column(key: CellKey) -> Column:
    kind = " (AUROC)" if names.headline(key.dataset).startswith("auroc") else ""
    title = names.metric_title(key.dataset, key.metric)
    return Column(title, names.dataset_title(key.dataset) + kind)


def main_results(given: ReportInput) -> Table:
    """Put what was measured above what a paper reports, method by method, tier by tier."""
    reference = given.reference
    rows: list[Row] = []
    for tier in tiers(reference):
        keys = _main_keys(tier.method)
        covered = tier.method in reference.methods
        stranger = " (not in the paper)" if reference and not covered else ""
        rows += paired_rows(
            (names.method_title(tier.method) + stranger, *tier.marks),
            {"measured": [measured_cell(given.runs, key) for key in keys]},
            [reference_cell(reference, key) for key in keys] if covered else [],
            tier.section,
        )
    ranked = ", ".join(names.headline_exceptions())
    origin = (
        f"Rows marked paper are {reference.title}'s own numbers, not measured here; * as there: "
        "taken from an earlier paper."
    )
    return Table(
        label="main_results",
        title="Main results",
        caption=(
            f"Worst-group and average accuracy{f' (AUROC for {ranked})' if ranked else ''} on the "
            "test sets. T: uses training group labels; V: uses validation group labels; I: shows "
            "the latent group at inference."
        ),
        row_headers=("Method", "T", "V", "I", "Source"),
        columns=tuple(map(_main_column, _main_keys())),
        rows=best_by_tier(rows),
        notes=(
            *([origin] if reference else []),
            seeds_note(cell for row in rows for cell in row.cells),
            "Bold: best of its tier, among measured and among paper rows apart.",
            *reference.notes.get("main_results", ()),
            machines(given.runs.of_main_table()),
        ),
        in_paper=bool(reference),
        section_titles=True,
    )


def main_differences(given: ReportInput) -> Table:
    """Subtract a paper's means from the measured ones, with a verdict for every cell."""
    rows = []
    for tier in tiers(given.reference):
        if tier.method in given.reference.methods:
            keys = _main_keys(tier.method)
            pairs = ((measured_cell(given.runs, k), given.reference.cell(k)) for k in keys)
            cells = starmap(difference, pairs)
            rows.append(Row((names.method_title(tier.method),), tuple(cells), tier.section))
    return method_table(
        label="main_differences",
        title="Measured minus paper",
        caption=(
            "Difference of the means of the main table, measured minus paper, and what its 95% "
            f"Welch interval says. {VERDICTS}"
        ),
        columns=tuple(map(_main_column, _main_keys())),
        rows=tuple(rows),
        uncertainty=(
            f"{WELCH} of the difference, in the CSV, from both spreads and both numbers of seeds, "
            "widened by what the paper's mean was rounded by"
        ),
        notes=(*given.reference.notes.get("main_differences", ()), UNKNOWN_SEEDS_NOTE),
    )


def measured_cell(runs: Collection, key: CellKey) -> Cell:
    """Return the mean of a metric over a method's published runs, or why there is none."""
    found = runs.published(key.method, key.dataset)
    values = metric_values(found, key.metric)
    if not values:
        return key.empty("not recorded" if found else runs.absence(key.method, key.dataset))
    preset = found[0].job.preset
    notes = {FIRST_PRESET: "", DEFAULT_PRESET: "default settings"}
    return replace(key.averaged(values), note=notes.get(preset, f"preset {preset}"))


def reference_cell(
    reference: Reference, key: CellKey, missing: str = "not adapted to this dataset in the paper"
) -> Cell:
    """Return a paper's number, or why there is none."""
    return reference.cell(key) or key.empty(missing, "paper")


def difference(measured: Cell, paper: Cell | None) -> Cell:
    """Return measured minus paper, with Welch's interval and the verdict on it."""
    if measured.mean is None:
        reason = measured.reason if paper else f"{measured.reason}; not in the paper either"
        return replace(measured, reason=reason)
    if paper is None or paper.mean is None:
        return measured.key.empty("not in the paper")
    low = high = None
    if measured.std is not None and measured.n is not None and paper.std is not None:
        ours = (measured.mean, measured.std, measured.n)
        low, high = welch_interval(ours, (paper.mean, paper.std, paper.n or UNKNOWN_SEEDS))
        rounded = 0.5 * 10**-paper.digits
        low, high = low - rounded, high + rounded
    return replace(
        measured,
        mean=measured.mean - paper.mean,
        std=None,
        ci_low=low,
        ci_high=high,
        interval=WELCH,
        note=verdict(low, high, measured.key.margin),
        signed=True,
    )


def best_by_tier(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Mark the best of each tier and column, measured and paper apart."""
    marked = {}
    for alike in grouped(rows, lambda row: (row.section, row.source)).values():
        columns = [mark_best(own) for own in zip(*(row.cells for row in alike), strict=True)]
        for row, cells in zip(alike, zip(*columns, strict=True), strict=True):
            marked[row] = replace(row, cells=cells)
    return tuple(marked[row] for row in rows)


apart_table = partial(Table, in_paper=False, appendix=True)
"""A table of runs that no other table may show."""


def smoke_runs(given: ReportInput) -> Table:
    """Average stand-in and quick runs, by method, dataset and data; labelled as what they are."""
    by_kind = grouped(
        given.runs.of_kind("smoke"),
        lambda run: (run.job.method, run.job.dataset, f"{run.reason}: {run.job.protocol}"),
    )
    rows = []
    for (method, dataset, what), runs in sorted(by_kind.items()):
        cells = []
        for metric in SMOKE_METRICS:
            key, values = CellKey(method, dataset, metric, what), metric_values(runs, metric)
            none = key.empty("not a metric of this dataset")
            cells.append(key.averaged(values) if values else none)
        header = (names.method_title(method), names.dataset_title(dataset), what)
        rows.append(Row(header, tuple(cells), section=dataset))
    return apart_table(
        label="smoke_runs",
        title="Stand-in and quick runs",
        caption=(
            "Runs on synthetic stand-in data, and smoke runs. They show that the machinery works; "
            "they say nothing about the methods."
        ),
        row_headers=("Method", "Dataset", "What it is"),
        columns=tuple(map(Column, SMOKE_METRICS.values())),
        rows=tuple(rows),
        notes=() if rows else ("None in this store.",),
    )


def left_out(given: ReportInput) -> Table:
    """Count the runs that no table shows, by method, dataset and reason."""
    found = [
        (run.job.method, run.job.dataset, run.reason, run.run_id)
        for run in given.runs.of_kind("left out")
    ]
    for broken in given.runs.unreadable:
        found.append(("", "", f"it cannot be read: {broken.reason}", broken.run_id))
    rows = []
    for (method, dataset, reason), same in sorted(grouped(found, lambda one: one[:3]).items()):
        key, ids = CellKey(method, dataset, "runs", reason), tuple(one[3] for one in same)
        cell = Cell("measured", key, mean=float(len(ids)), run_ids=ids, digits=0)
        header = (names.method_title(method), names.dataset_title(dataset), reason)
        rows.append(Row(header, (cell,)))
    return apart_table(
        label="left_out",
        title="Runs left out",
        caption="Runs in the store that no table above shows, and why.",
        row_headers=("Method", "Dataset", "Why"),
        columns=(Column("Runs", align="r"),),
        rows=tuple(rows),
        uncertainty="none, these are counts of runs",
        selection="none",
        notes=() if rows else ("None in this store.",),
    )
