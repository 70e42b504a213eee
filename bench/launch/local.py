"""Worker processes on this machine.

Workers are processes of their own, so that one that crashes or is killed costs one run; each is
told one job at a time over a pipe and reports back over it. A worker dies with its launcher.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from bench.execute import Machine, execute
from bench.plan import Job
from bench.provenance import git_state
from bench.records import failed_record
from bench.store import Store
from datasets.errors import BenchError
from methods.backbones import LENETS

RETRY_SECONDS = 2.0  # how often to look again at a job that another launcher is running


class WorkerDied(BenchError):
    """A worker process ended in the middle of a job."""

    kind = "worker_died"


class Watcher(Protocol):
    """Whoever shows how the work is going."""

    def started(self, job: Job) -> None:
        """A job was handed to a worker."""

    def progressed(self, job: Job, progress: dict[str, Any]) -> None:
        """A running job told how far it is."""

    def finished(self, job: Job, record: dict[str, Any]) -> None:
        """A job ended, well or not."""

    def tick(self) -> None:
        """Time passed."""


@dataclass
class Worker:
    """A process, the pipe to it, and the job it is at."""

    process: BaseProcess
    pipe: Connection
    job: Job | None = None


def default_workers(jobs: Sequence[Job]) -> int:
    """Choose how many processes to use: one a GPU, one a core for LeNets, else one."""
    import torch

    if torch.cuda.is_available():
        return min(len(jobs), torch.cuda.device_count())
    if all(job.config["backbone"]["name"] in LENETS for job in jobs):
        return max(1, min(len(jobs), _cores()))
    return 1


def run_local(
    jobs: Sequence[Job], machine: Machine, workers: int, watcher: Watcher
) -> list[dict[str, Any]]:
    """Run the jobs and return their records, in the order in which they ended."""
    store = Store(machine.results)
    waiting = deque((job, 0.0) for job in jobs)
    records: list[dict[str, Any]] = []
    crew: list[Worker] = []
    machines = _shares(machine, workers)
    try:
        while waiting or any(worker.job for worker in crew):
            _hand_out(waiting, crew, machines, watcher)
            pipes = [worker.pipe for worker in crew if worker.job]
            for pipe in wait(pipes, timeout=0.2) if pipes else _nap():
                worker = next(w for w in crew if w.pipe is pipe)
                record = _listen(worker, watcher, store)
                if record is None:
                    continue
                job, worker.job = worker.job, None
                assert job is not None
                if record["status"] == "running":
                    watcher.progressed(job, {"stage": "run by another process"})
                    waiting.append((job, time.monotonic() + RETRY_SECONDS))
                    continue
                watcher.finished(job, record)
                records.append(record)
                if not worker.process.is_alive():
                    crew.remove(worker)
            watcher.tick()
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            worker.process.join()
    return records


def _hand_out(
    waiting: deque[tuple[Job, float]],
    crew: list[Worker],
    machines: list[Machine],
    watcher: Watcher,
) -> None:
    """Give a job to every idle worker, starting workers as long as there is work for them."""
    crew[:] = [worker for worker in crew if worker.job or worker.process.is_alive()]
    ready = [entry for entry in waiting if entry[1] <= time.monotonic()]
    for entry in ready:
        idle = next((worker for worker in crew if worker.job is None), None)
        if idle is None and len(crew) < len(machines):
            taken = {worker.process.name for worker in crew}
            slot = next(i for i in range(len(machines)) if f"worker-{i}" not in taken)
            idle = _start(slot, machines[slot])
            crew.append(idle)
        if idle is None:
            return
        waiting.remove(entry)
        idle.job = entry[0]
        if not entry[1]:  # else it was started before and found to be run by another process
            watcher.started(entry[0])
        try:
            idle.pipe.send(entry[0])
        except OSError:  # it died since it was last looked at: somebody else gets the job
            idle.job = None
            crew.remove(idle)
            waiting.appendleft(entry)
            return


def _start(slot: int, machine: Machine) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, machine), name=f"worker-{slot}", daemon=True
    )
    # A terminal sends Ctrl-C to every process; the launcher alone decides what it means, and a
    # worker has to be deaf to it from its first moment, before any code of ours runs in it.
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    theirs.close()
    return Worker(process, ours)


def _listen(worker: Worker, watcher: Watcher, store: Store) -> dict[str, Any] | None:
    """Take one message; a record ends the job, a broken pipe ends it badly."""
    job = worker.job
    assert job is not None
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        error = WorkerDied(
            f"the worker process died ({how})",
            "most often the machine ran out of memory: use fewer --workers; the run resumes from "
            "its last epoch",
        )
        failed = failed_record(job, error, time.time())
        try:
            existing = store.record(job.run_id)
            if existing is None or existing["status"] != "done":
                store.write(failed)
        except BenchError as unwritable:
            failed["failure"]["message"] += f"; {unwritable.message}"
        return failed
    if kind == "progress":
        watcher.progressed(job, content)
        return None
    record: dict[str, Any] = content
    return record


def _serve(pipe: Connection, machine: Machine) -> None:
    """Live as a worker: take jobs until the launcher hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _die_with_parent()
    git_state()  # now, while the code that was just imported is what lies on disk

    def tell(kind: str, content: dict[str, Any]) -> None:
        try:
            pipe.send((kind, content))
        except OSError:  # the launcher is gone; the checkpoint of this epoch is kept
            sys.exit(1)

    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        record = execute(job, machine, lambda progress: tell("progress", progress))
        tell("record", record)


def _die_with_parent() -> None:
    """Ask Linux to end this process with the launcher, even if that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
        launcher = multiprocessing.parent_process()
        if launcher is not None and os.getppid() != launcher.pid:
            sys.exit(1)


def _shares(machine: Machine, workers: int) -> list[Machine]:
    """Divide GPUs and cores among the workers."""
    import torch

    threads = max(1, _cores() // workers)
    gpus = torch.cuda.device_count() if machine.device.startswith("cuda") else 0
    return [
        replace(machine, threads=threads, device=f"cuda:{i % gpus}" if gpus else machine.device)
        for i in range(workers)
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nap() -> list[Connection]:
    time.sleep(0.2)
    return []
