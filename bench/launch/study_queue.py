"""What has become of a study's submitted workers, from disk, cross-checked with SLURM.

studies/<study>/launches/<id>/launch.json    the array, and the workers of each of its tasks
studies/<study>/launches/<id>/tuning.json    what they tune
studies/<study>/launches/<id>/workers/       locks that tasks hold while they run
studies/<study>/launches/<id>/ended          there when nobody need look after them any more
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.files import atomic_file, to_json
from bench.launch.ledger import Launch, launches_lock, open_launches, read_launch
from bench.launch.queue import States, with_states
from bench.lease import Lease
from bench.store import Store
from bench.study import count_finished
from bench.tune import Tuning


@dataclass(frozen=True)
class Workers:
    """What a launch has of workers for a study that is not finished.

    Attributes:
        study: its folder.
        finished: the study's finished trials; what it is to have is in `tuning`.
        array: SLURM's number; empty if it never got one.
        queued, running: workers that SLURM has, or may have where it cannot be asked.
        jobs: SLURM's names of the tasks that they are in.
    """

    launch: Launch
    study: Path
    tuning: Tuning
    finished: int
    array: str
    queued: int
    running: int
    jobs: tuple[str, ...]

    @property
    def active(self) -> int:
        """Count the workers that are going to make trials."""
        return self.queued + self.running

    def matches(self, part: str) -> bool:
        """Tell whether a user means these: by a beginning or end of the study, or by the array."""
        name = self.study.name
        return name.startswith(part) or name.endswith(part) or part == self.array

    def facts(self) -> dict[str, Any]:
        """Describe them as `status --json` does."""
        return {
            "study": self.study.name,
            "method": self.tuning.method,
            "dataset": self.tuning.dataset,
            "finished": self.finished,
            "asked": self.tuning.trials,
            "array": self.array,
            "queued": self.queued,
            "running": self.running,
            "path": str(self.study),
        }


def study_workers(results: Path, *, submitting: bool = False) -> list[Workers]:
    """Look at every launch of workers whose study is not finished, oldest first.

    One whose workers are all gone is among them: its study waits for somebody to go on with it.

    Args:
        results: where studies are kept.
        submitting: whether it is us who hold the lock under which workers are submitted.
    """
    folders = sorted(path for path in (results / "studies").glob("*") if path.is_dir())
    launches = [launch for folder in folders for launch in open_launches(Store(folder))]
    found = []
    for launch, states in with_states(launches) if launches else ():
        workers = _look(launch, states, submitting=submitting)
        never_sent = not workers.array and not workers.active
        if never_sent and read_launch(launch.folder).arrays[0].job:
            never_sent = False  # they were submitted since the first look
        if never_sent or (workers.finished >= workers.tuning.trials and not workers.jobs):
            with contextlib.suppress(OSError):  # we may only be allowed to read
                launch.end()
        else:
            found.append(workers)
    return found


def worker_lock(launch: Launch, number: int) -> Path:
    """Name the lock that a task holds while its workers work."""
    return launch.folder / "workers" / str(number)


def write_tuning(launch: Launch, tuning: Tuning) -> None:
    """Keep what a launch's workers tune."""
    content = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(tuning).items()}
    with atomic_file(launch.folder / "tuning.json") as draft:
        draft.write_text(to_json(content))


def read_tuning(launch: Launch) -> Tuning:
    """Read what a launch's workers tune."""
    content = json.loads((launch.folder / "tuning.json").read_text())
    content |= {key: Path(content[key]) for key in ("data_root", "results")}
    return Tuning(**content)


def _look(launch: Launch, states: States | None, *, submitting: bool) -> Workers:
    tuning, study = read_tuning(launch), launch.folder.parents[1]
    finished = count_finished(study)
    (array,) = launch.arrays
    # Somebody may be about to submit them; and where SLURM is silent, they may be in its queue.
    sending = not array.job and not submitting and launches_lock(Store(study)).held()
    hopeful = sending or (states is None and finished < tuning.trials)
    number_known, queued, running, jobs = array.job, 0, 0, []
    for number, members in enumerate(array.tasks):
        task = states.get((array.name, number)) if states is not None else None
        there = task is not None and not task.over
        if Lease(worker_lock(launch, number)).held() or (there and task and not task.waiting):
            running += len(members)
        elif there or hopeful:
            queued += len(members)
        else:
            continue
        job = task.job if task is not None else array.task(number) if array.job else ""
        number_known = number_known or job.partition("_")[0]
        jobs.append(job)
    return Workers(launch, study, tuning, finished, number_known, queued, running, tuple(jobs))
