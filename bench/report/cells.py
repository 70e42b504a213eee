"""Cells: a number with its spread, its source, and the runs it comes from, or why it is empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.report.statistics import summarise

Source = Literal["measured", "paper", "expected"]
"""Ours (runs, data, code); the paper's; or a protocol's constant that no data here confirms."""

EMPTY = "-"
DIGITS = {"wga": 1, "avg": 1, "auroc": 3, "auroc_nonpatch": 3, "auroc_histopath": 3}


@dataclass(frozen=True)
class About:
    """What a cell is about, in the words of the store: the first columns of a table's CSV."""

    method: str = ""
    dataset: str = ""
    metric: str = ""
    variant: str = ""


@dataclass(frozen=True)
class Cell:
    """One cell of a table; it knows all that any rendering shows of it.

    Attributes:
        label: the text of a cell that is no number.
        note: a word beside the number, such as a verdict.
        reason: why there is no number.
        digits: decimals shown; the CSV has the whole number.
        signed: whether a plus is shown, as for differences.
        best: marked as the best of its kind.
        sourced: marked in the paper as taken from another paper.
    """

    source: Source
    about: About = About()
    mean: float | None = None
    std: float | None = None
    n: int | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    label: str = ""
    note: str = ""
    reason: str = ""
    run_ids: tuple[str, ...] = ()
    digits: int = 1
    signed: bool = False
    best: bool = False
    sourced: bool = False

    def number(self, value: float) -> str:
        """Write a number with this cell's decimals."""
        return f"{value:{'+' if self.signed else ''}z,.{self.digits}f}"  # z: no minus before a zero

    def text(self) -> str:
        """Write the cell as the paper does: mean ± spread, its label, or a dash."""
        if self.label:
            return self.label
        if self.mean is None:
            return EMPTY
        spread = "" if self.std is None else f" ± {self.std:,.{self.digits}f}"
        return self.number(self.mean) + spread

    def details(self) -> str:
        """Say in a line what the text leaves out: exact values, seeds, runs, or why it is empty."""
        parts: list[str] = [self.source]
        if self.mean is not None:
            parts.append(f"mean {self.mean:.6g}")
        if self.std is not None:
            parts.append(f"std {self.std:.6g}")
        if self.n is not None:
            parts.append(f"n {self.n}")
        if self.ci_low is not None and self.ci_high is not None:
            parts.append(f"95% interval {self.ci_low:.6g} to {self.ci_high:.6g}")
        if self.reason:
            parts.append(self.reason)
        if self.run_ids:
            parts.append("runs " + " ".join(self.run_ids))
        return "; ".join(parts)


def averaged(values: Sequence[tuple[float, str]], about: About, digits: int | None = None) -> Cell:
    """Average values over runs, each given with its run id; at least one is needed."""
    summary = summarise([value for value, _ in values])
    return Cell(
        "measured",
        about,
        mean=summary.mean,
        std=summary.std,
        n=summary.n,
        ci_low=summary.ci_low,
        ci_high=summary.ci_high,
        run_ids=tuple(sorted(run_id for _, run_id in values)),
        digits=DIGITS.get(about.metric, 1) if digits is None else digits,
    )


def empty(about: About, reason: str, source: Source = "measured") -> Cell:
    """Leave a cell empty and say why."""
    return Cell(source, about, reason=reason)
