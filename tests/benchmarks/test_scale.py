"""`plan`, `status` and an idle `run` on large grids: what they cost, and that it grows linearly."""

from __future__ import annotations

import contextlib
import getpass
import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.job import Job, Request, expand
from bench.launch import scheduler
from bench.launch.profile import Resources
from bench.launch.queue import Array, Launch
from bench.launch.scheduler import Cluster, TaskState
from bench.provenance import GitState
from bench.store import Store
from datasets import standins
from datasets.files import to_json

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from report_records import record

pytestmark = pytest.mark.slow

SMALL, LARGE = 500, 2000
TOLERATED = 2.0  # times the growth of the grid; quadratic growth would be 4 times
VERBS = ("plan", "status", "run")
METHODS, DATASETS = ("erm", "jtt"), ("umnist", "cmnist")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    standins.write("mnist", root, size=600)
    return root


def jobs_of(digits: Path, count: int) -> list[Job]:
    seeds = tuple(range(count // len(METHODS) // len(DATASETS)))
    return expand(Request(METHODS, DATASETS, seeds, digits, quick=True))


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Grids of which every run is done, as the words that select them."""
    words = {}
    for count in (SMALL, LARGE):
        results = tmp_path_factory.mktemp("finished") / "results"
        jobs = jobs_of(digits, count)
        for job in jobs:
            (results / "runs" / job.run_id).mkdir(parents=True)
            content = to_json(record(job, 50.0).to_json())
            (results / "runs" / job.run_id / "record.json").write_text(content)
        words[count] = [
            *("--methods", ",".join(METHODS), "--datasets", ",".join(DATASETS), "--quick"),
            *("--seeds", str(len(jobs) // len(METHODS) // len(DATASETS))),
            *("--data-root", str(digits), "--results", str(results)),
        ]
    return words


def call(verb: str, words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main([verb, *words]) == 0
    return out.getvalue()


def seconds(verb: str, words: list[str]) -> float:
    """Measure processor time, which does not depend on who else is at work."""
    spent = []
    for _ in range(2):
        began = time.process_time()
        call(verb, words)
        spent.append(time.process_time() - began)
    return min(spent)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("verb", VERBS)
def test_cost(benchmark: Any, finished: dict[int, list[str]], verb: str, count: int) -> None:
    text = benchmark.pedantic(call, (verb, finished[count]), rounds=3)
    if verb == "run":  # seeds from 100 up have a table of their own
        done = [int(shown) for shown, of in re.findall(r"(\d+) of (\d+)", text) if shown == of]
        assert sum(done) == count
    else:
        assert f"{count:,} runs" in text


@pytest.mark.parametrize("verb", VERBS)
def test_growth_is_linear(finished: dict[int, list[str]], verb: str) -> None:
    growth = seconds(verb, finished[LARGE]) / seconds(verb, finished[SMALL])
    assert growth < TOLERATED * LARGE / SMALL


def test_growth_is_linear_for_queued_runs(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {}
    for count in (SMALL, LARGE):
        store, jobs = Store(tmp_path / str(count)), jobs_of(digits, count)
        array = Array("bench-x-0", Resources(), tuple((job.run_id,) for job in jobs), job="7")
        launch = Launch(
            id="x",
            folder=store.launches / "x",
            created=time.time(),
            user=getpass.getuser(),
            cluster="dev",
            profile="",
            path_arguments="",
            git=GitState(),
            code="",
            arrays=(array,),
        )
        launch.write_jobs(jobs)
        launch.write()
        states = {("bench-x-0", n): TaskState(f"7_{n}", "PENDING") for n in range(count)}
        monkeypatch.setattr(scheduler, "task_states", lambda states=states: states)
        monkeypatch.setattr(scheduler, "find_cluster", lambda: Cluster("dev", 1001))
        spent[count] = seconds("status", ["--results", str(store.root)])
    assert spent[LARGE] / spent[SMALL] < TOLERATED * LARGE / SMALL
