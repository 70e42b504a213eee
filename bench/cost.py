"""What runs cost: read from stored records, and expected of runs that are yet to be made.

Every stage of a run has its own account: seconds by the wall and by the processor, image passes,
and whether another run had made it before. The audit, checkpoints and progress reports are left
out of it when it is kept. Two totals come from that: stand-alone, as if nothing had been shared,
which is what the paper's table means, and marginal, what the run added on its machine.

Warm-up is left out as well: what the first epoch of a training took beyond the median of its other
epochs (libraries loading, kernels being chosen, memory being reserved). It takes at least two other
epochs to see it, and it is seen by the wall alone: processor time includes it.

What jobs will cost is estimated from finished runs of the same method and dataset, stage by stage.
Which jobs share a stage follows from the jobs alone, by the address that the stage will have, so
nothing has to be on disk. Only stages that a method declares are taken for shared.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.job import Job
from bench.record import Record
from bench.store import Store

if TYPE_CHECKING:
    import pandas as pd

OTHER_EPOCHS_NEEDED = 2  # besides the first

StageSeconds = Mapping[str, float]
"""By a stage's name, what it takes in a run that makes it."""


@dataclass(frozen=True)
class Timing:
    """What one run cost: minutes without warm-up, and all but the marginal ones stand-alone."""

    method: str
    dataset: str
    hardware: str  # the kind of machine; times of two kinds do not compare
    minutes_standalone: float
    minutes_marginal: float
    cpu_minutes: float | None  # none if the record does not have them
    image_passes: int
    peak_memory_gb: float
    energy_kwh: float | None  # of the fit, where it was measured


def warm_up_seconds(history: pd.DataFrame, stages: Collection[str] | None = None) -> float:
    """Return what the first epochs of trainings, all or those named, took beyond the usual."""
    total = 0.0
    if "seconds" not in history:  # the epochs' times are kept, but not promised
        return total
    for (stage, _, _), epochs in history.groupby(["stage", "iteration", "phase"], dropna=False):
        seconds = epochs.sort_values("epoch")["seconds"].dropna().tolist()
        if (stages is None or stage in stages) and len(seconds) > OTHER_EPOCHS_NEEDED:
            total += max(0.0, seconds[0] - statistics.median(seconds[1:]))
    return total


def timing_of(record: Record, history: pd.DataFrame | None) -> Timing:
    """Return what a run cost, by its record and its history; without one no warm-up is known."""
    cost = record.cost
    warm_up = own_warm_up = 0.0
    if history is not None:
        reused = {stage.name for stage in cost.stages if stage.reused}
        own = set(history["stage"].dropna()) - reused  # a stage's training carries its name
        warm_up, own_warm_up = warm_up_seconds(history), warm_up_seconds(history, own)
    cpu_seconds = cost.cpu()
    return Timing(
        method=record.job.method,
        dataset=record.job.dataset,
        hardware=record.provenance.hardware(),
        minutes_standalone=(cost.standalone() - warm_up) / 60,
        minutes_marginal=(cost.marginal() - own_warm_up) / 60,
        cpu_minutes=None if cpu_seconds is None else cpu_seconds / 60,
        image_passes=cost.image_passes(),
        peak_memory_gb=(cost.peak_memory_bytes or 0) / 1e9,
        energy_kwh=cost.energy_kwh,
    )


def divided_cpu(records: Sequence[Record]) -> list[float | None]:
    """Return the processor's seconds of each run, a stage divided among the runs that share it.

    Their sum is what all of them cost together.
    """
    sharers = Counter((stage.name, stage.key) for one in records for stage in one.cost.stages)
    shares: list[float | None] = []
    for one in records:
        stages = one.cost.stages
        known = [
            s.cpu_seconds / sharers[s.name, s.key] for s in stages if s.cpu_seconds is not None
        ]
        shares.append(sum(known) if len(known) == len(stages) else None)
    return shares


def timings(store: Store, records: Iterable[Record]) -> list[Timing]:
    """Return what the finished ones among the runs cost."""
    found = [(record, store.history(record.run_id)) for record in records if record.done]
    return [timing_of(record, history) for record, history in found if history is not None]


def by_cell(found: Sequence[Timing]) -> dict[tuple[str, str], list[Timing]]:
    """Return timings by method and dataset, in the same order."""
    cells: dict[tuple[str, str], list[Timing]] = {}
    for timing in found:
        cells.setdefault((timing.method, timing.dataset), []).append(timing)
    return cells


@dataclass(frozen=True)
class MeanCost:
    """A method on a dataset: means over its runs, as if nothing had been shared."""

    method: str
    dataset: str
    runs: int
    image_passes: float
    seconds: float
    cpu_seconds: float | None  # none where a record does not have them

    @property
    def images_per_cpu_second(self) -> float | None:
        """Image passes by processor time, whatever else the method did in it."""
        return self.image_passes / self.cpu_seconds if self.cpu_seconds else None


def mean_costs(store: Store) -> list[MeanCost]:
    """Average the finished runs that count: on real data, in full, under the paper's settings."""
    usual = []
    for record in store.records():
        job, stacked = record.job, record.details.get("stack")
        if job.preset == "paper" and not (job.overrides or job.quick or job.standin or stacked):
            usual.append(record)
    means = []
    for (method, dataset), runs in by_cell(timings(store, usual)).items():
        cpu = [run.cpu_minutes for run in runs if run.cpu_minutes is not None]
        passes = statistics.fmean(run.image_passes for run in runs)
        seconds = 60 * statistics.fmean(run.minutes_standalone for run in runs)
        cpu_seconds = 60 * statistics.fmean(cpu) if len(cpu) == len(runs) else None
        means.append(MeanCost(method, dataset, len(runs), passes, seconds, cpu_seconds))
    return means


@dataclass(frozen=True)
class ExpectedCost:
    """What jobs cost together, in seconds of one worker: shared stages counted once, or in each.

    `unknown` jobs, of which nothing tells the cost, are in neither. The cost of `estimated` ones
    is no mean of finished runs, but `bench.estimate`'s.
    """

    shared: float
    standalone: float
    unknown: int
    estimated: int = 0


def stage_seconds(jobs: Sequence[Job], records: Iterable[Record]) -> dict[str, StageSeconds]:
    """Return, by run id, the mean seconds of the stages of finished runs like it.

    Those are the runs of the same method and version, dataset, network and resolution, as quick, on
    frozen features or not, and on a stand-in, which is of any size, or not. Another version may
    have cost many times as much.
    """
    summed: dict[tuple[object, ...], dict[str, float]] = {}
    runs: Counter[tuple[object, ...]] = Counter()
    for record in records:
        if record.done and not record.details.get("stack"):
            key = _kind(record.job)
            runs[key] += 1
            own = summed.setdefault(key, {})
            for stage in record.cost.stages:
                own[stage.name] = own.get(stage.name, 0.0) + stage.seconds_standalone
    means = {key: {name: s / runs[key] for name, s in own.items()} for key, own in summed.items()}
    keys = {job.run_id: _kind(job) for job in jobs}
    return {run_id: means[key] for run_id, key in keys.items() if key in means}


def _kind(job: Job) -> tuple[object, ...]:
    """Return what runs have in common that cost about as much as each other."""
    network, look = job.config.backbone.get("name"), job.config.dataset.get("resolution")
    how = job.quick, job.standin, job.network().frozen
    return job.method, job.version, job.dataset, network, look, *how


def expected_totals(jobs: Sequence[Job], known: Mapping[str, StageSeconds]) -> ExpectedCost:
    """Return what jobs cost; where they disagree on a shared stage, its mean counts."""
    from bench.context import stage_address
    from bench.features import STAGE as FEATURES
    from methods.base import get_method

    standalone, unknown = 0.0, 0
    shared: dict[str, list[float]] = {}
    for job in jobs:
        stages = known.get(job.run_id)
        if stages is None:
            unknown += 1
            continue
        standalone += sum(stages.values())
        for stage in get_method(job.method).stages(job.method_config()):
            own = stages.get(stage.name, 0.0)
            shared.setdefault(stage_address(job, stage), []).append(own)
        if job.network().frozen:
            network = {k: v for k, v in job.config.backbone.items() if k != "head"}
            key = f"{job.fingerprint} {job.config.dataset} {network} {job.quick}"
            shared.setdefault(key, []).append(stages.get(FEATURES, 0.0))
    saved = sum(sum(own) - statistics.fmean(own) for own in shared.values())
    return ExpectedCost(standalone - saved, standalone, unknown)


START_SECONDS = 10.0
"""About what it takes to start processes and to load a dataset."""


def describe_expected(cost: ExpectedCost, known: Mapping[str, StageSeconds], workers: int) -> str:
    """Return, as a sentence, how long runs should take together and when they should end.

    Workers share the work evenly at best, and the longest run has to be waited for.
    """
    if not known:
        return "how long that takes is not known: no run like these was finished yet"
    longest = max(sum(stages.values()) for stages in known.values())
    seconds = max(cost.shared / workers, longest)
    end = time.strftime("%H:%M", time.localtime(time.time() + seconds))
    length = f"{format_seconds(seconds)}{f' with {workers} workers' if workers > 1 else ''}"
    length += f", until about {end}"
    if seconds < START_SECONDS:  # starting takes longer than what follows
        length = "some seconds"
    unknown = f", and {cost.unknown} more of unknown cost" if cost.unknown else ""
    by_runs = "by runs finished here and published ones"
    measured = "by an estimate: image passes times the network's speed, measured on this machine"
    if cost.estimated == len(known):
        source = measured
    else:
        source = f"{by_runs}; {cost.estimated} of them {measured}" if cost.estimated else by_runs
    return f"expected to take {length}{unknown} ({source})"


def format_seconds(seconds: float) -> str:
    """Return a duration as one reads it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
