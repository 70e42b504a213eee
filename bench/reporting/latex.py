"""LaTeX: each table as a booktabs source that compiles as it is, a document, and its PDF.

The packages are common ones, which papers load anyway. Whatever comes from data is escaped: a
method's name or an error's text can neither break a table nor run a command in it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from string import ascii_lowercase

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from bench.reporting.collection import Reference
from bench.reporting.figure import WrittenFigure
from bench.reporting.leaderboard import Guide, by_topic
from bench.reporting.table import Cell, Row, Table
from datasets.errors import BenchError, UsageError

ROWS_A_PAGE = 44
ROWS_ACROSS = 26  # of a page that lies on its side
WIDEST = 150.0  # letters across an upright page, a fifth smaller than the text
BETWEEN, SMALL = 1.5, 0.7  # letters between columns; the size of spreads and notes
ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textquoteleft{}",
    "'": r"\textquoteright{}",
    "±": r"$\pm$",
    # After a row's end LaTeX takes these for arguments of the line break.
    "[": "{[}",
    "*": "{*}",
    # Two hyphens would join into a dash.
    "-": "{-}",
}
MARKS = {"yes": r"\ding{51}", "no": r"\ding{55}"}
TIER_COLUMNS = ("T", "V", "I", "F")
DELIMITERS = ("<%", "%>", "<<", ">>", "<#", "#>")  # of templates: braces mean something in LaTeX
DEBIAN_PACKAGES = (
    "texlive-latex-base texlive-latex-recommended texlive-latex-extra texlive-fonts-recommended"
)
TemplateFolder = partial(
    Environment,
    loader=PackageLoader("bench.reporting"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PASSES = 2  # the list of tables and the references are right after the second
TIME_LIMIT = 600  # seconds of one pass


def escape(text: object) -> str:
    """Return text that LaTeX prints; letters it has no font for become question marks."""
    return "".join(_character(character) for character in str(text))


def _character(character: str) -> str:
    if character in ESCAPES:
        return ESCAPES[character]
    if character.isspace():
        return " "
    if character.isascii():
        return character if character.isprintable() else "?"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return "".join(ESCAPES.get(letter, letter) for letter in plain) or "?"


def table_source(table: Table) -> str:
    """Return the source of one table, in as many parts as it needs pages."""
    empty = dict.fromkeys(c.reason for c in table.cells() if c.mean is None and not c.label)
    letters = chain(ascii_lowercase, map("".join, product(ascii_lowercase, repeat=2)))
    reasons = dict(zip(filter(None, empty), letters, strict=False))
    parts = [_part(table, rows, reasons) for rows in _pages(table)]
    return _template("table").render(table=table, parts=parts, reasons=reasons)


def document_source(
    tables: Sequence[Table],
    figures: Sequence[WrittenFigure],
    reference: Reference,
    guide: Guide | None = None,
) -> str:
    """Return the source of the document: what was found, then every table and drawn figure.

    Tables by topic; those with more than an upright page is wide lie on their side.
    """
    guide = guide or Guide()
    drawn = [figure for figure in figures if not figure.reason]
    shown = [table for table in tables if not table.appendix]
    apart = [table for table in tables if table.appendix and table.rows]
    sections = [(topic, own) for topic, own in by_topic(shown, guide.topics)]
    sections += [("Runs that no table above may show", apart)] if apart else []
    return _template("main").render(
        sections=[(title, _by_side(own)) for title, own in sections],
        first=[figure for figure in drawn if figure.first],
        figures=[figure for figure in drawn if not figure.first],
        reference=reference,
        findings=guide.findings,
        labels={table.label for table in (*shown, *apart)},
    )


def _by_side(tables: Sequence[Table]) -> list[tuple[bool, list[Table]]]:
    """Return neighbours that lie on their side together, and those that stand."""
    return [(wide, list(own)) for wide, own in groupby(tables, key=is_wide)]


def is_wide(table: Table) -> bool:
    """Return whether a table is too wide for an upright page, by the letters of its columns."""
    heads = zip(table.row_headers, *(row.header for row in table.rows), strict=True)
    cells = zip(*(row.cells for row in table.rows), strict=True)
    widths: list[float] = [max(map(len, own)) for own in heads]
    for column, own in zip(table.columns, cells, strict=False):
        widths.append(max(len(column.title), *map(_letters, own)))
    return sum(widths) + BETWEEN * len(widths) > WIDEST


def _letters(cell: Cell) -> float:
    """Return how wide a cell is, in letters of its number."""
    whole, label = len(cell.text()), len(cell.label or "")
    number = label or (0 if cell.mean is None else len(cell.number(cell.mean)))
    seeds = 0 if cell.n is None else 2
    return number + SMALL * (whole - number + len(cell.note)) + seeds


def _part(table: Table, rows: Sequence[Row], reasons: Mapping[str, str]) -> list[str]:
    """Return the lines of a page; what names a row leaves out what it shares with the row above."""
    lines: list[str] = []
    rule = r"\midrule" if len(table.sections()) <= 6 else r"\addlinespace"
    width = len(table.row_headers) + len(table.columns)
    for section, own in groupby(rows, key=lambda row: row.section):
        lines += [rule] if lines else []
        if table.section_titles:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape(section)}}}}} \\")
        above: tuple[str, ...] = ()
        for row in own:
            texts = []
            for place, (column, text) in enumerate(zip(table.row_headers, row.header, strict=True)):
                spelt = MARKS.get(text) if column in TIER_COLUMNS else None
                shared = above[: place + 1] == row.header[: place + 1]
                texts.append("" if shared else spelt or escape(text))
            texts += [_cell(cell, reasons) for cell in row.cells]
            shade = r"\rowcolor{gray!12} " if row.source == "paper" else ""
            lines.append(shade + " & ".join(texts) + r" \\")
            above = row.header
    return lines


def _cell(cell: Cell, reasons: Mapping[str, str]) -> str:
    """Return a cell: the number large, its spread and the number of seeds small."""
    note = rf"\,{{\scriptsize {escape(cell.note)}}}" if cell.note else ""
    seeds = rf"\,{{\tiny({cell.n})}}" if cell.n is not None else ""
    if cell.label:
        return escape(cell.label) + seeds + note
    if cell.mean is None:
        return rf"--$^{{{reasons[cell.reason]}}}$" if cell.reason else "--"
    star = "$^{*}$" if cell.from_other_paper else ""
    number = re.sub(r"^([+-])", r"$\1$", cell.number(cell.mean)) + star  # no hyphen for a minus
    if cell.std is not None:
        number += rf"\,{{\scriptsize$\pm${cell.std:,.{cell.digits}f}}}"
    return (rf"\textbf{{{number}}}" if cell.best else number) + seeds + note


def _pages(table: Table) -> list[list[Row]]:
    """Return rows by page, split between sections where one ends in a page's second half."""
    pages: list[list[Row]] = [[]]
    fit = ROWS_ACROSS if is_wide(table) else ROWS_A_PAGE
    for row in table.rows:
        filled = len(pages[-1])
        breaks = filled > fit // 2 and pages[-1][-1].section != row.section
        if filled >= fit or (breaks and len(table.rows) > fit):
            pages.append([])
        pages[-1].append(row)
    return pages


def _template(name: str) -> Template:
    environment = TemplateFolder(*DELIMITERS)
    environment.filters["latex"] = escape
    return environment.get_template(f"{name}.tex.j2")


def build_pdf(out: Path) -> Path:
    """Compile `main.tex` in the report's folder; LaTeX may run no other program."""
    program = shutil.which("pdflatex")
    if program is None:
        raise UsageError(
            "--pdf needs pdflatex, which is not installed",
            f"on Debian: apt-get install {DEBIAN_PACKAGES}; or compile {out / 'main.tex'}, which "
            "is written, on another machine",
        )
    options = ("-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape")
    command = [program, *options, "main.tex"]
    for _ in range(PASSES):
        done = subprocess.run(
            command, cwd=out, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT
        )
        if done.returncode != 0:
            errors = [line for line in done.stdout.splitlines() if line.startswith(("!", "l."))]
            message = " ".join(errors) or "no message"
            raise BenchError(
                f"pdflatex could not compile {out / 'main.tex'}: {message}",
                f"see {out / 'main.log'}",
            )
    return out / "main.pdf"
