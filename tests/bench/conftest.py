"""Stand-in data and a way to call the command line, for every test of the harness."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import estimate
from bench.cli import main
from datasets import standins


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line in this process."""

    def call(*words: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:  # argparse ends this way
            code = int(end.code or 0)
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    return call


@pytest.fixture(scope="session")
def digits_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a stand-in for MNIST; nothing may change it."""
    root = tmp_path_factory.mktemp("digits")
    standins.write("mnist", root, size=600)
    return root


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of how fast a network is here, which takes seconds."""
    speed = estimate.Speed(train=0.01, evaluate=0.002, features=512)
    monkeypatch.setattr(estimate, "measured_speed", lambda network: speed)
    monkeypatch.setattr(estimate, "kept_speed", lambda network: speed)


@pytest.fixture
def no_mnist_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MNIST be nowhere to be had, as on a machine without a network."""
    monkeypatch.setattr("datasets.mnist_source.default_sources", lambda: ())
