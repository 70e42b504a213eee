"""The tables of the heads' calibration: logit statistics and decision margins by head."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

from bench.report.cells import About, Cell
from bench.report.collection import Collection
from bench.report.names import dataset_name
from bench.report.paper import paper_cell, paper_rows
from bench.report.table import EACH_ITERATION, SEEDS_SPREAD, Column, Row, Table
from bench.report.tables.trees import Read, Tree, at_iteration, iteration, tree_cell

HEADS = ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3))
TWO_CLASSES = ("waterbirds", "celeba", "isic", "umnist")
COLUMNS = tuple(Column(f"H{head}", f"Iteration {t}") for t, head in HEADS)
ORDER = "Heads in the order of the leaves: of iteration 2, easy and hard of the first class first."
WITHIN = (
    "the spread is the standard deviation within a head over test samples, not over seeds; mean "
    "and spread are averaged over seeds (n beside them), and the CSV's interval is over seeds"
)


def logit_stats(runs: Collection) -> Table:
    """Give mean and spread of every head's logit."""
    return Table(
        label="logit_stats",
        title="Logits by head",
        caption="Mean ± standard deviation of each head's logit on the test set. " + ORDER,
        stub=("Dataset", "Source"),
        columns=COLUMNS,
        rows=_rows(runs, "logit_stats", "logit"),
        uncertainty=WITHIN,
        selection=EACH_ITERATION,
        notes=("CMNIST has more heads than columns: see the table of its calibration.",),
    )


def margins(runs: Collection) -> Table:
    """Give mean and spread of the winning logit's lead, by the leaf that wins."""
    return Table(
        label="margins",
        title="Decision margins",
        caption="Winning logit minus the second best, by predicted leaf: mean ± std. " + ORDER,
        stub=("Dataset", "Source"),
        columns=COLUMNS,
        rows=_rows(runs, "margins", "margin"),
        uncertainty=WITHIN,
        selection=EACH_ITERATION,
        notes=("CMNIST has more heads than columns: see the table of its calibration.",),
    )


def _rows(runs: Collection, label: str, quantity: str) -> tuple[Row, ...]:
    paper = {
        (row["dataset"], int(row["iteration"]), int(row["head"])): row for row in paper_rows(label)
    }
    rows = []
    for name in TWO_CLASSES:
        own, told = [], []
        for t, head in HEADS:
            about = About("nct", name, quantity, f"iteration {t} head {head}")
            own.append(_head(runs, about, t, head))
            told.append(paper_cell(paper[name, t, head], about, 2))
        rows.append(Row((dataset_name(name), "measured"), tuple(own), name, "measured"))
        rows.append(Row((dataset_name(name), "paper"), tuple(told), name, "paper"))
    return tuple(rows)


def _head(runs: Collection, about: About, t: int, head: int) -> Cell:
    """Average mean and spread of one head over seeds; a merged head has neither."""
    missing = "merged or never chosen in every run"
    mean = tree_cell(runs, about, at_iteration(t, f"{about.metric}_mean", head), 2, missing)
    spread = tree_cell(runs, about, at_iteration(t, f"{about.metric}_std", head), 2, missing)
    return replace(mean, std=spread.mean)


QUANTITIES: dict[str, tuple[str, str, Callable[[list[float]], float]]] = {
    "logit_mean_lowest": ("Lowest head mean", "logit_mean", min),
    "logit_mean_highest": ("Highest head mean", "logit_mean", max),
    "logit_std_average": ("Average std within a head", "logit_std", statistics.fmean),
    "margin_mean_lowest": ("Lowest mean margin", "margin_mean", min),
}


def cmnist_calibration(runs: Collection) -> Table:
    """Sum up CMNIST's heads as the paper's prose does."""
    paper = {(r["quantity"], int(r["iteration"])): r for r in paper_rows("cmnist_calibration")}
    rows = []
    for quantity, (title, key, reduce) in QUANTITIES.items():
        cells = []
        for t in (1, 2):
            about = About("nct", "cmnist", quantity, f"iteration {t}")
            told = float(paper[quantity, t]["value"])
            cells.append(tree_cell(runs, about, _reduced(t, key, reduce), 2))
            cells.append(Cell("paper", about, mean=told, digits=2))
        rows.append(Row((title,), tuple(cells)))
    return Table(
        label="cmnist_calibration",
        title="Calibration of CMNIST's heads",
        caption="The 5 heads of iteration 1 and the 10 of iteration 2, in the paper's figures.",
        stub=("Over the heads",),
        columns=tuple(
            Column(source, f"Iteration {t}") for t in (1, 2) for source in ("Measured", "Paper")
        ),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=EACH_ITERATION,
        notes=("The paper gives these in its text, without a spread.",),
        in_paper=False,
    )


def _reduced(t: int, key: str, reduce: Callable[[list[float]], float]) -> Read:
    """Make a reader that sums up the heads of an iteration, leaving out unused ones."""

    def read(tree: Tree) -> float | None:
        entry = iteration(tree, t)
        known = [] if entry is None else [value for value in entry[key] if value is not None]
        return float(reduce(known)) if known else None

    return read
