"""`status` sums up, says what is unfinished and how to go on, and can be watched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import a_job, a_record

from bench.cli import status
from bench.commands import unfinished_command
from bench.record import Metrics, Outcome
from bench.store import Store

sys.path.append(str(Path(__file__).parents[2]))
from planted import write_planted

Cli = Callable[..., Any]
COMMAND = "python -m bench run --methods erm --datasets cmnist --seeds 3"


def finished(seed: int, wga: float, **changed: Any) -> Any:
    outcome = Outcome({"test": Metrics({"wga": wga, "avg": 90.0})})
    return a_record(job=replace(a_job(seed=seed), **changed), outcome=outcome)


def interrupt(store: Store, runs: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), unfinished_command(store, COMMAND, runs):
        raise KeyboardInterrupt


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_runs_are_summed_up_by_variant(cli: Cli, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed, wga in ((0, 40.0), (1, 60.0)):
        store.write(finished(seed, wga))
    other = finished(2, 10.0, variant="heads=mlp")
    store.write(other)
    told = cli("status", "--results", tmp_path)
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in told.out.splitlines()]
    assert ["cmnist", "erm", "", "2 of 2 done", "WGA 50.0 +- 14.1, average 90.0 +- 0.0"] in rows
    assert ["cmnist", "erm", "heads=mlp", "1 of 1 done", "WGA 10.0, average 90.0"] in rows
    assert [other.run_id, "heads=mlp", "done", "WGA 10.0, average 90.0"] in rows
    assert "3 runs: 3 done" in told.out


def test_many_runs_are_listed_on_request(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "FEW", 1)
    records = [finished(seed, 50.0) for seed in (0, 1)]
    for record in records:
        Store(tmp_path).write(record)
    told = cli("status", "--results", tmp_path)
    assert records[0].run_id not in told.out and "--runs lists every run" in told.err
    assert records[0].run_id in cli("status", "--results", tmp_path, "--runs").out


def test_what_an_interrupted_command_left_is_told(cli: Cli, tmp_path: Path) -> None:
    store = Store(tmp_path)
    jobs = [a_job(seed=seed) for seed in range(3)]
    store.write(finished(0, 50.0))
    interrupt(store, [job.run_id for job in jobs])
    told = cli("status", "--results", tmp_path)
    assert "3 runs: 1 done, 0 failed, 0 running, 0 queued, 2 not started" in told.out
    assert "1 of 3 done, 2 not started" in told.out
    assert "unfinished: 2 runs of a command of " in told.err
    assert f"-> to go on: {COMMAND}" in told.err
    content = cli("status", "--results", tmp_path, "--json").json
    assert (content["total"], content["done"], content["missing"]) == (3, 1, 2)
    (given,) = content["unfinished"]
    assert given["command"] == COMMAND and given["running"] is False
    assert given["runs"] == [job.run_id for job in jobs[1:]]
    for job in jobs[1:]:
        store.write(finished(job.seed, 50.0))
    assert "unfinished" not in cli("status", "--results", tmp_path).err


def test_a_command_at_work_is_not_called_unfinished(cli: Cli, tmp_path: Path) -> None:
    run_id = a_job().run_id
    with unfinished_command(Store(tmp_path), COMMAND, [run_id]):
        told = cli("status", "--results", tmp_path, "--runs")
    assert "waiting" in told.out
    assert "at work since" in told.err and "unfinished" not in told.err


def test_watching_ends_when_nothing_runs_any_more(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, record, slept = Store(tmp_path), finished(0, 50.0), list[float]()
    lock = store.lock(record.run_id)
    assert lock.acquire()
    (store.work / record.run_id / "progress.json").write_text('{"stage": "erm"}')

    def end(seconds: float) -> None:
        slept.append(seconds)
        store.write(record)
        lock.release()

    monkeypatch.setattr(status.time, "sleep", end)
    told = cli("status", "--results", tmp_path, "--watch", 7)
    assert (told.code, slept) == (0, [7])
    assert "1 running" in one_line(told.out) and "1 run: 1 done" in one_line(told.out)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--watch", "0"], "--watch must be at least 1 second but got 0"),
        (["--watch", "--json"], "--watch prints for people"),
    ],
)
def test_watching_that_makes_no_sense(
    cli: Cli, tmp_path: Path, words: list[str], reason: str
) -> None:
    told = cli("status", "--results", tmp_path, *words)
    assert told.code == 2 and reason in told.err


def test_an_empty_folder_is_told_what_begins(cli: Cli, tmp_path: Path) -> None:
    told = cli("status", "--results", tmp_path)
    assert told.code == 0 and "0 runs" in told.out and f"{status.BEGIN} begins" in told.err


def test_runs_on_own_data_are_in_no_campaign(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "data"))
    write_planted(tmp_path / "pets", count=24)
    assert cli("data", "add", "pets", tmp_path / "pets").code == 0
    results = tmp_path / "results"
    Store(results).write(finished(0, 50.0, dataset="pets"))
    told = cli("status", "--results", results)
    assert "1 of 1 done" in told.out
    assert "campaigns" not in told.out + told.err
