"""Launches on disk: which runs were submitted as which tasks, so that anyone can look later.

launches/<id>/launch.json    arrays, their tasks, and the runs (or a study's workers) of each task
launches/<id>/jobs.json      the jobs themselves; tasks read them here
launches/<id>/tuning.json    in the place of jobs: what a study's workers tune
launches/<id>/code/          the code they run
launches/<id>/tasks/         what submitit keeps, and what tasks printed
launches/<id>/workers/       locks that a study's tasks hold while they run
launches/<id>/ended          there when nothing is left to look after

Runs are submitted from `launches/` of a results folder, workers from that of a study's folder.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.job import Job
from bench.launch.profile import Resources
from bench.provenance import GitState
from bench.store import Store
from datasets.config import Values, coerce, field_types
from datasets.errors import BenchError
from datasets.files import Damaged, atomic_file, read_checked, set_aside, with_checksum
from datasets.lock import Lock

LEDGER_FORMAT = 2  # of launch.json; files of the first format do not name theirs


@dataclass(frozen=True)
class Array:
    """Tasks that ask for the same resources and wait for the same others."""

    name: str  # SLURM's name of the job; unique, so that an array can be found by it
    resources: Resources
    tasks: tuple[tuple[str, ...], ...]  # the run ids of each task, or the names of its workers
    produces: Mapping[str, int] = field(default_factory=dict)  # shared stages: who computes each
    depends_on: tuple[str, ...] = ()  # the tasks that have to end first
    job: str = ""  # SLURM's number, empty as long as it is not submitted

    def task(self, number: int) -> str:
        """Return SLURM's name of a task; empty as long as it has none."""
        return self.job if len(self.tasks) == 1 or not self.job else f"{self.job}_{number}"


@dataclass(frozen=True)
class Launch:
    """One submission; only its user, on its cluster, can learn from SLURM how it is."""

    id: str
    folder: Path
    created: float  # by the clock that also dates the records
    user: str
    cluster: str
    profile: str
    path_arguments: str  # those that name the data root and the results folder
    git: GitState
    code: str  # the copy of the code that it runs; empty for an installed package
    arrays: tuple[Array, ...] = ()

    def write(self) -> None:
        """Put it on disk."""
        content = {name: value for name, value in asdict(self).items() if name != "folder"}
        with atomic_file(self.folder / "launch.json") as draft:
            draft.write_text(with_checksum({"format": LEDGER_FORMAT, **content}))

    def with_array(self, array: Array) -> Launch:
        """Return the launch with an array replaced by what has become of it, or added."""
        others = tuple(known for known in self.arrays if known.name != array.name)
        return replace(self, arrays=(*others, array))

    def write_jobs(self, jobs: Sequence[Job]) -> None:
        """Put the jobs on disk."""
        with atomic_file(self.folder / "jobs.json") as draft:
            draft.write_text(with_checksum({job.run_id: job.to_json() for job in jobs}))

    def tuning(self) -> Values:
        """Read what the workers of a study tune."""
        return read_checked(self.folder / "tuning.json")

    def write_tuning(self, tuning: Values) -> None:
        """Put on disk what the workers of a study tune."""
        with atomic_file(self.folder / "tuning.json") as draft:
            draft.write_text(with_checksum(tuning))

    def mark_complete(self) -> None:
        """Note that there is nothing left to look after, unless we may only read."""
        with contextlib.suppress(OSError):
            (self.folder / "ended").touch()


def launches_lock(store: Store) -> Lock:
    """Return the lock under which runs are submitted and lost ones are marked."""
    return Lock(store.launches / "lock")


def open_launches(store: Store) -> Iterator[Launch]:
    """Read the launches that may still have something under way, oldest first."""
    for folder in _open_folders(store):
        if _read_or_set_aside(folder / "launch.json").get("format") == LEDGER_FORMAT:
            yield read_launch(folder)


def read_launch(folder: Path) -> Launch:
    """Read a launch as it is now."""
    content, kinds = read_checked(folder / "launch.json"), field_types(Launch)
    del kinds["folder"]
    values = {name: coerce(content[name], kind, f"launch.{name}") for name, kind in kinds.items()}
    return Launch(folder=folder, **values)


def read_jobs(folder: Path) -> dict[str, Job]:
    """Read the jobs of a launch, by run id."""
    content = read_checked(folder / "jobs.json")
    return {run_id: Job.from_json(values) for run_id, values in content.items()}


def _read_or_set_aside(path: Path) -> Values:
    """Read a ledger; one that is damaged is set aside, and its runs are just missing."""
    try:
        return read_checked(path)
    except Damaged as error:
        damaged = f"launch {path.parent.name} is damaged ({error}) and not followed any more"
        sys.stderr.write(f"{damaged}: squeue shows what of it still runs\n")
        with contextlib.suppress(BenchError, OSError):  # where we may only read, it stays
            set_aside(path, path.parent / "damaged", str(error))
        return {}


def _open_folders(store: Store) -> list[Path]:
    written = sorted(path.parent for path in store.launches.glob("*/launch.json"))
    return [folder for folder in written if not (folder / "ended").exists()]


def old_launches(store: Store) -> list[Path]:
    """Return the open launches that an earlier version submitted, those of studies among them.

    They cannot be followed from here: they have to be finished or cancelled by the version that
    submitted them before a results folder is used with this one.
    """
    stores = [store, *(Store(study) for study in sorted((store.root / "studies").glob("*")))]
    return [
        folder
        for each in stores
        for folder in _open_folders(each)
        if _is_old(_read_or_set_aside(folder / "launch.json"), each)
    ]


def _is_old(content: Values, store: Store) -> bool:
    """Return whether a launch is in the first format, and a run of it has no record since."""
    if not content or "format" in content:
        return False
    arrays, created = content.get("arrays"), content.get("created")
    if not isinstance(arrays, list) or not isinstance(created, float):
        return True
    runs = [run for array in arrays for task in array["tasks"] for run in task]
    return any(store.record_mtime(run) < created for run in runs)
