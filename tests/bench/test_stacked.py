"""`bench run --stack-seeds`: seeds in one model, a record for each, none of them published."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_records import collection, jobs, record

from bench.context import Part
from bench.files import read_lines
from bench.perf.subject import context
from bench.plan import Job, Request, expand
from bench.records import base_record
from bench.spent import Spent
from bench.stacked import SharedTime, _shared, as_stacked, members, stacks_of
from bench.store import Store

SETTINGS = ("--set", "erm.epochs=2", "erm.batch_size=32")


def words(root: Path, results: Path, *more: str, datasets: str = "cmnist") -> list[str]:
    return [
        *("run", "--methods", "erm", "--datasets", datasets, "--workers", "1"),
        *("--data-root", str(root), "--results", str(results), *more),
    ]


def some_jobs(*seeds: int, method: str = "erm", dataset: str = "cmnist") -> list[Job]:
    return expand(Request((method,), (dataset,), seeds, Path(os.devnull)))


def test_a_stacked_run_has_an_id_of_its_own() -> None:
    (plain,) = some_jobs(100)
    (stacked,) = as_stacked([plain])
    assert stacked.run_id != plain.run_id
    assert stacked.command() == f"{plain.command()} --stack-seeds"
    assert replace(stacked, stack=(99, 100)).run_id == stacked.run_id  # whoever its mates are


@pytest.mark.parametrize(
    ("seeds", "most", "sizes"), [(1, 4, [1]), (4, 4, [4]), (5, 4, [2, 3]), (9, 4, [3, 3, 3])]
)
def test_stacks_are_even(seeds: int, most: int, sizes: list[int]) -> None:
    wanted = as_stacked(some_jobs(*range(100, 100 + seeds)))
    leads = stacks_of(wanted, most)
    assert [len(lead.stack) for lead in leads] == sizes
    assert [job.run_id for lead in leads for job in members(lead)] == [j.run_id for j in wanted]


def test_only_seeds_of_one_kind_share_a_stack() -> None:
    wanted = as_stacked([*some_jobs(100, 101), *some_jobs(100, 101, dataset="umnist")])
    leads = stacks_of([wanted[0], wanted[2], wanted[1], wanted[3]], 4)
    assert [(lead.dataset, lead.stack) for lead in leads] == [
        ("cmnist", (100, 101)),
        ("umnist", (100, 101)),
    ]


def test_grid_in_stacks(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    store, apart = Store(tmp_path / "stacked"), Store(tmp_path / "apart")
    grid = ("--seeds", "100,101,102", *SETTINGS)
    told = cli(*words(digits_root, store.root, *grid, "--stack-seeds", "2", "--keep-models"))
    assert told.code == 0, told.err
    assert "one model: erm on cmnist, seeds 100\n" in told.err
    assert "one model: erm on cmnist, seeds 101, 102\n" in told.err
    assert "stacked" in told.out and "3 of 3" in told.out
    records = list(store.records())
    assert [(r["seed"], r["stack"]) for r in records] == [
        *((100, [100]), (101, [101, 102]), (102, [101, 102])),
    ]
    assert not list(store.work.iterdir()) and not list(store.audits.iterdir())

    again = cli(*words(digits_root, store.root, *grid, "--stack-seeds"))
    assert again.code == 0 and "3 not to be run, 0 to run" in again.err

    assert cli(*words(digits_root, apart.root, *grid)).code == 0
    for stacked, alone in zip(records, apart.records(), strict=True):
        assert stacked["run_id"] != alone["run_id"] and "stack" not in alone
        for split in ("val", "test"):
            ours, theirs = stacked["metrics"][split], alone["metrics"][split]
            assert ours["avg"] == pytest.approx(theirs["avg"], abs=0.5)
            assert ours["group_count"] == theirs["group_count"]
        assert stacked["selection"]["epoch"] == alone["selection"]["epoch"]
        (fit,) = stacked["stages"]
        assert fit["image_passes"] == sum(s["image_passes"] for s in alone["stages"])
        assert fit["cpu_seconds"] > 0 and fit["seconds_standalone"] > 0
        here, there = (history(s, r["run_id"]) for s, r in ((store, stacked), (apart, alone)))
        assert here["epoch"].tolist() == [0, 1]
        for column in ("loss", "audit_test_avg"):
            assert here[column].tolist() == pytest.approx(there[column].tolist(), rel=0.01)
        assert (store.runs / stacked["run_id"] / "model.safetensors").is_file()


def history(store: Store, run_id: str) -> pd.DataFrame:
    return pd.read_parquet(store.runs / run_id / "history.parquet")


def test_a_stack_that_diverges_fails_for_every_seed(
    digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    grid = ("--seeds", "100,101", "--stack-seeds", "--set", "erm.lr=1e30", "erm.epochs=2")
    told = cli(*words(digits_root, tmp_path, *grid))
    assert told.code == 1
    records = list(Store(tmp_path).records())
    assert [r["failure"]["kind"] for r in records] == ["non_finite_loss"] * 2
    assert all("--stack-seeds" in r["failure"]["command"] for r in records)


def test_a_killed_stack_goes_on(
    digits_root: Path, tmp_path: Path, cli: Any, wait_until: Callable[..., Any]
) -> None:
    store, settings = Store(tmp_path / "results"), ("--set", "erm.epochs=20")
    grid = words(digits_root, store.root, "--seeds", "100,101", "--stack-seeds", *settings)
    overrides = {"erm.epochs": "20"}
    request = Request(("erm",), ("cmnist",), (100, 101), digits_root, overrides=overrides)
    ids = [job.run_id for job in as_stacked(expand(request))]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", *grid], stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: all(store.progress(run_id).get("epoch", 0) >= 2 for run_id in ids))
    assert [store.status(run_id) for run_id in ids] == ["running", "running"]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    wait_until(lambda: [store.status(run_id) for run_id in ids] == ["preempted", "preempted"])
    kept = {run_id: read_epochs(store, run_id) for run_id in ids}

    assert cli(*grid).code == 0
    for run_id in ids:
        epochs = history(store, run_id)
        assert epochs["epoch"].tolist() == list(range(20))
        # Measured times never repeat: equal ones are epochs that were not trained again.
        assert sum(second in set(epochs["seconds"]) for second in kept[run_id]) >= 2


def read_epochs(store: Store, run_id: str) -> list[float]:
    return [row["seconds"] for row in read_lines(store.work / run_id / "history.jsonl")]


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--methods", "jtt", "--stack-seeds"], ["seeds of jtt cannot be stacked", "erm"]),
        (["--methods", "erm,nct", "--stack-seeds"], ["seeds of nct cannot be stacked"]),
        (
            ["--stack-seeds", "--set", "backbone.name=resnet18", "backbone.pretrained=false"],
            ["backbone resnet18 cannot be stacked", "lenet4 or lenet5"],
        ),
        (["--stack-seeds", "--set", "erm.scheduler=plateau"], ["scheduler = plateau"]),
        (["--stack-seeds", "1"], ["--stack-seeds must be at least 2 but got 1"]),
        (["--stack-seeds", "two"], ["--stack-seeds: invalid int value: 'two'"]),
    ],
)
def test_wrong_use(
    more: list[str], parts: list[str], digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    told = cli(*words(digits_root, tmp_path / "results", *more))
    assert told.code == 2 and told.out == ""
    assert all(part in told.err for part in parts), told.err
    assert not (tmp_path / "results").exists()


def test_a_cluster_takes_no_stacks(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    profile = Path(__file__).parents[2] / "slurm" / "h100.toml"
    grid = words(digits_root, tmp_path / "results", "--stack-seeds", "--cluster", str(profile))
    grid = [word for word in grid if word not in ("--workers", "1")]
    told = cli(*grid)
    assert told.code == 2 and "--stack-seeds is about processes on this machine" in told.err


@pytest.mark.parametrize("seed", [0, 100])
def test_a_stacked_run_is_never_published(seed: int) -> None:
    (job,) = [job for job in jobs("erm", "umnist") if job.seed == 0]
    (stacked,) = as_stacked([replace(job, seed=seed)])
    runs = collection(record(stacked, 95.0, stack=base_record(stacked)["stack"]))
    (run,) = runs.runs
    assert (run.kind, run.reason) == ("left out", "seeds stacked into one model")
    assert runs.published("erm", "umnist") == []
    assert "1 seeds stacked into one model" in runs.absence("erm", "umnist")


def test_not_even_under_a_published_id() -> None:
    """The note in the record counts by itself."""
    (run,) = collection(record(jobs("erm", "umnist")[0], 95.0, stack=[0, 1])).runs
    assert run.kind == "left out"


def test_a_seed_is_charged_its_share_and_no_seed_what_the_harness_took(tmp_path: Path) -> None:
    record = {"name": "fit", "seconds_standalone": 8.0, "seconds_marginal": 4.0, "cpu_seconds": 2.0}
    quarter = {"seconds_standalone": 2.0, "seconds_marginal": 1.0, "cpu_seconds": 0.5}
    assert _shared(record, 4) == {"name": "fit", **quarter}
    parts = [Part(name, tmp_path / name) for name in ("first", "second")]
    contexts = [SharedTime(context(tmp_path).scope, part, parts) for part in parts]
    contexts[0]._not_counted(lambda: setattr(parts[0], "away", parts[0].away + Spent(3.0, 1.0)))
    assert [part.away for part in parts] == [Spent(3.0, 1.0)] * 2
