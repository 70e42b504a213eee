"""What one task of an array does: the same as a launcher on a workstation, for its few runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from bench.execute import Machine
from bench.launch.local import run_local
from bench.lease import Busy
from bench.plan import Job
from bench.progress import Plain
from bench.records import failed_record
from bench.store import Store
from datasets.errors import BenchError

RESUMES = 3  # how often a run goes on whose process was killed while its task lived


class TimeLimit(BenchError):
    """A task ran into its time limit as often as it may."""

    kind = "time_limit"


class Task:
    """Some runs, each in a process of its own, that can be stopped and started at any time.

    Nothing is carried from one start to the next but what the runs keep themselves, epoch by epoch:
    a requeue that nobody announced resumes in the same way as one that was.
    """

    def __init__(self, jobs: Sequence[Job], machine: Machine, retries: int) -> None:
        self.jobs = tuple(jobs)
        self.machine = machine
        self.retries = retries

    def __call__(self) -> list[str]:
        """Run what is not done yet; records go to the store, as everywhere."""
        from submitit.core.utils import UncompletedJobError

        watcher = Plain(len(self.jobs), Console(stderr=True))
        began = time.time()
        try:
            records = run_local(
                *(self.jobs, self.machine, len(self.jobs), watcher),
                retries=self.retries,
                resumes=RESUMES,
            )
        except UncompletedJobError as refused:  # submitit will not requeue us once more
            return [self._give_up(job, refused, began) for job in self.jobs]
        return [str(record["status"]) for record in records]

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Let submitit bring us back as we are: the runs' checkpoints are on disk already."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)

    def _give_up(self, job: Job, refused: Exception, began: float) -> str:
        """Leave a failed record of a run that has neither a result nor failed since we began."""
        store = Store(self.machine.results)
        error = TimeLimit(
            f"not finished when the task reached its last time limit: {refused}",
            "give it more minutes or requeues in the cluster profile; it goes on from its last "
            "epoch",
        )
        try:
            with store.lock(job.run_id).hold(wait=False):
                record = store.record(job.run_id)
                if record is None or (
                    record["status"] != "done" and store.written(job.run_id) < began
                ):
                    record = failed_record(job, error, began, self.machine.arguments())
                    store.write(record)
                return str(record["status"])
        except Busy:  # whoever runs it now will tell
            return "running"
