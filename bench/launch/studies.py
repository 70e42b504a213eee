"""Workers of a study on a cluster: an array whose tasks all draw from the same journal."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.launch.crew import run_crew
from bench.launch.dispatch import require_cluster
from bench.launch.ledger import Array, launches_lock
from bench.launch.profile import Profile
from bench.launch.study_queue import study_workers, worker_lock, write_tuning
from bench.launch.task import RESUMES
from bench.lease import Lease
from bench.store import Store
from bench.tune import Say, Tuning
from bench.tuned import finish


class StudyTask:
    """Some workers; stopped and started again they take up what they, or others, have left.

    As in the tasks of runs, the work is done by processes of its own, which do not hear SLURM's
    warnings: those come to this one, which lets submitit requeue it and ends. Nothing is carried
    from one start to the next but the journal and the trials' own checkpoints.
    """

    def __init__(self, tuning: Tuning, workers: int, lock: Path) -> None:
        self.tuning = tuning
        self.workers = workers
        self.lock = lock

    def __call__(self) -> None:
        """Make trials until the study has all; every task then writes the same preset."""

        def say(text: str) -> None:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

        with Lease(self.lock).hold(wait=True):
            run_crew(self.tuning, self.workers, say, RESUMES)
        finish(self.tuning)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Let submitit bring us back as we are: journal and checkpoints are on disk already."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def submit_workers(tuning: Tuning, workers: int, profile: Profile, say: Say) -> str:
    """Submit workers of a study until it has as many as that; give SLURM's number of their array.

    Workers that were submitted before and still have as many trials to make are not submitted
    again; the number is empty if that leaves nothing to do.
    """
    from bench.launch.slurm import prepare_launch, send_array

    cluster = require_cluster()
    store = Store(tuning.folder)
    with launches_lock(store).hold(wait=True):
        known = study_workers(tuning.results, submitting=True)
        earlier = [w for w in known if w.study.name == tuning.name]
        there = sum(w.active for w in earlier if w.tuning.trials >= tuning.trials)
        if there:
            say(f"{there} workers are queued or running on a cluster already")
        if there >= workers:
            return ""
        for gone in earlier:
            if not gone.active:  # what they have left to do, the new ones do
                gone.launch.end()
        asked = profile.resources(tuning.job())
        launch = prepare_launch(cluster, profile, tuning.machine(), store, say)
        names = [f"worker {number}" for number in range(workers - there)]
        tasks = tuple(tuple(names[n : n + asked.pack]) for n in range(0, len(names), asked.pack))
        array = Array(f"bench-tune-{tuning.name}-{launch.id}", asdict(asked), tasks)
        write_tuning(launch, tuning)
        launch = launch.with_array(array)
        launch.write()
        crews = [
            StudyTask(
                replace(tuning, device=asked.device, threads=max(1, asked.cpus // len(members))),
                len(members),
                worker_lock(launch, number),
            )
            for number, members in enumerate(tasks)
        ]
        what = f"{len(names)} worker{'s' * (len(names) != 1)}"
        sent = send_array(launch, array, asked, crews, what)
        launch.with_array(sent).write()
    say(f"submitted array {sent.job}: {what} in {len(tasks)} task{'s' * (len(tasks) != 1)}")
    return sent.job
