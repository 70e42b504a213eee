"""The table a run ends with: mean and spread over seeds, a row for each method and dataset."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.commands.common import print_table
from bench.development import shown_figures, shown_split
from bench.grid import Seen, survey
from bench.plan import Job
from bench.store import Store

COLUMNS = (
    ("own selection", "selection"),
    ("WGA", "wga"),
    ("average", "avg"),
    ("avg, train-weighted", "avg_train_weighted"),
    ("WGA, 10 digits", "wga_10digit"),
    ("AUROC", "auroc"),
    ("AUROC non-patch", "auroc_nonpatch"),
    ("AUROC histopath.", "auroc_histopath"),
)
TITLES = {
    "test": "Test set, mean +- std over seeds",
    "val": "Validation set, mean +- std over development seeds",
}


def print_results(
    jobs: Sequence[Job], store: Store, seen: Mapping[str, Seen] | None = None
) -> None:
    """Print the metrics of a grid, of development seeds apart; a cell without runs says why."""
    seen = survey((job.run_id for job in jobs), store) if seen is None else seen
    for split, title in TITLES.items():
        own = [job for job in jobs if shown_split(job.seed) == split]
        if own:
            _print_split(own, seen, title)


def _print_split(jobs: Sequence[Job], seen: Mapping[str, Seen], title: str) -> None:
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    states: dict[tuple[str, ...], list[str]] = {}
    notes: dict[tuple[str, ...], set[str]] = {}
    for job in jobs:
        key = (job.method, job.dataset, job.variant)
        record = seen[job.run_id].record
        states.setdefault(key, []).append(seen[job.run_id].status)
        notes.setdefault(key, set()).update(_notes(job))
        if record is not None and record["status"] == "done":
            cells.setdefault(key, []).append(shown_figures(record))
    shown = [c for c in COLUMNS if any(c[1] in own for found in cells.values() for own in found)]
    rows = []
    for cell, state in states.items():
        found = cells.get(cell, [])
        label = cell[1] + (f" ({', '.join(sorted(notes[cell]))})" if notes[cell] else "")
        values = [mean_and_spread([own.get(name) for own in found]) for _, name in shown]
        runs = ", ".join(filter(None, (f"{len(found)} of {len(state)}", _others(state))))
        rows.append((cell[0], label, runs, *values))
    columns = ("method", "dataset", "runs", *(heading for heading, _ in shown))
    print_table(title, columns, rows)


def _notes(job: Job) -> list[str]:
    """Say what keeps a row out of the paper's tables."""
    notes = ["stand-in"] if job.standin else []
    notes += ["quick"] if job.quick else []
    notes += ["stacked"] if job.stack else []
    changed = [f"{key}={value}" for key, value in job.overrides.items()]
    return notes + (changed if len(changed) <= 2 else [f"{len(changed)} settings changed"])


def mean_and_spread(values: Sequence[float | None], digits: int | None = None) -> str:
    """Write mean and standard deviation of what is known; AUROCs have more digits."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    if digits is None:
        digits = 3 if max(known) <= 1 and min(known) > 0 else 1
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} +- {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def _others(states: Sequence[str]) -> str:
    rest = sorted({state for state in states if state != "done"})
    return ", ".join(f"{states.count(state)} {state}" for state in rest)
