"""Cells: a number with its spread, its source, and the runs it comes from, or why it is empty."""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.plan import Request, expand
from bench.resources import paper_folder
from datasets.catalogue import DATASETS
from methods.base import load_methods

Key = tuple[str, str, str]
"""Method, dataset, metric."""

PUBLISHED_SEEDS = (0, 1, 2, 3, 4)
COLUMNS = {
    "waterbirds": ("wga", "avg"),
    "celeba": ("wga", "avg"),
    "isic": ("auroc", "auroc_nonpatch", "auroc_histopath"),
    "umnist": ("wga", "avg"),
    "cmnist": ("wga", "avg"),
}


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    source: Literal["measured", "paper"]
    mean: float | None = None
    std: float | None = None
    n: int | None = None
    reason: str = ""
    run_ids: tuple[str, ...] = ()

    def text(self, metric: str) -> str:
        """Write the number as the paper does."""
        if self.mean is None:
            return "-"
        digits = 3 if metric.startswith("auroc") else 1
        mean = f"{self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{digits}f}"


def paper_cells() -> dict[Key, Cell]:
    """Read the paper's main table."""
    with (paper_folder() / "main_results.csv").open(newline="") as source:
        return {
            (row["method"], row["dataset"], row["metric"]): Cell(
                "paper", float(row["mean"]), float(row["std"]) if row["std"] else None
            )
            for row in csv.DictReader(source)
        }


def published_runs() -> set[str]:
    """Name the runs of the main table: today's methods and presets, every dataset, seeds 0-4."""
    request = Request(
        methods=tuple(load_methods()),
        datasets=tuple(DATASETS),
        seeds=PUBLISHED_SEEDS,
        data_root=Path(os.devnull),  # what a run means does not depend on what is on disk
    )
    return {job.run_id for job in expand(request)}


def exclusion(record: dict[str, Any], published: set[str]) -> str | None:
    """Say why a run may not enter a paper table, or nothing if it may."""
    if record["status"] != "done":
        return str(record["status"])
    if record["standin"]:
        return "stand-in data"
    if record["quick"]:
        return "quick run"
    if record["preset"] not in ("paper", "tuned"):
        return f"preset {record['preset']}"
    if record["overrides"]:
        return "settings changed by hand"
    states = [record["git"], *(stage["git"] for stage in record["stages"])]
    if any(state["dirty"] is not False for state in states):
        return "code with uncommitted changes, or of no known commit"
    if record["seed"] not in PUBLISHED_SEEDS:
        return "development seed"
    if record["run_id"] not in published:
        return "an earlier version of the method, its preset or its data"
    return None


def measured_cells(
    records: Iterable[dict[str, Any]],
) -> tuple[dict[Key, Cell], list[tuple[str, str]]]:
    """Average what may enter the main table; list every run left out with the reason."""
    published = published_runs()
    values: dict[Key, list[tuple[float, str]]] = {}
    left_out = []
    for record in records:
        reason = exclusion(record, published)
        if reason is not None:
            left_out.append((str(record["run_id"]), reason))
            continue
        for metric in COLUMNS.get(record["dataset"], ("wga", "avg")):
            value = record["metrics"]["test"].get(metric)
            if value is not None:
                key = (record["method"], record["dataset"], metric)
                values.setdefault(key, []).append((value, record["run_id"]))
    return {key: _averaged(entries) for key, entries in values.items()}, left_out


def _averaged(entries: list[tuple[float, str]]) -> Cell:
    numbers = [value for value, _ in entries]
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    ids = tuple(sorted(run_id for _, run_id in entries))
    return Cell("measured", statistics.fmean(numbers), spread, len(numbers), run_ids=ids)
