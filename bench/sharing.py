"""What a grid is expected to cost: each run by itself, and with shared stages counted once.

The estimate comes from finished runs of the same method and dataset, stage by stage. Which jobs
share a stage follows from the jobs alone, by the address that the stage will have, so nothing has
to be on disk. Only the stage that a method declares is taken for shared; what else two runs may
turn out to have in common is not promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.launch.arrays import shared_stage
from bench.plan import Job
from bench.store import Store

Kind = tuple[str, str, bool, bool]
"""Method, dataset, and whether it is a quick run and one of stacked seeds."""
StageSeconds = Mapping[str, float]
"""By a stage's name, what it takes in a run that makes it."""


@dataclass(frozen=True)
class Totals:
    """What jobs cost together, in seconds of one worker.

    Attributes:
        shared: with every shared stage counted once.
        standalone: with every job paying for all stages it needs.
        unknown: jobs that no finished run tells the cost of; they are in neither.
    """

    shared: float
    standalone: float
    unknown: int


def kind_of(job: Job) -> Kind:
    """Say which finished runs tell what a job costs."""
    return job.method, job.dataset, job.quick, bool(job.stack)


def stage_seconds(jobs: Sequence[Job], store: Store) -> dict[Kind, StageSeconds]:
    """Average the stages of finished runs of the same methods and datasets."""
    wanted = {kind_of(job) for job in jobs}
    summed: dict[Kind, dict[str, float]] = {}
    counted: dict[Kind, int] = {}
    for record in store.records():
        stacked = bool(record.get("stack"))
        kind = record["method"], record["dataset"], record["quick"], stacked
        if kind in wanted and record["status"] == "done":
            counted[kind] = counted.get(kind, 0) + 1
            own = summed.setdefault(kind, {})
            for stage in record["stages"]:
                own[stage["name"]] = own.get(stage["name"], 0.0) + stage["seconds_standalone"]
    return {
        kind: {name: seconds / counted[kind] for name, seconds in own.items()}
        for kind, own in summed.items()
    }


def expected_totals(jobs: Sequence[Job], known: Mapping[Kind, StageSeconds]) -> Totals:
    """Add up what jobs cost; where they disagree on a shared stage, its mean counts."""
    own, standalone, unknown = 0.0, 0.0, 0
    shared: dict[str, list[float]] = {}
    for job in jobs:
        if kind_of(job) not in known:
            unknown += 1
            continue
        stages = known[kind_of(job)]
        whole = sum(stages.values())
        address = shared_stage(job, "")  # one dataset has one set of labels, whatever they are
        common = stages.get(address.rpartition("-")[0], 0.0) if address is not None else 0.0
        if address is not None:
            shared.setdefault(address, []).append(common)
        standalone += whole
        own += whole - common
    return Totals(own + sum(map(fmean, shared.values())), standalone, unknown)
