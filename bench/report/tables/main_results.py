"""The main table, and beside it how far measured numbers are from the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import FIRST_PRESET, Collection
from bench.report.machines import machines
from bench.report.names import (
    MAIN_COLUMNS,
    METHODS,
    METRICS,
    VARIANTS,
    dataset_name,
    method_name,
)
from bench.report.paper import main_cells, verdict
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Side, Table
from bench.report.tiers import Tier, tiers

COLUMNS = tuple(
    Column(METRICS[metric], dataset_name(name) + (" (AUROC)" if name == "isic" else ""))
    for name, own in MAIN_COLUMNS.items()
    for metric in own
)
CALIBRATED = (
    "NCT+ is a variant of NCT made here. It fits a calibration on validation class labels, by "
    "which ERM, GEORGE and NCT only choose: its numbers use more of validation than theirs."
)
KEYS = tuple((dataset, metric) for dataset, own in MAIN_COLUMNS.items() for metric in own)


def main_results(runs: Collection) -> Table:
    """Put what was measured above what the paper reports, method by method, tier by tier."""
    paper = main_cells()
    rows = []
    for tier in tiers():
        measured = tuple(measured_cell(runs, tier.method, *key) for key in KEYS)
        rows.append(_row(tier, measured, "measured"))
        if tier.method in METHODS:
            published = tuple(_paper_cell(paper, tier.method, *key) for key in KEYS)
            rows.append(_row(tier, published, "paper"))
    return Table(
        label="main_results",
        title="Main results",
        caption=(
            "Worst-group and average accuracy (AUROC for ISIC) on the test sets. T: uses training "
            "group labels; V: uses validation group labels; I: shows the latent group at inference."
        ),
        stub=("Method", "T", "V", "I", "Source"),
        columns=COLUMNS,
        rows=tuple(_best_marked(rows)),
        uncertainty=SEEDS_SPREAD,
        selection=OWN_RULE,
        notes=(
            "Rows marked paper are the NCT paper's own numbers, not measured here; * as there: "
            "taken from an earlier paper.",
            "Bold: best of its tier, among measured and among paper rows apart.",
            CALIBRATED,
            machines(runs),
        ),
        section_titles=True,
    )


def main_differences(runs: Collection) -> Table:
    """Subtract the paper's mean from the measured one, and give a verdict for every cell."""
    paper = main_cells()
    rows = [
        Row(
            (method_name(tier.method),),
            tuple(
                difference(measured_cell(runs, tier.method, *key), paper.get((tier.method, *key)))
                for key in KEYS
            ),
            section=tier.section,
        )
        for tier in tiers()
        if tier.method in METHODS
    ]
    return Table(
        label="main_differences",
        title="Measured minus paper",
        caption=(
            "Difference of the means of the main table, measured minus paper, and whether it lies "
            "within the paper's spread (its standard deviation; where it gives none, ours)."
        ),
        stub=("Method",),
        columns=COLUMNS,
        rows=tuple(rows),
        uncertainty="95% bootstrap interval over our seeds less the paper's mean, in the CSV",
        selection=OWN_RULE,
        in_paper=False,
        section_titles=True,
    )


def measured_cell(runs: Collection, method: str, dataset: str, metric: str) -> Cell:
    """Average a metric over a method's published runs, or say why there is none."""
    about = About(method, dataset, metric)
    found = runs.published(method, dataset)
    values = [
        (run.record["metrics"]["test"][metric], run.run_id)
        for run in found
        if run.record["metrics"]["test"].get(metric) is not None
    ]
    if not values:
        return empty(about, runs.absence(method, dataset) if not found else "not recorded")
    preset = found[0].record["preset"]
    note = "" if preset == FIRST_PRESET else f"preset {preset}"
    return replace(averaged(values, about), note=note)


def difference(measured: Cell, paper: Cell | None) -> Cell:
    """Compare a measured cell with the paper's: within its spread, above or below, or not run."""
    if measured.mean is None:
        reason = measured.reason if paper else f"{measured.reason}; not in the paper either"
        return replace(measured, reason=reason)
    if paper is None or paper.mean is None:
        return empty(measured.about, "not in the paper")
    interval = (measured.ci_low, measured.ci_high)
    low, high = (None if bound is None else bound - paper.mean for bound in interval)
    gap, word = measured.mean - paper.mean, verdict(measured, paper)
    return replace(measured, mean=gap, std=None, ci_low=low, ci_high=high, note=word, signed=True)


def _paper_cell(
    paper: dict[tuple[str, str, str], Cell], method: str, dataset: str, metric: str
) -> Cell:
    about = About(method, dataset, metric)
    reason = "not adapted to this dataset in the paper"
    return paper.get((method, dataset, metric), empty(about, reason, "paper"))


def _row(tier: Tier, cells: tuple[Cell, ...], source: Side) -> Row:
    name = method_name(tier.method)
    if tier.method in VARIANTS:
        name = f"{name} (not in the paper)"
    header = (name, *tier.marks(), source)
    return Row(header, cells, section=tier.section, source=source)


def _best_marked(rows: Sequence[Row]) -> list[Row]:
    """Mark the best of each tier and column, measured and paper apart, where there is a choice.

    More is better in every metric; cells that read the same are equally good.
    """
    shown: dict[tuple[str, str, int], list[float]] = {}
    for row in rows:
        for column, cell in enumerate(row.cells):
            if cell.mean is not None:
                key = (row.section, row.source, column)
                shown.setdefault(key, []).append(round(cell.mean, cell.digits))

    def marked(row: Row, column: int, cell: Cell) -> Cell:
        rivals = shown.get((row.section, row.source, column), [])
        if cell.mean is None or len(rivals) < 2:
            return cell
        return replace(cell, best=round(cell.mean, cell.digits) == max(rivals))

    return [
        replace(row, cells=tuple(marked(row, place, cell) for place, cell in enumerate(row.cells)))
        for row in rows
    ]
