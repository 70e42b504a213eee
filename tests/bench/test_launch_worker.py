from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from bench.launch import worker
from bench.launch.local import _once_more
from bench.launch.worker import how_it_died, kills_for_memory
from bench.pace import Pace
from bench.plan import Request, expand
from bench.records import failed_record


def failed(kind: str) -> dict[str, object]:
    return {"status": "failed", "failure": {"kind": kind}}


def test_retries_and_resumes_are_counted_apart() -> None:
    tries = {"failed": 1, "killed": 2}
    assert not _once_more({"status": "done"}, tries)
    assert [_once_more(failed("worker_died"), tries) for _ in range(2)] == [True, True]
    assert _once_more(failed("error"), tries)
    assert not _once_more(failed("error"), tries)
    assert not _once_more(failed("worker_died"), tries)
    assert not _once_more(failed("error"), {"failed": 0, "killed": 9})
    # With no resumes left, a retry serves a killed worker too.
    assert _once_more(failed("worker_died"), {"failed": 1, "killed": 0})


def test_how_a_worker_died() -> None:
    assert how_it_died(-9, out_of_memory=True).kind == "out_of_memory"
    assert how_it_died(-9, out_of_memory=False).kind == "worker_died"
    assert "signal 9 (SIGKILL)" in how_it_died(-9, out_of_memory=False).message
    assert "exit code 3" in how_it_died(3, out_of_memory=True).message


@pytest.mark.parametrize(
    ("membership", "file", "content"),
    [
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/step_0/memory.events", "low 0\noom_kill 2\n"),
        (
            "5:cpu:/x\n4:memory:/slurm/job_7\n0::/\n",
            "memory/slurm/job_7/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        ),
    ],
)
def test_kills_for_memory_are_read_from_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, file: str, content: str
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(worker, "CGROUPS", tmp_path)
    monkeypatch.setattr(worker, "MEMBERSHIP", tmp_path / "membership")
    assert kills_for_memory() == 2
    path.unlink()
    assert kills_for_memory() == 0


def test_running_out_of_memory_is_a_kind_of_its_own(digits_root: Path) -> None:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), digits_root, quick=True))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    record = failed_record(job, caught.value, time.time())
    assert record["failure"]["kind"] == "out_of_memory"
    assert failed_record(job, RuntimeError("x"), time.time())["failure"]["kind"] == "error"


def test_workers_in_a_slurm_task_leave_its_warnings_to_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert worker.not_for_workers() == {signal.SIGINT}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert worker.not_for_workers() == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}


def test_the_expected_end_follows_from_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    pace = Pace()
    assert pace.expect({"stage": "loading"}) == {}
    assert pace.expect({"stage": "erm", "epoch": 5, "epochs": 20}) == {}  # resumed at the fifth
    now = 1010.0
    assert pace.expect({"stage": "erm", "epoch": 7, "epochs": 20}) == {"expected_end": 1075.0}
    assert pace.expect({"stage": "jtt", "epoch": 8, "epochs": 20}) == {}
