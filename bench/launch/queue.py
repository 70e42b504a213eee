"""What has become of submitted runs, from disk, cross-checked with SLURM where it answers."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.launch.ledger import Array, Launch, launches_lock, open_launches, read_launch
from bench.launch.scheduler import TaskState, find_cluster, past_states, task_states
from bench.plan import Job
from bench.records import failed_record
from bench.store import Store
from datasets.errors import BenchError

States = Mapping[tuple[str, int], TaskState]  # by name of the array and number of the task
TAIL = 4000  # characters of a log that a failed record keeps


class TaskLost(BenchError):
    """A task ended without leaving a record of its runs."""

    def __init__(self, kind: str, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.kind = kind


# How a task can end without a word, by SLURM's state: kind of failure, and what to do about it.
ENDS = {
    "OUT_OF_MEMORY": ("out_of_memory", "give it more memory_gb in the cluster profile"),
    "NODE_FAIL": ("node_failure", "run the command again: it goes on from the last epoch"),
    "BOOT_FAIL": ("node_failure", "run the command again: it goes on from the last epoch"),
    "TIMEOUT": ("time_limit", "give it more minutes or requeues in the cluster profile"),
    "DEADLINE": ("time_limit", "give it more minutes or requeues in the cluster profile"),
    "CANCELLED": ("cancelled", "run the command again: it goes on from the last epoch"),
}
UNKNOWN = ("lost", "see stderr_tail; run the command again: it goes on from the last epoch")


@dataclass(frozen=True)
class Claim:
    """A run that a launch has promised to carry out and that has no result yet.

    Attributes:
        job: SLURM's name of the task; empty if it never got one.
        state: queued, running or preempted (interrupted, and will go on).
        active: whether SLURM has the task; True as well if it cannot be asked.
    """

    launch: Launch
    array: Array
    number: int
    job: str
    state: str
    active: bool = True


def claims(store: Store) -> dict[str, Claim]:
    """Find every run that is queued or running on a cluster, and bury what was lost.

    A run whose task is gone without a record gets a failed one here, saying how it ended.
    """
    launches = list(open_launches(store))
    if not launches:
        return {}
    found: dict[str, Claim] = {}
    for launch, states in with_states(launches):
        unsettled = dict(_unsettled(launch, store, states))
        if any(not claim.active for claim in unsettled.values()):
            buried = _bury(launch, store)
            unsettled = {r: c for r, c in unsettled.items() if r not in buried}
        if not unsettled:
            with contextlib.suppress(OSError):
                launch.end()
        found |= unsettled
    return found


def with_states(launches: Sequence[Launch]) -> Iterator[tuple[Launch, States | None]]:
    """Add to launches what SLURM says of our tasks; None to those it cannot be asked about.

    SLURM is asked before anything else is read: a task that has ended has written by then.
    """
    states = task_states()
    cluster = find_cluster() if states is not None else None
    us = getpass.getuser()
    for launch in launches:
        ours = cluster is not None and (launch.cluster, launch.user) == (cluster.name, us)
        yield launch, states if ours else None


def _unsettled(launch: Launch, store: Store, states: States | None) -> Iterator[tuple[str, Claim]]:
    """Give the runs of a launch that have no record of their own yet."""
    for array in launch.arrays:
        for number, runs in enumerate(array.tasks):
            task = states.get((array.name, number)) if states is not None else None
            job = task.job if task is not None else array.task(number) if array.job else ""
            for run_id in runs:
                if store.written(run_id) >= launch.created:
                    continue
                state = "preempted" if store.started(run_id) else "queued"
                active = states is None or (task is not None and not task.over)
                if store.lock(run_id).held():
                    state, active = "running", True
                elif task is not None and not task.over and not task.waiting:
                    state = "running"
                yield run_id, Claim(launch, array, number, job, state, active)


def _bury(launch: Launch, store: Store) -> set[str]:
    """Write failed records for runs whose task is gone; give back which are settled now.

    Ledger and SLURM are read again under the lock: what seemed lost may have been about to be
    submitted, and to forget it would let another launcher submit it a second time.
    """
    settled = set()
    # Where somebody is just submitting, or we may only read, others will do it, or we later.
    with contextlib.suppress(BenchError, OSError), launches_lock(store).hold(wait=False):
        if store.runs.is_dir():
            os.listdir(store.runs)  # a shared disk may show an old state until it is asked anew
        launch = read_launch(launch.folder)
        states = task_states()
        unsettled = _unsettled(launch, store, states)
        lost = {run_id: claim for run_id, claim in unsettled if not claim.active}
        states = states or {}
        jobs = launch.jobs()
        past = past_states({c.job for c in lost.values() if c.job and not _known(c, states)})
        for run_id, claim in lost.items():
            task = _known(claim, states)
            how = task.state if task is not None else past.get(claim.job, "")
            if claim.job:  # else it was never submitted: it is just missing
                with store.lock(run_id).hold(wait=False):
                    if store.written(run_id) < launch.created:
                        _write_failed(launch, claim, jobs[run_id], store, how)
            settled.add(run_id)
    return settled


def _known(claim: Claim, states: States) -> TaskState | None:
    return states.get((claim.array.name, claim.number))


def _write_failed(launch: Launch, claim: Claim, job: Job, store: Store, how: str) -> None:
    existing = store.record(job.run_id)
    if existing is not None and existing["status"] == "done":
        return  # an attempt to make it again was lost; what there was is kept
    kind, remedy = ENDS.get(how, UNKNOWN)
    state = f" ({how.lower().replace('_', ' ')})" if how else ""
    message = f"task {claim.job} ended without a result{state}"
    failed = failed_record(job, TaskLost(kind, message, remedy), time.time(), launch.places)
    failed["failure"]["stderr_tail"] = _tail(launch, claim)
    store.write({**failed, "git": launch.git})


def _tail(launch: Launch, claim: Claim) -> str:
    path = launch.folder / "tasks" / f"{claim.job}_0_log.err"
    try:
        return path.read_text(errors="replace")[-TAIL:]
    except OSError:
        return f"there is no {path}"
