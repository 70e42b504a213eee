"""One trial of a study: a fit on train and validation, with the test split out of the house.

A trial is a run without test: the test split is dropped as soon as the data is loaded, nothing is
audited, and the record keeps only what the method's tier may know of validation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from bench.allocation import keep_freed_memory
from bench.audit import AuditLink
from bench.context import Report, history_rows
from bench.evaluate import evaluate
from bench.execute import Machine, load_data
from bench.fitting import fit_job, task_of
from bench.objective import granted_metrics
from bench.outcome import device_name, history_table
from bench.plan import Job
from bench.pruning import Pruned
from bench.records import base_record, failed_record
from bench.store import Store
from datasets.base import LoadedData, Task, label_digest
from methods.prediction import EvalImages, predict


class Unaudited(AuditLink):
    """Nobody looks: an audit would need the test split."""

    def look(self, *_: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class TrialData:
    """What trials are made on: train and validation, and the digest of all labels."""

    data: LoadedData
    labels: str

    @staticmethod
    def of(job: Job, machine: Machine) -> TrialData:
        """Load a job's data and let go of the test split."""
        data = load_data(job, machine.data_root).to(torch.device(machine.device))
        labels = label_digest({name: part.labels for name, part in data.splits.items()})
        splits = {name: part for name, part in data.splits.items() if name != "test"}
        return TrialData(LoadedData(data.facts, splits, data.standin), labels)

    def task(self, job: Job) -> Task:
        """Show what the job's tier grants."""
        return task_of(job, self.data)


def run_trial(job: Job, data: TrialData, machine: Machine, report: Report) -> dict[str, Any]:
    """Fit, score validation, and store the record; a failure becomes a failed record.

    A trial that was finished before, by a worker that died before it could say so, is not
    repeated; one that was interrupted goes on from its last epoch. One that is pruned is finished,
    with a record of its own kind.
    """
    store = Store(machine.results)
    existing = store.record(job.run_id)
    if existing is not None and existing["status"] in ("done", "pruned"):
        return existing
    started = time.time()
    spent: list[dict[str, Any]] = []
    try:
        return _run(job, data, machine, store, report, spent)
    except Pruned as stopped:
        ended = {"status": "pruned", "reason": stopped.message, "stages": spent}
        record = {**base_record(job), **ended}
        store.write(record)
        store.forget_work(job.run_id)
        return record
    except Exception as error:
        failed = failed_record(job, error, started, machine.arguments()) | {"stages": spent}
    store.write(failed)
    return failed


def _run(
    job: Job,
    trial: TrialData,
    machine: Machine,
    store: Store,
    report: Report,
    spent: list[dict[str, Any]],
) -> dict[str, Any]:
    threads = machine.threads_for(job)
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = torch.device(machine.device)
    fit = fit_job(
        *(job, trial.data, trial.labels, store, device, Unaudited(), report),
        accounts=spent,
        cores=threads,
    )
    fit.fitted.module.eval()
    images = EvalImages(trial.data.splits["val"].images, trial.data.facts.eval_transform)
    metrics = evaluate(trial.data, "val", predict(fit.fitted.logits, images))
    facts = dict(fit.fitted.facts)
    record = {
        **base_record(job),
        "status": "done",
        "selection": facts.pop("selection", None),
        "stages": fit.stages,
        "device": device_name(device),
        "threads": threads,
        "label_digest": trial.labels,
        "metrics": {"val": granted_metrics(metrics, job.supervision)},
        **facts,
    }
    store.write(record, history_table(history_rows(fit.part)))
    store.forget_work(job.run_id)
    return record
