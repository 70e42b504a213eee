"""What becomes of launches on disk under SLURM's answers; the answers are made up here."""

from __future__ import annotations

import errno
import getpass
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import FakeSlurm, Notes, launch_of

from bench.job import Job
from bench.launch import launch as launch_jobs
from bench.launch import queue, scheduler
from bench.launch.profile import Profile
from bench.launch.queue import (
    follow,
    launches_lock,
    open_launches,
    read_jobs,
    read_launch,
    submitted_runs,
)
from bench.launch.scheduler import Cluster, TaskState
from bench.provenance import GitState
from bench.record import Status, new_record
from bench.runner import RunOptions
from bench.store import Store
from datasets.config import Values
from datasets.errors import UsageError
from datasets.files import StorageError, append_line


def statuses(store: Store) -> list[str]:
    return [run.status.value for run in submitted_runs(store).values()]


def test_launches_survive_a_round_trip(jobs: list[Job], store: Store) -> None:
    launch = launch_of(jobs, store)
    produced = replace(launch.arrays[0], produces={"erm-1": 0}, depends_on=("5_1",))
    launch = launch.with_array(produced)
    launch.write()
    (read,) = open_launches(store)
    assert read == launch
    assert read_jobs(read.folder) == {job.run_id: job for job in jobs}
    launch.mark_complete()
    assert not list(open_launches(store))


@pytest.mark.parametrize("content", ["", "\0" * 300, '{"id": "y"', '{"id": "y"}', "[]", None])
def test_a_damaged_launch_is_set_aside_and_named_once(
    jobs: list[Job], store: Store, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = launch_of(jobs[:1], store)
    damaged = replace(whole, id="y", folder=store.launches / "y")
    damaged.write()
    file = damaged.folder / "launch.json"
    changed = file.read_text().replace('"cluster": "dev"', '"cluster": "other"')
    file.write_text(changed if content is None else content)
    assert list(open_launches(store)) == [whole]
    assert "launch y is damaged" in capsys.readouterr().err
    assert list(open_launches(store)) == [whole]
    assert capsys.readouterr().err == ""


def test_a_launch_that_found_no_room_was_never_there(
    jobs: list[Job], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StorageError, match="no room left") as error:
            launch_of(jobs, store)
    assert "run the command again" in error.value.remedy
    assert list(open_launches(store)) == []
    again = launch_of(jobs, store)
    assert list(open_launches(store)) == [again]


def test_lost_runs_whose_jobs_cannot_be_read_are_missing(
    jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    launch = launch_of(jobs, store)
    (launch.folder / "jobs.json").write_bytes(b"")
    slurm.says("FAILED", "FAILED", "FAILED")
    assert submitted_runs(store) == {}
    assert store.status_of(jobs[0].run_id).status is Status.MISSING


def test_what_is_submitted_while_we_look_is_not_forgotten(
    jobs: list[Job], store: Store, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read as not yet submitted, not in SLURM's answer, and then submitted before we lock."""
    planned = launch_of(jobs, store, job="")
    slurm.says(None, None, None)

    def sent_meanwhile(some: Store) -> Any:
        planned.with_array(replace(planned.arrays[0], job="7")).write()
        slurm.says("PENDING", "PENDING", "PENDING")
        return launches_lock(some)

    monkeypatch.setattr(queue, "launches_lock", sent_meanwhile)
    assert list(submitted_runs(store)) == [job.run_id for job in jobs]
    assert list(open_launches(store))


def test_queued_running_and_preempted(jobs: list[Job], store: Store, slurm: FakeSlurm) -> None:
    launch_of(jobs, store)
    append_line(store.work / jobs[2].run_id / "progress.json", {"stage": "erm"})
    slurm.says("PENDING", "RUNNING", "PENDING")
    assert statuses(store) == ["queued", "running", "preempted"]
    known = {run_id: run.status for run_id, run in submitted_runs(store).items()}
    seen = store.all_statuses(known)
    assert [(s.status.value, s.submitted) for s in seen.values()] == [
        ("queued", True),
        ("running", True),
        ("preempted", True),
    ]


def test_without_slurm_the_disk_is_all_there_is(
    jobs: list[Job], store: Store, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_of(jobs, store)
    slurm.says("PENDING")
    slurm.cluster = "another cluster"
    assert statuses(store) == ["queued"] * 3
    slurm.cluster = "dev"
    slurm.says()
    with monkeypatch.context() as patch:
        patch.setattr(getpass, "getuser", lambda: "somebody else")
        assert statuses(store) == ["queued"] * 3
    slurm.silent = True
    with store.lock(jobs[0].run_id).hold(wait=False):
        assert statuses(store) == ["running", "queued", "queued"]
    store.write(new_record(jobs[1], Status.DONE))
    assert list(submitted_runs(store)) == [jobs[0].run_id, jobs[2].run_id]


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
    slurm: FakeSlurm,
    state: str | None,
    past: dict[str, str],
    kind: str,
    goes_on: bool,
) -> None:
    (job,) = jobs = jobs[:1]
    launch = launch_of(jobs, store)
    log = launch.folder / "tasks" / "7_0_log.err"
    log.parent.mkdir()
    log.write_text("x" * 9000 + "its last words")
    slurm.says(state)
    slurm.past = past
    assert submitted_runs(store) == {}
    record = store.record(job.run_id)
    assert record is not None and record.failure is not None
    failure = record.failure
    assert failure.kind == kind
    assert "task 7 ended without a result" in failure.message
    assert failure.remedy
    assert failure.command.endswith("--results here --rerun failed")
    assert failure.stderr_tail.endswith("its last words")
    assert len(failure.stderr_tail) < 5000
    assert record.provenance.git == GitState("abc", False)
    assert record.provenance.code is None, "what ran is not the code at hand"
    assert (launch.folder / "ended").exists()
    found = store.status_of(job.run_id)
    assert found.status is Status.FAILED
    assert found.interrupted is goes_on


def test_what_never_reached_slurm_is_just_missing(
    jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    launch_of(jobs, store, job="")
    slurm.says()
    with launches_lock(store).hold(wait=False):  # the launcher is about to submit
        assert statuses(store) == ["queued"] * 3
    assert submitted_runs(store) == {}
    assert store.status_of(jobs[0].run_id).status is Status.MISSING


def test_an_array_is_found_by_its_name_if_its_number_was_not_noted(
    jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    launch_of(jobs, store, job="")
    slurm.says("PENDING", "PENDING", "RUNNING")
    assert statuses(store) == ["queued", "queued", "running"]
    assert [run.job for run in submitted_runs(store).values()] == ["7_0", "7_1", "7_2"]


def test_a_lost_attempt_does_not_replace_a_result(
    jobs: list[Job], store: Store, slurm: FakeSlurm
) -> None:
    store.write(new_record(jobs[0], Status.DONE))
    before = store.record(jobs[0].run_id)
    launch = launch_of(jobs[:1], store)
    os.utime(store.runs / jobs[0].run_id / "record.json", (0, 0))  # from long before the launch
    slurm.says("FAILED")
    assert submitted_runs(store) == {}
    assert store.record(jobs[0].run_id) == before
    assert (launch.folder / "ended").exists()


def test_a_local_launcher_leaves_alone_what_a_cluster_has(
    jobs: list[Job], store: Store, slurm: FakeSlurm, digits_root: Path
) -> None:
    launch_of(jobs, store)
    slurm.says("PENDING", "PENDING", "PENDING")
    told: list[str] = []
    assert launch_jobs(jobs, RunOptions(digits_root, store.root), log=told.append) == []
    assert "3 runs are queued or running on a cluster already: left alone" in told
    assert not store.runs.exists()


def test_following_ends_with_the_last_run(
    jobs: list[Job],
    store: Store,
    slurm: FakeSlurm,
    digits_root: Path,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first run is running, the second is done while we look, the third was lost."""
    monkeypatch.setattr(queue, "FOLLOW_SECONDS", 0.0)
    launch_of(jobs, store)
    append_line(store.work / jobs[0].run_id / "progress.json", {"stage": "erm"})
    slurm.says("RUNNING", "PENDING", "CANCELLED")
    to_end = [jobs[1], jobs[0]]

    def progressed(job: Job, progress: Values) -> None:
        """End a run at each look at the first, which is followed to the end."""
        assert job == jobs[0]
        notes.stages.append(str(progress["stage"]))
        store.write(new_record(to_end.pop(0), Status.DONE))

    monkeypatch.setattr(notes, "progressed", progressed)
    records = follow(jobs, store, notes)
    ids = [job.run_id for job in jobs]
    assert [record.run_id for record in records] == [ids[2], ids[1], ids[0]]
    assert [record.status for record in records] == [Status.FAILED, Status.DONE, Status.DONE]
    assert notes.finished_jobs == [ids[2], ids[1], ids[0]]
    assert notes.started_jobs == [ids[0], ids[2], ids[1]]
    assert set(notes.stages) == {"erm"}


def test_squeue_and_sacct_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, str | None] = {
        "squeue": "x-0|7|0|RUNNING\nx-0|7|12|PENDING\no|9|N/A|FAILED\na|b|8|N/A|FAILED\n",
        "sacct": "7_0|CANCELLED by 1000\n7_1|OUT_OF_MEMORY\n8|\n",
        "scontrol": "Configuration data\nClusterName             = dev\nMaxArraySize = 30\n",
    }

    def ask(program: str, *arguments: str) -> str | None:
        return answers[program]

    monkeypatch.setattr(scheduler, "_ask", ask)
    found = scheduler.task_states()
    assert found is not None
    assert found["x-0", 0] == TaskState("7_0", "RUNNING")
    assert found["x-0", 12].state in scheduler.WAITING
    assert found["o", 0].job == "9" and found["o", 0].over
    assert found["a|b", 0].job == "8"
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
    jobs: list[Job], store: Store, slurm: FakeSlurm, digits_root: Path
) -> None:
    slurm.silent = True
    options = RunOptions(digits_root, store.root)
    with pytest.raises(UsageError, match="login node"):
        launch_jobs(jobs, options, log=print, profile=Profile("dev.toml", {}))
    assert not store.launches.exists()


def test_a_launch_is_read_as_it_is_now(jobs: list[Job], store: Store) -> None:
    launch = launch_of(jobs, store, job="")
    launch.with_array(replace(launch.arrays[0], job="9")).write()
    assert read_launch(launch.folder).arrays[0].task(1) == "9_1"
    single = replace(launch.arrays[0], tasks=(("a",),), job="9")
    assert single.task(0) == "9"
