"""Launches on disk: which runs were submitted as which tasks, so that anybody can look later.

launches/<id>/launch.json    arrays, their tasks, and the runs of each task
launches/<id>/jobs.json      the jobs themselves
launches/<id>/code/          the code they run
launches/<id>/tasks/         what submitit keeps, and what tasks printed
launches/<id>/ended          there when every run has a record
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.files import atomic_file, to_json
from bench.lease import Lease
from bench.plan import Job
from bench.store import Store


@dataclass(frozen=True)
class Array:
    """Tasks that ask for the same resources and wait for the same others.

    Attributes:
        name: SLURM's name of the job; unique, so that an array can be found by it.
        job: SLURM's number, empty as long as it is not submitted.
        tasks: the run ids of each task.
        makes: shared stages by name, and the number of the task that computes each.
        after: the tasks that have to end first.
    """

    name: str
    resources: dict[str, Any]
    tasks: tuple[tuple[str, ...], ...]
    makes: dict[str, int] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    job: str = ""

    def task(self, number: int) -> str:
        """Give SLURM's name of a task."""
        return self.job if len(self.tasks) == 1 else f"{self.job}_{number}"


@dataclass(frozen=True)
class Launch:
    """One submission; only its user, on its cluster, can learn from SLURM how it is."""

    id: str
    folder: Path
    created: float
    user: str
    cluster: str
    profile: str
    places: str
    git: dict[str, Any]
    code: str
    arrays: tuple[Array, ...] = ()

    def write(self) -> None:
        """Put it on disk."""
        content = {k: v for k, v in asdict(self).items() if k != "folder"}
        with atomic_file(self.folder / "launch.json") as draft:
            draft.write_text(to_json(content))

    def with_array(self, array: Array) -> Launch:
        """Replace an array by what has become of it, or add it."""
        others = tuple(a for a in self.arrays if a.name != array.name)
        return replace(self, arrays=(*others, array))

    def jobs(self) -> dict[str, Job]:
        """Read the jobs."""
        content = json.loads((self.folder / "jobs.json").read_text())
        return {
            run_id: Job(**{**values, "stack": tuple(values.get("stack", ()))})  # JSON has lists
            for run_id, values in content.items()
        }

    def write_jobs(self, jobs: Sequence[Job]) -> None:
        """Keep the jobs."""
        with atomic_file(self.folder / "jobs.json") as draft:
            draft.write_text(json.dumps({job.run_id: asdict(job) for job in jobs}))

    def end(self) -> None:
        """Mark that there is nothing left to look after."""
        (self.folder / "ended").touch()


def launches_lock(store: Store) -> Lease:
    """Give the lock under which runs are claimed and the lost are buried."""
    return Lease(store.launches / "lock")


def new_launch_id() -> str:
    """Name a launch so that names sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def open_launches(store: Store) -> Iterator[Launch]:
    """Read the launches that may still have something under way, oldest first."""
    if not store.launches.is_dir():
        return
    for folder in sorted(path for path in store.launches.iterdir() if path.is_dir()):
        if (folder / "launch.json").is_file() and not (folder / "ended").exists():
            yield read_launch(folder)


def read_launch(folder: Path) -> Launch:
    """Read a launch as it is now."""
    content = json.loads((folder / "launch.json").read_text())
    arrays = tuple(_array(values) for values in content.pop("arrays"))
    return Launch(folder=folder, arrays=arrays, **content)


def _array(values: dict[str, Any]) -> Array:
    tasks = tuple(tuple(runs) for runs in values.pop("tasks"))
    return Array(tasks=tasks, after=tuple(values.pop("after")), **values)
