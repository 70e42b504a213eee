"""What `status` makes of launches on disk and of SLURM's answers; the answers are made up here."""

from __future__ import annotations

import getpass
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.commands import cancel
from bench.commands.run import wanted
from bench.execute import Machine
from bench.files import append_line
from bench.grid import stored_overview, survey
from bench.launch import dispatch, queue, scheduler
from bench.launch.dispatch import launch as carry_out
from bench.launch.ledger import Array, Launch, launches_lock, open_launches
from bench.launch.queue import claims
from bench.launch.scheduler import Cluster, TaskState
from bench.plan import Job, Request, expand
from bench.records import base_record
from bench.store import Store

Answers = Callable[..., None]


@pytest.fixture
def jobs(digits_root: Path) -> list[Job]:
    return expand(Request(("erm",), ("cmnist",), (0, 1, 2), digits_root, quick=True))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Make up SLURM's answer: the state of each task, by number."""

    def says(*states: str | None, name: str = "dev", past: dict[str, str] | None = None) -> None:
        known = {
            ("bench-x-0", number): TaskState("7" + f"_{number}" * (len(states) > 1), state, "")
            for number, state in enumerate(states)
            if state
        }
        monkeypatch.setattr(queue, "task_states", lambda: known)
        monkeypatch.setattr(queue, "find_cluster", lambda: Cluster(name, 1001))
        monkeypatch.setattr(queue, "past_states", lambda jobs: past or {})

    return says


def submitted(jobs: list[Job], store: Store, job: str = "7") -> Launch:
    array = Array("bench-x-0", {}, tuple((j.run_id,) for j in jobs), job=job)
    facts = {"user": getpass.getuser(), "cluster": "dev", "profile": "dev.toml", "code": ""}
    git = {"commit": "abc", "dirty": False}
    folder = store.launches / "x"
    launch = Launch(
        "x", folder, time.time() - 1, git=git, arrays=(array,), places="--results here", **facts
    )
    launch.write_jobs(jobs)
    launch.write()
    return launch


def states(store: Store) -> list[str]:
    return [claim.state for claim in claims(store).values()]


def test_launches_survive_a_round_trip(jobs: list[Job], store: Store) -> None:
    launch = submitted(jobs, store)
    (read,) = open_launches(store)
    assert read == launch
    assert read.jobs() == {job.run_id: job for job in jobs}
    launch.end()
    assert not list(open_launches(store))


def test_what_is_submitted_while_we_look_is_not_forgotten(
    jobs: list[Job], store: Store, slurm_says: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as not yet submitted, not in SLURM's answer, and then submitted before we lock."""
    planned = submitted(jobs, store, job="")
    slurm_says(None, None, None)

    def sent_meanwhile(some: Store) -> Any:
        planned.with_array(replace(planned.arrays[0], job="7")).write()
        slurm_says("PENDING", "PENDING", "PENDING")
        return launches_lock(some)

    monkeypatch.setattr(queue, "launches_lock", sent_meanwhile)
    assert list(claims(store)) == [job.run_id for job in jobs]
    assert list(open_launches(store))


def test_queued_running_and_preempted(jobs: list[Job], store: Store, slurm_says: Answers) -> None:
    submitted(jobs, store)
    append_line(store.work / jobs[2].run_id / "progress.json", {"stage": "erm"})
    slurm_says("PENDING", "RUNNING", "PENDING")
    assert states(store) == ["queued", "running", "preempted"]
    found = stored_overview(store)
    assert (found["queued"], found["running"], found["missing"]) == (2, 1, 0)
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]


def test_without_slurm_the_disk_is_all_there_is(
    jobs: list[Job], store: Store, slurm_says: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(jobs, store)
    slurm_says("PENDING", name="another cluster")
    assert states(store) == ["queued"] * 3
    slurm_says()
    monkeypatch.setattr(queue.getpass, "getuser", lambda: "somebody else")
    assert states(store) == ["queued"] * 3
    monkeypatch.undo()
    monkeypatch.setattr(queue, "task_states", lambda: None)
    with store.lock(jobs[0].run_id).hold(wait=False):
        assert states(store) == ["running", "queued", "queued"]
    store.write({**base_record(jobs[1]), "status": "done"})
    assert list(claims(store)) == [jobs[0].run_id, jobs[2].run_id]


@pytest.mark.parametrize(
    ("state", "past", "kind", "goes_on"),
    [
        ("OUT_OF_MEMORY", {}, "out_of_memory", False),
        ("NODE_FAIL", {}, "node_failure", True),
        ("TIMEOUT", {}, "time_limit", False),
        ("CANCELLED", {}, "cancelled", True),
        ("FAILED", {}, "lost", True),
        (None, {}, "lost", True),
        (None, {"7": "OUT_OF_MEMORY"}, "out_of_memory", False),
    ],
)
def test_a_lost_task_gets_its_failed_record(
    jobs: list[Job],
    store: Store,
    slurm_says: Answers,
    state: str | None,
    past: dict[str, str],
    kind: str,
    goes_on: bool,
) -> None:
    (job,) = jobs = jobs[:1]
    launch = submitted(jobs, store)
    log = launch.folder / "tasks" / "7_0_log.err"
    log.parent.mkdir()
    log.write_text("x" * 9000 + "its last words")
    slurm_says(state, past=past)
    assert claims(store) == {}
    record = store.record(job.run_id)
    assert record is not None
    failure = record["failure"]
    assert failure["kind"] == kind
    assert "task 7 ended without a result" in failure["message"]
    assert failure["remedy"]
    assert failure["command"].endswith("--results here --rerun failed")
    assert failure["stderr_tail"].endswith("its last words")
    assert len(failure["stderr_tail"]) < 5000
    assert record["git"] == {"commit": "abc", "dirty": False}
    assert (launch.folder / "ended").exists()
    (found,) = survey([job.run_id], store).values()
    assert wanted(found, "missing") is goes_on
    assert wanted(found, "failed")


def test_what_never_reached_slurm_is_just_missing(
    jobs: list[Job], store: Store, slurm_says: Answers
) -> None:
    submitted(jobs, store, job="")
    slurm_says()
    with launches_lock(store).hold(wait=False):  # the launcher is about to submit
        assert states(store) == ["queued"] * 3
    assert claims(store) == {}
    assert store.status(jobs[0].run_id) == "missing"


def test_an_array_is_found_by_its_name_if_its_number_was_not_noted(
    jobs: list[Job], store: Store, slurm_says: Answers
) -> None:
    submitted(jobs, store, job="")
    slurm_says("PENDING", "PENDING", "RUNNING")
    assert states(store) == ["queued", "queued", "running"]
    assert [claim.job for claim in claims(store).values()] == ["7_0", "7_1", "7_2"]


def test_a_lost_attempt_does_not_replace_a_result(
    jobs: list[Job], store: Store, slurm_says: Answers
) -> None:
    done = {**base_record(jobs[0]), "status": "done"}
    store.write(done)
    launch = submitted(jobs[:1], store)
    os.utime(store.runs / jobs[0].run_id / "record.json", (0, 0))  # from long before the launch
    slurm_says("FAILED")
    assert claims(store) == {}
    assert store.record(jobs[0].run_id) == json.loads(json.dumps(done))
    assert (launch.folder / "ended").exists()


def test_a_local_launcher_leaves_alone_what_a_cluster_has(
    jobs: list[Job], store: Store, slurm_says: Answers, digits_root: Path
) -> None:
    submitted(jobs, store)
    slurm_says("PENDING", "PENDING", "PENDING")
    told: list[str] = []
    assert carry_out(jobs, Machine(digits_root, store.root), say=told.append) == []
    assert "3 runs are queued or running on a cluster already: left alone" in told
    assert not store.runs.exists()


def test_squeue_and_sacct_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, str | None] = {
        "squeue": "bench-x-0|7|0|RUNNING|None\nbench-x-0|7|12|PENDING|(a|b)\no|9|N/A|FAILED|x\n",
        "sacct": "7_0|CANCELLED by 1000\n7_1|OUT_OF_MEMORY\n8|\n",
        "scontrol": "Configuration data\nClusterName             = dev\nMaxArraySize = 30\n",
    }

    def ask(program: str, *arguments: str) -> str | None:
        return answers[program]

    monkeypatch.setattr(scheduler, "_ask", ask)
    found: Any = scheduler.task_states()
    assert found["bench-x-0", 0] == TaskState("7_0", "RUNNING", "None")
    assert found["bench-x-0", 12].waiting and not found["bench-x-0", 12].over
    assert found["o", 0].job == "9" and found["o", 0].over
    assert scheduler.past_states(["7_0", "7_1", "8"]) == {
        "7_0": "CANCELLED",
        "7_1": "OUT_OF_MEMORY",
    }
    assert scheduler.past_states([]) == {}
    assert scheduler.find_cluster() == Cluster("dev", 30)
    answers |= {"squeue": None, "scontrol": None, "sacct": None}
    assert scheduler.task_states() is None
    assert scheduler.find_cluster() is None
    assert scheduler.past_states(["7"]) == {}


def test_a_cluster_that_is_not_there_is_said_before_any_work(
    cli: Any, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_cluster", lambda: None)
    words = ["run", "--methods", "erm", "--datasets", "cmnist", "--data-root", digits_root]
    words += ["--results", tmp_path / "results", "--cluster", "slurm/dev.toml"]
    ended = cli(*words)
    assert ended.code == 2
    assert "login node" in ended.err
    assert "--workers is about" in cli(*words, "--workers", "2").err
    assert "--retries cannot be negative" in cli(*words, "--retries", "-1").err
    assert "mine.toml" in cli(*words[:-1], "mine.toml").err
    assert not any((tmp_path / "results").glob("launches/*"))


def test_runs_of_one_task_are_cancelled_together(
    cli: Any, jobs: list[Job], store: Store, slurm_says: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = submitted(jobs, store)
    packed = replace(launch.arrays[0], tasks=(tuple(job.run_id for job in jobs),))
    launch.with_array(packed).write()
    slurm_says("RUNNING")
    told: list[list[str]] = []
    monkeypatch.setattr(cancel, "cancel_tasks", lambda tasks: told.append(tasks))
    refused = cli("cancel", jobs[1].run_id, "--results", store.root)
    assert refused.code == 2
    assert jobs[0].run_id in refused.err and jobs[2].run_id in refused.err
    assert cli("cancel", "nct", "--results", store.root).code == 2
    assert told == []
    monkeypatch.setattr(cancel, "PATIENCE_SECONDS", 0.0)
    assert cli("cancel", "erm", "--results", store.root).code == 1  # told, but SLURM holds on
    assert told == [["7"]]
