"""The table of training time: what a run costs by itself, and what all methods cost together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.machines import machines
from bench.report.names import DATASETS, METHODS, dataset_name, method_name
from bench.report.paper import paper_cell, paper_rows
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Table
from bench.timing import minutes_together

ALL = "all"
TOGETHER = {
    "standalone": "All methods, each by itself",
    "shared": "All methods, shared stages once",
}
NO_EPOCHS = pd.DataFrame({"stage": []})


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
    sums = [_together(runs, name) for name in DATASETS]
    for way, title in TOGETHER.items():
        rows.append(Row((title, "measured"), tuple(both[way] for both in sums), ALL, "measured"))
    return Table(
        label="training_time",
        title="Training time",
        caption=(
            "Minutes of training by itself: stages shared with other runs are counted in full, "
            "the audit, the final evaluation and the warm-up of a training's first epoch are not. "
            "Below, all methods of one seed together, as such and with shared stages counted once."
        ),
        stub=("Method", "Source"),
        columns=tuple(Column(dataset_name(name)) for name in DATASETS),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=OWN_RULE,
        notes=(
            "The paper's minutes are of one H100 GPU: compare ratios, not minutes.",
            "Together are the methods that have a published run on the dataset, on the seeds that "
            "all of them have.",
            machines(runs),
        ),
    )


def minutes(run: Run) -> float:
    """Give what a run would have cost by itself; its warm-up is known from its history alone."""
    return minutes_together([_cost(run)])


def _measured(runs: Collection, about: About) -> Cell:
    found = runs.published(about.method, about.dataset)
    if not found:
        return empty(about, runs.absence(about.method, about.dataset))
    return averaged([(minutes(run), run.run_id) for run in found], about)


def _together(runs: Collection, dataset: str) -> dict[str, Cell]:
    """Add up the methods, seed by seed, both ways; a seed that one of them lacks would cost less.

    The histories are read here once more, but once for both.
    """
    abouts = {way: About(ALL, dataset, "minutes", way) for way in TOGETHER}
    found = [runs.published(method, dataset) for method in METHODS]
    by_method = [{int(run.record["seed"]): run for run in own} for own in found if own]
    seeds = sorted(set.intersection(*(set(own) for own in by_method))) if by_method else []
    if not seeds:
        reason = "no seed that every method has" if by_method else "not run"
        return {way: empty(about, reason) for way, about in abouts.items()}
    sums: dict[str, list[float]] = {way: [] for way in TOGETHER}
    for seed in seeds:
        costs = [_cost(own[seed]) for own in by_method]
        sums["standalone"].append(sum(minutes_together([cost]) for cost in costs))
        sums["shared"].append(minutes_together(costs))
    run_ids = tuple(sorted(own[seed].run_id for own in by_method for seed in seeds))
    note = f"{len(by_method)} methods"
    return {
        way: replace(
            averaged([(value, "") for value in sums[way]], about), note=note, run_ids=run_ids
        )
        for way, about in abouts.items()
    }


def _cost(run: Run) -> tuple[dict[str, Any], pd.DataFrame]:
    history = run.history()
    return run.record, NO_EPOCHS if history is None else history
