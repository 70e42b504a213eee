"""The terminal shows validation figures of development seeds, and test figures of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import a_job, a_record

from bench.cli.output import print_results
from bench.job import FIRST_DEVELOPMENT_SEED, Job
from bench.record import Metrics, Outcome, Record, Status
from bench.store import RunStatus
from methods.base import Supervision

METRICS = {"val": Metrics({"wga": 61.0, "avg": 71.0}), "test": Metrics({"wga": 62.0, "avg": 72.0})}


def finished(job: Job) -> Record:
    shown = replace(job, supervision=Supervision(val_groups=True))
    return a_record(job=shown, outcome=Outcome(METRICS))


def test_the_table_of_a_run_shows_no_test_figure_of_a_development_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = [a_job(dataset="umnist", seed=seed) for seed in (0, FIRST_DEVELOPMENT_SEED)]
    statuses = {job.run_id: RunStatus(Status.DONE, finished(job)) for job in jobs}
    print_results(jobs, statuses)
    test, validation = capsys.readouterr().out.split("Validation set")
    assert "Test set" in test and "62.0" in test and "72.0" in test
    assert "61.0" in validation and "71.0" in validation
    assert not any(figure in validation for figure in ("62.0", "72.0"))
    assert not any(figure in test for figure in ("61.0", "71.0"))
