"""With the switches of version 1, versions 2 of NCT and NCT+ are version 1 to the last bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd
import pytest
import torch

from bench.job import Request, expand
from bench.record import Status
from bench.runner import RunOptions, run_job
from datasets.standins import write

VERSION_1 = {
    "checkpoint": "iteration",
    "pwga": "predicted",
    "depth_rule": "false",
    "iterations": "3",
    "epochs": "1,4,4",
    "phase1_ratio": "0,0.5",
    "head_lr": "0.005",
    "backbone_lr": "0.005",
    "batch_size": "32",
    "min_samples": "6",
}
FROZEN = {
    ("nct", "umnist"): "324cb19c6693e4cc",
    ("nct", "cmnist"): "aca6b79b3f764248",
    ("nct_plus", "umnist"): "5c51b8345801821a",
    ("nct_plus", "cmnist"): "dbace57210902427",
}
"""Digests of the predictions (class, leaf, scores) that the code of version 1 made."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    write("mnist", root, size=300)
    return root


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.0"),
    reason="frozen with torch 2.13.0: others round apart",
)
@pytest.mark.parametrize(("method", "dataset"), FROZEN)
def test_predictions_are_those_of_version_1(
    method: str, dataset: str, digits: Path, tmp_path: Path
) -> None:
    overrides = {f"{method}.{name}": value for name, value in VERSION_1.items()}
    if method == "nct_plus":
        overrides["nct_plus.penalty"] = "1e-4"
    (job,) = expand(Request((method,), (dataset,), (100,), digits, overrides=overrides))
    record = run_job(job, RunOptions(digits, tmp_path, isolate=False), lambda progress: None)
    assert record.status is Status.DONE, record.failure
    table = pd.read_parquet(tmp_path / "runs" / job.run_id / "predictions.parquet")
    found = hashlib.sha256()
    for name in ("pred", "leaf", *(column for column in table if column.startswith("score_"))):
        found.update(table[name].to_numpy().tobytes())
    assert found.hexdigest()[:16] == FROZEN[method, dataset]
