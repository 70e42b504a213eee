"""What most tests of launching need: a made-up SLURM, an empty store, and jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from launch_fakes import FakeSlurm, Notes, Sent

from bench.job import Job, Request, expand
from bench.launch import scheduler
from bench.launch import slurm as slurm_module
from bench.launch.queue import Array, Launch, read_launch
from bench.launch.slurm import ArrayTask
from bench.store import Store


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """SLURM as this test makes it up."""
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "_ask", fake.ask)
    return fake


@pytest.fixture
def sent(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Sent:
    """What was handed to submitit, which is not called; SLURM then has it in its queue."""
    arrays: Sent = []

    def send(launch: Launch, array: Array, tasks: Sequence[ArrayTask], noun: str) -> Array:
        known = {each.name: each for each in read_launch(launch.folder).arrays}
        assert known[array.name].tasks == array.tasks, "what is sent is on disk before"
        assert known[array.name].job == ""
        arrays.append((launch, array, tasks))
        number = str(6 + len(arrays))
        slurm.says(*("PENDING" for _ in array.tasks), array=array.name, job=number)
        return replace(array, job=number)

    monkeypatch.setattr(slurm_module, "send", send)
    monkeypatch.setattr(slurm_module, "take_snapshot", lambda target: tmp_path / "code")
    return arrays


@pytest.fixture
def notes() -> Notes:
    """A display that remembers."""
    return Notes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty results folder."""
    return Store(tmp_path / "results")


@pytest.fixture
def jobs(digits_root: Path) -> list[Job]:
    """Three jobs that no test here carries out."""
    return expand(Request(("erm",), ("cmnist",), (0, 1, 2), digits_root, quick=True))
