"""Several seeds of one method and dataset in one model: which belong together, and their run.

Each seed ends with a record of its own, as if it had run alone, but for its id and a note of who
shared the model. A stack that is killed goes on from the last epoch of its seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.audit import AuditLink, start_audit
from bench.context import Part, RunContext, RunScope, part_record
from bench.execute import Machine, Report, load_data, settle, teller
from bench.fitting import Fit, scope_of, task_of
from bench.lease import Busy, Lease, LeaseLost
from bench.outcome import digest_of_labels, keep_result
from bench.plan import Job
from bench.records import base_record, failed_record
from bench.store import Store
from datasets.base import LoadedData
from datasets.config import build_config
from datasets.errors import BenchError, UsageError
from methods.base import get_method
from methods.classifier import FittedClassifier
from methods.stacking import Stackable, check_stackable, train_stacked

USUAL_SEEDS = 4  # at once: beyond it little is gained (docs/speed.md)


def as_stacked(jobs: Sequence[Job]) -> list[Job]:
    """Give jobs the ids of stacked runs; an error if one of them cannot be stacked."""
    for job in jobs:
        method = get_method(job.method)
        config = build_config(method.config_type, job.config["method"], job.method)
        check_stackable(method, config, job.config["backbone"]["name"])
    return [replace(job, stack=(job.seed,)) for job in jobs]


def check_size(seeds: int | None) -> None:
    """Refuse a stack of one."""
    if seeds is not None and seeds < 2:
        raise UsageError(f"--stack-seeds must be at least 2 but got {seeds}", "e.g. --stack-seeds")


def stacks_of(jobs: Sequence[Job], most: int) -> list[Job]:
    """Put jobs that differ in nothing but the seed together, as evenly as possible.

    Each stack is given as the job of its first seed, which names all of them.
    """
    alike: dict[str, list[Job]] = {}
    for job in jobs:
        alike.setdefault(replace(job, seed=0, stack=(0,)).run_id, []).append(job)
    leads = []
    for group in alike.values():
        count = -(-len(group) // most)
        for number in range(count):
            part = group[number * len(group) // count : (number + 1) * len(group) // count]
            leads.append(replace(part[0], stack=tuple(job.seed for job in part)))
    return leads


def members(lead: Job) -> list[Job]:
    """Give the jobs of a stack."""
    return [replace(lead, seed=seed) for seed in lead.stack]


def execute_stack(
    lead: Job, machine: Machine, report: Report, *, final: bool = True
) -> dict[str, Any]:
    """Run the jobs of a stack and store a record for each, as `execute` does for one.

    Returns the record of the first, or of the first that failed; those stored before stay done.
    """
    store = Store(machine.results)
    try:
        with ExitStack() as held:
            jobs, leases = [], []
            for job in members(lead):
                leases.append(held.enter_context(store.lock(job.run_id).hold(wait=False)))
                jobs.append(job)
            todo = [
                (job, lease)
                for job, lease in zip(jobs, leases, strict=True)
                if not _done(job, store, machine.not_before)
            ]
            started = time.time()
            try:
                if todo:
                    _run(todo, machine, store, report)
                return store.record(lead.run_id) or base_record(lead)
            except LeaseLost:
                raise
            except Exception as error:
                failed = [
                    failed_record(job, error, started, machine.arguments())
                    for job, _ in todo
                    if not _done(job, store, machine.not_before)
                ]
            for record in failed if final else ():
                store.write(record)
            return failed[0] if failed else store.record(lead.run_id) or base_record(lead)
    except (Busy, LeaseLost):
        return {**base_record(lead), "status": "running"}
    except (BenchError, OSError) as error:  # not even a failed record could be written
        return failed_record(lead, error, time.time(), machine.arguments())


def _done(job: Job, store: Store, not_before: float) -> bool:
    record = store.record(job.run_id)
    done = record is not None and record["status"] == "done"
    return done and store.written(job.run_id) >= not_before


def _run(todo: Sequence[tuple[Job, Lease]], machine: Machine, store: Store, report: Report) -> None:
    jobs = [job for job, _ in todo]
    where = settle(jobs[0], machine)
    # The launcher follows the first seed; `bench status` reads the progress of each.
    reports = [report, *(_unheard for _ in jobs[1:])]
    tells = [
        teller(job, store, lease, heard) for (job, lease), heard in zip(todo, reports, strict=True)
    ]
    for tell in tells:
        tell({"stage": "loading"})
    data = load_data(jobs[0], machine.data_root).to(where.device)
    audit = start_audit(data, store.audits, where.threads)
    labels = digest_of_labels(data)
    scopes = [
        scope_of(job, labels, store, where.device, audit, tell, machine.not_before)
        for job, tell in zip(jobs, tells, strict=True)
    ]
    fits = _fit(jobs, data, store, scopes, audit)
    for job, fit, tell in zip(jobs, fits, tells, strict=True):
        tell({"stage": "evaluating"})
        keep_result(job, fit, data, labels, store, where, machine.keep_models)


def _unheard(progress: dict[str, Any]) -> None:
    """Tell nobody."""


class SharedTime(RunContext):
    """A context whose audits, checkpoints and reports are nobody's time in its stack."""

    def __init__(self, scope: RunScope, part: Part, parts: Sequence[Part]) -> None:
        super().__init__(scope, part, [])
        self.others = [other for other in parts if other is not part]

    def _not_counted(self, work: Callable[[], None]) -> None:
        before = self.part.away
        work()
        for other in self.others:
            other.away += self.part.away - before

    def report(self, **progress: Any) -> None:
        """Tell whoever watches how far the work has come."""
        self._not_counted(lambda: super(SharedTime, self).report(**progress))

    def audit(self, where: dict[str, Any], val_outputs: Tensor, module: nn.Module) -> None:
        """Let the harness look at the model."""
        self._not_counted(lambda: super(SharedTime, self).audit(where, val_outputs, module))

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        self._not_counted(lambda: super(SharedTime, self).save(name, state))


def _fit(
    jobs: Sequence[Job],
    data: LoadedData,
    store: Store,
    scopes: Sequence[RunScope],
    audit: AuditLink,
) -> list[Fit]:
    """Fit all seeds; each is charged its share of the time they took together."""
    method = get_method(jobs[0].method)
    assert isinstance(method, Stackable)
    config = build_config(method.config_type, jobs[0].config["method"], jobs[0].method)
    task = task_of(jobs[0], data)
    parts = [Part(job.run_id, store.work / job.run_id) for job in jobs]
    contexts = [SharedTime(scope, part, parts) for scope, part in zip(scopes, parts, strict=True)]
    threads = torch.get_num_threads()
    try:
        trainings = [method.training(task, config, ctx) for ctx in contexts]
        ended = train_stacked(trainings)
    finally:
        audit.close()
        torch.set_num_threads(threads)
    fits = []
    for part, training, trained in zip(parts, trainings, ended, strict=True):
        fitted = FittedClassifier(training.model, method.facts(task, trained))
        fits.append(Fit(fitted, part, [_shared(part_record("fit", part), len(jobs))], None))
    return fits


def _shared(record: dict[str, Any], seeds: int) -> dict[str, Any]:
    times = ("seconds_standalone", "seconds_marginal", "cpu_seconds")
    return {**record, **{name: record[name] / seeds for name in times}}
