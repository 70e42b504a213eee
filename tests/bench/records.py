"""Records for tests of what reads them: real ones in all but the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.job import Job, Request, expand
from bench.record import (
    Cost,
    Failure,
    Metrics,
    Outcome,
    Record,
    Selection,
    StageCost,
    Status,
    new_record,
)
from bench.resources import published_folder
from bench.store import Store


def a_job(method: str = "erm", dataset: str = "cmnist", seed: int = 0, **settings: str) -> Job:
    """The job of a real dataset that is nowhere on disk; settings by knob of the method."""
    overrides = {f"{method}.{knob}": value for knob, value in settings.items()}
    request = Request((method,), (dataset,), (seed,), Path("/nonexistent"), overrides=overrides)
    return expand(request)[0]


def a_record(status: Status = Status.DONE, job: Job | None = None, **parts: Any) -> Record:
    """A record of a job; finished ones have metrics and a stage."""
    job = job or a_job()
    if status is Status.DONE:
        metrics = Metrics({"wga": 10.0, "avg": 20.0}, {"one": 10.0}, {"one": 5})
        outcome = Outcome({"val": metrics, "test": metrics}, Selection("val_avg", 20.0, 3, 5))
        cost = Cost((StageCost("fit", job.run_id, 60.0, 60.0, 50.0, 1000, False),), 10**9)
        parts = {"outcome": outcome, "cost": cost, **parts}
    if status is Status.FAILED:
        failure = Failure("error", "it broke", "mend it", "python -m bench run")
        parts = {"failure": failure, **parts}
    return new_record(job, status, **parts)


def named(record: Record, run_id: str) -> Record:
    """The record under another name."""
    return replace(record, stored_id=run_id)


def published_run(prefix: str) -> str:
    """The id of a published run with the settings of its preset; the latest of several versions."""
    store = Store(published_folder())
    found = [store.record(name) for name in store.matches(f"{prefix}-")]
    plain = [one for one in found if one is not None and not one.job.overrides]
    return max(plain, key=lambda one: (one.job.version, one.run_id)).run_id
