"""LaTeX: each table as a booktabs source that compiles as it is, and a document with all of them.

The packages are those the paper itself loads. Whatever comes from data is escaped: a method's name
or an error's text can neither break a table nor run a command in it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.report.cells import Cell
from bench.report.table import Row, Table

ROWS_A_PAGE = 44
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
TIER_COLUMNS = ("T", "V", "I")


def escape(text: object) -> str:
    """Write any text so that LaTeX prints it; letters it has no font for become question marks."""
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
    """Write one table, in as many parts as it needs pages."""
    reasons = _lettered(table)
    parts = [_part(table, rows, reasons) for rows in _pages(table.rows)]
    content = {"table": table, "parts": parts, "reasons": reasons}
    return str(_environment().get_template("table.tex.j2").render(content))


def document_source(tables: Sequence[Table], figures: Mapping[str, str]) -> str:
    """Write the document that includes every table and figure.

    Args:
        tables: in order; the paper's, further ones and what stands aside get a section each.
        figures: for each PDF below `figures/`, its caption.
    """
    sections = (
        ("Tables of the paper", [table for table in tables if table.in_paper]),
        ("Further tables", [t for t in tables if not t.in_paper and not t.aside]),
        ("Runs that no table above may show", [table for table in tables if table.aside]),
    )
    content = {"sections": sections, "figures": figures}
    return str(_environment().get_template("main.tex.j2").render(content))


@dataclass(frozen=True)
class Line:
    """One line of a tabular: a rule, a title, or cells, ready to be printed."""

    text: str


def _part(table: Table, rows: Sequence[Row], reasons: Mapping[str, str]) -> list[Line]:
    lines = []
    sections = len(table.sections())
    rule = r"\midrule" if sections <= 6 else r"\addlinespace"
    previous: Row | None = None
    for row in rows:
        fresh = previous is None or row.section != previous.section
        if fresh and previous is not None:
            lines.append(Line(rule))
        if fresh and table.section_titles:
            width = len(table.stub) + len(table.columns)
            title = rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape(row.section)}}}}} \\"
            lines.append(Line(title))
        header = _header(table, row, None if fresh else previous)
        cells = [_cell(cell, reasons) for cell in row.cells]
        shade = r"\rowcolor{gray!12} " if row.source == "paper" else ""
        lines.append(Line(shade + " & ".join([*header, *cells]) + r" \\"))
        previous = row
    return lines


def _header(table: Table, row: Row, previous: Row | None) -> list[str]:
    """Write what names a row, leaving out what it shares with the row above."""
    texts = []
    shared = previous is not None
    for place, text in enumerate(row.header):
        shared = shared and previous is not None and previous.header[place] == text
        spelt = MARKS.get(text) if table.stub[place] in TIER_COLUMNS else None
        texts.append("" if shared else spelt or escape(text))
    return texts


def _cell(cell: Cell, reasons: Mapping[str, str]) -> str:
    """Write a cell: the number large, its spread and the number of seeds small."""
    note = rf"\,{{\scriptsize {escape(cell.note)}}}" if cell.note else ""
    seeds = rf"\,{{\tiny({cell.n})}}" if cell.n is not None else ""
    if cell.label:
        return escape(cell.label) + seeds + note
    if cell.mean is None:
        return rf"--$^{{{reasons[cell.reason]}}}$" if cell.reason else "--"
    star = "$^{*}$" if cell.sourced else ""
    number = _signed(cell.number(cell.mean)) + star
    if cell.std is not None:
        number += rf"\,{{\scriptsize$\pm${cell.std:,.{cell.digits}f}}}"
    return (rf"\textbf{{{number}}}" if cell.best else number) + seeds + note


def _signed(number: str) -> str:
    """Print a real minus or plus instead of a hyphen."""
    return f"${number[0]}${number[1:]}" if number[0] in "+-" else number


def _lettered(table: Table) -> dict[str, str]:
    """Give every reason for an empty cell a letter, for the legend below the table."""
    found = dict.fromkeys(c.reason for c in table.cells() if c.mean is None and not c.label)
    reasons = [reason for reason in found if reason]
    return {reason: _letters(number) for number, reason in enumerate(reasons)}


def _letters(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (letters[number // 26 - 1] if number >= 26 else "") + letters[number % 26]


def _pages(rows: Sequence[Row]) -> list[list[Row]]:
    """Split rows into pages, between sections where one ends in the page's second half."""
    pages: list[list[Row]] = [[]]
    for before, row in pairwise([None, *rows]):
        assert row is not None
        full = len(pages[-1]) >= ROWS_A_PAGE
        breaks = before is not None and before.section != row.section
        if full or (breaks and len(pages[-1]) > ROWS_A_PAGE // 2 and len(rows) > ROWS_A_PAGE):
            pages.append([])
        pages[-1].append(row)
    return pages


def _environment() -> Environment:
    """Braces mean something in LaTeX, so its templates use other delimiters."""
    environment = Environment(
        loader=PackageLoader("bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        finalize=_never_none,
    )
    environment.filters["latex"] = escape
    return environment


def _never_none(value: Any) -> Any:
    return "" if value is None else value
