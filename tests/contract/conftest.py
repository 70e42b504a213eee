"""Stand-in digits, and short runs on them through the real harness."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.execute import Machine, execute, load_data
from bench.plan import Job, Request, expand
from datasets.base import LoadedData
from datasets.standins import write
from methods.base import METHODS, Method, load_methods, register


def say_nothing(progress: dict[str, Any]) -> None:
    """Stand where a progress display would."""


@dataclass(frozen=True)
class Run:
    """A finished run and the folder it left."""

    job: Job
    record: dict[str, Any]
    folder: Path

    @property
    def predictions(self) -> pd.DataFrame:
        return pd.read_parquet(self.folder / "predictions.parquet")

    @property
    def history(self) -> pd.DataFrame:
        """The history without its clock readings, which no two runs have in common."""
        return pd.read_parquet(self.folder / "history.parquet").drop(columns="seconds")


@dataclass
class Runs:
    """Quick runs on the stand-in digits; each is made once, whoever asks."""

    data_root: Path
    home: Path
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def job(
        self, method: str, dataset: str, seed: int = 0, overrides: Mapping[str, str] | None = None
    ) -> Job:
        request = Request(
            (method,), (dataset,), (seed,), self.data_root, overrides=overrides or {}, quick=True
        )
        return expand(request)[0]

    def execute(self, job: Job, results: str) -> Run:
        machine = Machine(self.data_root, self.home / results)
        record = execute(job, machine, say_nothing)
        return Run(job, record, machine.results / "runs" / job.run_id)

    def run(self, method: str, dataset: str, seed: int = 0, results: str = "first") -> Run:
        key = (method, dataset, seed, results)
        if key not in self.made:
            self.made[key] = self.execute(self.job(method, dataset, seed), results)
        run: Run = self.made[key]
        return run


@pytest.fixture(scope="session")
def standin_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with 600 training and 100 test digits."""
    root = tmp_path_factory.mktemp("standins")
    write("mnist", root, size=600)
    return root


@pytest.fixture(scope="session")
def runs(standin_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(standin_root, tmp_path_factory.mktemp("results"))


@pytest.fixture(params=["umnist", "cmnist"])
def data(request: pytest.FixtureRequest, runs: Runs) -> LoadedData:
    """All of a dataset, as only the harness sees it."""
    return load_data(runs.job("erm", request.param), runs.data_root)


@pytest.fixture
def add_method(request: pytest.FixtureRequest) -> Callable[[type[Method], type[Any]], str]:
    """Register a method for one test, under its class's name."""
    load_methods()

    def add(method: type[Method], config: type[Any]) -> str:
        name = method.__name__.lower()
        register(name, version=1, config=config)(method)
        request.addfinalizer(lambda: METHODS.pop(name))
        return name

    return add
