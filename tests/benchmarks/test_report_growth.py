"""How the report grows with the store: time in proportion to the runs, memory within 1 GB."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bench import paper, reporting
from bench.job import NO_DATA, Request, expand
from bench.store import Store
from datasets.files import to_json

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from report_records import record

pytestmark = pytest.mark.slow

FEW, MANY = 500, 2000
CELLS = tuple(
    (m, d) for m in ("nct", "erm", "groupdro", "jtt", "dfr") for d in ("umnist", "cmnist")
)
SAMPLES = 2000
LINEAR_WITH_ROOM = 1.5 * MANY / FEW
A_GIGABYTE = 1 << 30
# Not getrusage: its peak starts from that of the process that started this one.
MEMORY = """
import sys
from pathlib import Path
import torch
from bench import api
from bench.process import peak_memory_bytes

root, out = map(Path, sys.argv[1:])
api.report(out, results=root, data_root=out / "no-data")
print(peak_memory_bytes(torch.device("cpu")))
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """Stores of either size, every run with its predictions."""
    root = tmp_path_factory.mktemp("growth")
    shared = _predictions(root)
    return {size: _store(root / str(size), size, shared) for size in (FEW, MANY)}


def _predictions(folder: Path) -> Path:
    draws = np.random.default_rng(0)
    y = draws.integers(0, 2, SAMPLES)
    table = pd.DataFrame(
        {
            "id": np.arange(SAMPLES),
            "split": "test",
            "y": y,
            "group": 2 * y + draws.integers(0, 2, SAMPLES),
            "pred": np.where(draws.random(SAMPLES) < 0.9, y, 1 - y),
        }
    )
    path = folder / "predictions.parquet"
    table.to_parquet(path, index=False)
    return path


def _store(root: Path, size: int, shared: Path) -> Store:
    store = Store(root)
    seeds = tuple(range(size // len(CELLS)))
    for method, dataset in CELLS:
        for job in expand(Request((method,), (dataset,), seeds, NO_DATA)):
            run = store.runs / job.run_id
            run.mkdir(parents=True)
            (run / "record.json").write_text(to_json(record(job, 80.0 + job.seed % 17).to_json()))
            os.link(shared, run / "predictions.parquet")
    return store


def report(store: Store, out: Path) -> reporting.Collection:
    """Render with every run published, whatever its seed: the most that tables can be asked."""
    runs = reporting.collect(store, paper.variant_specs(), range(MANY))
    given = reporting.ReportInput(runs, out / "no-data", paper.reference())
    reporting.build(out, given, paper.TABLES, paper.FIGURES)
    return runs


def processor_seconds(store: Store, out: Path) -> float:
    began = time.process_time()
    report(store, out)
    return time.process_time() - began


@pytest.mark.benchmark(group="the whole report")
@pytest.mark.parametrize("size", [FEW, MANY])
def test_report(benchmark: Any, stores: dict[int, Store], tmp_path: Path, size: int) -> None:
    runs = benchmark.pedantic(report, (stores[size], tmp_path), rounds=1)
    assert len(runs.of_kind("published")) == size


def test_time_grows_in_proportion_to_the_runs(stores: dict[int, Store], tmp_path: Path) -> None:
    ratios: list[float] = []
    # A busy machine disturbs both measurements, which can hide the truth but not make it up.
    while len(ratios) < 3 and min(ratios, default=9e9) >= LINEAR_WITH_ROOM:
        few, many = (processor_seconds(stores[n], tmp_path) for n in (FEW, MANY))
        ratios.append(many / few)
    assert min(ratios) < LINEAR_WITH_ROOM, ratios


def test_two_thousand_runs_fit_into_a_gigabyte(stores: dict[int, Store], tmp_path: Path) -> None:
    words = [sys.executable, "-c", MEMORY, str(stores[MANY].root), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < A_GIGABYTE
