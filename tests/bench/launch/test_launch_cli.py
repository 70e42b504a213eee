"""`status` and `cancel` on what a cluster has, under made-up answers of SLURM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import STUDY_ARRAY, FakeSlurm, launch_of, launch_of_workers

from bench.cli import cancel
from bench.job import Job
from bench.store import Store
from datasets.files import append_line

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for what SLURM will never do here."""
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.0)


@pytest.fixture
def one_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every study have one finished trial; there is no journal here."""
    monkeypatch.setattr("bench.tuning.workers.count_finished", lambda folder: 1)


def test_status_counts_what_a_cluster_has(
    cli: Cli, jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    launch_of(jobs, store)
    append_line(store.work / jobs[2].run_id / "progress.json", {"stage": "erm"})
    slurm.says("PENDING", "RUNNING", "PENDING")
    found = cli("status", "--json", "--results", store.root).json
    assert (found["queued"], found["running"], found["missing"]) == (2, 1, 0)
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]
    assert [run["status"] for run in found["runs"]] == ["queued", "running", "preempted"]


def test_runs_of_one_task_are_cancelled_together(
    cli: Cli, jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    launch = launch_of(jobs, store)
    packed = replace(launch.arrays[0], tasks=(tuple(job.run_id for job in jobs),))
    launch.with_array(packed).write()
    slurm.says("RUNNING")
    refused = cli("cancel", jobs[1].run_id, "--results", store.root)
    assert refused.code == 2
    assert jobs[0].run_id in refused.err and jobs[2].run_id in refused.err
    assert cli("cancel", "nct", "--results", store.root).code == 2
    assert slurm.cancelled == []
    assert cli("cancel", "erm", "--results", store.root).code == 1  # told, but SLURM holds on
    assert slurm.cancelled == [["7"]]


def test_status_and_cancel_choose_studies_as_they_choose_runs(
    cli: Cli, tmp_path: Path, slurm: FakeSlurm, one_finished: None
) -> None:
    launch_of_workers(tmp_path)
    slurm.says("RUNNING", "PENDING", array=STUDY_ARRAY)
    where = ("--results", tmp_path)
    assert [s["array"] for s in cli("status", "--json", *where).json["studies"]] == ["7"]
    assert cli("status", "--json", "--methods", "erm", *where).json["studies"] == []
    assert len(cli("status", "--json", "--datasets", "umnist", *where).json["studies"]) == 1
    refused = cli("cancel", "jtt", "nct", *where)
    assert refused.code == 2 and "'nct'" in refused.err and slurm.cancelled == []
    for part in ("jtt-umnist", "umnist", "7"):
        ended = cli("cancel", part, "--json", *where)
        assert ended.code == 1, "told, but SLURM holds on"
        assert ended.json["studies"] == {"cancelled": [], "still_there": ["jtt-umnist"]}
    assert slurm.cancelled == [["7_0", "7_1"]] * 3
    slurm.says("CANCELLED", "CANCELLED", array=STUDY_ARRAY)
    shown = cli("status", *where)
    assert "stopped after 1 of 4 trials" in shown.err and "on a cluster" not in shown.out


def test_ways_of_launching_that_make_no_sense_are_refused_before_any_work(
    cli: Cli, digits_root: Path, tmp_path: Path, slurm: FakeSlurm
) -> None:
    slurm.silent = True
    words = ["run", "--methods", "erm", "--datasets", "cmnist", "--data-root", digits_root]
    words += ["--results", tmp_path / "results", "--cluster", "slurm/dev.toml"]
    ended = cli(*words)
    assert ended.code == 2
    assert "login node" in ended.err
    assert "--workers is about" in cli(*words, "--workers", "2").err
    assert "--retries cannot be negative" in cli(*words, "--retries", "-1").err
    assert "mine.toml" in cli(*words[:-1], "mine.toml").err
    assert not any((tmp_path / "results").glob("launches/*"))
