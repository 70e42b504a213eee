"""The paper's tables of an empty and of a full store, and its figures drawn once, as SVG only."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from report_records import collection, jobs, record

from bench import paper
from bench.job import NO_DATA
from bench.paper.campaigns import CAMPAIGNS, campaign_cells
from bench.record import Record
from bench.reporting import GENERIC_FIGURES, ReportInput
from bench.reporting.collection import Collection
from bench.reporting.figure import WrittenFigure, write_figures
from bench.reporting.table import Cell, Table
from bench.store import Store

Report = dict[str, Table]
"""Tables by their labels."""

MakeInput = Callable[..., ReportInput]


@pytest.fixture(scope="session")
def paper_input() -> MakeInput:
    """Make what a table of the paper is made from, of made-up records."""

    @cache
    def specs() -> tuple[object, ...]:
        return paper.variant_specs()

    def make(*records: Record, folder: Path = Path("runs"), root: Path = NO_DATA) -> ReportInput:
        runs = collection(*records, folder=folder, variants=specs())
        return ReportInput(runs, root, paper.reference())

    return make


def tables_of(given: ReportInput) -> Report:
    return {table.label: table for table in (build(given) for build in paper.TABLES)}


@pytest.fixture(scope="session")
def empty_report(paper_input: MakeInput) -> Report:
    """All tables of an empty store."""
    return tables_of(paper_input())


@pytest.fixture(scope="session")
def full_report(paper_input: MakeInput) -> Report:
    """Five seeds of NCT and ERM on two datasets, and one ablation's variant."""
    made = [
        record(job, wga + job.seed)
        for dataset in ("umnist", "isic")
        for method, wga in (("nct", 92.0), ("erm", 90.0))
        for job in jobs(method, dataset)
    ]
    cells = campaign_cells(CAMPAIGNS["ablation-scope"], ("umnist",), NO_DATA)
    (heads_only,) = [cell for cell in cells if cell.variant.name == "scope=head_only"]
    return tables_of(paper_input(*made, *(record(job, 60.0) for job in heads_only.jobs)))


@pytest.fixture(scope="session")
def cells_of() -> Callable[..., list[Cell]]:
    """Find cells of a table by their source and by parts of their keys."""

    def find(table: Table, source: str, **key: str) -> list[Cell]:
        return [
            cell
            for cell in table.cells()
            if cell.source == source and all(getattr(cell.key, k) == v for k, v in key.items())
        ]

    return find


def audited_history() -> pd.DataFrame:
    """Three iterations of two phases of four epochs."""
    places = [(t, phase, epoch) for t in (1, 2, 3) for phase in (1, 2) for epoch in range(4)]
    table = pd.DataFrame(places, columns=["iteration", "phase", "epoch"])
    return table.astype({"iteration": "Int64", "phase": "Int64"}).assign(
        stage=[f"nct-{t}-{phase}" for t, phase, _ in places],
        selection=[epoch / (9 + t) for t, _, epoch in places],
        loss=1.0,
        audit_val_wga=10.0 * table["epoch"],
        audit_test_wga=11.0 * table["epoch"],
    )


@pytest.fixture(scope="session")
def tree_runs(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """Two seeds of NCT on three datasets with their histories, and a stand-in run."""
    store = Store(tmp_path_factory.mktemp("store"))
    made = [
        record(job, 80.0 + job.seed)
        for dataset in ("umnist", "cmnist", "isic")
        for job in jobs("nct", dataset, 2)
    ]
    smoke = jobs("nct", "umnist", 1)[0]
    made.append(record(smoke, 50.0, standin=True, run_id="nct-umnist-s0-standin"))
    for one in made:
        store.write(one, audited_history())
    return collection(*made, folder=store.runs)


@pytest.fixture(scope="session")
def drawn_figures(
    tree_runs: Collection, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[WrittenFigure]]:
    """The figures of these runs that are the paper's own, and where they were written."""
    out = tmp_path_factory.mktemp("figures")
    given = ReportInput(tree_runs, NO_DATA, paper.reference())
    own = [spec for spec in paper.FIGURES if spec not in GENERIC_FIGURES]
    return out, write_figures(given, own, out, ("svg",))
