"""`bench plan`, and that the command a job names gives that very job."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cli.arguments import expand_jobs
from bench.cli.parser import make_parser
from bench.job import Job

NOWHERE = Path("/nonexistent")
Cli = Callable[..., Any]


def jobs_of(words: list[str]) -> list[Job]:
    return expand_jobs(make_parser().parse_args(words), need_data=False)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--datasets", "cmnist", "--seeds", "3"],
        ["--datasets", "umnist,cmnist", "--seeds", "3,7", "--quick"],
        ["--datasets", "umnist", "--set", "umnist.hflip=true", "erm.lr=0.02", "--seeds", "5,"],
        ["--datasets", "cmnist", "--set", "erm.scheduler=step", "erm.milestones=2,4"],
        ["--methods", "eiil", "--datasets", "cmnist", "--set", "eiil.erm.lr=0.5"],
    ],
)
def test_command_reproduces_the_job(words: list[str]) -> None:
    planned = jobs_of(["run", "--data-root", str(NOWHERE), *words])
    assert planned
    for job in planned:
        (again,) = jobs_of([*shlex.split(job.command())[3:], "--data-root", str(NOWHERE)])
        assert again == job
        assert again.run_id == job.run_id


def test_command_survives_a_path_with_a_space(tmp_path: Path) -> None:
    weights = tmp_path / "my weights; rm.pth"
    weights.write_bytes(b"weights")
    setting = ["--set", "backbone.name=resnet18", f"backbone.weights={weights}"]
    words = ["run", "--methods", "erm", "--datasets", "cmnist", "--seeds", "2,", *setting]
    (job,) = jobs_of(words)
    (again,) = jobs_of(shlex.split(job.command())[3:])
    assert again == job


def test_plan_needs_neither_data_nor_results(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folders = ("--data-root", tmp_path / "data", "--results", tmp_path / "results")
    told = cli("plan", "--methods", "erm,nct", "--datasets", "all", "--seeds", "2", *folders)
    assert told.code == 0
    assert "28 runs, 0 done" in told.out
    assert "to run: 28" in told.err
    for name in ("waterbirds", "cmnist"):
        assert f"not on disk: {name}; to get it: python -m bench data get {name}" in told.err
    assert [*tmp_path.rglob("*")] == [tmp_path / "data"]


def test_cost_is_known_from_published_runs(cli: Cli, tmp_path: Path) -> None:
    words = ("plan", "--methods", "nct", "--datasets", "cmnist", "--seeds", "2", "--json")
    planned = cli(*words, "--data-root", tmp_path, "--results", tmp_path).json
    assert (planned["total"], planned["missing"], planned["published"]) == (2, 2, False)
    assert all(run["expected_seconds"] > 10 for run in planned["runs"])
    assert planned["expected_seconds"]["shared"] == pytest.approx(
        sum(run["expected_seconds"] for run in planned["runs"])
    )
