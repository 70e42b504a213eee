"""Tables: cells that know what they show, rows, columns, and what the numbers mean.

A cell is a number with its spread, its source and the runs it comes from, or the reason why it is
empty. One model serves three renderings: a renderer needs nothing beyond it, and the CSV follows
from the cells alone, since each has a key.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Literal

from bench.reporting.statistics import Comparison, seed_interval

Source = Literal["measured", "paper", "expected", "external"]
"""Ours (runs, data, code); a paper's; a protocol's constant that no data here confirms; or scored
here and made elsewhere."""

EMPTY = "-"
CSV_COLUMNS = (
    *("table", "method", "dataset", "metric", "variant", "mean", "std", "n", "ci_low", "ci_high"),
    *("source", "reason", "run_ids", "text"),
)
OVER_SEEDS = "95% t-interval over seeds"
OVER_SAMPLES = "95% bootstrap interval over test samples"
WELCH = "95% Welch interval"
SEEDS_SPREAD = (
    "mean ± standard deviation over seeds (n beside it), as in the paper; in the CSV the "
    f"{OVER_SEEDS}"
)
OWN_RULE = "each run's own rule, on validation data that its tier grants (the record names it)"


@dataclass(frozen=True)
class CellKey:
    """What a cell is about, in the words of the store: the first columns of a table's CSV."""

    method: str = ""
    dataset: str = ""
    metric: str = ""
    variant: str = ""

    @property
    def digits(self) -> int:
        """The decimals that tables show of the metric: AUROCs are fractions, others percents."""
        return 3 if self.metric.startswith("auroc") else 1

    @property
    def margin(self) -> float:
        """How far an interval may reach to each side if means are to be called equal: 5 points.

        Of an AUROC it is half as much of the scale, of which the lower half is below chance.
        """
        return 0.025 if self.metric.startswith("auroc") else 5.0

    def empty(self, reason: str, source: Source = "measured") -> Cell:
        """Return an empty cell with the reason."""
        return Cell(source, self, reason=reason)

    def averaged(self, values: Sequence[tuple[float, str]], digits: int | None = None) -> Cell:
        """Return the mean of values, at least one, each given with the id of its run.

        The spread is the paper's, a standard deviation; a single run has none.
        """
        numbers, run_ids = zip(*values, strict=True)
        low, high = seed_interval(numbers)
        return Cell(
            "measured",
            self,
            mean=statistics.fmean(numbers),
            std=statistics.stdev(numbers) if len(numbers) > 1 else None,
            n=len(numbers),
            ci_low=low,
            ci_high=high,
            run_ids=tuple(sorted(run_ids)),
            digits=self.digits if digits is None else digits,
        )

    def difference(self, found: Comparison, note: str, run_ids: tuple[str, ...] = ()) -> Cell:
        """Return a paired difference with its interval and a word on it."""
        return Cell(
            "measured",
            self,
            mean=found.difference,
            n=found.n,
            ci_low=found.low,
            ci_high=found.high,
            note=note,
            run_ids=run_ids,
            digits=self.digits,
            signed=True,
        )


@dataclass(frozen=True)
class Cell:
    """One cell of a table, with all that any rendering shows of it."""

    source: Source
    key: CellKey = CellKey()
    mean: float | None = None
    std: float | None = None
    n: int | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    interval: str = OVER_SEEDS  # what the two are
    label: str = ""  # the text of a cell that is no number
    note: str = ""  # a word beside the number, such as a verdict
    reason: str = ""  # why there is no number
    run_ids: tuple[str, ...] = ()
    digits: int = 1  # decimals shown; the CSV has the whole number
    signed: bool = False  # a plus is shown, as for differences
    best: bool = False  # of its kind
    from_other_paper: bool = False  # as the paper marks it
    tone: Literal["", "good", "bad"] = ""  # of a verdict, which the page colours

    def number(self, value: float) -> str:
        """Return a number with this cell's decimals."""
        return f"{value:{'+' if self.signed else ''}z,.{self.digits}f}"  # z: no minus before a zero

    def text(self) -> str:
        """Return the cell as the paper writes it: mean ± spread, its label, or a dash."""
        if self.label or self.mean is None:
            return self.label or EMPTY
        spread = "" if self.std is None else f" ± {self.std:,.{self.digits}f}"
        return self.number(self.mean) + spread

    def details(self) -> str:
        """Return what the text leaves out: exact values, seeds, runs, or why it is empty."""
        numbers = {"mean": self.mean, "std": self.std, "n": self.n}
        known = [f"{name} {value:.6g}" for name, value in numbers.items() if value is not None]
        if self.ci_low is not None and self.ci_high is not None:
            known.append(f"{self.interval} {self.ci_low:.6g} to {self.ci_high:.6g}")
        runs = "runs " + " ".join(self.run_ids) if self.run_ids else ""
        return "; ".join(filter(None, (self.source, *known, self.reason, runs)))

    def csv_row(self, table: str) -> tuple[object, ...]:
        """Return the cell as a row of a table's CSV, its text as the table shows it last."""
        return (
            *(table, *map(_inert, asdict(self.key).values())),
            *(self.mean, self.std, self.n, self.ci_low, self.ci_high),
            *(self.source, _inert(self.reason or self.note), " ".join(self.run_ids)),
            _inert(self.label) or self.text(),
        )


def _inert(text: str) -> str:
    """Return text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def mark_best(
    cells: Sequence[Cell], *, mark_ties: bool = True, lowest: bool = False
) -> tuple[Cell, ...]:
    """Return cells of which the best are marked, where there is a choice.

    More is better in every metric, but `lowest` of what is spent; cells that read the same are
    equally good. Without `mark_ties`, cells that all read the same are no choice.
    """
    known = [round(cell.mean, cell.digits) for cell in cells if cell.mean is not None]
    if len(known if mark_ties else set(known)) < 2:
        return tuple(cells)
    best = min(known) if lowest else max(known)
    return tuple(
        replace(cell, best=cell.mean is not None and round(cell.mean, cell.digits) == best)
        for cell in cells
    )


@dataclass(frozen=True)
class Column:
    """One column; neighbours with the same `group` share a header above them."""

    title: str
    group: str = ""
    align: Literal["l", "c", "r"] = "c"


@dataclass(frozen=True)
class Row:
    """One row; a renderer draws a rule, or prints the section, where the section changes."""

    header: tuple[str, ...]  # one text for each of the table's `row_headers`
    cells: tuple[Cell, ...]
    section: str = ""
    source: Literal["measured", "paper", ""] = ""  # where rows of both kinds alternate


def columns(groups: Iterable[str], titles: Sequence[str]) -> tuple[Column, ...]:
    """Return the titled columns below each group's header."""
    return tuple(Column(title, group) for group in groups for title in titles)


def paired_rows(
    header: tuple[str, ...],
    measured: Mapping[str, Sequence[Cell]],
    reference: Sequence[Cell],
    section: str,
) -> list[Row]:
    """Return rows of measured cells and, if it has cells, one of a paper's, all in one section.

    Where they come from is the last header: what names the measured cells, or `paper`.
    """
    ours = [Row((*header, word), tuple(own), section, "measured") for word, own in measured.items()]
    theirs = Row((*header, "paper"), tuple(reference), section, "paper")
    return [*ours, theirs] if reference else ours


@dataclass(frozen=True)
class Table:
    """One table of the report."""

    label: str  # name of its files; the paper's label without `tab:` where it has one
    title: str
    caption: str
    row_headers: tuple[str, ...]  # titles of the leading columns that name a row
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    uncertainty: str = SEEDS_SPREAD  # which one its numbers show
    selection: str = OWN_RULE  # what chose the model behind them, and on which data
    notes: tuple[str, ...] = ()
    in_paper: bool = True
    appendix: bool = False  # it shows only runs that no other table may show
    section_titles: bool = False  # sections are named, and not only set apart

    def __post_init__(self) -> None:
        for row in self.rows:
            if (len(row.header), len(row.cells)) != (len(self.row_headers), len(self.columns)):
                raise ValueError(f"{self.label}: a row does not fit its columns: {row.header}")

    def groups(self) -> list[tuple[str, int]]:
        """Return the group headers with the number of columns below each."""
        return [(name, len(list(own))) for name, own in groupby(c.group for c in self.columns)]

    def sections(self) -> list[tuple[str, list[Row]]]:
        """Return the rows by section, in order."""
        return [(name, list(own)) for name, own in groupby(self.rows, key=lambda r: r.section)]

    def cells(self) -> Iterator[Cell]:
        """Go through all cells, row by row."""
        for row in self.rows:
            yield from row.cells

    def to_csv(self) -> str:
        """Return the table's CSV, a row a cell."""
        text = io.StringIO()
        rows = [CSV_COLUMNS, *(cell.csv_row(self.label) for cell in self.cells())]
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()
