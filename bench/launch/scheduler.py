"""What SLURM knows: its configuration, and which of our tasks it still has.

Its answer is a second opinion: the truth about runs is their records. Finished jobs it forgets
within minutes, and its accounting, where there is one, lags. Nothing else in this package calls
squeue, scontrol, sacct or scancel.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from datasets.errors import UsageError

TIMEOUT_SECONDS = 60
DEFAULT_ARRAY_SIZE = 1001  # what SLURM allows unless its configuration says otherwise
CANCELLED_AT_ONCE = 500  # task names in one call of scancel
OVER = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True)
class Cluster:
    """A cluster that answers."""

    name: str
    largest_array: int


@dataclass(frozen=True)
class TaskState:
    """What SLURM says of one task of an array."""

    job: str
    state: str

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state in OVER

    @property
    def running(self) -> bool:
        """Whether it has been started, and has neither ended nor to be started again."""
        return not self.over and self.state not in WAITING


def find_cluster() -> Cluster | None:
    """Return the cluster this machine belongs to; none where there is none, or it is silent."""
    if (answer := _ask("scontrol", "show", "config")) is None:
        return None
    found = dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", answer, re.MULTILINE))
    size = found.get("MaxArraySize", "")
    largest = int(size) if size.isdigit() else DEFAULT_ARRAY_SIZE
    return Cluster(found.get("ClusterName", ""), largest)


def require_cluster() -> Cluster:
    """Return the cluster; raise `UsageError` where there is none, before any work is done."""
    if (found := find_cluster()) is not None:
        return found
    raise UsageError(
        "SLURM does not answer on this machine (scontrol show config)",
        "run this on a login node of the cluster, or leave out --cluster",
    )


def task_states() -> dict[tuple[str, int], TaskState] | None:
    """Return this user's tasks by job name and number in the array; none if SLURM is silent."""
    answer = _ask(
        *("squeue", "--noheader", "--array", "--states=all", "--user", getpass.getuser()),
        *("--format", "%j|%F|%K|%T"),
    )
    if answer is None:
        return None
    states = {}
    for line in answer.splitlines():
        name, job, number, state = line.rsplit("|", 3)
        single = not number.isdigit()  # an array of one is submitted as a plain job
        key = (name, 0 if single else int(number))
        states[key] = TaskState(job if single else f"{job}_{number}", state)
    return states


def past_states(jobs: Iterable[str]) -> dict[str, str]:
    """Return how jobs ended that squeue has forgotten, where there is an accounting to ask."""
    wanted = ",".join(jobs)
    answer = wanted and _ask(
        *("sacct", "--noheader", "--allocations", "--parsable2"),
        *("--format", "JobID,State", "--jobs", wanted),
    )
    rows = (line.split("|", 1) for line in (answer or "").splitlines() if "|" in line)
    return {job: state.split()[0] for job, state in rows if state.strip()}  # "CANCELLED by 1000"


def cancel_tasks(jobs: Iterable[str]) -> None:
    """Cancel tasks; those that have ended meanwhile do not matter."""
    listed = list(jobs)
    for start in range(0, len(listed), CANCELLED_AT_ONCE):
        _ask("scancel", *listed[start : start + CANCELLED_AT_ONCE])


def _ask(program: str, *arguments: str) -> str | None:
    if shutil.which(program) is None:
        return None
    try:
        command = [program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
