"""The paper's own numbers, as transcribed in `results/paper`: one tidy file a table."""

from __future__ import annotations

import csv
from functools import cache

from bench.report.cells import DIGITS, About, Cell
from bench.resources import paper_folder


@cache
def paper_rows(name: str) -> tuple[dict[str, str], ...]:
    """Read one file, row by row."""
    with (paper_folder() / f"{name}.csv").open(newline="", encoding="utf-8") as source:
        return tuple(csv.DictReader(source))


def paper_cell(row: dict[str, str], about: About, digits: int | None = None) -> Cell:
    """Make a cell of a row that has a mean and, where the paper gives one, a spread."""
    return Cell(
        "paper",
        about,
        mean=float(row["mean"]),
        std=float(row["std"]) if row.get("std") else None,
        digits=DIGITS.get(about.metric, 1) if digits is None else digits,
        sourced=row.get("sourced") == "1",
    )


def verdict(measured: Cell, paper: Cell) -> str:
    """Say whether our mean is within the paper's spread, above or below; nothing without both."""
    if measured.mean is None or paper.mean is None:
        return ""
    spread = paper.std if paper.std is not None else measured.std
    if spread is None:
        return "no spread to compare with"
    gap = measured.mean - paper.mean
    # The paper rounds its means, so a gap below half a unit of its last digit is none.
    if abs(gap) <= spread + 0.5 * 10 ** -DIGITS.get(measured.about.metric, 1):
        return "within"
    return "above" if gap > 0 else "below"


def main_cells() -> dict[tuple[str, str, str], Cell]:
    """Read the main table, by method, dataset and metric."""
    cells = {}
    for row in paper_rows("main_results"):
        key = (row["method"], row["dataset"], row["metric"])
        cells[key] = paper_cell(row, About(*key))
    return cells
