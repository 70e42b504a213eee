from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from bench import provenance
from bench.execute import Machine, execute
from bench.launch import local
from bench.launch.local import default_workers, run_local
from bench.lease import Lease
from bench.plan import Job, Request, expand
from bench.store import Store
from methods.base import METHODS, get_method

PLUG_IN = '''
"""A method outside the repository that trains nothing, and on request brings down its process
or keeps memory for good."""

import os
from dataclasses import dataclass

from methods.backbones import build_classifier
from methods.base import Method, register
from methods.classifier import FittedClassifier


@dataclass(frozen=True)
class CrashingConfig:
    crash_on: int = -1
    keep_on: int = -1
    note: str = ""

    def quick(self):
        return self


KEPT = []


@register("crashing", version=1, config=CrashingConfig)
class Crashing(Method):
    def fit(self, task, config, ctx):
        if ctx.scope.seed == config.crash_on:
            os._exit(3)
        if ctx.scope.seed == config.keep_on:
            KEPT.append(b"x" * 10**9)
        if config.note and not os.path.exists(config.note):
            open(config.note, "w").close()
            raise RuntimeError("the first attempt")
        return FittedClassifier(build_classifier(task, ctx, "net"), {})

    def search_space(self, trial, task):
        return CrashingConfig()
'''


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a plug-in as pip would; workers inherit the path."""
    site = tmp_path / "site"
    facts = site / "crashing_method-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "crashing_method.py").write_text(PLUG_IN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: crashing-method\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[bench.methods]\ncrashing = crashing_method\n")
    monkeypatch.syspath_prepend(str(site))
    assert get_method("crashing").name == "crashing"
    yield "crashing"
    METHODS.pop("crashing")
    sys.modules.pop("crashing_method")


class Notes:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.started_jobs: list[str] = []
        self.finished_jobs: list[str] = []
        self.stages: list[str] = []

    def started(self, job: Job) -> None:
        self.started_jobs.append(job.run_id)

    def progressed(self, job: Job, progress: dict[str, Any]) -> None:
        self.stages.append(progress["stage"])

    def finished(self, job: Job, record: dict[str, Any]) -> None:
        self.finished_jobs.append(job.run_id)

    def tick(self) -> None:
        pass


class KillerOfIdleWorkers(Notes):
    """Kills the worker that waits because another process holds its job, then lets the job go."""

    def __init__(self, lock: Lease) -> None:
        super().__init__()
        self.lock = lock
        self.killed: list[int] = []

    def progressed(self, job: Job, progress: dict[str, Any]) -> None:
        super().progressed(job, progress)
        if progress["stage"] == "run by another process" and not self.killed:
            for worker in multiprocessing.active_children():
                if worker.name.startswith("worker-"):
                    worker.kill()
                    worker.join()
                    self.killed.append(worker.pid or 0)
            self.lock.release()


def jobs_of(method: str, root: Path, seeds: tuple[int, ...], **overrides: str) -> list[Job]:
    settings = {f"{method}.{knob}": value for knob, value in overrides.items()}
    return expand(Request((method,), ("cmnist",), seeds, root, overrides=settings, quick=True))


def test_a_crash_costs_one_run(crashing: str, digits_root: Path, tmp_path: Path) -> None:
    jobs = jobs_of(crashing, digits_root, (0, 1, 2), crash_on="1")
    notes, store = Notes(), Store(tmp_path / "results")
    records = run_local(jobs, Machine(digits_root, store.root), 1, notes)

    ids = [job.run_id for job in jobs]
    assert [record["run_id"] for record in records] == ids  # one worker: in the order given
    assert notes.started_jobs == notes.finished_jobs == ids
    assert [record["status"] for record in records] == ["done", "failed", "done"]
    assert {"loading", "evaluating"} <= set(notes.stages)
    assert [store.status(run) for run in ids] == ["done", "failed", "done"]
    failure = records[1]["failure"]
    assert failure["kind"] == "worker_died"
    assert "exit code 3" in failure["message"]
    assert "--workers" in failure["remedy"]
    assert failure["command"].endswith("--rerun failed")
    assert "crashing.crash_on=1" in failure["command"]
    stored = store.record(ids[1])
    assert stored is not None
    assert stored["failure"] == failure
    # A method that keeps no history still has the table, with the columns every run has.
    history = pd.read_parquet(store.runs / ids[0] / "history.parquet")
    assert len(history) == 0
    assert {"stage", "epoch", "loss", "selection", "audit_test_wga"} <= set(history)
    assert not multiprocessing.active_children()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process keeps")
@pytest.mark.parametrize("edited", [False, True])
def test_a_worker_that_keeps_much_memory_is_replaced(
    crashing: str, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    """A run's peak memory has little of what ran before it, unless the code was edited since."""
    stamps = ({("erm.py", when)} for when in itertools.count()) if edited else itertools.repeat({})
    monkeypatch.setattr(local, "source_stamp", lambda: next(stamps))
    jobs = jobs_of(crashing, digits_root, (0, 1), keep_on="0")
    first, second = run_local(jobs, Machine(digits_root, tmp_path / "results"), 1, Notes())
    assert first["status"] == second["status"] == "done"
    assert first["peak_memory_bytes"] > 10**9
    assert (second["peak_memory_bytes"] > 10**9) == edited
    assert not multiprocessing.active_children()


def test_the_stamp_of_the_code_changes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "methods" / "presets").mkdir(parents=True)
    monkeypatch.setattr(provenance.bench, "__file__", str(tmp_path / "bench" / "__init__.py"))
    preset = tmp_path / "methods" / "presets" / "umnist.toml"
    stamps = [provenance.source_stamp()]
    for content in ("lr = 1", "lr = 2"):
        preset.write_text(content)
        os.utime(preset, ns=(len(stamps), len(stamps)))
        stamps.append(provenance.source_stamp())
    (tmp_path / "methods" / "notes.pyc").write_text("")
    assert provenance.source_stamp() == stamps[-1]
    assert len(set(stamps)) == 3


def test_a_crash_does_not_replace_a_good_record(
    crashing: str, digits_root: Path, tmp_path: Path
) -> None:
    (job,) = jobs_of(crashing, digits_root, (1,), crash_on="1")
    store = Store(tmp_path / "results")
    store.write({"run_id": job.run_id, "status": "done", "kept": True})
    machine = Machine(digits_root, store.root, not_before=time.time() + 1)
    (record,) = run_local([job], machine, 1, Notes())
    assert record["status"] == "failed"
    assert store.record(job.run_id) == {"run_id": job.run_id, "status": "done", "kept": True}


def test_a_worker_that_dies_while_idle_is_replaced(
    crashing: str, digits_root: Path, tmp_path: Path
) -> None:
    (job,) = jobs_of(crashing, digits_root, (0,))
    store = Store(tmp_path / "results")
    lock = store.lock(job.run_id)
    assert lock.acquire()
    watcher = KillerOfIdleWorkers(lock)
    (record,) = run_local([job], Machine(digits_root, store.root), 1, watcher)
    assert len(watcher.killed) == 1
    assert record["status"] == "done"
    assert store.status(job.run_id) == "done"
    assert watcher.started_jobs == [job.run_id]  # told once, however often it was tried


def test_a_retry_leaves_no_trace_of_the_failure_before_it(
    crashing: str, digits_root: Path, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    (job,) = jobs_of(crashing, digits_root, (0,), note=str(note))
    store, notes = Store(tmp_path / "results"), Notes()
    machine = Machine(digits_root, store.root)
    failed = execute(job, machine, lambda progress: None, final=False)
    assert failed["status"] == "failed"
    assert store.record(job.run_id) is None
    note.unlink()
    (record,) = run_local([job], machine, 1, notes, retries=1)
    assert record["status"] == "done"
    assert "starting again" in notes.stages
    assert notes.started_jobs == notes.finished_jobs == [job.run_id]


def test_default_workers(digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    lenets = jobs_of("erm", digits_root, tuple(range(5)))
    assert default_workers(lenets) == 3
    assert default_workers(lenets[:2]) == 2
    config = {**lenets[0].config, "backbone": {"name": "resnet18", "pretrained": False}}
    assert default_workers([*lenets, replace(lenets[0], config=config)]) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_workers(lenets) == 2
    assert default_workers(lenets[:1]) == 1
