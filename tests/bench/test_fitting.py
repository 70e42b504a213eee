"""The fit in a process of its own: what goes in, what comes back, and how it may end."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.context import FitStopped
from bench.fitting import FitFailed, FitProcess, FitTask, fit_here
from bench.job import Job, Request, expand
from bench.record import RECORD_KEYS, Status
from bench.runner import RunOptions, checked_details, fit_task, load_data, run_job
from bench.store import Store
from datasets.base import Task
from datasets.catalogue import get_dataset
from datasets.errors import BenchError
from methods.backbones import FittedClassifier
from methods.base import METHODS, Context, Fitted, Method, register
from methods.erm import ErmConfig

HELD: list[Any] = []


class Ending(Method):
    """A fit that ends in the way its configuration's batch size says."""

    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        ctx.report(stage="ending", epoch=1, epochs=2)
        if config.batch_size == 2:
            raise ZeroDivisionError("by design")
        if config.batch_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.batch_size == 4:
            return FittedClassifier(nn.Linear(1, 1), details={"odd": lambda: None})
        if config.batch_size == 5:
            time.sleep(600)
        if config.batch_size == 6:
            raise Unpicklable("with", "two arguments")
        if config.batch_size == 7:
            return FittedClassifier(nn.Linear(1, 1), details={"metrics": {"test": {"wga": 100}}})
        if config.batch_size == 8:
            get_dataset(task.name).load(Path(), None)
        if config.batch_size == 9:
            searched = sorted(_search())
            return FittedClassifier(nn.Linear(1, 1), details={"ending": {"found": searched}})
        raise AssertionError(config.batch_size)

    def search_space(self, trial: Any, task: Task) -> Any:
        raise NotImplementedError


class Unpicklable(Exception):
    """An error that cannot be made again from its text."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def _search() -> Iterator[str]:
    """Name what a method finds that looks everywhere it can from inside a fit."""
    from datasets.base import LabelledSplit, LoadedData

    things = [*gc.get_objects(), *HELD]
    for frame in sys._current_frames().values():
        while frame is not None:
            things += list(frame.f_locals.values())
            frame = frame.f_back  # type: ignore[assignment]
    yield from (type(t).__name__ for t in things if isinstance(t, LoadedData | LabelledSplit))
    yield from (f"thread {t.name}" for t in threading.enumerate() if t.name == "audit")


@pytest.fixture(autouse=True)
def ending() -> Iterator[None]:
    register("ending", version=1, config=ErmConfig)(Ending)
    yield
    METHODS.pop("ending")


@pytest.fixture
def job(digits_root: Path) -> Job:
    return job_of(digits_root, 2)


def job_of(root: Path, batch_size: int) -> Job:
    settings = {"ending.batch_size": str(batch_size)}
    return expand(Request(("ending",), ("umnist",), (0,), root, overrides=settings, quick=True))[0]


def given(job: Job, root: Path, results: Path, **options: Any) -> FitTask:
    how = RunOptions(root, results, **options)
    return fit_task(job, load_data(job, root), how, Store(results))


def failure(batch_size: int, root: Path, results: Path) -> BaseException:
    process = FitProcess(fork=False)
    with pytest.raises(FitFailed) as caught:
        process.fit(given(job_of(root, batch_size), root, results), lambda values: None, None)
    return caught.value.error


def test_error_comes_back_with_its_traceback(digits_root: Path, tmp_path: Path) -> None:
    error = failure(2, digits_root, tmp_path)
    assert isinstance(error, ZeroDivisionError) and str(error) == "by design"
    assert "in fit" in str(error.__cause__)


def test_error_that_cannot_be_sent_reads_the_same(digits_root: Path, tmp_path: Path) -> None:
    assert "Unpicklable: with two arguments" in str(failure(6, digits_root, tmp_path))


def test_killed_fit_says_how_it_died(digits_root: Path, tmp_path: Path) -> None:
    error = failure(3, digits_root, tmp_path)
    assert getattr(error, "kind", "") == "worker_died"
    assert "SIGKILL" in str(error)


def test_model_that_cannot_be_sent_is_named(digits_root: Path, tmp_path: Path) -> None:
    error = failure(4, digits_root, tmp_path)
    assert "cannot be sent" in str(error) and "ending-umnist" in str(error)


def test_fit_cannot_load_a_dataset(digits_root: Path, tmp_path: Path) -> None:
    assert "cannot load" in str(failure(8, digits_root, tmp_path))


def test_hanging_fit_ends_with_the_run(digits_root: Path, tmp_path: Path) -> None:
    process = FitProcess(fork=False)

    def interrupt(values: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.fit(given(job_of(digits_root, 5), digits_root, tmp_path), interrupt, None)
    assert not process.process.is_alive()


def test_stop_is_answered_before_the_next_step(digits_root: Path, tmp_path: Path) -> None:
    task = given(job_of(digits_root, 2), digits_root, tmp_path, steered=True)
    for fit in (FitProcess(fork=False).fit, fit_here):
        with pytest.raises(FitFailed) as caught:
            fit(task, lambda values: "too slow", None)
        assert isinstance(caught.value.error, FitStopped)
        assert caught.value.error.message == "too slow"
        assert [cost.name for cost in caught.value.stages] == ["fit"]


def test_search_from_inside_finds_no_data(digits_root: Path, tmp_path: Path) -> None:
    """Frames, the collector, threads and module state of the process that fits."""
    job = job_of(digits_root, 9)
    task = given(job, digits_root, tmp_path)
    HELD.append(load_data(job, digits_root))  # in this process; the other has a list of its own
    try:
        apart = FitProcess(fork=False).fit(task, lambda values: None, None)
        here = fit_here(task, lambda values: None, None)
    finally:
        HELD.clear()
    assert apart.fitted.details["ending"] == {"found": []}
    assert here.fitted.details["ending"] != {"found": []}, "the search finds nothing anywhere"


def test_details_may_not_overwrite_the_record(digits_root: Path, tmp_path: Path) -> None:
    options = RunOptions(digits_root, tmp_path, isolate=False)
    record = run_job(job_of(digits_root, 7), options, lambda values: None)
    assert record.status is Status.FAILED and record.failure is not None
    assert "metrics" in record.failure.message
    stored = Store(tmp_path).record(record.run_id)
    assert stored is not None and stored.test.wga is None


@pytest.mark.parametrize("key", sorted(RECORD_KEYS))
def test_no_field_of_the_record_can_be_a_detail(key: str) -> None:
    with pytest.raises(BenchError, match=f"the keys {key}, which are the record's"):
        checked_details({"own": {"figure": 1}, key: {"test": {"wga": 100.0}}})


def test_details_have_a_size_limit() -> None:
    kept = {"own": {"figures": [0.5] * 1000}}
    assert checked_details(kept) == kept
    with pytest.raises(BenchError, match=r"details\['own'\] .* more than the 1,048,576"):
        checked_details({"own": {"figures": [0.123456789] * 100_000}})


def test_a_run_that_was_finished_meanwhile_is_not_made_again(
    digits_root: Path, tmp_path: Path
) -> None:
    (job,) = expand(Request(("erm",), ("umnist",), (0,), digits_root, quick=True))
    options = RunOptions(digits_root, tmp_path, isolate=False)
    first, reported = run_job(job, options, lambda values: None), []
    assert first.done
    again = run_job(job, options, lambda values: reported.append(values))
    assert again == Store(tmp_path).record(job.run_id)
    assert reported == []


def test_unset_random_state_of_this_process_does_not_matter(
    digits_root: Path, tmp_path: Path
) -> None:
    """The same fit here and in a process of its own, whatever was drawn before."""
    (job,) = expand(Request(("erm",), ("umnist",), (0,), digits_root, quick=True))
    torch.rand(7)
    task = given(job, digits_root, tmp_path / "one")
    apart = FitProcess(fork=False).fit(task, lambda values: None, None)
    other = replace(task.settings, stages=tmp_path / "two" / "stages")
    here = fit_here(replace(task, settings=other), lambda values: None, None)
    for one, two in zip(
        apart.fitted.module.parameters(), here.fitted.module.parameters(), strict=True
    ):
        assert torch.equal(one, two)
