"""Launches on disk, and what has become of their runs: cross-checked with SLURM.

launches/<id>/launch.json    arrays, their tasks, and the runs (or a study's workers) of each task
launches/<id>/jobs.json      the jobs themselves; tasks read them here
launches/<id>/tuning.json    in the place of jobs: what a study's workers tune
launches/<id>/code/          the code they run
launches/<id>/tasks/         what submitit keeps, and what tasks printed
launches/<id>/workers/       locks that a study's tasks hold while they run
launches/<id>/ended          there when nothing is left to look after

Runs are submitted from `launches/` of a results folder, workers from that of a study's folder.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.job import Job
from bench.launch import scheduler
from bench.launch.profile import Resources
from bench.launch.progress import Display
from bench.launch.scheduler import TaskState
from bench.provenance import GitState
from bench.record import Record, Status, failed_record
from bench.store import Store
from datasets.config import Values, coerce, field_types
from datasets.errors import BenchError
from datasets.files import Damaged, atomic_file, read_checked, set_aside, with_checksum
from datasets.lock import Lock

FOLLOW_SECONDS = 2.0  # how often a followed launch is looked at
LOG_TAIL = 4000  # characters of a task's log that a failed record keeps

States = Mapping[tuple[str, int], TaskState]
"""SLURM's answer, by name of the array and number of the task."""

GO_ON = "run the command again: it goes on from the last epoch"
MORE_TIME = "give it more minutes or requeues in the cluster profile"
FAILURE_BY_SLURM_STATE = {
    "OUT_OF_MEMORY": ("out_of_memory", "give it more memory_gb in the cluster profile"),
    "NODE_FAIL": ("node_failure", GO_ON),
    "BOOT_FAIL": ("node_failure", GO_ON),
    "TIMEOUT": ("time_limit", MORE_TIME),
    "DEADLINE": ("time_limit", MORE_TIME),
    "CANCELLED": ("cancelled", GO_ON),
}
"""How a task can end without a record of its runs: the kind of failure, and what to do about it."""
UNKNOWN_FAILURE = ("lost", f"see stderr_tail; {GO_ON}")


@dataclass(frozen=True)
class Array:
    """Tasks that ask for the same resources and wait for the same others."""

    name: str  # SLURM's name of the job; unique, so that an array can be found by it
    resources: Resources
    tasks: tuple[tuple[str, ...], ...]  # the run ids of each task, or the names of its workers
    produces: Mapping[str, int] = field(default_factory=dict)  # shared stages: who computes each
    waits_for: tuple[str, ...] = ()  # the shared stages that have to be computed first
    depends_on: tuple[str, ...] = ()  # the tasks that compute them
    job: str = ""  # SLURM's number, empty as long as it is not submitted

    def task(self, number: int) -> str:
        """Return SLURM's name of a task; empty as long as it has none."""
        return self.job if len(self.tasks) == 1 or not self.job else f"{self.job}_{number}"

    def describe(self, noun: str) -> str:
        """Return how many there are in it of what the noun names, and in how many tasks."""
        counts = {noun: sum(map(len, self.tasks)), "task": len(self.tasks)}
        return " in ".join(
            f"{number} {what}{'s' * (number != 1)}" for what, number in counts.items()
        )


@dataclass(frozen=True)
class Launch:
    """One submission; only its user, on its cluster, can learn from SLURM how it is."""

    id: str
    folder: Path
    created: float  # by the clock that also dates the records
    user: str
    cluster: str
    profile: str
    path_arguments: str  # those that name the data root and the results folder
    git: GitState
    code: str  # the copy of the code that it runs; empty for an installed package
    arrays: tuple[Array, ...] = ()

    def write(self) -> None:
        """Put it on disk."""
        content = {name: value for name, value in asdict(self).items() if name != "folder"}
        self.write_file("launch.json", content)

    def write_file(self, name: str, content: Values) -> None:
        """Put a file into its folder."""
        with atomic_file(self.folder / name) as draft:
            draft.write_text(with_checksum(content))

    def write_jobs(self, jobs: Sequence[Job]) -> None:
        """Put the jobs on disk."""
        self.write_file("jobs.json", {job.run_id: job.to_json() for job in jobs})

    def with_array(self, array: Array) -> Launch:
        """Return the launch with an array replaced by what has become of it, or added."""
        others = tuple(known for known in self.arrays if known.name != array.name)
        return replace(self, arrays=(*others, array))

    def mark_complete(self) -> None:
        """Note that there is nothing left to look after, unless we may only read."""
        with contextlib.suppress(OSError):
            (self.folder / "ended").touch()


def launches_lock(store: Store) -> Lock:
    """Return the lock under which runs are submitted and lost ones are marked."""
    return Lock(store.launches / "lock")


def open_launches(store: Store) -> Iterator[Launch]:
    """Read the launches that may still have something under way, oldest first."""
    for path in sorted(store.launches.glob("*/launch.json")):
        if (path.parent / "ended").exists():
            continue
        try:
            yield read_launch(path.parent)
        except Damaged as error:  # its runs are just missing
            stop_following(path.parent, error)


def stop_following(folder: Path, error: Damaged) -> None:
    """Set aside a launch that cannot be read, and say so."""
    damaged = f"launch {folder.name} is damaged ({error}) and not followed any more"
    sys.stderr.write(f"{damaged}: squeue shows what of it still runs\n")
    with contextlib.suppress(BenchError, OSError):  # where we may only read, it stays
        set_aside(folder / "launch.json", folder / "damaged", str(error))


def read_launch(folder: Path) -> Launch:
    """Read a launch as it is now."""
    content = read_checked(folder / "launch.json")
    kinds = {name: kind for name, kind in field_types(Launch).items() if name != "folder"}
    if missing := [name for name in kinds if name not in content]:
        raise Damaged(f"it lacks {', '.join(missing)}")
    values = {name: coerce(content[name], kind, f"launch.{name}") for name, kind in kinds.items()}
    return Launch(folder=folder, **values)


def read_jobs(folder: Path) -> dict[str, Job]:
    """Read the jobs of a launch, by run id."""
    content = read_checked(folder / "jobs.json")
    return {run_id: Job.from_json(values) for run_id, values in content.items()}


@dataclass(frozen=True)
class SubmittedRun:
    """A run that a launch is going to carry out and that has no result yet."""

    launch: Launch
    array: Array
    number: int  # of its task in the array
    job: str  # SLURM's name of the task; empty if it never got one
    status: Status  # queued, running or preempted (interrupted, and will go on)
    active: bool = True  # SLURM has the task, or cannot be asked
    state: str = ""  # what SLURM says of the task, if it knows it


def submitted_runs(store: Store) -> dict[str, SubmittedRun]:
    """Find every run that is queued or running on a cluster, by run id, and mark lost ones.

    A run whose task is gone without a record gets a failed one here, which says how it ended.
    """
    found: dict[str, SubmittedRun] = {}
    for launch, states in with_states([*open_launches(store)]):
        unfinished = dict(unfinished_runs(launch, store, states))
        if any(not run.active for run in unfinished.values()):
            marked = mark_lost(launch, store)
            unfinished = {r: run for r, run in unfinished.items() if r not in marked}
        if not unfinished:
            launch.mark_complete()
        found |= unfinished
    return found


def with_states(launches: Sequence[Launch]) -> Iterator[tuple[Launch, States | None]]:
    """Add to launches what SLURM says of our tasks; none to those it cannot be asked about.

    SLURM is asked before anything else is read: a task that has ended has written by then.
    """
    states = scheduler.task_states() if launches else None
    cluster = scheduler.find_cluster() if states is not None else None
    user = getpass.getuser()
    for launch in launches:
        ours = cluster is not None and (launch.cluster, launch.user) == (cluster.name, user)
        yield launch, states if ours else None


def unfinished_runs(
    launch: Launch, store: Store, states: States | None
) -> Iterator[tuple[str, SubmittedRun]]:
    """Yield the runs of a launch that have no record since it was made, each with its id."""
    for array in launch.arrays:
        for number, runs in enumerate(array.tasks):
            task = (states or {}).get((array.name, number))
            job, state = (task.job, task.state) if task else (array.task(number), "")
            for run_id in runs:
                if store.record_mtime(run_id) >= launch.created:
                    continue
                status = Status.PREEMPTED if store.has_progress(run_id) else Status.QUEUED
                active = states is None or (task is not None and not task.over)
                if store.lock(run_id).held():
                    status, active = Status.RUNNING, True
                elif task is not None and task.running:
                    status = Status.RUNNING
                yield run_id, SubmittedRun(launch, array, number, job, status, active, state)


def mark_lost(launch: Launch, store: Store) -> set[str]:
    """Write failed records for runs whose task is gone; return the runs that have ended so.

    Ledger and SLURM are read again under the lock: what seemed lost may have been about to be
    submitted, and to forget it would let another launcher submit it a second time.
    """
    marked = set()
    # Where another process is just submitting, or we may only read, it is done by others, or later.
    with contextlib.suppress(BenchError, OSError), launches_lock(store).hold(wait=False):
        if store.runs.is_dir():
            os.listdir(store.runs)  # a shared disk may show an old state until it is asked anew
        launch = read_launch(launch.folder)
        unfinished = unfinished_runs(launch, store, scheduler.task_states())
        lost = {run_id: run for run_id, run in unfinished if not run.active}
        try:
            jobs = read_jobs(launch.folder)
        except Damaged:  # what they were is not known any more: they are just missing
            jobs = {}
        past = scheduler.past_states({r.job for r in lost.values() if r.job and not r.state})
        for run_id, run in lost.items():
            state = run.state or past.get(run.job, "")
            if run.job and run_id in jobs:  # else it was never submitted: it is just missing
                with store.lock(run_id).hold(wait=False):
                    if store.record_mtime(run_id) < launch.created:
                        store.write_failure(_lost_record(run, jobs[run_id], state))
            marked.add(run_id)
    return marked


def _lost_record(run: SubmittedRun, job: Job, state: str) -> Record:
    kind, remedy = FAILURE_BY_SLURM_STATE.get(state, UNKNOWN_FAILURE)
    how = f" ({state.lower().replace('_', ' ')})" if state else ""
    error = BenchError(f"task {run.job} ended without a result{how}", remedy)
    record = failed_record(job, error, time.time(), run.launch.path_arguments)
    path = run.launch.folder / "tasks" / f"{run.job}_0_log.err"
    try:
        tail = path.read_text(errors="replace")[-LOG_TAIL:]
    except OSError:
        tail = f"there is no {path}"
    assert record.failure is not None
    failure = replace(record.failure, kind=kind, stderr_tail=tail)
    provenance = replace(record.provenance, git=run.launch.git, code=None)
    return replace(record, failure=failure, provenance=provenance)


def follow(jobs: Sequence[Job], store: Store, display: Display) -> list[Record]:
    """Wait until no launch has any of the runs left, and return their records as they came."""
    waiting = {job.run_id: job for job in jobs}
    shown: set[str] = set()
    records = []
    while waiting:
        submitted = submitted_runs(store)
        for run_id, job in list(waiting.items()):
            run = submitted.get(run_id)
            record = store.record(run_id) if run is None else None
            if (run is None or run.status is Status.RUNNING) and run_id not in shown:
                shown.add(run_id)
                display.started(job)
            if run is None:
                del waiting[run_id]
                if record is not None:
                    display.finished(job, record)
                    records.append(record)
            elif run_id in shown:
                display.progressed(job, store.progress(run_id) or {"stage": run.status.value})
        if waiting:
            time.sleep(FOLLOW_SECONDS)
    return records
