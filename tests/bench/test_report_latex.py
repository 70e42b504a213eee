"""LaTeX and CSV: whatever stands in a name or a message appears as text, and all of it compiles."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_records import collection, jobs, known, record

from bench.report.cells import About, Cell
from bench.report.latex import ESCAPES, ROWS_A_PAGE, document_source, escape, table_source
from bench.report.render import write_report
from bench.report.table import Column, Row, Table
from bench.store import Store
from methods.base import METHODS, get_method, load_methods

Cli = Callable[..., Any]
HOSTILE = r"<script>alert(1)</script> & 100% a_b \input{/etc/passwd} $x^2$ #{~} [2] *"


@pytest.fixture
def hostile_method() -> Iterator[str]:
    """A plug-in whose name is an attack on every format."""
    load_methods()
    erm = type(get_method("erm"))
    name = HOSTILE.replace("/", ":")
    METHODS[name] = type("Hostile", (erm,), {"name": name})()
    known.cache_clear()
    yield name
    del METHODS[name]
    known.cache_clear()


def hostile_records(name: str) -> list[dict[str, Any]]:
    failure = {"kind": f"{HOSTILE} ünï 漢", "message": HOSTILE}
    first, second, third = jobs("erm", "umnist", 3)
    return [
        record(first, 90.0, method=name, run_id="hostile-1"),
        record(second, 90.0, method=name, run_id="hostile-2", standin=True, protocol=HOSTILE),
        record(third, 90.0, method=name, run_id="hostile-3", status="failed", failure=failure),
    ]


def table_of(rows: int, section: str = "") -> Table:
    cells = (Cell("measured", About("m"), mean=1.0),)
    made = tuple(Row((f"row {i}",), cells, section=section) for i in range(rows))
    return Table("made", "Made up", "A table.", ("Name",), (Column("X"),), made, "none", "none")


def test_hostile_text_is_escaped() -> None:
    text = escape(HOSTILE)
    assert r"\textbackslash{}input\{/etc/passwd\}" in text
    assert r"\textless{}script\textgreater{}" in text
    assert r"\& 100\% a\_b" in text


@given(st.text())
def test_escaped_text_holds_no_command_but_those_that_print_a_letter(text: str) -> None:
    known_commands = {re.escape(value) for value in ESCAPES.values()}
    rest = re.sub("|".join(sorted(known_commands, key=len, reverse=True)), "", escape(text))
    assert not set(rest) & set("\\{}$&#^_%~")
    assert rest.isascii() and rest.isprintable()


def test_letters_without_a_font_are_written_plainly() -> None:
    assert escape("Aïvodji") == "Aivodji"
    assert escape("漢\x07\n") == "?? "


def test_a_cell_shows_spread_seeds_marks_and_reasons() -> None:
    row = (
        Cell("measured", mean=93.25, std=2.5, n=5, best=True),
        Cell("paper", mean=63.3, std=1.6, sourced=True),
        Cell("measured", mean=-0.25, digits=2, note="below"),
        Cell("measured", reason="not run & why"),
        Cell("measured", label="a_b"),
    )
    columns = tuple(Column(letter, "Group" if letter in "ab" else "") for letter in "abcde")
    table = Table("t", "T", "C", ("N",), columns, (Row(("n",), row),), "none", "none")
    tex = table_source(table)
    assert r"\textbf{93.2\,{\scriptsize$\pm$2.5}}\,{\tiny(5)}" in tex
    assert r"63.3$^{*}$\,{\scriptsize$\pm$1.6}" in tex
    assert r"$-$0.25\,{\scriptsize below}" in tex
    assert r"--$^{a}$ & a\_b \\" in tex
    assert r"$^{a}$\,not run \& why." in tex
    assert r"\multicolumn{2}{c}{\textbf{Group}}" in tex
    assert r"\cmidrule(lr){2-3}" in tex and r"\cmidrule(lr){4" not in tex


def test_a_long_table_goes_on_over_pages() -> None:
    tex = table_source(table_of(2 * ROWS_A_PAGE + 1))
    assert tex.count(r"\begin{table}") == 3
    assert tex.count(r"\label{tab:made}") == 1
    assert tex.count("row ") == 2 * ROWS_A_PAGE + 1


def test_a_document_includes_tables_and_figures() -> None:
    tex = document_source([table_of(1)], {"pareto.pdf": "Worst & average"})
    assert r"\input{tables/made}" in tex
    assert r"{figures/pareto.pdf}" in tex and r"\caption{Worst \& average}" in tex


def test_hostile_names_are_text_in_every_file(tmp_path: Path, hostile_method: str) -> None:
    runs = collection(*hostile_records(hostile_method))
    write_report(runs, tmp_path, tmp_path / "no-data")
    html = (tmp_path / "index.html").read_text()
    assert "<script>alert" not in html
    for path in (tmp_path / "tables").glob("*.tex"):
        assert r"\input" not in path.read_text() and "<script>" not in path.read_text()
    with (tmp_path / "tables" / "main_results.csv").open(newline="") as source:
        assert hostile_method in {row["method"] for row in csv.DictReader(source)}


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    cell = Cell("measured", About(method="=cmd|' /C calc'!A0", dataset="@x"), reason="-1+1")
    (row,) = Table("t", "", "", (), (Column("x"),), (Row((), (cell,)),), "", "").csv_rows()
    assert all(row[key].startswith("'") for key in ("method", "dataset", "reason"))


def test_the_command_renders_an_empty_store(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "report"
    place = ("--out", out, "--results", tmp_path / "none", "--data-root", tmp_path)
    assert cli("report", *place).code == 0
    assert (out / "main.tex").is_file() and (out / "index.html").is_file()
    assert (out / "tables" / "aux_sweep.tex").is_file()
    assert (out / "tables" / "aux_sweep.csv").is_file()


def test_without_latex_the_command_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.report.pdf.shutil.which", lambda program: None)
    place = ("--out", tmp_path / "report", "--results", tmp_path, "--data-root", tmp_path)
    outcome = cli("report", "--pdf", *place)
    assert outcome.code == 2
    assert "texlive-latex-base" in outcome.err


@pytest.mark.latex
def test_the_report_compiles(
    cli: Cli, tmp_path: Path, hostile_method: str, mnist_root: Path
) -> None:
    """Hostile names, empty cells, long tables and all, with Debian's packages."""
    store = Store(tmp_path / "results")
    full = [record(j, 90.0 + j.seed) for m in ("nct", "erm") for j in jobs(m, "umnist")]
    for made in (*hostile_records(hostile_method), *full):
        store.write(made)
    out = tmp_path / "report"
    place = ("--out", out, "--results", store.root, "--data-root", mnist_root)
    assert cli("report", "--pdf", *place).code == 0
    text = subprocess.run(
        [shutil.which("pdftotext") or "pdftotext", "-layout", out / "main.pdf", "-"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Main results" in text and "Auxiliary loss" in text
    assert r"\input{" in text and "<script>alert(1)" in text
    log = (out / "main.log").read_text(errors="replace")
    assert "undefined" not in log
