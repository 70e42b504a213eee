"""A made-up SLURM, launches that were never sent to it, and a display that remembers."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.job import Job
from bench.launch.profile import Profile, Resources
from bench.launch.queue import Array, Launch
from bench.launch.slurm import ArrayTask
from bench.provenance import GitState
from bench.record import Record
from bench.store import Store
from datasets.config import Values

PROFILE = Profile("dev.toml", {"pack": 2})
STUDY_ARRAY = "bench-tune-x"
TUNING = {"method": "jtt", "dataset": "umnist", "trials": 4, "overrides": {"jtt.lr": "0.1"}}

Sent = list[tuple[Launch, Array, Sequence[ArrayTask]]]
"""What was handed to submitit."""


class Notes:
    """A display that remembers what it was shown."""

    def __init__(self) -> None:
        self.started_jobs: list[str] = []
        self.finished_jobs: list[str] = []
        self.stages: list[str] = []

    def started(self, job: Job) -> None:
        self.started_jobs.append(job.run_id)

    def progressed(self, job: Job, progress: Values) -> None:
        self.stages.append(str(progress["stage"]))

    def finished(self, job: Job, record: Record) -> None:
        self.finished_jobs.append(job.run_id)


@dataclass
class FakeSlurm:
    """SLURM's programs, with made-up answers; in the place of `scheduler._ask`.

    Attributes:
        tasks: the state of each task that squeue knows, by name of the array and number.
        numbers: SLURM's number of each array.
        past: the states that sacct knows, by SLURM's name of a task.
        cancelled: what scancel was called with.
        single: the arrays of one task, which SLURM has as plain jobs.
    """

    cluster: str = "dev"
    silent: bool = False
    tasks: dict[tuple[str, int], str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    past: Mapping[str, str] = field(default_factory=dict)
    cancelled: list[list[str]] = field(default_factory=list)
    single: set[str] = field(default_factory=set)

    def says(self, *states: str | None, array: str = "bench-x-0", job: str = "7") -> None:
        """Make squeue know an array by the state of each of its tasks; none is forgotten."""
        self.tasks = {key: state for key, state in self.tasks.items() if key[0] != array}
        self.tasks |= {(array, n): state for n, state in enumerate(states) if state}
        self.numbers[array] = job
        self.single = self.single - {array} | ({array} if len(states) == 1 else set())

    def ask(self, program: str, *arguments: str) -> str | None:
        if self.silent:
            return None
        if program == "squeue":
            return "".join(
                f"{name}|{self.numbers[name]}|{'N/A' if name in self.single else number}|{state}\n"
                for (name, number), state in self.tasks.items()
            )
        if program == "sacct":
            return "".join(f"{job}|{state}\n" for job, state in self.past.items())
        if program == "scancel":
            self.cancelled.append(list(arguments))
            return ""
        return f"ClusterName = {self.cluster}\nMaxArraySize = 1001\n"


def _launch(folder: Path, array: Array) -> Launch:
    return Launch(
        id="x",
        folder=folder,
        created=time.time() - 1,
        user=getpass.getuser(),
        cluster="dev",
        profile="dev.toml",
        path_arguments="--results here",
        git=GitState("abc", False),
        code="",
        arrays=(array,),
    )


def launch_of(jobs: list[Job], store: Store, job: str = "7") -> Launch:
    """Put on disk that runs were submitted, each in a task of its own."""
    resources = Resources(partition="main", setup=("module load x",))
    array = Array("bench-x-0", resources, tuple((j.run_id,) for j in jobs), job=job)
    launch = _launch(store.launches / "x", array)
    launch.write_jobs(jobs)
    launch.write()
    return launch


def launch_of_workers(results: Path, job: str = "7") -> Launch:
    """Put on disk that three workers of a study were submitted, in two tasks."""
    tasks = (("worker 0", "worker 1"), ("worker 2",))
    folder = results / "studies" / "jtt-umnist" / "launches" / "x"
    launch = _launch(folder, Array(STUDY_ARRAY, Resources(), tasks, job=job))
    launch.write()
    launch.write_file("tuning.json", TUNING)
    return launch
