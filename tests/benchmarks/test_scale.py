"""`plan`, `status` and an idle `run` on large grids: what they cost, and that it grows linearly."""

from __future__ import annotations

import contextlib
import getpass
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.files import to_json
from bench.launch import queue
from bench.launch.ledger import Array, Launch
from bench.launch.scheduler import Cluster, TaskState
from bench.plan import Job, Request, expand
from bench.records import base_record
from bench.store import Store
from datasets import standins

SMALL, LARGE = 500, 2000
TOLERATED = 2.0  # times the growth of the grid; quadratic growth would be 4 times
VERBS = ("plan", "status", "run")
METHODS, DATASETS = ("erm", "jtt"), ("umnist", "cmnist")
TEST = {
    **{"wga": 50.0, "avg": 60.0, "avg_train_weighted": 70.0},
    "group_accuracy": {str(group): 1.0 for group in range(25)},
    "group_count": {str(group): 4 for group in range(25)},
}


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
            record = {**base_record(job), "status": "done", "metrics": {"val": TEST, "test": TEST}}
            record["stages"] = [{"name": "fit", "seconds_standalone": 1.0}]
            (results / "runs" / job.run_id).mkdir(parents=True)
            (results / "runs" / job.run_id / "record.json").write_text(to_json(record))
        words[count] = [
            *("--methods", ",".join(METHODS), "--datasets", ",".join(DATASETS), "--quick"),
            *("--seeds", str(len(jobs) // len(METHODS) // len(DATASETS))),
            *("--data-root", str(digits), "--results", str(results)),
        ]
    return words


def carry_out(verb: str, words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main([verb, *words]) == 0
    return out.getvalue()


def seconds(verb: str, words: list[str]) -> float:
    """Measure processor time, which does not depend on who else is at work."""
    spent = []
    for _ in range(2):
        began = time.process_time()
        carry_out(verb, words)
        spent.append(time.process_time() - began)
    return min(spent)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("verb", VERBS)
def test_cost(benchmark: Any, finished: dict[int, list[str]], verb: str, count: int) -> None:
    text = benchmark.pedantic(carry_out, (verb, finished[count]), rounds=3)
    if verb == "run":  # seeds from 100 up have a table of their own
        done = [int(shown) for shown, of in re.findall(r"(\d+) of (\d+)", text) if shown == of]
        assert sum(done) == count
    else:
        assert f"{count} runs" in text


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
        array = Array("bench-x-0", {}, tuple((job.run_id,) for job in jobs), job="7")
        facts = {
            "user": getpass.getuser(),
            "cluster": "dev",
            "profile": "",
            "places": "",
            "code": "",
            "git": {},
        }
        launch = Launch("x", store.launches / "x", time.time(), arrays=(array,), **facts)
        launch.write_jobs(jobs)
        launch.write()
        states = {("bench-x-0", n): TaskState(f"7_{n}", "PENDING", "") for n in range(count)}
        monkeypatch.setattr(queue, "task_states", lambda states=states: states)
        monkeypatch.setattr(queue, "find_cluster", lambda: Cluster("dev", 1001))
        spent[count] = seconds("status", ["--results", str(store.root)])
    assert spent[LARGE] / spent[SMALL] < TOLERATED * LARGE / SMALL
