"""Workers of a study on a cluster: submitting them, and what has become of them.

All workers share the study's journal. A launch of them is kept in the study's folder as one of runs
is in the results folder, with `tuning.json`, which says what is tuned, in the place of the jobs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from bench.api import log_to_stderr
from bench.launch import slurm
from bench.launch.profile import Profile
from bench.launch.queue import (
    Array,
    Launch,
    States,
    launches_lock,
    open_launches,
    read_launch,
    stop_following,
    with_states,
)
from bench.launch.scheduler import require_cluster
from bench.store import Store
from bench.tuning.source import StudySource, Tuning, missing_trials
from bench.tuning.study import count_finished
from bench.tuning.summary import finish_study
from datasets.fetch import Log
from datasets.files import Damaged, read_checked
from datasets.lock import Lock


def submit(tuning: Tuning, *, workers: int = 1, profile: Profile, log: Log) -> bool:
    """Submit workers until a study has as many as that; return whether it lacks any trials.

    Workers that were submitted before and still have as many trials to make are not submitted
    again. The preset is written when the last trial ends.
    """
    cluster = require_cluster()
    missing = missing_trials(tuning, workers, log)
    if missing <= 0:
        return False
    workers = min(workers, missing)
    # Tasks start in another folder.
    tuning = replace(tuning, data_root=tuning.data_root.resolve(), results=tuning.results.resolve())
    options, store = tuning.options(), Store(tuning.folder)
    with launches_lock(store).hold(wait=True):
        known = study_workers(tuning.results, submitting=True)
        earlier = [found for found in known if found.study.name == tuning.name]
        there = sum(found.active for found in earlier if found.trials >= tuning.trials)
        if there:
            log(f"{there} workers are queued or running on a cluster already")
        if there >= workers:
            return True
        for found in earlier:
            if not found.active:  # what they have left to do, the new ones do
                found.launch.mark_complete()
        asked = profile.resources(tuning.base_job)
        launch = slurm.new_launch(cluster, profile, options, store, log)
        packed = slurm.chunks([f"worker {number}" for number in range(workers - there)], asked.pack)
        array = Array(f"bench-tune-{tuning.name}-{launch.id}", asked, packed)
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(tuning).items()}
        launch.write_file("tuning.json", plain)
        launch.with_array(array).write()
        source = partial(StudySource, tuning, log_to_stderr)
        finish = partial(finish_study, tuning)  # every task writes the same
        place, tasks = replace(options, device=asked.device), []
        for number, members in enumerate(packed):
            lock = worker_lock(launch, number)
            task = slurm.ArrayTask(source, place, tuning.trials, len(members), 0, lock, finish)
            tasks.append(task)
        sent = slurm.send(launch, array, tasks, "worker")
        launch.with_array(sent).write()
    log(f"submitted array {sent.job}: {sent.describe('worker')}")
    return True


@dataclass(frozen=True)
class StudyWorkers:
    """The workers that a launch has for a study that is not finished.

    SLURM has those that are queued or running, or may have them where it cannot be asked.
    """

    launch: Launch
    study: Path  # its folder
    method: str
    dataset: str
    trials: int  # how many finished ones they are to reach
    finished: int  # the study's finished trials
    array: str  # SLURM's number; empty if it never got one
    queued: int = 0
    running: int = 0
    jobs: tuple[str, ...] = ()  # SLURM's names of the tasks that they are in

    @property
    def active(self) -> int:
        """How many workers are going to make trials."""
        return self.queued + self.running

    def matches(self, part: str) -> bool:
        """Return whether a name means them: a beginning or end of the study's, or the array's."""
        name = self.study.name
        return name.startswith(part) or name.endswith(part) or part == self.array

    def to_json(self) -> dict[str, object]:
        """Return them as `status --json` has them."""
        return {
            "study": self.study.name,
            "method": self.method,
            "dataset": self.dataset,
            "finished": self.finished,
            "asked": self.trials,
            "array": self.array,
            "queued": self.queued,
            "running": self.running,
            "path": str(self.study),
        }


def worker_lock(launch: Launch, number: int) -> Path:
    """Return the lock that a task holds while its workers work."""
    return launch.folder / "workers" / str(number)


def study_workers(results: Path, *, submitting: bool = False) -> list[StudyWorkers]:
    """Return the launches of workers whose study is not finished, oldest first.

    One whose workers are all gone is among them: its study can be taken up again. `submitting` says
    that it is us who hold the lock under which workers are submitted.
    """
    folders = sorted(path for path in (results / "studies").glob("*") if path.is_dir())
    launches = [launch for folder in folders for launch in open_launches(Store(folder))]
    found = []
    for launch, states in with_states(launches):
        finished = count_finished(launch.folder.parents[1])
        try:
            workers = _workers_of(launch, finished, states, submitting=submitting)
        except Damaged as error:
            stop_following(launch.folder, error)
            continue
        never_sent = not workers.array and not workers.active
        if never_sent and read_launch(launch.folder).arrays[0].job:
            never_sent = False  # they were submitted since the first look
        if never_sent or (finished >= workers.trials and not workers.jobs):
            launch.mark_complete()
        else:
            found.append(workers)
    return found


def _workers_of(
    launch: Launch, finished: int, states: States | None, *, submitting: bool
) -> StudyWorkers:
    study, (array,) = launch.folder.parents[1], launch.arrays
    tuning = read_checked(launch.folder / "tuning.json")
    method, dataset, trials = tuning["method"], tuning["dataset"], int(tuning["trials"])
    # They may be about to be submitted; and where SLURM is silent, they may be in its queue.
    sending = not array.job and not submitting and launches_lock(Store(study)).held()
    assumed = sending or (states is None and finished < trials)
    number_of_array, queued, running, jobs = array.job, 0, 0, []
    for number, members in enumerate(array.tasks):
        task = (states or {}).get((array.name, number))
        if Lock(worker_lock(launch, number)).held() or (task is not None and task.running):
            running += len(members)
        elif assumed or (task is not None and not task.over):
            queued += len(members)
        else:
            continue
        jobs.append(task.job if task is not None else array.task(number))
        number_of_array = number_of_array or jobs[-1].partition("_")[0]
    known = StudyWorkers(launch, study, method, dataset, trials, finished, number_of_array)
    return replace(known, queued=queued, running=running, jobs=tuple(jobs))
