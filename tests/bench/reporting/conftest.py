"""A store of made-up runs and the figures of it, drawn once a session, as SVG only."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from report_records import collection, given, jobs, record

from bench.reporting import GENERIC_FIGURES, Reference
from bench.reporting.collection import Collection
from bench.reporting.figure import WrittenFigure, write_figures
from bench.reporting.table import Cell, CellKey
from bench.store import Store

PAPER = Reference(
    title="the made-up paper",
    methods=("erm", "nct"),
    cells={
        ("nct", "umnist", "wga"): Cell(
            "paper", CellKey("nct", "umnist", "wga"), mean=93.5, std=0.6, from_other_paper=True
        ),
        ("nct", "umnist", "avg"): Cell("paper", CellKey("nct", "umnist", "avg"), mean=95.0),
        ("erm", "umnist", "minutes"): Cell("paper", CellKey("erm", "umnist", "minutes"), mean=7.5),
    },
    notes={
        "main_results": ("A note of the paper.",),
        "training_time": ("Minutes on another machine.",),
    },
    baselines=("nct", "erm"),
)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """A paper with a few numbers."""
    return PAPER


def history(iterations: int = 3) -> pd.DataFrame:
    rows = [
        {"stage": f"nct-{t}-{p}", "iteration": t, "phase": p, "epoch": e, "selection": e / (9 + t)}
        for t in range(1, iterations + 1)
        for p in (1, 2)
        for e in range(4)
    ]
    table = pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"})
    table["loss"] = 1.0
    table["audit_val_wga"] = 10.0 * table["epoch"]
    return table.assign(audit_test_wga=11.0 * table["epoch"])


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """Two seeds of three methods on three datasets, and a stand-in run of each method."""
    store = Store(tmp_path_factory.mktemp("store"))
    made = []
    for place, method in enumerate(("nct", "erm", "dfr")):
        for dataset in ("umnist", "cmnist", "isic"):
            for job in jobs(method, dataset, 2):
                made.append(record(job, 80.0 + 3 * place + job.seed))
        smoke = jobs(method, "umnist", 1)[0]
        made.append(record(smoke, 50.0, standin=True, run_id=f"{method}-umnist-s0-standin"))
    for one in made:
        store.write(one, history() if one.job.method == "nct" else None)
    return collection(*made, folder=store.runs)


@pytest.fixture(scope="session")
def drawn_figures(
    stored: Collection, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[WrittenFigure]]:
    """The figures of that store, and where they were written."""
    out = tmp_path_factory.mktemp("figures")
    return out, write_figures(given(stored, PAPER), GENERIC_FIGURES, out, ("svg",))
