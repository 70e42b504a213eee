"""What never stands in a paper table: stand-in and quick runs, and the runs left out."""

from __future__ import annotations

from collections import Counter

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run
from bench.report.names import dataset_name, method_name
from bench.report.table import OWN_RULE, SEEDS_SPREAD, Column, Row, Table

SHOWN = {"wga": "WGA", "avg": "Avg", "auroc": "AUROC"}


def trials(runs: Collection) -> Table:
    """Average stand-in and quick runs, by method, dataset and data; labelled as what they are."""
    grouped: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs.of_kind("trial"):
        record = run.record
        key = (record["method"], record["dataset"], run.reason, record["protocol"])
        grouped.setdefault(key, []).append(run)
    rows = []
    for (method, dataset, reason, protocol), found in sorted(grouped.items()):
        what = f"{reason}: {protocol}"
        cells = tuple(_mean(found, About(method, dataset, metric, what)) for metric in SHOWN)
        rows.append(Row((method_name(method), dataset_name(dataset), what), cells, section=dataset))
    return Table(
        label="trials",
        title="Stand-in and quick runs",
        caption=(
            "Runs on synthetic stand-in data, and smoke runs. They show that the machinery works; "
            "they say nothing about the methods."
        ),
        stub=("Method", "Dataset", "What it is"),
        columns=tuple(Column(title) for title in SHOWN.values()),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=OWN_RULE,
        notes=() if rows else ("None in this store.",),
        in_paper=False,
        aside=True,
    )


def left_out(runs: Collection) -> Table:
    """Count the runs that no table shows, by method, dataset and reason."""
    counted: Counter[tuple[str, str, str]] = Counter()
    ids: dict[tuple[str, str, str], list[str]] = {}
    for run in runs.of_kind("left out"):
        key = (run.record["method"], run.record["dataset"], run.reason)
        counted[key] += 1
        ids.setdefault(key, []).append(run.run_id)
    rows = tuple(
        Row(
            (method_name(method), dataset_name(dataset), reason),
            (
                Cell(
                    "measured",
                    About(method, dataset, "runs", reason),
                    mean=float(counted[method, dataset, reason]),
                    run_ids=tuple(ids[method, dataset, reason]),
                    digits=0,
                ),
            ),
        )
        for method, dataset, reason in sorted(counted)
    )
    return Table(
        label="left_out",
        title="Runs left out",
        caption="Runs in the store that no table above shows, and why.",
        stub=("Method", "Dataset", "Why"),
        columns=(Column("Runs", align="r"),),
        rows=rows,
        uncertainty="none, these are counts of runs",
        selection="none",
        notes=() if rows else ("None in this store.",),
        in_paper=False,
        aside=True,
    )


def _mean(found: list[Run], about: About) -> Cell:
    values = [
        (value, run.run_id)
        for run in found
        if (value := run.record["metrics"]["test"].get(about.metric)) is not None
    ]
    return averaged(values, about) if values else empty(about, "not a metric of this dataset")
