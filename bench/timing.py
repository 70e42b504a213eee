"""What runs cost, read from stored records: nothing is run again to be timed.

Every stage of a run has its own account: seconds by the wall and by the processor, image passes,
and whether another run had made it before. The audit, checkpoints and progress reports are left
out of it when it is kept. Two totals come from that: stand-alone, as if nothing had been shared,
which is what the paper's table means, and marginal, what the run added on its machine.

Warm-up is left out as well: what the first epoch of a training took beyond the median of its other
epochs (libraries loading, kernels being chosen, memory being reserved). It needs at least two other
epochs to be told; the time of trainings shorter than that is kept whole. What was left out is told
beside the totals. It can only be told by the wall, so processor time includes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.plan import Job
from bench.store import Store

OTHERS_NEEDED = 2  # epochs besides the first


@dataclass(frozen=True)
class Timing:
    """What one run cost.

    Attributes:
        minutes_standalone: without warm-up, as if the run had made every stage itself.
        minutes_marginal: without warm-up, of the stages it did make.
        warm_up_minutes: what was left out of the stand-alone minutes.
        cpu_minutes: of the processor, stand-alone; none if the record does not have them.
        image_passes: images through the network, stand-alone.
        energy_kwh: of the fit, where it was measured.
    """

    run_id: str
    method: str
    dataset: str
    seed: int
    device: str
    processor: str
    threads: int
    minutes_standalone: float
    minutes_marginal: float
    warm_up_minutes: float
    cpu_minutes: float | None
    image_passes: int
    peak_memory_gb: float
    energy_kwh: float | None


def warm_up_seconds(history: pd.DataFrame, stages: Collection[str] | None = None) -> float:
    """Add up what the trainings' first epochs took beyond their others' median.

    Args:
        history: a run's epochs.
        stages: the trainings to look at, by name; all if not given.
    """
    total = 0.0
    if "seconds" not in history:  # the epochs' times are kept, but not promised
        return total
    trainings = history.groupby(["stage", "iteration", "phase"], dropna=False)
    for (stage, _, _), epochs in trainings:
        seconds = epochs.sort_values("epoch")["seconds"].dropna().tolist()
        chosen = stages is None or stage in stages
        if chosen and len(seconds) > OTHERS_NEEDED:
            total += max(0.0, seconds[0] - statistics.median(seconds[1:]))
    return total


def timing_of(record: Mapping[str, Any], history: pd.DataFrame) -> Timing:
    """Read what a run cost from its record and its history."""
    stages: Sequence[Mapping[str, Any]] = record["stages"]
    reused = {stage["name"] for stage in stages if stage["reused"]}
    own = set(history["stage"].dropna()) - reused  # a stage's training carries its name
    warm_up, own_warm_up = warm_up_seconds(history), warm_up_seconds(history, own)
    processor = [stage.get("cpu_seconds") for stage in stages]
    known = [seconds for seconds in processor if seconds is not None]
    return Timing(
        run_id=record["run_id"],
        method=record["method"],
        dataset=record["dataset"],
        seed=record["seed"],
        device=record["device"],
        processor=record["environment"]["processor"],
        threads=record["threads"],
        minutes_standalone=(_sum(stages, "seconds_standalone") - warm_up) / 60,
        minutes_marginal=(_sum(stages, "seconds_marginal") - own_warm_up) / 60,
        warm_up_minutes=warm_up / 60,
        cpu_minutes=sum(known) / 60 if len(known) == len(processor) else None,
        image_passes=int(_sum(stages, "image_passes")),
        peak_memory_gb=record["peak_memory_bytes"] / 1e9,
        energy_kwh=record.get("energy_kwh"),
    )


def minutes_together(runs: Iterable[tuple[Mapping[str, Any], pd.DataFrame]]) -> float:
    """Add up runs, without warm-up, as if each stage they have in common had been made once.

    Args:
        runs: record and history of each.
    """
    seconds = 0.0
    counted: set[tuple[str, str]] = set()
    for record, history in runs:
        repeated = {stage["name"] for stage in record["stages"] if _address(stage) in counted}
        new = [stage for stage in record["stages"] if _address(stage) not in counted]
        own = set(history["stage"].dropna()) - repeated
        seconds += _sum(new, "seconds_standalone") - warm_up_seconds(history, own)
        counted.update(_address(stage) for stage in new)
    return seconds / 60


def _address(stage: Mapping[str, Any]) -> tuple[str, str]:
    return stage["name"], stage["key"]


def _sum(stages: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(stage[name] for stage in stages))


def timings(store: Store, jobs: Iterable[Job]) -> list[Timing]:
    """Read what the finished ones among the jobs cost."""
    found = []
    for job in jobs:
        record = store.record(job.run_id)
        if record is not None and record["status"] == "done":
            history = pd.read_parquet(store.runs / job.run_id / "history.parquet")
            found.append(timing_of(record, history))
    return found


def by_cell(found: Sequence[Timing]) -> dict[tuple[str, str], list[Timing]]:
    """Sort by method and dataset, keeping the order."""
    cells: dict[tuple[str, str], list[Timing]] = {}
    for timing in found:
        cells.setdefault((timing.method, timing.dataset), []).append(timing)
    return cells


def machines(found: Iterable[Timing]) -> list[str]:
    """Name the kinds of machine the runs were made on; times of two kinds do not compare."""
    kinds = {
        f"{t.processor if t.device == 'cpu' else t.device}, {t.threads} thread"
        + ("s" if t.threads > 1 else "")
        for t in found
    }
    return sorted(kinds)
