"""The demo: a shortcut learnt and undone, on data that says it is synthetic, without options."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import a_job, a_record

from bench.cli import demo as demo_command
from bench.paper import demo
from bench.record import Metrics, Outcome, Record
from bench.store import Store

Cli = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "IMAGES", 600)


def finished(method: str, worst: float, *, like_training: float = 95.0) -> Record:
    test = Metrics({"wga": worst, "avg": 50.0, "avg_train_weighted": like_training})
    return a_record(job=a_job(method), outcome=Outcome({"test": test}))


@pytest.mark.usefixtures("small")
def test_every_run_is_synthetic_and_short(tmp_path: Path) -> None:
    demo.write_standins(tmp_path, print)
    jobs = demo.demo_jobs(tmp_path)
    assert [job.method for job in jobs] == [*demo.METHODS] == [*demo.RECIPES]
    assert all(job.standin and job.seed == 0 for job in jobs)
    assert all(job.overrides["cmnist.conflicts"] == "0.05" for job in jobs)
    sees = {job.method: job.supervision.train_groups for job in jobs}
    assert [method for method, seen in sees.items() if seen] == [demo.KNOWS_GROUPS]


@pytest.mark.usefixtures("small")
def test_standins_are_written_once(tmp_path: Path) -> None:
    demo.write_standins(tmp_path, print)
    (marker,) = tmp_path.rglob("standin.json")
    before = marker.stat().st_mtime_ns
    demo.write_standins(tmp_path, print)
    assert marker.stat().st_mtime_ns == before


def test_what_happened_is_said_by_the_numbers() -> None:
    records = [finished("erm", 0.2), finished("groupdro", 97.9), finished("nct", 93.7)]
    first, second, third = demo.what_happened([*records, finished("jtt", 91.4)])
    assert first.startswith("ERM learnt the colour: 95% right")
    assert first.endswith("0% in the worst group of class and colour.")
    assert second == "Group DRO 98%: it is told the colour of every training image."
    assert third == "NCT 94%, JTT 91%: without it."


def test_what_did_not_work_is_said_as_well() -> None:
    lines = demo.what_happened([finished("erm", 0.0), finished("nct", 12.0)])
    assert lines[1:] == ["Not undone by NCT 12%."]
    assert demo.what_happened([finished("nct", 12.0)]) == []


@pytest.mark.slow
def test_the_demo_shows_a_shortcut_and_ends_with_a_page(cli: Cli, tmp_path: Path) -> None:
    first = cli("demo", "--out", tmp_path / "demo")
    assert first.code == 0, first.err
    assert "not results" in first.err and "index.html" in first.out
    assert demo_command.NEXT in first.err
    assert "leaked" not in first.err and "Warning" not in first.err
    runs = {record.job.method: record for record in Store(tmp_path / "demo" / "results").records()}
    assert [*runs] and {*runs} == {*demo.METHODS}
    worst = {method: record.test.get("wga") or 0.0 for method, record in runs.items()}
    assert worst.pop(demo.PLAIN) < 10
    assert min(worst.values()) > 80, worst
    assert runs[demo.PLAIN].test.get("avg_train_weighted") > 90
    page = (tmp_path / "demo" / "report" / "index.html").read_text()
    blobs = re.findall(r'data-blob="runs-\d+">([^<]+)<', page)
    details = "".join(gzip.decompress(base64.b64decode(text)).decode() for text in blobs)
    assert "stand-in" in page and "groupdro" in details
    again = cli("demo", "--out", tmp_path / "demo")
    assert again.code == 0 and "0 to run" in again.err
