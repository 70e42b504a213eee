"""What most tests of launching need: a made-up SLURM, an empty store, and jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_fakes import FakeSlurm, Notes

from bench.job import Job, Request, expand
from bench.launch import scheduler
from bench.store import Store


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """SLURM as this test makes it up."""
    fake = FakeSlurm()
    monkeypatch.setattr(scheduler, "_ask", fake.ask)
    return fake


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
