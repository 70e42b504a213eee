"""How much longer a grid takes, told after every run that ends, and now and then in between.

What runs like these took says how long each should take; the runs that have ended since say how
this machine compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from bench.cost import format_seconds
from bench.job import Job
from bench.launch.progress import Display
from bench.record import Record
from datasets.config import Values

LEAST_SECONDS = 30.0  # less is not worth a line
QUIET_SECONDS = 120.0  # between two lines while nothing ends


class WithRemaining(Display):
    """A display that adds, after each run, how many are left and how long they should take."""

    def __init__(
        self,
        display: Display,
        expected: Mapping[str, float],
        workers: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.display, self.log, self.clock = display, log, clock
        self.left, self.workers = dict(expected), workers
        self._began: dict[str, float] = {}
        self._last_line = clock()
        self._expected = self._taken = 0.0  # of the runs that have ended

    def started(self, job: Job) -> None:
        """Show that a job was handed to a worker."""
        self._began[job.run_id] = self.clock()
        self.display.started(job)

    def progressed(self, job: Job, progress: Values) -> None:
        """Show how far a running job is."""
        self.display.progressed(job, progress)
        if self.clock() - self._last_line > QUIET_SECONDS:
            self._tell()

    def finished(self, job: Job, record: Record) -> None:
        """Show how a job ended, and what is left."""
        self.display.finished(job, record)
        began = self._began.pop(job.run_id, None)
        expected = self.left.pop(job.run_id, None)
        if record.done and began is not None and expected:
            self._expected += expected
            self._taken += self.clock() - began
        self._tell()

    def _tell(self) -> None:
        """Print how long the rest should take, if that is known and long."""
        self._last_line = self.clock()
        seconds = self.seconds()
        if seconds is not None and seconds >= LEAST_SECONDS:
            end = time.strftime("%H:%M", time.localtime(time.time() + seconds))
            self.log(f"about {format_seconds(seconds)} left, until about {end}")

    def seconds(self) -> float | None:
        """Return how long the rest should take; none where nothing is known of it."""
        if not self.left:
            return None
        pace = self._taken / self._expected if self._expected else 1.0
        now = self.clock()
        each = [
            max(0.0, pace * seconds - (now - self._began.get(run_id, now)))
            for run_id, seconds in self.left.items()
        ]
        return max(max(each), sum(each) / self.workers)
