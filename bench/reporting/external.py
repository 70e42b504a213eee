"""Predictions made elsewhere, in a table of their own, with our runs on the same data below them.

Nothing is known of how they were trained or chosen, so that no other table shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.job import FIRST_DEVELOPMENT_SEED
from bench.reporting import names
from bench.reporting.collection import ReportInput, Run, grouped, metric_values
from bench.reporting.table import Cell, CellKey, Column, Row, Table

if TYPE_CHECKING:
    from bench.scoring import Evaluation

METRICS = {
    **{"wga": "WGA", "worst_class": "Worst class", "avg": "Avg"},
    **{"balanced": "Balanced", "auroc": "AUROC"},
}


def external_results(given: ReportInput) -> Table:
    """Show what was evaluated from outside, each marked external, and runs on the same samples."""
    rows: list[Row] = []
    found = grouped(given.external, lambda one: (one.dataset, one.protocol, one.data_kind))
    for (dataset, protocol, kind), same in found.items():
        data = protocol if kind in ("release", protocol) else f"{protocol}, {kind} data"
        header = names.dataset_title(dataset), data
        for one in same:
            cells = tuple(_cell(one, metric) for metric in METRICS)
            rows.append(Row((*header, one.split, one.name, one.source), cells, dataset))
        if any(one.split == "test" for one in same):
            rows += _measured(given, header, (dataset, protocol, kind))
    return Table(
        label="external_results",
        title="Predictions made elsewhere",
        caption=(
            "Rows marked external were made outside of this suite and scored by its code; how "
            "they were trained, and what they were chosen by, is not known. Rows marked measured "
            "are runs of the suite on the same data, below them for comparison."
        ),
        row_headers=("Dataset", "Protocol", "Split", "Predictions", "Source"),
        columns=tuple(map(Column, METRICS.values())),
        rows=tuple(rows),
        uncertainty=(
            f"of external rows {given.external[0].uncertainty}, in the CSV; of measured ones "
            "mean ± standard deviation over seeds"
            if given.external
            else "none"
        ),
        selection="not known for external rows; of measured ones each run's own rule",
        notes=() if rows else ("None were given.",),
        in_paper=False,
    )


def _cell(found: Evaluation, metric: str) -> Cell:
    key, value = CellKey(found.name, found.dataset, metric, found.split), found.metrics.get(metric)
    if value is None:
        return key.empty("not a metric of these predictions", "external")
    low, high = found.intervals.get(metric, (None, None))
    bounds = {"ci_low": low, "ci_high": high, "interval": found.uncertainty}
    return Cell("external", key, mean=value, digits=key.digits, **bounds)  # type: ignore[arg-type]


def _measured(
    given: ReportInput, header: tuple[str, str], data: tuple[str, str, str]
) -> Iterator[Row]:
    """Go through the methods with runs that may stand here, one row for each of their settings."""

    def stands(run: Run) -> bool:
        job = run.job
        own = job.data_kind == "own" and not job.quick and job.seed < FIRST_DEVELOPMENT_SEED
        shown = run.kind == "published" or (own and run.record.done)
        return shown and (job.dataset, job.protocol, job.data_kind) == data

    def settings(run: Run) -> tuple[str, str]:
        job = run.job
        changes = [f"{name}={value}" for name, value in sorted(job.overrides.items())]
        preset = [] if run.kind == "published" else [f"preset {job.preset}"]
        return job.method, ", ".join((*preset, *changes))

    found = grouped(filter(stands, given.runs.runs), settings)
    for (method, variant), runs in sorted(found.items()):
        cells = []
        for metric in METRICS:
            key = CellKey(method, data[0], metric, variant)
            values = metric_values(runs, metric)
            none = key.empty("not a metric of this dataset")
            cells.append(key.averaged(values) if values else none)
        title = ", ".join(filter(None, (names.method_title(method), variant)))
        yield Row((*header, "test", title, "measured"), tuple(cells), data[0], "measured")
