"""A table: columns under group headers, rows in sections, cells, and what its numbers mean.

One model for three renderings. A renderer needs nothing beyond it, and the CSV follows from the
cells alone, since each knows what it is about.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from bench.report.cells import Cell

FIELDS = (
    *("table", "method", "dataset", "metric", "variant", "mean", "std", "n", "ci_low", "ci_high"),
    *("source", "reason", "run_ids", "text"),
)
SEEDS_SPREAD = "mean ± standard deviation over seeds (n beside it), as in the paper"
Side = Literal["measured", "paper"]
"""Ours, or the paper's."""

NO_UNCERTAINTY = "none, these are facts of the protocol and not estimates"
OWN_RULE = "each run's own rule, on validation data that its tier grants (the record names it)"
DEPTH_RULE = "the method's depth rule, on validation data without group labels"
EACH_ITERATION = (
    "each iteration at its best checkpoint on validation data (by loss at iteration 1, by pWGA2 "
    "after it); no iteration is chosen over another"
)


@dataclass(frozen=True)
class Column:
    """One column; neighbours with the same `group` share a header above them."""

    title: str
    group: str = ""
    align: Literal["l", "c", "r"] = "c"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        header: texts of the leading columns, one for each of the table's `stub`.
        section: rows are kept together by it; a renderer draws a rule, or prints it, at a change.
        source: which kind of row it is, where rows of both kinds alternate.
    """

    header: tuple[str, ...]
    cells: tuple[Cell, ...]
    section: str = ""
    source: Side | Literal[""] = ""


@dataclass(frozen=True)
class Table:
    """One table of the report.

    Attributes:
        label: the paper's label without `tab:`, and the name of the table's files.
        stub: titles of the leading columns that name a row.
        uncertainty: which uncertainty its numbers show.
        selection: which rule chose the model behind them, and on which data.
        notes: whatever else a reader has to know.
        in_paper: whether the paper has this table.
        aside: whether it shows only runs that no paper table may show.
        section_titles: whether sections are named, and not only set apart.
    """

    label: str
    title: str
    caption: str
    stub: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    uncertainty: str
    selection: str
    notes: tuple[str, ...] = ()
    in_paper: bool = True
    aside: bool = False
    section_titles: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if (len(row.header), len(row.cells)) != (len(self.stub), len(self.columns)):
                raise ValueError(f"{self.label}: a row does not fit its columns: {row.header}")

    def groups(self) -> list[tuple[str, int]]:
        """Give the group headers with the number of columns below each."""
        return [(name, len(list(own))) for name, own in groupby(c.group for c in self.columns)]

    def has_groups(self) -> bool:
        """Tell whether any column stands under a group header."""
        return any(column.group for column in self.columns)

    def group_spans(self) -> list[tuple[int, int]]:
        """Give the first and the last column, from 1, below each group header that has a name."""
        spans, first = [], len(self.stub) + 1
        for name, count in self.groups():
            if name:
                spans.append((first, first + count - 1))
            first += count
        return spans

    def sections(self) -> list[tuple[str, list[Row]]]:
        """Give the rows by section, in order."""
        return [(name, list(own)) for name, own in groupby(self.rows, key=lambda r: r.section)]

    def cells(self) -> Iterator[Cell]:
        """Go through all cells, row by row."""
        for row in self.rows:
            yield from row.cells

    def csv_rows(self) -> list[dict[str, Any]]:
        """Give every cell as a row of the table's CSV."""
        return [_csv_row(self.label, cell) for cell in self.cells()]

    def to_csv(self) -> str:
        """Write the table's CSV."""
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.csv_rows())
        return text.getvalue()


def _csv_row(label: str, cell: Cell) -> dict[str, Any]:
    """Write one cell: the contract's columns, and as the last its text as the table shows it."""
    return {
        "table": label,
        "method": _inert(cell.about.method),
        "dataset": _inert(cell.about.dataset),
        "metric": _inert(cell.about.metric),
        "variant": _inert(cell.about.variant),
        **{name: getattr(cell, name) for name in ("mean", "std", "n", "ci_low", "ci_high")},
        "source": cell.source,
        "reason": _inert(cell.reason or cell.note),
        "run_ids": " ".join(cell.run_ids),
        "text": _inert(cell.text()) if cell.label else cell.text(),
    }


def _inert(text: str) -> str:
    """Keep a spreadsheet from taking text for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
