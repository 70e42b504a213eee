"""One job, start to finish: data -> task -> fit -> evaluate -> record."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.allocation import keep_freed_memory
from bench.audit import start_audit
from bench.files import atomic_file, to_json
from bench.fitting import fit_job
from bench.lease import Busy, Lease, LeaseLost
from bench.outcome import Surroundings, digest_of_labels, keep_result
from bench.pace import Pace
from bench.plan import Job
from bench.provenance import PeakMemory
from bench.records import base_record, failed_record
from bench.store import Store
from bench.subsample import quick_subset
from datasets.base import LoadedData
from datasets.catalogue import get_dataset
from datasets.config import build_config
from datasets.dataset import Progress, silent
from datasets.errors import BenchError
from methods.backbones import LENETS


@dataclass(frozen=True)
class Machine:
    """Where and how a job runs; nothing of it belongs to what the job means.

    Attributes:
        threads: cores that a job may keep busy; a LeNet's has one.
        not_before: results (runs and shared stages) older than this are made again.
    """

    data_root: Path
    results: Path
    device: str = "cpu"
    threads: int = 1
    keep_models: bool = False
    not_before: float = 0.0

    def threads_for(self, job: Job) -> int:
        """LeNets take one thread: more only wait for each other, and results stay comparable."""
        return 1 if job.config["backbone"]["name"] in LENETS else self.threads

    def arguments(self) -> str:
        """Give the places as arguments of a command that runs the job again."""
        places = {"--data-root": self.data_root, "--results": self.results}
        return " ".join(f"{name} {shlex.quote(str(path))}" for name, path in places.items())


Report = Callable[[dict[str, Any]], None]


def execute(job: Job, machine: Machine, report: Report, *, final: bool = True) -> dict[str, Any]:
    """Run a job and store its record; a failure becomes a failed record, never an exception.

    A job that was finished meanwhile is not repeated. Returns the record, or one with status
    `running` if another process is at it. Where the attempt is not the `final` one, a failure is
    returned but not stored: nobody should take it for the end.
    """
    store = Store(machine.results)
    try:
        with store.lock(job.run_id).hold(wait=False) as lease:
            existing = store.record(job.run_id)
            done = existing is not None and existing["status"] == "done"
            if existing is not None and done and store.written(job.run_id) >= machine.not_before:
                return existing
            started = time.time()
            try:
                return _run(job, machine, store, lease, report)
            except LeaseLost:
                raise
            except Exception as error:
                failed = failed_record(job, error, started, machine.arguments())
            # Only here: a live exception may hold open the very file that filled the disk.
            if final and not done:
                store.write(failed)
            return failed
    except (Busy, LeaseLost):
        return {**base_record(job), "status": "running"}
    except (BenchError, OSError) as error:  # not even a failed record could be written
        return failed_record(job, error, time.time(), machine.arguments())


def settle(job: Job, machine: Machine) -> Surroundings:
    """Make this process ready for a job."""
    threads = machine.threads_for(job)
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = torch.device(machine.device)
    return Surroundings(device, threads, PeakMemory(device))


def teller(job: Job, store: Store, lease: Lease, report: Report) -> Report:
    """Make what is called with a job's progress: it goes to the store and to whoever listens."""
    pace, file = Pace(), store.work / job.run_id / "progress.json"

    def tell(progress: dict[str, Any]) -> None:
        lease.check()
        progress = {**progress, **pace.expect(progress)}
        with atomic_file(file) as draft:
            draft.write_text(to_json({**progress, "time": time.time()}))
        report(progress)

    return tell


def _run(job: Job, machine: Machine, store: Store, lease: Lease, report: Report) -> dict[str, Any]:
    where = settle(job, machine)
    tell = teller(job, store, lease, report)
    tell({"stage": "loading"})
    data = load_data(job, machine.data_root).to(where.device)
    digest = digest_of_labels(data)
    audit = start_audit(data, store.audits, where.threads)
    fit = fit_job(
        *(job, data, digest, store, where.device, audit, tell),
        not_before=machine.not_before,
        cores=where.threads,
    )
    tell({"stage": "evaluating"})
    return keep_result(job, fit, data, digest, store, where, machine.keep_models)


def load_data(job: Job, root: Path, progress: Progress = silent) -> LoadedData:
    """Load a job's dataset, cut down for a quick run, and check that it is the planned one."""
    dataset = get_dataset(job.dataset)
    settings = build_config(dataset.config_type, job.config["dataset"], job.dataset)
    data = dataset.load(root, settings, progress)
    if data.facts.fingerprint() != job.fingerprint:
        raise BenchError(
            f"{job.dataset} in {root} is not the data this job was planned for",
            "plan the job again with the same --data-root",
        )
    return quick_subset(data) if job.quick else data
