"""A study as a source of jobs: what it hands out, and what it makes of the records it gets back."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.job import Job
from bench.launch.pool import JobSource
from bench.launch.profile import Profile
from bench.launch.queue import Array, Launch
from bench.launch.scheduler import Cluster
from bench.launch.slurm import ArrayTask
from bench.process import WorkerDied
from bench.record import (
    Cost,
    Metrics,
    Outcome,
    Record,
    Selection,
    StageCost,
    Status,
    failed_record,
    new_record,
)
from bench.tuning.source import MAX_WORKER_DEATHS, StudySource, Tuning
from bench.tuning.study import MAX_FAILURES, StudyFailing
from bench.tuning.workers import submit
from datasets.config import as_plain
from datasets.errors import BenchError, UsageError
from datasets.fetch import use_data_root
from datasets.files import read_checked
from datasets.intake import AddOptions, add
from methods.base import get_method
from methods.presets import preset_config
from methods.training import NonFiniteLoss

COST = Cost((StageCost("fit", "key", 3.0, 3.0, 2.0, 100, False),))


@pytest.fixture
def tuning(digits_root: Path, tmp_path: Path) -> Tuning:
    return Tuning("erm", "umnist", digits_root, tmp_path, trials=3, quick=True)


def done(job: Job, value: float = 90.0) -> Record:
    outcome = Outcome({"val": Metrics({"avg": value})}, Selection("val_avg", value, 1))
    return new_record(job, Status.DONE, outcome=outcome, cost=COST)


def failed(job: Job, error: BaseException) -> Record:
    return replace(failed_record(job, error, 0.0), cost=COST)


def taken(source: JobSource) -> Job:
    job = source.next()
    assert job is not None
    return job


def drain(source: JobSource) -> list[Job]:
    jobs = []
    while (job := source.next()) is not None:
        source.finish(job, done(job, 80.0 + len(jobs)))
        jobs.append(job)
    assert source.exhausted
    return jobs


def test_a_trial_is_a_job_without_a_test_split(tuning: Tuning) -> None:
    with StudySource(tuning, print) as source:
        job = taken(source)
    assert job.splits == ("train", "val")
    assert job.variant == "trial 0 of study erm-umnist-standin-quick"
    drawn = {name for name in job.overrides if name.startswith("erm.")}
    assert drawn and job.run_id != tuning.base_job.run_id
    assert replace(job, splits=("train", "val", "test"), variant="").run_id == job.run_id


def test_it_hands_out_as_many_as_were_asked_for(tuning: Tuning) -> None:
    lines: list[str] = []
    with StudySource(tuning, lines.append) as source:
        first, second = taken(source), taken(source)
        source.finish(second, done(second, 70.0))
        third = taken(source)
        assert source.next() is None and not source.exhausted, "two are still under way"
        source.finish(first, done(first, 95.0))
        source.finish(third, done(third, 60.0))
        assert source.exhausted and source.next() is None
    assert lines == [
        "[1/3] trial 1: val_avg 70.0000, best 70.0000  [3 s]",
        "[2/3] trial 0: val_avg 95.0000, best 95.0000  [3 s]",
        "[3/3] trial 2: val_avg 60.0000, best 95.0000  [3 s]",
    ]
    trial = tuning.open().trials()[0]
    assert trial.user_attrs["run_id"] == first.run_id
    assert trial.user_attrs["objective"] == "val_avg"
    assert (trial.user_attrs["seconds"], trial.user_attrs["image_passes"]) == (3.0, 100)


def test_launchers_share_a_study(tuning: Tuning) -> None:
    with StudySource(tuning, print) as one, StudySource(tuning, print) as other:
        first, second, third = taken(one), taken(other), taken(one)
        assert len({job.variant for job in (first, second, third)}) == 3
        assert one.next() is None and other.next() is None
        assert not one.exhausted and not other.exhausted
        one.finish(first, done(first))
        one.finish(third, done(third))
        assert not one.exhausted, "the other's trial may have to be made again"
        other.finish(second, done(second))
        assert one.next() is None and one.exhausted and other.exhausted


def test_what_is_under_way_when_it_is_closed_is_made_again(tuning: Tuning) -> None:
    with StudySource(tuning, print) as source:
        undisturbed = drain(source)
    again = replace(tuning, results=tuning.results / "again")
    with StudySource(again, print) as source:
        first = taken(source)
        source.finish(first, done(first, 80.0))
        taken(source)
    with StudySource(again, print) as source:
        later = drain(source)
    assert [job.run_id for job in (first, *later)] == [job.run_id for job in undisturbed]


def test_a_trial_that_diverged_counts(tuning: Tuning) -> None:
    lines: list[str] = []
    with StudySource(replace(tuning, trials=1), lines.append) as source:
        job = taken(source)
        source.finish(job, failed(job, NonFiniteLoss("the loss is nan", "a smaller lr")))
        assert source.exhausted
    assert lines == ["trial 0 diverged and counts as the worst"]
    (trial,) = tuning.open().trials("PRUNED")
    assert trial.user_attrs["seconds"] == 3.0 and "pruned" not in trial.user_attrs


def test_a_pruned_trial_counts(tuning: Tuning) -> None:
    lines: list[str] = []
    with StudySource(replace(tuning, trials=1), lines.append) as source:
        job = taken(source)
        source.finish(job, new_record(job, Status.PRUNED, details={"reason": "too slow"}))
        assert source.exhausted
    assert lines == ["[1/1] trial 0 pruned: too slow"]
    assert tuning.open().trials("PRUNED")[0].user_attrs["pruned"] == "too slow"


def test_failed_trials_do_not_count_and_many_of_them_end_the_study(tuning: Tuning) -> None:
    lines: list[str] = []
    source = StudySource(tuning, lines.append)
    job = taken(source)
    source.finish(job, replace(done(job), outcome=Outcome({"val": Metrics({"avg": None})})))
    assert lines == ["trial 0 failed: the trial has no value of val_avg"]
    with pytest.raises(StudyFailing, match="no such file"):
        for _ in range(MAX_FAILURES):
            job = taken(source)
            source.finish(job, failed(job, BenchError("no such file")))
    assert len(lines) == MAX_FAILURES and "trial 4 failed: no such file" in lines
    assert len(tuning.open().finished()) == 0


def test_the_trial_of_a_worker_that_died_is_made_again(tuning: Tuning) -> None:
    lines: list[str] = []
    source = StudySource(tuning, lines.append)
    first = taken(source)
    for death in range(MAX_WORKER_DEATHS - 1):
        job = taken(source) if death else first
        source.finish(job, failed(job, WorkerDied("the worker process died (signal 9)")))
        assert job.run_id == first.run_id
    assert lines[0] == "the worker process died (signal 9); trial 0 is made again"
    job = taken(source)
    assert job.run_id == first.run_id and job.variant != first.variant
    with pytest.raises(BenchError, match="signal 9"):
        source.finish(job, failed(job, WorkerDied("the worker process died (signal 9)")))
    again = taken(StudySource(tuning, print))
    assert again.run_id == first.run_id, "whenever the study goes on, so does the trial"


def test_a_trial_that_was_given_away_is_left_to_the_other(tuning: Tuning) -> None:
    lines: list[str] = []
    tuning = replace(tuning, trials=1)
    slow, other = StudySource(tuning, lines.append), StudySource(tuning, lines.append)
    mine = taken(slow)
    for trial, _ in slow._under_way.values():
        slow.study.release(trial)  # as if it had been silent for too long
    again = taken(other)
    assert again.run_id == mine.run_id
    slow.finish(mine, done(mine))
    assert "trial 0 was taken for a dead worker's" in lines[-1]
    other.finish(again, done(again))
    assert len(tuning.open().finished()) == 1


def test_a_search_space_cannot_change_the_tier(
    tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = get_method("george")

    def space(self: Any, trial: Any, task: Any) -> Any:
        return replace(preset_config(method, task.name), true_shares=True)

    monkeypatch.setattr(type(method), "search_space", space)
    lines: list[str] = []
    with pytest.raises(StudyFailing, match="another supervision tier"):
        StudySource(replace(tuning, method="george"), lines.append).next()
    assert len(lines) == MAX_FAILURES


def test_a_defect_of_a_search_space_is_not_hidden(
    tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def space(self: Any, trial: Any, task: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(type(get_method("erm")), "search_space", space)
        with pytest.raises(ZeroDivisionError):
            StudySource(tuning, print).next()
    with StudySource(tuning, print) as source:
        assert len(drain(source)) == 3


@pytest.mark.parametrize("finished", [False, True])
def test_what_is_submitted_can_be_sent_and_ends_in_a_preset(
    finished: bool, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Launch, ArrayTask]] = []

    def send(launch: Launch, array: Array, tasks: list[ArrayTask], noun: str) -> Array:
        sent.extend((launch, task) for task in tasks)
        return array

    cluster, profile = Cluster("here", 100), Profile("toy.toml", {"pack": 9})
    monkeypatch.setattr("bench.tuning.workers.require_cluster", lambda: cluster)
    monkeypatch.setattr("bench.launch.slurm.send", send)
    monkeypatch.setattr("bench.launch.slurm.take_snapshot", lambda target: None)
    monkeypatch.chdir(tuning.results)
    tuning = replace(tuning, results=Path("here"))
    if finished:
        with StudySource(tuning, print) as source:
            drain(source)
    lines: list[str] = []
    assert submit(tuning, workers=8, profile=profile, log=lines.append) is not finished
    assert lines[0] == f"study {tuning.name}: {3 * finished} of 3 trials finished"
    if finished:
        assert not sent
        return
    ((launch, task),) = sent
    assert (task.workers, launch.cluster, launch.profile) == (3, "here", "toy.toml")
    kept = read_checked(launch.folder / "tuning.json")
    assert (kept["trials"], kept["results"]) == (3, str(tuning.results.absolute()))
    assert task.options.results == tuning.folder.absolute() and not task.options.steered
    again: ArrayTask = pickle.loads(pickle.dumps(task))
    monkeypatch.chdir("/")
    source = again.make_source()
    assert isinstance(source, StudySource)
    with source:
        assert len(drain(source)) == 3
    assert again.on_complete is not None
    again.on_complete()
    preset = Path(kept["results"]) / "presets" / f"{source.tuning.name}.toml"
    assert "study erm-umnist-standin-quick, trial 2: val_avg 82.0000" in preset.read_text()


@pytest.mark.parametrize(
    ("preset", "base"), [("paper", "kinds/features"), ("small", "kinds/small")]
)
def test_own_data_is_searched_from_the_recipe_of_its_kind(
    preset: str, base: str, tmp_path: Path
) -> None:
    y = np.arange(60) % 2
    np.savez(tmp_path / "rows.npz", x=y[:, None] + np.arange(60)[:, None] / 100, y=y)
    add("rows", tmp_path / "rows.npz", tmp_path / "data", AddOptions())
    use_data_root(tmp_path / "data")
    tuning = Tuning("erm", "rows", tmp_path / "data", tmp_path, trials=20, preset=preset)
    recipe, drawn = as_plain(preset_config(get_method("erm"), base)), set()
    with StudySource(tuning, lambda line: None) as source:
        for _ in range(12):
            job = taken(source)
            params = source._under_way[job.variant][0].params
            assert job.config.method == recipe | params
            drawn.add(params["batch_size"])
    assert drawn == {32, 64, 128}, "the recipe's own and the method's default among them"
    other = replace(tuning, preset="scratch")
    with pytest.raises(UsageError, match=r"preset was kind-\w+ and is kind-scratch"):
        other.open()


def test_a_search_starts_from_no_tuned_preset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start from the preset 'tuned'"):
        Tuning("erm", "umnist", tmp_path, tmp_path, preset="tuned")
