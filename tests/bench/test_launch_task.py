from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError

from bench.execute import Machine
from bench.launch import task as task_module
from bench.launch.task import Task
from bench.plan import Request, expand
from bench.records import base_record, failed_record
from bench.store import Store


def test_the_last_time_limit_fails_what_is_not_finished(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = expand(Request(("erm",), ("cmnist",), (0, 1, 2, 3), digits_root, quick=True))
    done, failed_before, failed_now, unfinished = jobs
    store = Store(tmp_path / "results")
    store.write({**base_record(done), "status": "done"})
    store.write(failed_record(failed_before, RuntimeError("long ago"), 0.0))
    os.utime(store.runs / failed_before.run_id / "record.json", (0, 0))

    def run_until_told(*arguments: Any, **named: Any) -> None:
        store.write(failed_record(failed_now, RuntimeError("just now"), 0.0))
        raise UncompletedJobError("timed-out too many times")

    monkeypatch.setattr(task_module, "run_local", run_until_told)
    ended = Task(jobs, Machine(digits_root, store.root), retries=0)()
    assert ended == ["done", "failed", "failed", "failed"]
    records = [store.record(job.run_id) or {} for job in jobs]
    kinds = [record.get("failure", {}).get("kind") for record in records]
    assert kinds == [None, "time_limit", "error", "time_limit"]
    assert "timed-out too many times" in records[3]["failure"]["message"]
    assert store.status(unfinished.run_id) == "failed"
