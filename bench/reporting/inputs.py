"""What a report is made from: stored runs, a data root, and a paper's numbers to stand beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.reporting.collection import Collection
from bench.reporting.table import Cell, Table


@dataclass(frozen=True)
class Reference:
    """A paper's own numbers; without any, tables have no rows of a paper.

    Cells are by method, dataset and metric (`minutes`: of training). What is added to the notes of
    a table or a figure, and the methods that a table leaves out, are by its label.
    """

    title: str = "the paper"
    methods: tuple[str, ...] = ()  # in its order
    cells: Mapping[tuple[str, str, str], Cell] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    omitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.methods)

    def cell(self, method: str, dataset: str, metric: str) -> Cell | None:
        """Return the paper's number, if it has one."""
        return self.cells.get((method, dataset, metric))


@dataclass(frozen=True)
class ReportInput:
    """What every table is made from; data may be missing where samples are counted or shown."""

    runs: Collection
    data_root: Path
    reference: Reference = field(default_factory=Reference)


TableBuilder = Callable[[ReportInput], Table]
