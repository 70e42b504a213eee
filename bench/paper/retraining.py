"""The regularisation strength of retrained last layers, and whether its grid ended there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.reporting.collection import ReportInput, Run, grouped
from bench.reporting.names import dataset_title, method_title
from bench.reporting.table import Cell, CellKey, Column, Row, Table

DETAILS = "retraining"


@dataclass(frozen=True)
class Strength:
    """The C of one run.

    Attributes:
        chosen: it; larger is a weaker penalty.
        grid: what was to be tried, in ascending order.
        at_end: it is an end of the grid, or beyond it.
        is_open: no value beyond it was tried.
    """

    chosen: float
    grid: tuple[float, ...]
    at_end: bool
    is_open: bool


def strength_of(run: Run) -> Strength | None:
    """Return what a run chose, or none if it retrains no last layer by a grid.

    Version 1 of DFR and of ExMap took an end of its grid and recorded the choice alone.
    """
    told = run.record.details.get(DETAILS)
    if not isinstance(told, dict) or "penalty" not in told:
        return None
    grid: tuple[float, ...] = run.job.method_config().penalties
    chosen = float(told["penalty"])
    at_end = len(set(grid)) > 1 and not min(grid) < chosen < max(grid)
    is_open = bool(told.get("penalty_open", at_end))
    return Strength(chosen, tuple(sorted(grid)), at_end, is_open)


def retraining(given: ReportInput) -> Table:
    """Show each method's choices of C, dataset by dataset."""
    known = [(run, own) for run in given.runs.of_kind("published") if (own := strength_of(run))]
    cells = grouped(known, lambda one: (one[0].job.method, one[0].job.dataset))
    rows = []
    for (method, dataset), found in sorted(cells.items()):
        ids = tuple(run.run_id for run, _ in sorted(found))
        strengths = [own for _, own in found]
        counts: dict[str, Callable[[Strength], bool]] = {
            "at an end": lambda own: own.at_end,
            "still open": lambda own: own.is_open,
        }
        shown = [
            Cell("measured", CellKey(method, dataset, "C", what), label=text, run_ids=ids)
            for what, text in (("grid", _grids(strengths)), ("chosen", _choices(strengths)))
        ]
        for what, holds in counts.items():
            key, count = CellKey(method, dataset, "seeds", what), sum(map(holds, strengths))
            note = f"of {len(ids)}"
            shown.append(Cell("measured", key, float(count), run_ids=ids, digits=0, note=note))
        title = method_title(method)
        rows.append(Row((title, dataset_title(dataset)), tuple(shown), section=title))
    return Table(
        label="retraining",
        title="Regularisation of retrained last layers",
        caption=(
            "The C that DFR, ExMap and their like chose for the logistic regression of the last "
            "layer; larger is weaker. A choice at or beyond an end of the grid says that the grid "
            "was too narrow; the grid then goes on beyond it, and is still open where the last "
            "value tried was the best."
        ),
        row_headers=("Method", "Dataset"),
        columns=(
            *(Column("Grid", align="l"), Column("C chosen", align="l")),
            *(Column("At or beyond an end"), Column("Still open")),
        ),
        rows=tuple(rows),
        uncertainty="none, these are choices and counts of seeds",
        selection="the worst group of held-out halves of validation, by the groups of the tier",
        notes=(
            "Version 1 of DFR and ExMap tried nothing beyond its grid, so that each of its ends "
            "counts as open.",
            *(() if rows else ("No published run retrains a last layer.",)),
        ),
        in_paper=False,
    )


def _grids(found: Sequence[Strength]) -> str:
    ends = dict.fromkeys((own.grid[0], own.grid[-1], len(own.grid)) for own in found)
    return "; ".join(f"{low:g} to {high:g}, {count} values" for low, high, count in ends)


def _choices(found: Sequence[Strength]) -> str:
    """Return the values chosen, each with its number of seeds."""
    counted = Counter(f"{own.chosen:.3g}" for own in sorted(found, key=lambda own: -own.chosen))
    return ", ".join(f"{value} ({count})" for value, count in counted.items())
