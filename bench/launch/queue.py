"""What has become of submitted runs and workers: from disk, cross-checked with SLURM."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.job import Job
from bench.launch import scheduler
from bench.launch.ledger import Array, Launch, launches_lock, open_launches, read_jobs, read_launch
from bench.launch.progress import Display
from bench.launch.scheduler import TaskState
from bench.record import Record, Status, failed_record
from bench.store import Store
from datasets.errors import BenchError
from datasets.files import Damaged
from datasets.lock import Lock

FOLLOW_SECONDS = 2.0  # how often a followed launch is looked at
FOLLOW_TICKS = 8  # how often the display is drawn in that time
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
    launches = list(open_launches(store))
    found: dict[str, SubmittedRun] = {}
    for launch, states in _with_states(launches) if launches else ():
        unfinished = dict(unfinished_runs(launch, store, states))
        if any(not run.active for run in unfinished.values()):
            marked = mark_lost(launch, store)
            unfinished = {r: run for r, run in unfinished.items() if r not in marked}
        if not unfinished:
            launch.mark_complete()
        found |= unfinished
    return found


def _with_states(launches: Sequence[Launch]) -> Iterator[tuple[Launch, States | None]]:
    """Add to launches what SLURM says of our tasks; none to those it cannot be asked about.

    SLURM is asked before anything else is read: a task that has ended has written by then.
    """
    states = scheduler.task_states()
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
        for _ in range(FOLLOW_TICKS if waiting else 0):
            display.tick()
            time.sleep(FOLLOW_SECONDS / FOLLOW_TICKS)
    return records


@dataclass(frozen=True)
class StudyWorkers:
    """The workers that a launch has for a study that is not finished.

    SLURM has those that are queued or running, or may have them where it cannot be asked.
    """

    launch: Launch
    study: Path  # its folder
    method: str
    dataset: str
    trials: int  # how many finished ones they are to reach
    finished: int  # the study's finished trials
    array: str  # SLURM's number; empty if it never got one
    queued: int = 0
    running: int = 0
    jobs: tuple[str, ...] = ()  # SLURM's names of the tasks that they are in

    @property
    def active(self) -> int:
        """How many workers are going to make trials."""
        return self.queued + self.running

    def matches(self, part: str) -> bool:
        """Return whether a name means them: a beginning or end of the study's, or the array's."""
        name = self.study.name
        return name.startswith(part) or name.endswith(part) or part == self.array

    def to_json(self) -> dict[str, object]:
        """Return them as `status --json` has them."""
        return {
            "study": self.study.name,
            "method": self.method,
            "dataset": self.dataset,
            "finished": self.finished,
            "asked": self.trials,
            "array": self.array,
            "queued": self.queued,
            "running": self.running,
            "path": str(self.study),
        }


def worker_lock(launch: Launch, number: int) -> Path:
    """Return the lock that a task holds while its workers work."""
    return launch.folder / "workers" / str(number)


def study_workers(
    results: Path, count_finished: Callable[[Path], int], *, submitting: bool = False
) -> list[StudyWorkers]:
    """Return the launches of workers whose study is not finished, oldest first.

    One whose workers are all gone is among them: its study can be taken up again. `count_finished`
    counts the finished trials of a study's folder; `submitting` says that it is us who hold the
    lock under which workers are submitted.
    """
    folders = sorted(path for path in (results / "studies").glob("*") if path.is_dir())
    launches = [launch for folder in folders for launch in open_launches(Store(folder))]
    found = []
    for launch, states in _with_states(launches) if launches else ():
        finished = count_finished(launch.folder.parents[1])
        workers = _workers_of(launch, finished, states, submitting=submitting)
        never_sent = not workers.array and not workers.active
        if never_sent and read_launch(launch.folder).arrays[0].job:
            never_sent = False  # they were submitted since the first look
        if never_sent or (finished >= workers.trials and not workers.jobs):
            launch.mark_complete()
        else:
            found.append(workers)
    return found


def _workers_of(
    launch: Launch, finished: int, states: States | None, *, submitting: bool
) -> StudyWorkers:
    study, tuning = launch.folder.parents[1], launch.tuning()
    method, dataset = str(tuning["method"]), str(tuning["dataset"])
    trials = int(str(tuning["trials"]))
    (array,) = launch.arrays
    # They may be about to be submitted; and where SLURM is silent, they may be in its queue.
    sending = not array.job and not submitting and launches_lock(Store(study)).held()
    assumed = sending or (states is None and finished < trials)
    number_of_array, queued, running, jobs = array.job, 0, 0, []
    for number, members in enumerate(array.tasks):
        task = (states or {}).get((array.name, number))
        if Lock(worker_lock(launch, number)).held() or (task is not None and task.running):
            running += len(members)
        elif assumed or (task is not None and not task.over):
            queued += len(members)
        else:
            continue
        jobs.append(task.job if task is not None else array.task(number))
        number_of_array = number_of_array or jobs[-1].partition("_")[0]
    known = StudyWorkers(launch, study, method, dataset, trials, finished, number_of_array)
    return replace(known, queued=queued, running=running, jobs=tuple(jobs))
