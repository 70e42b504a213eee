"""Workers of studies on disk, under made-up answers of SLURM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import PROFILE, STUDY_ARRAY, FakeSlurm, Sent, launch_of_workers

from bench.launch.queue import launches_lock
from bench.store import Store
from bench.tuning import workers
from bench.tuning.source import Tuning
from bench.tuning.workers import StudyWorkers, study_workers, submit, worker_lock
from datasets.files import read_checked
from datasets.lock import Lock


def found_in(results: Path, number: int = 1, **how: Any) -> list[StudyWorkers]:
    """Find the workers, if every study has so many finished trials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "count_finished", lambda folder: number)
        return study_workers(results, **how)


@pytest.mark.parametrize(
    ("states", "queued", "running", "jobs"),
    [
        (("PENDING", "PENDING"), 3, 0, ("7_0", "7_1")),
        (("RUNNING", "PENDING"), 1, 2, ("7_0", "7_1")),
        (("COMPLETED", "RUNNING"), 0, 1, ("7_1",)),
        (("CANCELLED", None), 0, 0, ()),
    ],
)
def test_workers_are_counted_as_slurm_has_their_tasks(
    tmp_path: Path,
    slurm: FakeSlurm,
    states: tuple[str | None, ...],
    queued: int,
    running: int,
    jobs: tuple[str, ...],
) -> None:
    launch = launch_of_workers(tmp_path)
    slurm.says(*states, array=STUDY_ARRAY)
    (found,) = found_in(tmp_path)
    assert (found.queued, found.running, found.jobs) == (queued, running, jobs)
    assert found.active == queued + running
    assert found.to_json() == {
        **{"study": "jtt-umnist", "method": "jtt", "dataset": "umnist"},
        **{"finished": 1, "asked": 4, "array": "7", "queued": queued, "running": running},
        "path": str(tmp_path / "studies" / "jtt-umnist"),
    }
    assert not (launch.folder / "ended").exists(), "it can be taken up again"
    assert all(map(found.matches, ("jtt", "umnist", "7"))) and not found.matches("nct")


def test_a_finished_study_without_workers_is_settled(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch = launch_of_workers(tmp_path)
    slurm.says("RUNNING", None, array=STUDY_ARRAY)
    assert [found.running for found in found_in(tmp_path, 4)] == [2]
    slurm.says("COMPLETED", None, array=STUDY_ARRAY)
    assert found_in(tmp_path, 4) == []
    assert (launch.folder / "ended").exists()


def test_where_slurm_is_silent_the_disk_tells(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch = launch_of_workers(tmp_path)
    slurm.silent = True
    with Lock(worker_lock(launch, 0)).hold(wait=False):
        (found,) = found_in(tmp_path)
    assert (found.queued, found.running) == (1, 2)
    assert found_in(tmp_path, 4) == []


def test_workers_that_were_never_sent(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch = launch_of_workers(tmp_path, job="")
    with launches_lock(Store(tmp_path / "studies" / "jtt-umnist")).hold(wait=False):
        assert [found.queued for found in found_in(tmp_path)] == [3]
        assert found_in(tmp_path, submitting=True) == []
    assert (launch.folder / "ended").exists()


def test_workers_that_are_sent_while_we_look_are_not_forgotten(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = launch_of_workers(tmp_path, job="")
    slurm.says(None, None, array=STUDY_ARRAY)
    look = workers._workers_of

    def sent_meanwhile(*seen: Any, **how: Any) -> StudyWorkers:
        found = look(*seen, **how)
        launch.with_array(replace(launch.arrays[0], job="7")).write()
        return found

    monkeypatch.setattr(workers, "_workers_of", sent_meanwhile)
    assert len(found_in(tmp_path)) == 1
    assert not (launch.folder / "ended").exists()


def test_an_array_is_found_by_its_name(tmp_path: Path, slurm: FakeSlurm) -> None:
    launch_of_workers(tmp_path, job="")
    slurm.says("RUNNING", "PENDING", array=STUDY_ARRAY)
    (found,) = found_in(tmp_path)
    assert (found.array, found.jobs) == ("7", ("7_0", "7_1"))


def test_workers_of_a_damaged_launch_are_named_once(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of_workers(tmp_path)
    slurm.says("RUNNING", "PENDING", array=STUDY_ARRAY)
    (launch.folder / "tuning.json").write_bytes(b"\0" * 40)
    assert found_in(tmp_path) == []
    assert "launch x is damaged" in capsys.readouterr().err
    assert found_in(tmp_path) == [] and capsys.readouterr().err == ""


def test_workers_are_submitted_until_there_are_enough(
    digits_root: Path, tmp_path: Path, sent: Sent, slurm: FakeSlurm
) -> None:
    tuning, told = Tuning("erm", "cmnist", digits_root, tmp_path, prune=True), list[str]()

    def submit_some(number: int, trials: int = 4) -> None:
        asked = replace(tuning, trials=trials)
        assert submit(asked, workers=number, profile=PROFILE, log=told.append)

    submit_some(3)
    assert told[-1] == "submitted array 7: 3 workers in 2 tasks"
    launch, array, tasks = sent[0]
    assert array.tasks == (("worker 0", "worker 1"), ("worker 2",))
    assert [(task.workers, task.total) for task in tasks] == [(2, 4), (1, 4)]
    assert [task.lock for task in tasks] == [worker_lock(launch, 0), worker_lock(launch, 1)]
    assert tasks[0].options == replace(tuning.options(), device="cpu")
    assert tasks[0].options.steered
    assert read_checked(launch.folder / "tuning.json")["trials"] == 4
    (found,) = study_workers(tmp_path)
    assert (found.queued, found.running, found.trials) == (3, 0, 4)
    submit_some(3)
    assert told[-1] == "3 workers are queued or running on a cluster already"
    # Workers that are to make fewer trials do not count; nor do those that are gone.
    submit_some(2, trials=9)
    assert len(sent) == 2
    slurm.tasks.clear()
    submit_some(1)
    assert len(sent) == 3
    assert (launch.folder / "ended").exists()
