"""Worker processes on this machine.

Workers are processes of their own, so that one that crashes or is killed costs one run; each is
told one job at a time over a pipe and reports back over it. A worker dies with its launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from bench.execute import Machine
from bench.launch.worker import (
    WorkerDied,
    how_it_died,
    keeps_much,
    kills_for_memory,
    not_for_workers,
    serve,
)
from bench.plan import Job
from bench.provenance import source_stamp
from bench.records import failed_record
from bench.store import Store
from datasets.errors import BenchError
from methods.backbones import LENETS

RETRY_SECONDS = 2.0  # how often to look again at a job that another launcher is running


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
    """A process, the pipe to it, the job it is at, and what the kernel had killed before it."""

    process: BaseProcess
    pipe: Connection
    job: Job | None = None
    memory_kills: int = field(default_factory=kills_for_memory)


def default_workers(jobs: Sequence[Job]) -> int:
    """Choose how many processes to use: one a GPU, one a core for LeNets, else one."""
    import torch

    if torch.cuda.is_available():
        return min(len(jobs), torch.cuda.device_count())
    if all(job.config["backbone"]["name"] in LENETS for job in jobs):
        return max(1, min(len(jobs), cores()))
    return 1


def run_local(
    jobs: Sequence[Job],
    machine: Machine,
    workers: int,
    watcher: Watcher,
    retries: int = 0,
    resumes: int = 0,
) -> list[dict[str, Any]]:
    """Run the jobs and return their records, in the order in which they ended.

    Args:
        jobs: what to run.
        machine: where.
        workers: how many at a time.
        watcher: who is told.
        retries: how often a run that failed, in whatever way, is tried again.
        resumes: how often a run whose worker was killed goes on without that counting as a try.
    """
    store = Store(machine.results)
    waiting = deque((job, 0.0) for job in jobs)
    tries = {job.run_id: {"failed": retries, "killed": resumes} for job in jobs}
    records: list[dict[str, Any]] = []
    crew: list[Worker] = []
    machines = _shares(machine, workers)
    code = source_stamp()
    try:
        while waiting or any(worker.job for worker in crew):
            _hand_out(waiting, crew, machines, watcher, tries)
            pipes = [worker.pipe for worker in crew if worker.job]
            for pipe in wait(pipes, timeout=0.2) if pipes else _nap():
                worker = next(w for w in crew if w.pipe is pipe)
                record = _listen(worker, watcher)
                if record is None:
                    continue
                job, worker.job = worker.job, None
                assert job is not None
                if record["status"] == "running":
                    watcher.progressed(job, {"stage": "run by another process"})
                    waiting.append((job, time.monotonic() + RETRY_SECONDS))
                    continue
                died = not worker.process.is_alive()
                if died:
                    crew.remove(worker)
                elif (
                    waiting
                    and record.get("device") == "cpu"
                    and keeps_much(worker.process.pid)
                    and source_stamp() == code  # a new worker would import what was edited since
                ):
                    crew.remove(worker)
                    _end([worker])
                if _once_more(record, tries[job.run_id]):
                    watcher.progressed(job, {"stage": "starting again"})
                    waiting.append((job, time.monotonic()))
                    continue
                if died and record["status"] == "failed":
                    _keep(record, store)
                watcher.finished(job, record)
                records.append(record)
            watcher.tick()
    finally:
        _end(crew)
    return records


def _end(crew: Sequence[Worker]) -> None:
    for worker in crew:
        worker.process.kill()
    for worker in crew:
        worker.process.join()


def _once_more(record: dict[str, Any], tries: dict[str, int]) -> bool:
    """Decide whether a run that ended so is handed out again, and count it."""
    if record["status"] != "failed":
        return False
    killed = record["failure"]["kind"] == WorkerDied.kind and tries["killed"] > 0
    why = "killed" if killed else "failed"
    tries[why] -= 1
    return tries[why] >= 0


def _hand_out(
    waiting: deque[tuple[Job, float]],
    crew: list[Worker],
    machines: list[Machine],
    watcher: Watcher,
    tries: Mapping[str, Mapping[str, int]],
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
            idle.pipe.send((entry[0], tries[entry[0].run_id]["failed"] == 0))
        except OSError:  # it died since it was last looked at: somebody else gets the job
            idle.job = None
            crew.remove(idle)
            waiting.appendleft(entry)
            return


def _start(slot: int, machine: Machine) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, machine), name=f"worker-{slot}", daemon=True
    )
    # A terminal sends Ctrl-C to every process, and SLURM its warnings to every process of a task;
    # the launcher alone decides what they mean, and a worker has to be deaf to them from its first
    # moment, before any code of ours runs in it.
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, not_for_workers())
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    theirs.close()
    return Worker(process, ours)


def _listen(worker: Worker, watcher: Watcher) -> dict[str, Any] | None:
    """Take one message; a record ends the job, a broken pipe ends it badly."""
    job = worker.job
    assert job is not None
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        error = how_it_died(worker.process.exitcode or 0, kills_for_memory() > worker.memory_kills)
        return failed_record(job, error, time.time())
    if kind == "progress":
        watcher.progressed(job, content)
        return None
    record: dict[str, Any] = content
    return record


def _keep(failed: dict[str, Any], store: Store) -> None:
    """Write down the end of a run whose worker could not, unless there is a result already."""
    try:
        existing = store.record(failed["run_id"])
        if existing is None or existing["status"] != "done":
            store.write(failed)
    except BenchError as unwritable:
        failed["failure"]["message"] += f"; {unwritable.message}"


def _shares(machine: Machine, workers: int) -> list[Machine]:
    """Divide GPUs and cores among the workers."""
    import torch

    threads = max(1, cores() // workers)
    gpus = torch.cuda.device_count() if machine.device.startswith("cuda") else 0
    return [
        replace(machine, threads=threads, device=f"cuda:{i % gpus}" if gpus else machine.device)
        for i in range(workers)
    ]


def cores() -> int:
    """Count the cores this process may use."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")  # not every cluster binds tasks to cores
    if given.isdigit():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _nap() -> list[Connection]:
    time.sleep(0.2)
    return []
