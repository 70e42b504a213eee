"""The paper's own numbers, as transcribed in `results/paper`: one tidy file a table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

from bench.paper.campaigns import IN_MAIN_TABLE, MAIN_SEEDS
from bench.reporting.collection import Reference
from bench.reporting.main_table import difference
from bench.reporting.table import Cell, CellKey
from bench.resources import paper_folder

PAPER_DATASETS = ("waterbirds", "celeba", "isic", "umnist", "cmnist")
CALIBRATED = (
    "NCT+ is a variant of NCT made here. It fits a calibration on validation class labels, by "
    "which ERM, GEORGE and NCT only choose: its numbers use more of validation than theirs."
)
SEEDS_OF_THE_PAPER = (
    "The paper's own cells are taken to be of its five main seeds; of those from earlier papers "
    "(*) it gives no number."
)
ON_GPU = "The paper's minutes are of one H100 GPU: compare ratios, not minutes."


@cache
def paper_rows(name: str) -> tuple[Mapping[str, str], ...]:
    """Read one file, row by row."""
    with (paper_folder() / f"{name}.csv").open(newline="", encoding="utf-8") as source:
        return tuple(csv.DictReader(source))


def paper_by(name: str, *columns: str) -> dict[tuple[str, ...], Mapping[str, str]]:
    """Return the rows of one file by what they have in these columns."""
    return {tuple(row[column] for column in columns): row for row in paper_rows(name)}


def paper_cell(
    row: Mapping[str, str], key: CellKey, digits: int | None = None, n: int | None = None
) -> Cell:
    """Return the cell of a row that has a mean and, where the paper gives one, a spread.

    `n` is its number of seeds, where the paper says it.
    """
    return Cell(
        "paper",
        key,
        mean=float(row["mean"]),
        std=float(row["std"]) if row.get("std") else None,
        n=n if row.get("std") else None,
        digits=key.digits if digits is None else digits,
        from_other_paper=row.get("sourced") == "1",
    )


def with_verdict(measured: Iterable[Cell], paper: Iterable[Cell]) -> list[Cell]:
    """Return measured cells with a note on how each compares with the paper's."""
    pairs = zip(measured, paper, strict=True)
    return [replace(cell, note=difference(cell, reported).note) for cell, reported in pairs]


@cache
def reference() -> Reference:
    """Return what the paper reports of every method, for the tables that are not its own."""
    cells = {}
    for row in (*paper_rows("main_results"), *paper_rows("training_time")):
        key = (row["method"], row["dataset"], row.get("metric", "minutes"))
        own = None if row.get("sourced") == "1" else len(MAIN_SEEDS)
        cells[key] = paper_cell(row, CellKey(*key), n=own)
    return Reference(
        title="the NCT paper",
        methods=IN_MAIN_TABLE,
        cells=cells,
        notes={
            "main_results": (CALIBRATED,),
            "main_differences": (SEEDS_OF_THE_PAPER,),
            "training_time": (ON_GPU,),
        },
        baselines=("nct", "erm"),
        featured=("nct", "nct_plus"),
    )
