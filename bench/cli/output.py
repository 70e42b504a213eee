"""How verbs print: JSON and tables to stdout, everything else to stderr."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.api import Grid, log_to_stderr
from bench.job import FIRST_DEVELOPMENT_SEED, Job, shown_split
from bench.record import Status
from bench.store import RunStatus
from datasets.catalogue import get_dataset
from datasets.files import to_json

log = log_to_stderr
PLAIN_WIDTH = 160  # columns where no terminal says otherwise

METRIC_COLUMNS = {
    "selection": "own selection",
    "wga": "WGA",
    "avg": "average",
    "worst_class": "worst class",
    "avg_train_weighted": "avg, train-weighted",
    "balanced": "balanced",
    "auroc": "AUROC",
    "ece": "ECE",
}
"""The metrics that any dataset can have; what else one has follows, as the dataset spells it."""

SPLIT_TITLES = {
    "test": "Test set, mean +- std over seeds",
    "val": "Validation set, mean +- std over development seeds",
}


def print_json(value: object) -> None:
    """Print JSON to stdout."""
    sys.stdout.write(json.dumps(json.loads(to_json(value)), indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout, wide enough not to cut anything where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)


def print_failures(grid: Grid) -> int:
    """Print what failed and what was left out; return the exit code."""
    failed = [job.run_id for job in grid.jobs if grid.statuses[job.run_id].status is Status.FAILED]
    stopped = [found for run_id in failed if (found := grid.statuses[run_id]).interrupted]
    for run_id in failed:
        log(f"failed: {run_id}: {grid.statuses[run_id].reason}")
    for remedy in dict.fromkeys(found.failure.remedy for found in stopped if found.failure):
        log(f"  -> {remedy}")
    if len(failed) > len(stopped):
        log("  -> python -m bench show RUN tells more; --rerun failed runs them again")
    for entry in grid.skipped:
        log(str(entry))
    return 1 if failed else 0


def print_results(jobs: Sequence[Job], statuses: Mapping[str, RunStatus]) -> None:
    """Print the mean metrics of each method and dataset; a cell without runs says why.

    Development seeds have a table of their own, with validation figures only.
    """
    for split, title in SPLIT_TITLES.items():
        cells: dict[tuple[str, str, str], list[Job]] = {}
        for job in jobs:
            if shown_split(job.seed) == split:
                cells.setdefault((job.method, job.dataset, job.variant), []).append(job)
        if cells:
            _print_cells(title, [*cells.values()], statuses)
        if cells and split == "val":
            log(
                f"seeds from {FIRST_DEVELOPMENT_SEED} on are for development: no test figures, and "
                "worst groups only where the method may see validation groups"
            )


def _print_cells(title: str, cells: list[list[Job]], statuses: Mapping[str, RunStatus]) -> None:
    headings: dict[str, str] = {}
    figures = []
    for own in cells:
        records = [statuses[job.run_id].record for job in own]
        found = [record.shown_metrics() for record in records if record is not None and record.done]
        headings |= _headings(own[0].dataset, found)
        figures.append(found)
    columns = {name: METRIC_COLUMNS[name] for name in METRIC_COLUMNS if name in headings} | headings
    rows = []
    for own, found in zip(cells, figures, strict=True):
        notes = sorted({note for job in own for note in job_notes(job)})
        states = [statuses[job.run_id].status.value for job in own]
        others = (f"{states.count(state)} {state}" for state in sorted({*states} - {"done"}))
        counts = ", ".join((f"{len(found)} of {len(own)}", *others))
        dataset = own[0].dataset + (f" ({', '.join(notes)})" if notes else "")
        values = (mean_and_spread([one.get(name) for one in found]) for name in columns)
        rows.append((own[0].method, dataset, counts, *values))
    print_table(title, ("method", "dataset", "runs", *columns.values()), rows)


def _headings(name: str, found: Sequence[Mapping[str, float | None]]) -> dict[str, str]:
    """Return the metrics that runs on a dataset have and tables show, each with its heading."""
    dataset = get_dataset(name)
    headings = {}
    for metric in dict.fromkeys(metric for one in found for metric in one):
        # The worst of groups other than the headline's is shown where it is another number.
        differs = any(one.get(metric) != one.get("wga") for one in found)
        if metric in METRIC_COLUMNS:
            headings[metric] = METRIC_COLUMNS[metric]
        elif metric in dataset.table_metrics or (metric.startswith("wga_") and differs):
            title = dataset.metric_title(metric)
            headings[metric] = f"AUROC {title}" if metric.startswith("auroc_") else title
    return headings


def job_notes(job: Job) -> list[str]:
    """Return what keeps a row out of the paper's tables."""
    changed = [f"{key}={value}" for key, value in job.overrides.items()]
    return job.labels + (changed if len(changed) <= 2 else [f"{len(changed)} settings changed"])


def mean_and_spread(values: Sequence[float | None], digits: int | None = None) -> str:
    """Return mean and standard deviation of what is known; AUROCs have more digits."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if digits is None:
        digits = 3 if max(known) <= 1 and min(known) > 0 else 1
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} +- {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean
