"""Freed memory is kept, signals are left to the launcher, and a death is described."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import process
from bench.job import NO_DATA, Request, expand
from bench.process import (
    count_oom_kills,
    default_threads,
    launcher_signals,
    worker_exit_error,
)
from bench.record import failed_record

COUNT_FAULTS = """
import resource, sys, torch
from bench.process import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.zeros(2**23).sum()
before = pages()
for _ in range(60):
    torch.zeros(2**23).sum()  # 32 MB
print(pages() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_was_freed_is_used_again() -> None:
    assert faults("kept") * 4 < faults("as it comes")


def test_how_a_worker_died() -> None:
    assert worker_exit_error(-9, out_of_memory=True).kind == "out_of_memory"
    assert worker_exit_error(-9, out_of_memory=False).kind == "worker_died"
    assert "signal 9 (SIGKILL)" in worker_exit_error(-9, out_of_memory=False).message
    assert "exit code 3" in worker_exit_error(3, out_of_memory=True).message


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
    monkeypatch.setattr(process, "CGROUPS", tmp_path)
    monkeypatch.setattr(process, "CGROUP_MEMBERSHIP", tmp_path / "membership")
    assert count_oom_kills() == 2
    path.unlink()
    assert count_oom_kills() == 0


def test_running_out_of_memory_is_a_kind_of_its_own() -> None:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), NO_DATA, quick=True))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**16)
    kinds = {}
    for error in (caught.value, RuntimeError("x")):
        failure = failed_record(job, error, time.time()).failure
        assert failure is not None
        kinds[str(error)] = failure.kind
    assert list(kinds.values()) == ["out_of_memory", "error"]


def test_workers_in_a_slurm_task_leave_its_warnings_to_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launcher_signals() == {signal.SIGINT}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launcher_signals() == {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}


@pytest.mark.parametrize(
    ("given", "threads"), [("2", 2), ("3,1", 3), ("", 4), ("0", 4), ("many", 4), (None, 4)]
)
def test_threads_are_those_of_openmp_or_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, given: str | None, threads: int
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_threads(2) == threads
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(20) == 1
