"""Workers of studies in the ledger, under made-up answers of SLURM."""

from __future__ import annotations

import getpass
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.commands import cancel
from bench.launch import crew, queue, study_queue
from bench.launch.crew import run_crew
from bench.launch.ledger import Array, Launch, launches_lock
from bench.launch.scheduler import Cluster, TaskState
from bench.launch.study_queue import read_tuning, study_workers, worker_lock, write_tuning
from bench.launch.worker import WorkerDied
from bench.lease import Lease
from bench.store import Store
from bench.tune import Tuning

Cli = Callable[..., Any]
Says = Callable[..., None]


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Make up SLURM's answer (the state of each task, by number) and the journal's."""

    def says(*states: str | None, finished: int = 1, silent: bool = False) -> None:
        known = {
            ("bench-tune-x", number): TaskState(f"7_{number}", state, "")
            for number, state in enumerate(states)
            if state
        }
        monkeypatch.setattr(queue, "task_states", lambda: None if silent else known)
        monkeypatch.setattr(queue, "find_cluster", lambda: Cluster("dev", 1001))
        monkeypatch.setattr(study_queue, "count_finished", lambda folder: finished)

    return says


def submitted(results: Path, job: str = "7") -> Launch:
    tuning = Tuning("jtt", "umnist", Path("/data"), results, trials=4, overrides={"jtt.lr": "0.1"})
    study = results / "studies" / "jtt-umnist"
    tasks = (("worker 0", "worker 1"), ("worker 2",))
    facts: dict[str, Any] = {"user": getpass.getuser(), "cluster": "dev", "profile": "dev.toml"}
    facts |= {"places": "", "git": {}, "code": "", "created": time.time()}
    arrays = (Array("bench-tune-x", {}, tasks, job=job),)
    launch = Launch("x", study / "launches" / "x", arrays=arrays, **facts)
    launch.write()
    write_tuning(launch, tuning)
    assert read_tuning(launch) == tuning
    return launch


@pytest.mark.parametrize(
    ("states", "queued", "running", "jobs"),
    [
        (("PENDING", "PENDING"), 3, 0, ("7_0", "7_1")),
        (("RUNNING", "PENDING"), 1, 2, ("7_0", "7_1")),
        (("COMPLETED", "RUNNING"), 0, 1, ("7_1",)),
        (("CANCELLED", None), 0, 0, ()),
    ],
)
def test_workers_are_counted_as_slurm_has_their_tasks(
    tmp_path: Path,
    slurm_says: Says,
    states: tuple[str | None, ...],
    queued: int,
    running: int,
    jobs: tuple[str, ...],
) -> None:
    launch = submitted(tmp_path)
    slurm_says(*states)
    (found,) = study_workers(tmp_path)
    assert (found.queued, found.running, found.jobs) == (queued, running, jobs)
    assert found.facts() == {
        **{"study": "jtt-umnist", "method": "jtt", "dataset": "umnist"},
        **{"finished": 1, "asked": 4, "array": "7", "queued": queued, "running": running},
        "path": str(tmp_path / "studies" / "jtt-umnist"),
    }
    assert not (launch.folder / "ended").exists(), "it waits for somebody to go on with it"


def test_a_finished_study_without_workers_is_settled(tmp_path: Path, slurm_says: Says) -> None:
    launch = submitted(tmp_path)
    slurm_says("RUNNING", None, finished=4)
    assert [found.running for found in study_workers(tmp_path)] == [2]
    slurm_says("COMPLETED", None, finished=4)
    assert study_workers(tmp_path) == []
    assert (launch.folder / "ended").exists()


def test_where_slurm_is_silent_the_disk_tells(tmp_path: Path, slurm_says: Says) -> None:
    launch = submitted(tmp_path)
    slurm_says(silent=True)
    with Lease(worker_lock(launch, 0)).hold(wait=False):
        (found,) = study_workers(tmp_path)
    assert (found.queued, found.running) == (1, 2)
    slurm_says(silent=True, finished=4)
    assert study_workers(tmp_path) == []


def test_workers_that_were_never_sent(tmp_path: Path, slurm_says: Says) -> None:
    launch = submitted(tmp_path, job="")
    slurm_says()
    with launches_lock(Store(tmp_path / "studies" / "jtt-umnist")).hold(wait=False):
        assert [found.queued for found in study_workers(tmp_path)] == [3]
        assert study_workers(tmp_path, submitting=True) == []
    assert (launch.folder / "ended").exists()


def test_workers_that_are_sent_while_we_look_are_not_forgotten(
    tmp_path: Path, slurm_says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = submitted(tmp_path, job="")
    slurm_says(None, None)
    look = study_queue._look

    def sent_meanwhile(*seen: Any, **how: Any) -> Any:
        found = look(*seen, **how)
        launch.with_array(replace(launch.arrays[0], job="7")).write()
        return found

    monkeypatch.setattr(study_queue, "_look", sent_meanwhile)
    assert len(study_workers(tmp_path)) == 1
    assert not (launch.folder / "ended").exists()


def test_an_array_is_found_by_its_name(tmp_path: Path, slurm_says: Says) -> None:
    submitted(tmp_path, job="")
    slurm_says("RUNNING", "PENDING")
    (found,) = study_workers(tmp_path)
    assert (found.array, found.jobs) == ("7", ("7_0", "7_1"))


def test_status_and_cancel_choose_studies_as_they_choose_runs(
    cli: Cli, tmp_path: Path, slurm_says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path)
    slurm_says("RUNNING", "PENDING")
    where = ("--results", tmp_path)
    assert [s["array"] for s in cli("status", "--json", *where).json["studies"]] == ["7"]
    assert cli("status", "--json", "--methods", "erm", *where).json["studies"] == []
    assert len(cli("status", "--json", "--datasets", "umnist", *where).json["studies"]) == 1
    told: list[list[str]] = []
    monkeypatch.setattr(cancel, "cancel_tasks", lambda tasks: told.append(tasks))
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.0)
    refused = cli("cancel", "jtt", "nct", *where)
    assert refused.code == 2 and "'nct'" in refused.err and told == []
    for part in ("jtt-umnist", "umnist", "7"):
        ended = cli("cancel", part, "--json", *where)
        assert ended.code == 1, "told, but SLURM holds on"
        assert ended.json["studies"] == {"cancelled": [], "still_there": ["jtt-umnist"]}
    assert told == [["7_0", "7_1"]] * 3
    slurm_says("CANCELLED", "CANCELLED")
    shown = cli("status", *where)
    assert "stopped after 1 of 4 trials" in shown.err and "on a cluster" not in shown.out


def die(tuning: Tuning) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_workers_are_replaced_so_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_serve", die)
    tuning = Tuning("jtt", "umnist", tmp_path, tmp_path)
    told: list[str] = []
    with pytest.raises(WorkerDied):
        run_crew(tuning, 1, told.append, resumes=2)
    assert len(told) == 3
