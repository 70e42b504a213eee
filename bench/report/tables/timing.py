"""The table of training time: what a run costs by itself, as if nothing had been shared."""

from __future__ import annotations

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.machines import machines
from bench.report.names import DATASETS, METHODS, dataset_name, method_name
from bench.report.paper import paper_cell, paper_rows
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Table
from bench.timing import timing_of


def training_time(runs: Collection) -> Table:
    """Put measured minutes above the paper's; the machines differ, so only ratios compare."""
    paper = {(row["method"], row["dataset"]): row for row in paper_rows("training_time")}
    rows = []
    for method in METHODS:
        own, told = [], []
        for name in DATASETS:
            about = About(method, name, "minutes")
            own.append(_measured(runs, about))
            row = paper.get((method, name))
            told.append(
                paper_cell(row, about) if row else empty(about, "not in the paper", "paper")
            )
        rows.append(Row((method_name(method), "measured"), tuple(own), method, "measured"))
        rows.append(Row((method_name(method), "paper"), tuple(told), method, "paper"))
    return Table(
        label="training_time",
        title="Training time",
        caption=(
            "Minutes of training by itself: stages shared with other runs are counted in full, "
            "the audit, the final evaluation and the warm-up of a training's first epoch are not."
        ),
        stub=("Method", "Source"),
        columns=tuple(Column(dataset_name(name)) for name in DATASETS),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=OWN_RULE,
        notes=(
            "The paper's minutes are of one H100 GPU: compare ratios, not minutes.",
            machines(runs),
        ),
    )


def minutes(run: Run) -> float:
    """Give what a run would have cost by itself; its warm-up is known from its history alone."""
    history = run.history()
    if history is None:
        return float(sum(stage["seconds_standalone"] for stage in run.record["stages"])) / 60
    return timing_of(run.record, history).minutes_standalone


def _measured(runs: Collection, about: About) -> Cell:
    found = runs.published(about.method, about.dataset)
    if not found:
        return empty(about, runs.absence(about.method, about.dataset))
    return averaged([(minutes(run), run.run_id) for run in found], about)
