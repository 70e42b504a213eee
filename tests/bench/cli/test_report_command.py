"""`report`: the one path to open, what it is limited to, and the browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from report_records import jobs, record

from bench import reporting
from bench.store import Store


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store = Store(tmp_path / "results")
    for method in ("nct", "erm", "dfr"):
        for job in jobs(method, "umnist", 2):
            store.write(record(job, 90.0 + job.seed))
    return store.root


def test_report_is_limited_and_opened(
    tmp_path: Path, results: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    out = tmp_path / "report"
    limits = ("--methods", "nct,erm", "--datasets", "umnist", "--tables", "main_results,claims")
    told = cli("report", "--results", results, "--out", out, "--open", *limits)
    page = out / "index.html"
    assert (told.code, told.out) == (0, f"{page}\n")
    assert opened == [page.as_uri()]
    assert {path.stem for path in (out / "tables").iterdir()} == {"main_results", "claims"}
    text, csv = page.read_text(), (out / "tables" / "main_results.csv").read_text()
    assert "nct-umnist" in text and "dfr-umnist" not in text
    assert ",erm,umnist," in csv and ",dfr," not in csv and "celeba" not in csv
    assert not list((out / "figures").glob("*.pdf"))  # which only the document needs


def test_where_no_browser_starts_the_address_is_printed(
    tmp_path: Path, results: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    words = ("--results", results, "--out", tmp_path / "out", "--tables", "main_results")
    told = cli("report", *words, "--open")
    assert told.code == 0 and (tmp_path / "out" / "index.html").as_uri() in told.err


@pytest.mark.parametrize(
    ("option", "name", "hint"),
    [
        ("--methods", "ntc", "nct"),
        ("--datasets", "umist", "umnist"),
        ("--tables", "main_result", "main_results"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(
    tmp_path: Path, results: Path, cli: Any, option: str, name: str, hint: str
) -> None:
    told = cli("report", "--results", results, "--out", tmp_path / "out", option, name)
    assert told.code == 2 and f"'{name}'" in told.err and f"'{hint}'" in told.err
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_told_before_anything_is_drawn(
    tmp_path: Path, results: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "write_figures", lambda *given: pytest.fail("drawn"))
    (tmp_path / "file").write_text("kept")
    told = cli("report", "--results", results, "--out", tmp_path / "file" / "report")
    assert told.code == 2 and f"cannot write {tmp_path / 'file' / 'report'}" in told.err
    assert "name a place that can be written to" in told.err and "--results" not in told.err
