"""Life as a worker: a process that takes jobs from a launcher and dies with it."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.execute import Machine, execute
from bench.provenance import git_state
from bench.stacked import execute_stack
from datasets.errors import BenchError

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# What compiled code holds for good (a gigabyte after UMAP) and what was freed but not given back
# would count as the next run's: a worker that keeps more than this after a run is replaced.
KEPT_BYTES = 768 * 2**20


class WorkerDied(BenchError):
    """A worker process ended in the middle of a job."""

    kind = "worker_died"


class OutOfMemory(BenchError):
    """A worker process was ended by the kernel because its memory was used up."""

    kind = "out_of_memory"


def how_it_died(exit_code: int, out_of_memory: bool) -> BenchError:
    """Describe the end of a worker that said nothing itself."""
    if exit_code == -signal.SIGKILL and out_of_memory:
        return OutOfMemory(
            "the worker process was killed because the memory was used up",
            "use a smaller batch_size, fewer --workers or a smaller `pack`, or more memory",
        )
    name = signal.Signals(-exit_code).name if exit_code < 0 else ""
    how = f"signal {-exit_code} ({name})" if name else f"exit code {exit_code}"
    return WorkerDied(
        f"the worker process died ({how})",
        "most often the machine ran out of memory: use fewer --workers; the run resumes from "
        "its last epoch",
    )


def kills_for_memory() -> int:
    """Count the processes the kernel has killed in our control group because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = "memory/" if "memory" in controllers else ""
            for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
                file = CGROUPS / f"{folder}{path.lstrip('/')}" / name
                if (folder or not controllers) and file.is_file():
                    counts = dict(row.split() for row in file.read_text().splitlines())
                    return int(counts.get("oom_kill", 0))
    return 0


def keeps_much(pid: int | None) -> bool:
    """Tell whether a process holds much memory, files mapped into it aside; no if nobody knows."""
    with contextlib.suppress(OSError, StopIteration):
        status = Path(f"/proc/{pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024 > KEPT_BYTES
    return False


def serve(pipe: Connection, machine: Machine) -> None:
    """Take jobs until the launcher hangs up."""
    for deaf_to in not_for_workers():
        signal.signal(deaf_to, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, not_for_workers())
    die_with_parent()
    git_state()  # now, while the code that was just imported is what lies on disk

    def tell(kind: str, content: dict[str, Any]) -> None:
        try:
            pipe.send((kind, content))
        except OSError:  # the launcher is gone; the checkpoint of this epoch is kept
            sys.exit(1)

    while True:
        try:
            job, final = pipe.recv()
        except EOFError:
            return
        carry_out = execute_stack if job.stack else execute
        record = carry_out(job, machine, lambda progress: tell("progress", progress), final=final)
        tell("record", record)


def not_for_workers() -> set[signal.Signals]:
    """List the signals that concern the launcher; in a SLURM task these include its warnings."""
    warnings = {signal.SIGTERM, signal.SIGUSR2} if "SLURM_JOB_ID" in os.environ else set()
    return {signal.SIGINT, *warnings}


def die_with_parent() -> None:
    """Ask Linux to end this process with the launcher, even if that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        launcher = multiprocessing.parent_process()
        if launcher is not None and os.getppid() != launcher.pid:
            sys.exit(1)
