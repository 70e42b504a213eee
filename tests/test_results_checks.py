"""Committed checks: their tables are those of the records and predictions beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

FOLDER = Path(__file__).parent.parent / "results" / "checks"
CHECKS = sorted(path.parent for path in FOLDER.glob("*/results.csv"))


@pytest.mark.parametrize("folder", CHECKS, ids=lambda path: path.name)
def test_table_is_that_of_the_stored_runs(folder: Path) -> None:
    table = pd.read_csv(folder / "results.csv").set_index("run_id")
    assert {path.name for path in (folder / "runs").iterdir()} == set(table.index)
    for run_id, row in table.iterrows():
        raw = json.loads((folder / "runs" / str(run_id) / "record.json").read_text())
        assert raw["status"] == "done" and not raw["git"]["dirty"]
        assert row["test_wga"] == pytest.approx(raw["metrics"]["test"]["wga"], abs=1e-3)
        assert row["test_avg"] == pytest.approx(raw["metrics"]["test"]["avg"], abs=1e-3)
        found = pd.read_parquet(
            folder / "runs" / str(run_id) / "predictions.parquet",
            columns=["split", "y", "pred", "group"],
        ).query("split == 'test'")
        right = (found["y"] == found["pred"]).groupby(found["group"]).mean()
        assert 100 * right.min() == pytest.approx(row["test_wga"], abs=1e-3)


@pytest.mark.parametrize("folder", CHECKS, ids=lambda path: path.name)
def test_runs_took_less_than_two_gigabytes(folder: Path) -> None:
    records = [json.loads(path.read_text()) for path in folder.glob("runs/*/record.json")]
    peaks = {record["run_id"]: record["peak_memory_bytes"] for record in records}
    assert peaks and not {run: peak for run, peak in peaks.items() if not 0 < peak < 2e9}


@pytest.mark.parametrize("folder", CHECKS, ids=lambda path: path.name)
def test_no_photo_and_no_weights_are_kept(folder: Path) -> None:
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".md", ".csv", ".json", ".parquet", ".py", ".sh"}
