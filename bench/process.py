"""What a process of ours is and does: its cores, clocks, memory, signals, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from datasets.errors import BenchError

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")

# glibc's mallopt: numbers of its parameters, and the values that keep freed memory in the process.
MALLOPT_TRIM_THRESHOLD, MALLOPT_TOP_PAD, MALLOPT_MMAP_THRESHOLD = -1, -2, -3
NEVER_TRIM_BYTES = 2**31 - 1
MMAP_ABOVE_BYTES = 2**28  # larger blocks, such as whole splits, still go back at once
TOP_PAD_BYTES = 2**26
PR_SET_PDEATHSIG = 1  # Linux's prctl: the signal for a process whose parent ends


class WorkerDied(BenchError):
    """A process ended in the middle of a job."""

    kind = "worker_died"


class OutOfMemory(BenchError):
    """A process was ended by the kernel because its memory was used up."""

    kind = "out_of_memory"


@dataclass(frozen=True)
class CpuClock:
    """Seconds by the wall and by the processor; on a busy machine only the second can be trusted.

    The processor's are those of all threads of this process and of the children that it had.
    """

    wall: float = 0.0
    cpu: float = 0.0

    @staticmethod
    def now() -> CpuClock:
        """Read both clocks."""
        had = os.times()
        children = had.children_user + had.children_system
        return CpuClock(time.perf_counter(), time.process_time() + children)

    def __add__(self, other: CpuClock) -> CpuClock:
        return CpuClock(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: CpuClock) -> CpuClock:
        return CpuClock(self.wall - other.wall, self.cpu - other.cpu)


def available_cores() -> int:
    """Return how many cores this process may use."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")  # not every cluster binds tasks to cores
    if given.isdigit():
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(workers: int = 1) -> int:
    """Return the threads of a job where none are asked for: OMP_NUM_THREADS, or a share of cores.

    Of a list, which is for nested loops, the first counts, as OpenMP has it.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, available_cores() // workers)


def configure_process(threads: int) -> None:
    """Make this process ready for a job."""
    import torch  # slow to import, and launchers do without it

    torch.set_num_threads(threads)
    keep_freed_memory()


def quiet_libraries() -> None:
    """Show no warnings of libraries, unless Python was asked for them (`-W`, `PYTHONWARNINGS`).

    They are addressed to us, not to the user: what a run has to say goes through its log and
    record. Processes that are forked later inherit it.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step; return whether the C library took the setting.

    A training step allocates the same tensors again and again. glibc returns large ones to the
    kernel at once, and the kernel clears every page anew: up to a quarter of a LeNet's step. What
    is computed does not change.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {
        MALLOPT_MMAP_THRESHOLD: MMAP_ABOVE_BYTES,
        MALLOPT_TRIM_THRESHOLD: NEVER_TRIM_BYTES,
        MALLOPT_TOP_PAD: TOP_PAD_BYTES,
    }
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the GPU where there is one, else of this process."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def launcher_signals() -> set[signal.Signals]:
    """Return the signals that concern the launcher alone; in a SLURM task also its notices."""
    notices = {signal.SIGTERM, signal.SIGUSR2} if "SLURM_JOB_ID" in os.environ else set()
    return {signal.SIGINT, *notices}


@contextlib.contextmanager
def starting_a_child() -> Iterator[None]:
    """Block the launcher's signals while a child starts.

    A terminal sends Ctrl-C to every process, and SLURM its warnings to every process of a task; the
    launcher alone decides what they mean. A child has to ignore them from its first moment, before
    any code of ours runs in it, and inherits the blocked signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, launcher_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_as_child() -> None:
    """Ignore the launcher's signals, and end when the parent has ended, even if it was killed.

    So it does with the process that it was forked from, which may be the fork server.
    """
    quiet_libraries()
    for number in launcher_signals():
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launcher_signals())
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def worker_exit_error(exit_code: int, out_of_memory: bool) -> BenchError:
    """Describe the end of a process that did not say itself how it ended."""
    if exit_code == -signal.SIGKILL and out_of_memory:
        return OutOfMemory(
            "the worker process was killed because the memory was used up",
            "use a smaller batch_size, fewer --workers or a smaller `pack`, or more memory",
        )
    how = f"exit code {exit_code}"
    if exit_code < 0:
        how = f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return WorkerDied(
        f"the worker process died ({how})",
        "most often the machine ran out of memory: use fewer --workers; the run resumes from "
        "its last epoch",
    )


def count_oom_kills() -> int:
    """Count the processes the kernel has killed in our control group because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in CGROUP_MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = "memory/" if "memory" in controllers else ""
            for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
                file = CGROUPS / f"{folder}{path.lstrip('/')}" / name
                if (folder or not controllers) and file.is_file():
                    counts = dict(row.split() for row in file.read_text().splitlines())
                    return int(counts.get("oom_kill", 0))
    return 0
