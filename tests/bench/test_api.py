"""The library: what `import bench` offers, without the command line."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import bench
import bench.api
from bench.api import LaunchOptions, results_table, wanted
from bench.job import Job
from bench.record import Status
from bench.resources import published_folder
from bench.store import RunStatus, Store
from datasets.errors import DataMissing, UsageError
from methods.base import METHODS, Method, get_method, register
from methods.erm import Erm, ErmConfig


def test_examples_in_the_docstrings_hold() -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testmod(bench.api, optionflags=flags)
    assert found.attempted >= 6 and not found.failed


def test_import_is_light() -> None:
    code = "import sys, bench; assert not {'torch', 'pandas', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code + "; print(bench.plan)"], check=True)


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = bench.nothing  # type: ignore[attr-defined]
    assert {"plan", "run", "tune", "report", "load_results", "load_model"} <= set(dir(bench))
    assert {"fit", "evaluate", "compare", "check"} <= set(dir(bench))
    assert all(callable(getattr(bench, name)) for name in bench.__all__)


@pytest.fixture(scope="module")
def grid(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two quick runs whose models are kept."""
    return bench.run(
        methods=["erm", "nct"],
        datasets="umnist",
        seeds=[0],
        quick=True,
        keep_models=True,
        data_root=digits_root,
        results=tmp_path_factory.mktemp("api"),
    )


def test_run_returns_how_everything_stands(grid: Any) -> None:
    assert grid.counts() == {"done": 2, "failed": 0, "running": 0, "queued": 0, "missing": 0}
    assert [record.run_id for record in grid.records()] == [job.run_id for job in grid.jobs]
    table = grid.frame()
    assert list(table["status"]) == ["done", "done"]
    assert table["test_avg"].notna().all()
    assert {run["path"] for run in grid.to_json()["runs"]} == {
        str(grid.store.runs / job.run_id) for job in grid.jobs
    }


def test_finished_runs_are_not_run_again(grid: Any, digits_root: Path) -> None:
    before = {job.run_id: grid.store.record_mtime(job.run_id) for job in grid.jobs}
    again = bench.run(
        "erm,nct", "umnist", 1, quick=True, data_root=digits_root, results=grid.store.root
    )
    assert again.counts()["done"] == 2
    assert before == {job.run_id: grid.store.record_mtime(job.run_id) for job in again.jobs}


def test_own_results_as_a_table(grid: Any) -> None:
    table = bench.load_results(grid.store.root)
    assert set(table["method"]) == {"erm", "nct"}
    assert table["test_worst_class"].between(0, 100).all()
    assert set(table["data_kind"]) == {"standin"}


def test_kept_model_predicts_what_the_run_predicted(grid: Any, digits_root: Path) -> None:
    for job in grid.jobs:
        model = bench.load_model(job.run_id, grid.store.root)
        images = _test_images(job, digits_root)
        table = grid.store.predictions(job.run_id)
        expected = table[table["split"] == "test"]["pred"].tolist()
        assert model.logits(images).argmax(dim=1).tolist() == expected
        assert list(model.predict(images[:2])) == [model.facts.classes[c] for c in expected[:2]]


def _test_images(job: Job, root: Path) -> torch.Tensor:
    from bench.runner import load_data

    images = load_data(job, root).splits["test"].images
    return images.batch(torch.arange(len(images))).pixels


def test_model_that_was_not_kept_says_how_to_keep_it(grid: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(grid.records()[0])
    with pytest.raises(DataMissing) as caught:
        bench.load_model("erm", tmp_path)
    assert "--keep-models" in caught.value.remedy


def test_plan_runs_nothing(digits_root: Path, tmp_path: Path) -> None:
    grid = bench.plan("all", "all", "3,7", data_root=digits_root, results=tmp_path / "none")
    assert {job.seed for job in grid.jobs} == {3, 7}
    assert grid.counts()["missing"] == len(grid.jobs)
    assert grid.expected is not None and grid.expected.standalone > 0
    assert not (tmp_path / "none").exists()


def test_settings_are_written_as_set_reads_them(digits_root: Path, tmp_path: Path) -> None:
    settings = {"nct.epochs": [1, 2, 3], "nct.depth_rule": False, "nct.z": 1.5}
    grid = bench.plan("nct", "umnist", 1, settings=settings, results=tmp_path)
    values = grid.jobs[0].config.method
    assert (values["epochs"], values["depth_rule"], values["z"]) == ([1, 2, 3], False, 1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": "ermm"}, "did you mean 'erm'"),
        ({"datasets": "cmnits"}, "did you mean 'cmnist'"),
        ({"seeds": "²"}, "--seeds"),
        ({"seeds": 10**12}, "10000"),
        ({"settings": {"erm.rate": 1}}, "unknown setting 'erm.rate'"),
        ({"preset": "best"}, "unknown preset"),
    ],
)
def test_wrong_words_are_errors_before_any_work(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    known = {"methods": "erm", "datasets": "cmnist", "seeds": 1, "results": tmp_path, **arguments}
    with pytest.raises(UsageError) as caught:
        bench.plan(**known)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"threads": 0}, {"device": "tpu"}, {"retries": -1}, {"rerun": "often"}],
)
def test_ways_to_run_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LaunchOptions(**options)


@pytest.mark.parametrize(
    ("status", "rerun", "expected"),
    [
        (Status.MISSING, "missing", True),
        (Status.PREEMPTED, "missing", True),
        (Status.FAILED, "missing", False),
        (Status.FAILED, "failed", True),
        (Status.DONE, "missing", False),
        (Status.DONE, "always", True),
        (Status.MISSING, "never", False),
    ],
)
def test_what_is_run(status: Status, rerun: Any, expected: bool) -> None:
    assert wanted(RunStatus(status), rerun) is expected


def test_method_of_a_notebook_runs_in_this_process(digits_root: Path, tmp_path: Path) -> None:
    """No other process could import it."""

    class Sketch(Erm):
        __module__ = "__main__"

    register("sketch", version=1, config=ErmConfig)(Sketch)
    try:
        grid = bench.run("sketch", "umnist", 1, quick=True, data_root=digits_root, results=tmp_path)
        assert grid.counts()["done"] == 1
        assert isinstance(get_method("sketch"), Method)
    finally:
        METHODS.pop("sketch")
    assert grid.records()[0].job.preset == "default"


def test_published_table_is_that_of_the_published_runs() -> None:
    """Made by `python -m bench.api`; a wheel carries it in place of the runs."""
    stored = bench.load_results("published")
    made = results_table(Store(published_folder()))
    assert len(stored) >= 214
    pd.testing.assert_frame_equal(stored, made[list(stored.columns)], check_dtype=False)


def test_results_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no results"):
        bench.load_results(tmp_path)
