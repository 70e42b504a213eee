"""LaTeX: whatever stands in a name or a message appears as text, and all of it compiles."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given as given_text
from hypothesis import strategies as st
from report_records import collection, failed, given, jobs, record

from bench.record import Record
from bench.reporting import Reference, build, collect
from bench.reporting.figure import WrittenFigure
from bench.reporting.latex import (
    ESCAPES,
    ROWS_A_PAGE,
    ROWS_ACROSS,
    build_pdf,
    document_source,
    escape,
    is_wide,
    table_source,
)
from bench.reporting.leaderboard import Finding, Guide
from bench.reporting.table import Cell, CellKey, Column, Row, Table
from bench.store import Store
from datasets.errors import BenchError, UsageError
from methods.base import METHODS, get_method

HOSTILE = r"<script>alert(1)</script> & 100% a_b \input{/etc/passwd} $x^2$ #{~} [2] *"
SVG_ONLY = ("svg",)


@pytest.fixture
def hostile_method() -> Iterator[str]:
    """A plug-in whose title is an attack on every format."""
    erm = type(get_method("erm"))
    METHODS["hostile"] = type("Hostile", (erm,), {"name": "hostile", "title": HOSTILE})()
    yield "hostile"
    del METHODS["hostile"]
    jobs.cache_clear()


def hostile_records(name: str) -> list[Record]:
    first, second, third = jobs(name, "umnist", 3)
    return [
        record(first, 90.0),
        record(second, 90.0, standin=True, protocol=HOSTILE),
        failed(third, f"{HOSTILE} ünï 漢", HOSTILE),
    ]


def table_of(rows: int, section: str = "", *, in_paper: bool = True) -> Table:
    cells = (Cell("measured", CellKey("m"), mean=1.0),)
    made = tuple(Row((f"row {i}",), cells, section=section) for i in range(rows))
    columns = (Column("X"),)
    return Table(
        *("made", "Made up", "A table.", ("Name",), columns, made, "none", "none"),
        in_paper=in_paper,
    )


def test_hostile_text_is_escaped() -> None:
    text = escape(HOSTILE)
    assert r"\textbackslash{}input\{/etc/passwd\}" in text
    assert r"\textless{}script\textgreater{}" in text
    assert r"\& 100\% a\_b" in text


@given_text(st.text())
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
        Cell("paper", mean=63.3, std=1.6, from_other_paper=True),
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
    # What goes on is not listed again, neither by its title nor as a blank line.
    assert tex.count(r"{\renewcommand{\addcontentsline}[3]{}\caption[]") == 2
    assert tex.count("row ") == 2 * ROWS_A_PAGE + 1


def test_a_document_includes_tables_and_figures(reference: Reference) -> None:
    figure = WrittenFigure("pareto", "Pareto", True, "Worst & average", ("A note.",))
    missing = WrittenFigure("ranks", "Ranks", False, reason="no runs")
    tex = document_source([table_of(1)], [figure, missing], reference)
    assert r"\input{tables/made}" in tex
    assert r"{figures/pareto.pdf}" in tex and r"Worst \& average A note.}" in tex
    assert "not results. Worst" in tex and "ranks.pdf" not in tex
    assert "Shaded rows are the made{-}up paper's own numbers" in tex
    assert r"\section{Tables}" in tex and r"\section{Further tables}" not in tex


def test_a_document_begins_with_what_was_found(reference: Reference) -> None:
    finding = Finding("A & B", "50% of it.", "made")
    elsewhere = Finding("C", "No table has it.", "not_here")
    guide = Guide((), (finding, elsewhere), {"First topic": ("made",)})
    first = WrittenFigure("answer", "Answer", False, "All of it.", look="Look here.", first=True)
    later = WrittenFigure("pareto", "Pareto", False, "Caption.")
    other = replace(table_of(1), label="other")
    tex = document_source([table_of(1), other], [first, later], reference, guide)
    parts = (
        *(r"\section{What was found}", r"\textbf{A \& B.} 50\% of it. See Table~\ref{tab:made}."),
        *("figures/answer.pdf", r"\textbf{Look here.} All of it.", r"\listoftables"),
        *(r"\section{First topic}", r"\input{tables/made}", r"\section{Further tables}"),
        *(r"\input{tables/other}", r"\section{Figures}", "figures/pareto.pdf"),
    )
    places = [tex.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)
    assert "tab:not" not in tex


def wide_table(rows: int) -> Table:
    cell = Cell("measured", CellKey("m"), label="x" * 60)
    made = tuple(Row((f"row {i}",), (cell,) * 3) for i in range(rows))
    return replace(table_of(1), columns=(Column("X"),) * 3, rows=made)


def test_only_a_table_wider_than_the_page_lies_on_its_side(reference: Reference) -> None:
    assert is_wide(wide_table(1)) and not is_wide(table_of(9))
    narrow = replace(table_of(1), label="narrow")
    tex = document_source([wide_table(1), narrow], [], reference)
    inside = tex[tex.index(r"\begin{landscape}") : tex.index(r"\end{landscape}")]
    assert r"\section{Tables}" in inside  # else its title stands alone on a page
    assert "tables/made" in inside and "tables/narrow" not in inside
    assert table_source(wide_table(2 * ROWS_ACROSS)).count(r"\begin{table}") == 2


def test_a_document_without_a_paper_mentions_none() -> None:
    tex = document_source([table_of(1, in_paper=False)], [], Reference())
    assert r"\section{Tables}" in tex and "paper" not in tex.replace("a4paper", "")
    assert "What was found" not in tex


def test_hostile_names_are_text_in_every_file(tmp_path: Path, hostile_method: str) -> None:
    runs = collection(*hostile_records(hostile_method))
    page = build(tmp_path, given(runs), formats=SVG_ONLY)
    assert page == tmp_path / "index.html"
    assert "<script>alert" not in page.read_text()
    for path in (tmp_path / "tables").glob("*.tex"):
        assert r"\input" not in path.read_text() and "<script>" not in path.read_text()
    with (tmp_path / "tables" / "main_results.csv").open(newline="") as source:
        assert hostile_method in {row["method"] for row in csv.DictReader(source)}
    with (tmp_path / "tables" / "left_out.csv").open(newline="") as source:
        assert any(HOSTILE in row["variant"] for row in csv.DictReader(source))


def test_an_empty_store_gives_a_report(tmp_path: Path) -> None:
    out = tmp_path / "report"
    build(out, given(collect(Store(tmp_path / "none"))))
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"index.html", "main.tex", "tables/main_results.csv", "tables/left_out.tex"} <= names


def test_without_latex_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.reporting.latex.shutil.which", lambda program: None)
    with pytest.raises(UsageError) as refused:
        build_pdf(tmp_path)
    assert "texlive-latex-base" in refused.value.remedy


def test_what_latex_complains_of_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "pdflatex"
    program.write_text("#!/bin/sh\necho '! Undefined control sequence.'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("bench.reporting.latex.shutil.which", lambda name: str(program))
    with pytest.raises(BenchError, match="Undefined control sequence"):
        build_pdf(tmp_path)


@pytest.mark.latex
def test_the_report_compiles(tmp_path: Path, hostile_method: str, reference: Reference) -> None:
    """Hostile names, empty cells, long tables and all, with Debian's packages."""
    store = Store(tmp_path / "results")
    full = [record(j, 90.0 + j.seed) for m in ("nct", "erm") for j in jobs(m, "umnist")]
    for made in (*hostile_records(hostile_method), *full):
        store.write(made)
    out = tmp_path / "report"
    build(out, given(collect(store), reference))
    text = subprocess.run(
        [shutil.which("pdftotext") or "pdftotext", "-layout", build_pdf(out), "-"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Main results" in text and "Planned comparisons" in text
    assert r"\input{" in text and "<script>alert(1)" in text
    log = (out / "main.log").read_text(errors="replace")
    assert "undefined" not in log
    assert ("What was found" in text and "ERM is first" in text) or "NCT is first" in text
    listed = text[text.index("List of Tables") : text.index("Table 1:")]
    numbers = re.findall(r"^ *(\d+) .*\. \d+$|^ *(\d+) .*\s\d+$", listed, re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 3
