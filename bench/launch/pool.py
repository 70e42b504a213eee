"""Worker processes on this machine: one for each job, as many at a time as there is room for.

Jobs come from a `JobSource`: a fixed list, or a study that draws trials. A worker is a process of
its own, so that one that crashes or is killed costs one run, and no run sees another's memory. It
is given its job when it starts, reports over a pipe, and ends with its launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from bench.devices import gpus_of, show_one_gpu
from bench.job import Job
from bench.launch.progress import Display
from bench.process import (
    WorkerDied,
    available_cores,
    begin_as_child,
    count_oom_kills,
    default_threads,
    starting_a_child,
    worker_exit_error,
)
from bench.record import Record, Status, failed_record
from bench.runner import WORKER, RunOptions, run_job
from bench.store import Store
from datasets.config import Values
from methods.backbones import SMALL_NETWORKS

RETRY_SECONDS = 2.0  # how often to look again at a job that another process is running
POLL_SECONDS = 0.2  # how long to wait for a message before the source is asked for more jobs
SOURCE_SECONDS = 0.5  # how often to ask a source again that had nothing to hand out
EXIT_SECONDS = 10.0  # how long a worker that has sent its record may take to end
START_TRIES = 6  # how often to try to start a worker whose fork server dies meanwhile
START_SECONDS = 0.5  # how long to wait in between: a server that was killed needs a while to end
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class JobSource(Protocol):
    """Where a pool takes its jobs from."""

    @property
    def exhausted(self) -> bool:
        """Whether there will never be another job to hand out."""

    def next(self) -> Job | None:
        """Return the next job; none if there is nothing to hand out now."""

    def progress(self, job: Job, progress: Values) -> str | None:
        """Take the progress of a steered job, whose fit waits; a text asks it to stop, and why."""
        return None

    def finish(self, job: Job, record: Record) -> None:
        """Take the record of a job that has ended, well or not."""
        return


class FixedJobs(JobSource):
    """A list of jobs, handed out in order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)
        self._waiting = deque(jobs)

    @property
    def exhausted(self) -> bool:
        """Whether every job was handed out."""
        return not self._waiting

    def next(self) -> Job | None:
        """Return the next job."""
        return self._waiting.popleft() if self._waiting else None


@dataclass
class Attempt:
    """A job that was handed out, and how often it may be tried again."""

    job: Job
    retries: int  # once it has failed, in whatever way
    resumes: int  # once a process of it was killed; these come first
    not_before: float = 0.0  # when to look at it again, by the monotonic clock

    @property
    def final(self) -> bool:
        """Whether it is not tried again if it fails, so that its failure can be stored at once."""
        return self.retries == 0 and self.resumes == 0

    def should_retry(self, record: Record) -> bool:
        """Return whether a job that ended so is tried once more, and count that."""
        if record.failure is None:
            return False
        if record.failure.kind == WorkerDied.kind and self.resumes > 0:
            self.resumes -= 1
            return True
        self.retries -= 1
        return self.retries >= 0


@dataclass
class Worker:
    """A process, the pipe to it, its job, and its share of the machine."""

    process: BaseProcess
    pipe: Connection
    attempt: Attempt
    slot: int
    died: bool = False  # it ended without a record, so that its failure is not stored yet
    started: float = field(default_factory=time.time)
    oom_kills: int = field(default_factory=count_oom_kills)

    def end(self) -> None:
        """End the process, if it does not do so by itself."""
        self.process.join(EXIT_SECONDS)
        self.process.kill()
        self.process.join()
        self.pipe.close()


def default_workers(jobs: Sequence[Job], device: str = "cpu") -> int:
    """Return how many processes to use: one a GPU, one a core for small networks, else one."""
    if gpus := gpus_of(device):
        return min(len(jobs), len(gpus))
    if all(job.backbone().name in SMALL_NETWORKS for job in jobs):
        return max(1, min(len(jobs), available_cores()))
    return 1


def run_pool(
    source: JobSource,
    options: RunOptions,
    workers: int,
    display: Display,
    retries: int = 0,
    resumes: int = 0,
) -> list[Record]:
    """Run the jobs of a source and return their records, in the order in which they ended.

    Without `options.isolate` they run in this process, one after the other. A run that failed, in
    whatever way, is tried again `retries` times; one whose process was killed goes on `resumes`
    times before that counts as a try.
    """
    shares = _shares(options, workers) if options.isolate else [options]
    pool = _Pool(source, options, shares, display, (retries, resumes))
    try:
        while pool.workers or pool.waiting or not source.exhausted:
            pool.assign_jobs()
            pool.receive()
    finally:
        pool.end()
    return pool.records


@dataclass
class _Pool:
    source: JobSource
    options: RunOptions
    shares: list[RunOptions]
    display: Display
    tries: tuple[int, int]
    records: list[Record] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    waiting: deque[Attempt] = field(default_factory=deque)
    ask_source_at: float = 0.0

    def __post_init__(self) -> None:
        self.store = Store(self.options.results)

    def assign_jobs(self) -> None:
        """Start a worker in every free slot, as long as there are jobs."""
        taken = {worker.slot for worker in self.workers}
        free = [slot for slot in range(len(self.shares)) if slot not in taken]
        while free and (attempt := self._due_again() or self._new_attempt()) is not None:
            if self.options.isolate:
                self._start(attempt, free.pop(0))
            else:
                self._run_here(attempt)

    def _start(self, attempt: Attempt, slot: int) -> None:
        for left in reversed(range(START_TRIES)):
            _start_server()
            try:
                with starting_a_child():  # an interruption waits until the worker is on the list
                    self.workers.append(_start(attempt, self.shares[slot], slot))
                return
            except (EOFError, ConnectionError) as gone:
                if not left:
                    raise WorkerDied(
                        "the server that worker processes come from died as often as it started",
                        "most often the machine ran out of memory: use fewer --workers",
                    ) from gone
                time.sleep(START_SECONDS)

    def _due_again(self) -> Attempt | None:
        """Return a job that is to be tried again now; one that still runs elsewhere waits on."""
        for attempt in self.waiting:
            if attempt.not_before > time.monotonic():
                continue
            if attempt.not_before and self.store.lock(attempt.job.run_id).held():
                attempt.not_before = time.monotonic() + RETRY_SECONDS
                continue
            self.waiting.remove(attempt)
            return attempt
        return None

    def _new_attempt(self) -> Attempt | None:
        if self.source.exhausted or time.monotonic() < self.ask_source_at:
            return None
        if (job := self.source.next()) is None:
            self.ask_source_at = time.monotonic() + SOURCE_SECONDS
            return None
        self.display.started(job)
        return Attempt(job, *self.tries)

    def receive(self) -> None:
        """Wait a moment for messages, and take one from each worker that has sent any."""
        if not self.workers:
            time.sleep(POLL_SECONDS)
            return
        # A closed pipe would not show that a worker died: its fit process has that end open, too.
        pipes = [worker.pipe for worker in self.workers]
        wait([*pipes, *(worker.process.sentinel for worker in self.workers)], POLL_SECONDS)
        for worker in list(self.workers):
            if (record := self._message(worker)) is not None:
                self.workers.remove(worker)
                worker.end()
                stored = worker.attempt.final and not worker.died
                self._ended(worker.attempt, record, stored=stored)

    def _message(self, worker: Worker) -> Record | None:
        """Take a worker's message, if there is one; its record ends the job, or else its death."""
        alive = worker.process.is_alive()
        try:
            if not worker.pipe.poll():
                return None if alive else self._died(worker)
            message: Record | Values = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            return self._died(worker)
        if isinstance(message, Record):
            return message
        reason = self._progressed(worker.attempt.job, message)
        if self.options.steered:
            with contextlib.suppress(OSError):  # it died meanwhile; the next look finds that
                worker.pipe.send(reason)
        return None

    def _progressed(self, job: Job, progress: Values) -> str | None:
        """Show a job's progress; return why it is to stop, if the source says so."""
        self.display.progressed(job, progress)
        return self.source.progress(job, progress) if self.options.steered else None

    def _run_here(self, attempt: Attempt) -> None:
        """Run a job in this process."""
        report, stored = partial(self._progressed, attempt.job), attempt.final
        record = run_job(attempt.job, self.options, report, final=stored)
        self._ended(attempt, record, stored=stored)

    def _died(self, worker: Worker) -> Record:
        worker.died = True
        killed = count_oom_kills() > worker.oom_kills
        error = worker_exit_error(worker.process.exitcode or 0, out_of_memory=killed)
        arguments = self.options.path_arguments()
        return failed_record(worker.attempt.job, error, worker.started, arguments)

    def _ended(self, attempt: Attempt, record: Record, *, stored: bool) -> None:
        """Try the job again, or hand on its record, which is kept if that was not done yet."""
        job, elsewhere = attempt.job, record.status is Status.RUNNING
        if elsewhere or attempt.should_retry(record):
            stage = "run by another process" if elsewhere else "starting again"
            self.display.progressed(job, {"stage": stage})
            attempt.not_before = time.monotonic() + RETRY_SECONDS if elsewhere else 0.0
            self.waiting.append(attempt)
            return
        if record.status is Status.FAILED and not stored:
            record = self.store.write_failure(record)
        self.source.finish(job, record)
        self.display.finished(job, record)
        self.records.append(record)
        self.ask_source_at = 0.0

    def end(self) -> None:
        """End all workers; what they have so far is on disk."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end()


def _shares(options: RunOptions, workers: int) -> list[RunOptions]:
    """Divide GPUs and cores among the workers; each is shown one GPU, which is then its first."""
    threads = options.threads or default_threads(workers)
    own = replace(options, threads=threads)
    if not (gpus := gpus_of(options.device)):
        return [own] * workers
    return [replace(own, device="cuda", gpu=gpus[i % len(gpus)]) for i in range(workers)]


def _start_server() -> None:
    """Start the process that workers are forked from, if there is to be one and it does not run."""
    if START_METHOD != "forkserver":
        return
    resource_tracker.ensure_running()  # unblocks signals when it starts, so it must run already
    forkserver.set_forkserver_preload(["bench.launch.preload"])
    # It has to find the very code that runs here; Python would look in the current folder first.
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        with starting_a_child():
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _start(attempt: Attempt, options: RunOptions, slot: int) -> Worker:
    context: Any = multiprocessing.get_context(START_METHOD)
    ours, theirs = context.Pipe()
    work = (theirs, attempt.job, options, attempt.final)
    # No daemon: it has a child of its own, the fit.
    process = context.Process(target=_work, args=work, name=f"{WORKER}-{slot}", daemon=False)
    process.start()
    theirs.close()
    return Worker(process, ours, attempt, slot)


def _work(pipe: Connection, job: Job, options: RunOptions, final: bool) -> None:
    """Run one job in a worker process; the launcher hears how it goes and what came of it."""
    begin_as_child()
    if options.gpu is not None:
        show_one_gpu(options.gpu)

    def report(progress: Values) -> str | None:
        try:
            pipe.send(dict(progress))
            return pipe.recv() if options.steered else None
        except (EOFError, OSError):  # the launcher is gone; the checkpoint of this epoch is kept
            sys.exit(1)

    record = run_job(job, options, report, final=final)
    with contextlib.suppress(OSError):
        pipe.send(record)
