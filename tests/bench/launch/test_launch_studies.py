"""Workers of studies on disk, under made-up answers of SLURM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_fakes import STUDY_ARRAY, FakeSlurm, launch_of_workers

from bench.launch import queue
from bench.launch.queue import StudyWorkers, launches_lock, study_workers, worker_lock
from bench.store import Store
from datasets.lock import Lock


def finished(number: int) -> Callable[[Path], int]:
    """Make every study have so many finished trials."""
    return lambda folder: number


def found_in(results: Path, number: int = 1, **how: Any) -> list[StudyWorkers]:
    return study_workers(results, finished(number), **how)


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
    look = queue._workers_of

    def sent_meanwhile(*seen: Any, **how: Any) -> StudyWorkers:
        found = look(*seen, **how)
        launch.with_array(replace(launch.arrays[0], job="7")).write()
        return found

    monkeypatch.setattr(queue, "_workers_of", sent_meanwhile)
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
