"""Published runs are shown where they are asked for, always labelled; own runs come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import a_job, a_record

from bench.record import Metrics, Outcome
from bench.resources import published_folder
from bench.store import Store

Cli = Callable[..., Any]
GRID = ("--methods", "jtt", "--datasets", "cmnist", "--seeds", "2")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without results, data or anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.usefixtures("elsewhere")
def test_status_shows_own_runs_or_published_ones(cli: Cli) -> None:
    own, published = cli("status", "--json").json, cli("status", "--published", "--json").json
    stored = Store(published_folder()).run_ids()
    assert (own["total"], own["published"]) == (0, False)
    assert (published["total"], published["published"]) == (len(stored), True)
    assert {run["run_id"] for run in published["runs"]} == {*stored}
    campaigns = {(one["name"], one["dataset"]): one for one in published["campaigns"]}
    assert campaigns["main", "cmnist"]["total"] == 100  # ten methods, ten seeds
    told = cli("status", "--published")
    assert f"{len(stored)} published runs: {len(stored)} done" in " ".join(told.out.split())


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("verb", ["plan", "status"])
def test_a_grid_is_looked_for_in_one_store(cli: Cli, verb: str) -> None:
    own, published = cli(verb, *GRID, "--json").json, cli(verb, *GRID, "--published", "--json").json
    assert (own["done"], own["missing"], own["published"]) == (0, 2, False)
    assert (published["done"], published["missing"], published["published"]) == (2, 0, True)
    told = cli(verb, *GRID, "--published")
    assert "published" in told.out
    assert "to run" not in told.err


@pytest.mark.usefixtures("elsewhere")
def test_run_does_not_take_published_runs_for_its_own(cli: Cli, mnist_root: Path) -> None:
    """Else the first command of a fresh clone would train nothing."""
    told = cli("run", *GRID, "--data-root", mnist_root, "--rerun", "never", "--json")
    assert (told.code, told.json["done"], told.json["missing"]) == (0, 0, 2)


def test_show_looks_among_published_runs_last(cli: Cli, elsewhere: Path) -> None:
    name = "jtt-cmnist-s0-2d03fa0b07"
    told = cli("show", name)
    assert told.code == 0
    assert f"{name} (published)" in told.out
    assert f"{name} is a published run" in told.err
    shipped = cli("show", name, "--json").json
    assert shipped["run_id"] == name

    own = a_record(job=a_job("jtt"), outcome=Outcome({"test": Metrics({"wga": 12.5})}))
    assert own.run_id == name
    Store(elsewhere / "results").write(own)
    told = cli("show", name)
    assert "published" not in told.out + told.err
    assert "12.5" in told.out


def test_several_published_runs_with_that_beginning(cli: Cli, elsewhere: Path) -> None:
    told = cli("show", "nct-cmnist")
    assert told.code == 2
    assert f"runs match 'nct-cmnist' in {published_folder() / 'runs'}" in told.err


def test_explain_of_a_published_run(cli: Cli, elsewhere: Path) -> None:
    told = cli("explain", "nct-cmnist-s0", "--picture", elsewhere / "tree.svg")
    assert told.code == 0, told.err
    assert "is a published run" in told.err
    assert (elsewhere / "tree.svg").stat().st_size > 1000


@pytest.mark.usefixtures("elsewhere")
def test_explain_of_what_has_no_tree(cli: Cli, tmp_path: Path) -> None:
    told = cli("explain", "erm-cmnist-s0")
    assert told.code == 2
    assert "has no tree to explain: erm grows none" in told.err
    assert "-> give a finished run of nct, nct_plus" in told.err
    failed = replace(a_record(job=a_job("nct", seed=77)), details={})
    Store(tmp_path / "results").write(failed)
    told = cli("explain", failed.run_id)
    assert told.code == 2
    assert f"{failed.run_id} has no tree to explain" in told.err
