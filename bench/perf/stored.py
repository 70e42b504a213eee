"""What whole runs cost, read from the records in a results folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.store import Store
from bench.timing import Timing, by_cell, timing_of

HEADINGS = (
    *("method", "dataset", "runs", "image passes (millions)", "seconds", "CPU-seconds"),
    "images per CPU-second",
)


@dataclass(frozen=True)
class Total:
    """A method on a dataset: means over its runs, as if nothing had been shared.

    Attributes:
        cpu_seconds: none where a record does not have them.
    """

    method: str
    dataset: str
    runs: int
    image_passes: float
    seconds: float
    cpu_seconds: float | None

    @property
    def images_per_cpu_second(self) -> float | None:
        """Image passes by processor time, whatever else the method did in it."""
        return self.image_passes / self.cpu_seconds if self.cpu_seconds else None


def totals(store: Store) -> list[Total]:
    """Add up the finished runs that count: on real data, in full, under the paper's settings."""
    found = []
    for record in store.records():
        history = store.runs / str(record["run_id"]) / "history.parquet"
        if _counts(record) and history.is_file():
            found.append(timing_of(record, pd.read_parquet(history)))
    return [_total(method, dataset, runs) for (method, dataset), runs in by_cell(found).items()]


def _counts(record: Mapping[str, Any]) -> bool:
    changed = record["preset"] != "paper" or record["overrides"] or record.get("stack")
    return record["status"] == "done" and not (changed or record["quick"] or record["standin"])


def _total(method: str, dataset: str, runs: list[Timing]) -> Total:
    processor = [run.cpu_minutes for run in runs if run.cpu_minutes is not None]
    return Total(
        method,
        dataset,
        len(runs),
        statistics.fmean(run.image_passes for run in runs),
        60 * statistics.fmean(run.minutes_standalone for run in runs),
        60 * statistics.fmean(processor) if len(processor) == len(runs) else None,
    )


def cells(found: list[Total]) -> list[tuple[object, ...]]:
    """Write totals for people."""
    return [
        (
            total.method,
            total.dataset,
            total.runs,
            f"{total.image_passes / 1e6:.2f}",
            f"{total.seconds:,.0f}",
            _known(total.cpu_seconds),
            _known(total.images_per_cpu_second),
        )
        for total in found
    ]


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
