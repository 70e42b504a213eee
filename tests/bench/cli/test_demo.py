"""The demo: every method, on data that says it is synthetic, without options."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.paper import demo
from bench.reporting import collect
from bench.store import Store
from methods.base import METHODS, load_methods

Cli = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (replace(demo.PHOTOS, size=40), replace(demo.DIGITS, size=600))
    monkeypatch.setattr(demo, "DEMO", parts)


@pytest.mark.usefixtures("small")
def test_every_method_runs_on_every_standin(tmp_path: Path) -> None:
    demo.write_standins(tmp_path, print)
    jobs = demo.demo_jobs(tmp_path)
    datasets = ("waterbirds", "umnist", "cmnist")
    expected = {(method, dataset) for method in load_methods() for dataset in datasets}
    assert {(job.method, job.dataset) for job in jobs} == expected
    assert len(jobs) == len(expected)
    assert all(job.standin and job.quick and job.seed == 0 for job in jobs)
    assert not any(job.config.backbone["pretrained"] for job in jobs)


@pytest.mark.usefixtures("small")
def test_standins_are_written_once(tmp_path: Path) -> None:
    demo.write_standins(tmp_path, print)
    markers = sorted(tmp_path.rglob("standin.json"))
    assert len(markers) == 2
    before = [marker.stat().st_mtime_ns for marker in markers]
    demo.write_standins(tmp_path, print)
    assert [marker.stat().st_mtime_ns for marker in markers] == before


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_demo_ends_with_a_page(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_methods()
    few = {name: METHODS[name] for name in ("cnc", "erm", "jtt", "nct", "nct_plus")}
    monkeypatch.setattr(demo, "load_methods", lambda: few)
    first = cli("demo", "--out", tmp_path / "demo")
    assert first.code == 0, first.err
    assert "not results" in first.out and "index.html" in first.out
    runs = collect(Store(tmp_path / "demo" / "results"))
    assert len(runs.runs) == 15 and all(run.kind == "smoke" for run in runs.runs)
    page = (tmp_path / "demo" / "report" / "index.html").read_text()
    blobs = re.findall(r'data-blob="runs-\d+">([^<]+)<', page)
    details = "".join(gzip.decompress(base64.b64decode(text)).decode() for text in blobs)
    assert "stand-in" in page and "data:image/png" in details and "data:image/jpeg" in details
    assert (tmp_path / "demo" / "report" / "figures" / "smoke_attribution.svg").is_file()
    again = cli("demo", "--out", tmp_path / "demo")
    assert again.code == 0 and "0 to run" in again.err
