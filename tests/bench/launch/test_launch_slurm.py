"""Submitting, the copy of the code, and what a task does; nothing here reaches a cluster."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from launch_fakes import PROFILE, FakeSlurm, Sent
from submitit.core.utils import UncompletedJobError

from bench import provenance
from bench.job import Job, Request, expand
from bench.launch import slurm as slurm_module
from bench.launch.pool import FixedJobs, JobSource
from bench.launch.profile import Profile
from bench.launch.queue import (
    Array,
    open_launches,
    read_launch,
    submitted_runs,
)
from bench.launch.scheduler import Cluster
from bench.launch.slurm import ArrayTask, shared_stage, submit, take_snapshot
from bench.provenance import SUBMITTED, GitState, git_state
from bench.record import Record, Status, failed_record, new_record
from bench.runner import RunOptions
from bench.store import Store
from datasets.errors import UsageError
from datasets.lock import Lock

CLUSTER = Cluster("dev", 1001)


def git(tree: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(
        ["git", *who, "-C", tree, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def use_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a tree in the place of ours."""
    for module in (slurm_module, provenance):
        monkeypatch.setattr(module, "source_root", lambda: root)
    git_state.cache_clear()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small repository in the place of ours."""
    root = tmp_path / "tree"
    for name in ("bench/__init__.py", "methods/a.py", "methods/gone.py", "results/runs/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("committed\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    use_root(root, monkeypatch)
    yield root
    git_state.cache_clear()


def test_edits_and_new_files_are_copied_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    (tree / "methods" / "a.py").write_text("edited\n")
    (tree / "methods" / "new.py").write_text("new\n")
    (tree / "methods" / "noise.log").write_text("ignored\n")
    (tree / "methods" / "gone.py").unlink()
    code = take_snapshot(tmp_path / "code")
    assert code is not None
    files = {str(p.relative_to(code)) for p in code.rglob("*") if p.is_file()}
    assert files == {"bench/__init__.py", "methods/a.py", "methods/new.py", SUBMITTED}
    assert (code / "methods" / "a.py").read_text() == "edited\n"
    state = {"commit": git(tree, "rev-parse", "HEAD"), "dirty": True}
    assert json.loads((code / SUBMITTED).read_text()) == state


def test_code_in_a_snapshot_knows_what_it_was_taken_from(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = GitState(git(tree, "rev-parse", "HEAD"), False)
    code = take_snapshot(tmp_path / "code")
    assert code is not None
    (tree / "methods" / "a.py").write_text("edited later\n")
    use_root(code, monkeypatch)
    assert git_state() == expected
    assert take_snapshot(tmp_path / "again") == code  # a job that submits passes its own copy on


def test_an_installed_package_has_no_tree_to_copy(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "bench").mkdir(parents=True)
    use_root(tmp_path / "site", monkeypatch)
    assert take_snapshot(tmp_path / "code") is None
    assert not (tmp_path / "code").exists()


def grid(root: Path, methods: str = "erm,dfr", seeds: int = 2) -> list[Job]:
    names = tuple(methods.split(","))
    return expand(Request(names, ("cmnist",), tuple(range(seeds)), root, quick=True))


def test_a_grid_is_submitted_with_its_dependencies_and_only_once(
    digits_root: Path, store: Store, sent: Sent, tmp_path: Path
) -> None:
    jobs, told = grid(digits_root), list[str]()
    options = RunOptions(digits_root, store.root, keep_models=True)
    launch = submit(jobs, options, CLUSTER, PROFILE, 3, told.append)
    assert launch is not None
    assert read_launch(launch.folder) == launch
    producing, waiting = launch.arrays
    stages = [shared_stage(job) for job in jobs[:2]]
    assert producing.produces == dict.fromkeys(stages, 0)
    assert waiting.depends_on == ("7",)
    assert told == [
        "submitted array 7: 2 runs in 1 task",
        "submitted array 8: 2 runs in 1 task, after 7",
    ]
    # A task is small: its jobs are read where they are kept.
    (task,) = sent[0][2]
    again: ArrayTask = pickle.loads(pickle.dumps(task))
    assert replace(again, make_source=task.make_source) == task and len(pickle.dumps(task)) < 2000
    assert (task.workers, task.retries, task.options) == (2, 3, replace(options, device="cpu"))
    source = again.make_source()
    assert isinstance(source, FixedJobs)
    assert list(source.jobs) == jobs[:2]
    assert launch.code == str(tmp_path / "code")
    # What a launch has is not submitted again, and neither is what is done.
    assert list(submitted_runs(store)) == [job.run_id for job in jobs]
    assert submit(jobs, options, CLUSTER, PROFILE, 3, told.append) is None
    (other,) = grid(digits_root, "jtt", 1)
    store.write(new_record(other, Status.DONE))
    assert submit([*jobs, other], options, CLUSTER, PROFILE, 3, told.append) is None
    assert submit([other], replace(options, not_before=1e12), CLUSTER, PROFILE, 0, told.append)
    assert len(list(open_launches(store))) == 2


def test_a_stage_that_an_earlier_launch_computes_is_waited_for(
    digits_root: Path, store: Store, sent: Sent
) -> None:
    jobs, options = grid(digits_root, seeds=1), RunOptions(digits_root, store.root)
    erm, dfr = jobs
    submit([erm], options, CLUSTER, PROFILE, 0, print)
    launch = submit([dfr], options, CLUSTER, PROFILE, 0, print)
    assert launch is not None
    assert launch.arrays[0].depends_on == ("7",)


def test_a_stage_on_disk_is_not_waited_for(digits_root: Path, store: Store, sent: Sent) -> None:
    jobs, options = grid(digits_root, seeds=1), RunOptions(digits_root, store.root)
    stage = store.stages / str(shared_stage(jobs[0])) / "stage.json"
    stage.parent.mkdir(parents=True)
    stage.write_text("{}")
    launch = submit(jobs, options, CLUSTER, PROFILE, 0, print)
    assert launch is not None
    assert [(a.produces, a.depends_on) for a in launch.arrays] == [({}, ())]
    assert [len(task) for task in launch.arrays[0].tasks] == [2]


def test_what_slurm_refuses_is_not_taken_for_submitted(
    digits_root: Path, store: Store, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Array:
        raise UsageError("SLURM refused 2 runs")

    monkeypatch.setattr(slurm_module, "send", refuse)
    monkeypatch.setattr(slurm_module, "take_snapshot", lambda target: None)
    jobs, told = grid(digits_root, "erm"), list[str]()
    with pytest.raises(UsageError, match="refused"):
        submit(jobs, RunOptions(digits_root, store.root), CLUSTER, PROFILE, 0, told.append)
    assert "installed package" in told[0]
    assert submitted_runs(store) == {}
    assert store.status_of(jobs[0].run_id).status is Status.MISSING


class NoTrials(FixedJobs):
    """The source of a study that has all its trials."""

    def __init__(self) -> None:
        super().__init__([])


def interrupted(store: Store, job: Job) -> Any:
    """A pool in which one job fails, and then comes the last time limit."""

    def run(*_: Any) -> list[Record]:
        store.write(failed_record(job, RuntimeError("just now"), 0.0))
        raise UncompletedJobError("timed-out too many times")

    return run


def test_the_last_time_limit_fails_what_is_not_finished(
    digits_root: Path, store: Store, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = grid(digits_root, "erm", 4)
    done, failed_before, failed_now, unfinished = jobs
    options = RunOptions(digits_root, store.root)
    submit(jobs, options, CLUSTER, Profile("dev.toml", {"pack": 4}), 0, print)
    ((_, _, (task,)),) = sent
    store.write(new_record(done, Status.DONE))
    store.write(failed_record(failed_before, RuntimeError("long ago"), 0.0))
    os.utime(store.runs / failed_before.run_id / "record.json", (0, 0))
    monkeypatch.setattr(slurm_module, "run_pool", interrupted(store, failed_now))
    assert task() == ["done", "failed", "failed", "failed"]
    records = [store.record(job.run_id) for job in jobs]
    kinds = [r.failure.kind if r is not None and r.failure is not None else None for r in records]
    assert kinds == [None, "time_limit", "error", "time_limit"]
    last = records[3]
    assert last is not None and last.failure is not None
    assert "timed-out too many times" in last.failure.message
    assert "--rerun failed" in last.failure.command
    assert store.status_of(unfinished.run_id).status is Status.FAILED
    # A run that another process has meanwhile is left to it.
    with store.lock(unfinished.run_id).hold(wait=False):
        assert task()[3] == "running"


def test_a_study_that_runs_out_of_time_is_left_as_it_is(
    digits_root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = grid(digits_root, "erm", 1)
    monkeypatch.setattr(slurm_module, "run_pool", interrupted(store, job))
    study = cast(JobSource, object())
    task = ArrayTask(lambda: study, RunOptions(digits_root, store.root), 1, 1)
    with pytest.raises(UncompletedJobError):
        task()


def test_a_task_holds_its_lock_and_tells_when_it_is_complete(
    digits_root: Path, store: Store, tmp_path: Path
) -> None:
    lock, seen = tmp_path / "lock", list[bool]()

    class Looking(NoTrials):
        @property
        def exhausted(self) -> bool:
            seen.append(Lock(lock).held())
            return True

    task = ArrayTask(
        Looking,
        RunOptions(digits_root, store.root),
        total=0,
        workers=1,
        lock=lock,
        on_complete=lambda: seen.append(Lock(lock).held()),
    )
    assert task() == []
    assert seen[0] is True and seen[-1] is False
    again = task.checkpoint()
    assert again.function is task


def test_a_task_takes_the_jobs_that_its_launch_kept(
    digits_root: Path, store: Store, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, options = grid(digits_root, "erm", 3), RunOptions(digits_root, store.root, isolate=False)
    ran: list[Job] = []

    def run_job(job: Job, *_: Any, **__: Any) -> Record:
        ran.append(job)
        return new_record(job, Status.DONE)

    monkeypatch.setattr("bench.launch.pool.run_job", run_job)
    submit(jobs, options, CLUSTER, PROFILE, 0, print)
    first, second = sent[0][2]
    assert second() == ["done"] and ran == jobs[2:]
    assert first() == ["done", "done"] and ran == [*jobs[2:], *jobs[:2]]
