from __future__ import annotations

import pytest
from records import a_job, a_record

from bench.job import Job
from bench.launch.progress import Display
from bench.launch.remaining import WithRemaining
from bench.record import Record
from datasets.config import Values


class Seen(Display):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def started(self, job: Job) -> None:
        self.calls.append("started")

    def progressed(self, job: Job, progress: Values) -> None:
        self.calls.append("progressed")

    def finished(self, job: Job, record: Record) -> None:
        self.calls.append("finished")


def test_the_rest_is_expected_by_how_fast_this_machine_was() -> None:
    jobs = [a_job(seed=seed) for seed in range(4)]
    now, lines, seen = [0.0], list[str](), Seen()
    expected = {job.run_id: 100.0 for job in jobs}
    shown = WithRemaining(seen, expected, 1, lines.append, clock=lambda: now[0])
    assert shown.seconds() == pytest.approx(400.0)
    shown.started(jobs[0])
    now[0] = 50.0
    shown.progressed(jobs[0], {})
    assert shown.seconds() == pytest.approx(350.0)
    now[0] = 200.0  # twice as slow as expected
    shown.finished(jobs[0], a_record(job=jobs[0]))
    assert shown.seconds() == pytest.approx(600.0)
    assert len(lines) == 1 and lines[0].startswith("about 10 min left, until about ")
    assert seen.calls == ["started", "progressed", "finished"]


def test_a_long_run_is_not_silent() -> None:
    job, now, lines = a_job(), [0.0], list[str]()
    shown = WithRemaining(Seen(), {job.run_id: 1000.0}, 1, lines.append, clock=lambda: now[0])
    shown.started(job)
    for now[0] in (60.0, 119.0, 121.0, 130.0):
        shown.progressed(job, {})
    assert [line.split(",")[0] for line in lines] == ["about 15 min left"]


def test_workers_share_the_rest_and_the_longest_run_has_to_end() -> None:
    jobs = [a_job(seed=seed) for seed in range(3)]
    expected = dict(zip([job.run_id for job in jobs], (300.0, 60.0, 60.0), strict=True))
    shown = WithRemaining(Seen(), expected, 2, print, clock=lambda: 0.0)
    assert shown.seconds() == pytest.approx(300.0)


def test_what_is_not_known_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    job, lines = a_job(), list[str]()
    shown = WithRemaining(Seen(), {}, 2, lines.append)
    shown.started(job)
    shown.finished(job, a_record(job=job))
    assert shown.seconds() is None and lines == []
