"""A package installed on the side: its method and its dataset are citizens like any other."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOUSE = Path(__file__).parents[2]
SIDE = Path(__file__).parent / "side"
ENTRY_POINTS = """[bench.methods]
smooth = side_bench.smooth

[bench.datasets]
stripes = side_bench.stripes
"""
SHORT = ("--set", "smooth.epochs=2", "smooth.batch_size=64")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: the package, and what its installer noted."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(SIDE / "side_bench", site / "side_bench")
    info = site / "side_bench-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: side-bench\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "data" / "stripes").mkdir(parents=True)
    (site / "data" / "stripes" / "marker").touch()
    return site


def call(site: Path, *words: str, code: int = 0) -> str:
    """Call the command line with the package installed."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{HOUSE}{os.pathsep}{site}"},
        cwd=site,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def bench_json(site: Path, *words: str) -> Any:
    return json.loads(call(site, *words, "--json"))


@pytest.fixture(scope="module")
def ran(site: Path) -> Any:
    """Runs of the package's method and of a built-in one on its dataset."""
    words = ("run", "--methods", "smooth,erm", "--datasets", "stripes", "--seeds", "2")
    settings = ("--set", "erm.epochs=1", "--data-root", "data")
    call(site, "run", "--methods", "smooth", "--datasets", "stripes", "--seeds", "1", *settings[2:])
    return bench_json(site, *words, *settings)


def test_both_are_listed(site: Path) -> None:
    listed = bench_json(site, "list", "--data-root", "data")
    assert "smooth" in [method["name"] for method in listed["methods"]]
    (stripes,) = [entry for entry in listed["datasets"] if entry["name"] == "stripes"]
    assert stripes["on_disk"] and stripes["counts"] == {"train": 200, "val": 80, "test": 80}


def test_both_are_planned(site: Path) -> None:
    words = ("plan", "--methods", "all", "--datasets", "stripes", "--seeds", "1")
    planned = bench_json(site, *words, "--data-root", "data")
    assert "smooth" in {run["method"] for run in planned["runs"]}


def test_both_run_and_say_where_they_come_from(site: Path, ran: Any) -> None:
    assert ran["failed"] == 0 and ran["done"] == 4
    for run in ran["runs"]:
        record = json.loads((site / "results" / "runs" / run["run_id"] / "record.json").read_text())
        plugin = record["plugin"]
        assert (plugin["distribution"], plugin["version"]) == ("side-bench", "1.5")
        assert len(plugin["digest"]) == 16
        assert record["preset"] == "default", "settings nobody chose are not the paper's"
        assert "side-bench" in record["identity"]["plugin"].values()


def mark_committed(runs: Path) -> None:
    """Make records as a clean checkout leaves them; this tree may have uncommitted changes."""
    for path in runs.glob("*/record.json"):
        record = json.loads(path.read_text())
        for part in (record, *record["stages"]):
            part["git"]["dirty"] = False
        record.pop("checksum", None)
        path.write_text(json.dumps(record))


def test_both_stand_in_the_report(site: Path, ran: Any) -> None:
    mark_committed(site / "results" / "runs")
    call(site, "report", "--out", "report", "--data-root", "data")
    with (site / "report" / "tables" / "main_results.csv").open() as source:
        rows = [row for row in csv.DictReader(source) if row["dataset"] == "stripes"]
    cells = {(row["method"], row["metric"]): row for row in rows}
    assert cells["smooth", "wga"]["mean"], cells["smooth", "wga"]["reason"]
    assert int(cells["smooth", "wga"]["n"]) == 2
    page = (site / "report" / "index.html").read_text()
    assert "Stripes" in page and "Smooth" in page


def test_broken_plug_in_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken, ignore=shutil.ignore_patterns("results", "report"))
    (broken / "side_bench" / "smooth.py").write_text("import nothing_of_that_name")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "list"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{HOUSE}{os.pathsep}{broken}"},
        cwd=broken,
    )
    assert done.returncode == 2
    assert "smooth" in done.stderr and "side-bench" in done.stderr
