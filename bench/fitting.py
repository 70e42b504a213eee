"""Fitting a job's method on its task: the part of a run that a published run and a trial share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bench.audit import AuditLink
from bench.context import Part, Report, RunContext, RunScope, part_record
from bench.energy import measured_energy
from bench.plan import Job, backbone_spec
from bench.store import Store
from datasets.base import LoadedData, Task
from datasets.config import build_config
from methods.base import Fitted, get_method


@dataclass(frozen=True)
class Fit:
    """What fitting left behind: the model, and the accounts of how it came about."""

    fitted: Fitted
    part: Part
    stages: list[dict[str, Any]]
    energy_kwh: float | None


def task_of(job: Job, data: LoadedData) -> Task:
    """Show of the data what the tier of the job's method, so configured, grants."""
    method = get_method(job.method)
    config = build_config(method.config_type, job.config["method"], job.method)
    granted = method.supervision(config)
    return data.task(
        backbone_spec(job.config["backbone"]),
        train_groups=granted.train_groups,
        val_groups=granted.val_groups,
    )


def stage_scope(job: Job, label_digest: str) -> dict[str, Any]:
    """Say what, besides its own configuration and seed, a stage of this job depends on."""
    return {
        "fingerprint": job.fingerprint,
        "labels": label_digest,
        "dataset": job.config["dataset"],
        "backbone": {k: v for k, v in job.config["backbone"].items() if k != "weights"},
        "quick": job.quick,
    }


def scope_of(
    job: Job,
    labels: str,
    store: Store,
    device: torch.device,
    audit: AuditLink,
    report: Report,
    not_before: float,
    cores: int = 1,
) -> RunScope:
    """Say what all parts of the job's fit have in common."""
    return RunScope(
        run_id=job.run_id,
        seed=job.seed,
        device=device,
        meaning=stage_scope(job, labels),
        stages=store.stages,
        report=report,
        audit=audit,
        not_before=not_before,
        cores=cores,
    )


def fit_job(
    job: Job,
    data: LoadedData,
    labels: str,
    store: Store,
    device: torch.device,
    audit: AuditLink,
    report: Report,
    not_before: float = 0.0,
    accounts: list[dict[str, Any]] | None = None,
    cores: int = 1,
) -> Fit:
    """Fit the job's method; `labels` is the digest of all labels, which shared stages depend on.

    What it costs is added to `accounts`, where they are given, however it ends. It may keep as many
    `cores` busy as are given.
    """
    method = get_method(job.method)
    config = build_config(method.config_type, job.config["method"], job.method)
    part = Part(job.run_id, store.work / job.run_id)
    stages = [] if accounts is None else accounts
    scope = scope_of(job, labels, store, device, audit, report, not_before, cores)
    threads = torch.get_num_threads()
    try:
        with measured_energy() as energy:
            fitted = method.fit(task_of(job, data), config, RunContext(scope, part, stages))
    finally:
        audit.close()
        torch.set_num_threads(threads)  # libraries that limit them may give back too many
        stages.append(part_record("fit", part))
    resumed = part.before.wall > 0
    return Fit(fitted, part, stages, None if resumed else energy.kwh)
