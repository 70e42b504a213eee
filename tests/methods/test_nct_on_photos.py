"""NCT on the photo datasets, end to end from JPEG files, with a small timm network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from bench.job import Request, expand
from bench.record import Status
from bench.runner import RunOptions, run_job
from datasets import standins

pytestmark = pytest.mark.slow

# From scratch on few images: higher rates than the presets', which start from ImageNet weights. As
# in the paper's recipe for CelebA, iteration 1 trains its heads alone; what random features cannot
# tell apart is then left to be hard, in either class.
SETTINGS = {
    "nct.iterations": "3",
    "nct.epochs": "2,6,3",
    "nct.phase1_ratio": "1,0.34",
    "nct.batch_size": "16",
    "nct.optimizer": "adamw",
    "nct.backbone_lr": "0.001",
    "nct.head_lr": "0.01",
    "nct.lr_decay_factor": "1",
    "nct.weight_decay": "0.0001",
    "nct.scheduler": "none",
    "nct.sampling": "geomean",
    "nct.hidden": "16",
    "nct.min_samples": "2",
    "backbone.name": "test_resnet",  # timm's smallest ResNet
    "backbone.pretrained": "false",
}
# Random features call every stand-in lesion malignant, so there iteration 1 trains all of the
# network, on fewer images lest it be without mistakes.
OWN = {
    "isic": {
        "nct.iterations": "2",
        "nct.epochs": "1,6",
        "nct.phase1_ratio": "0,0.34",
        "nct.batch_size": "32",
        "nct.head_lr": "0.001",
    }
}


@pytest.mark.parametrize(
    ("method", "dataset", "size"),
    [
        ("nct", "waterbirds", 600),
        ("nct", "celeba", 600),
        ("nct", "isic", 400),
        ("nct_plus", "waterbirds", 600),
        ("nct_plus", "isic", 400),
    ],
)
def test_grows_a_tree_above_chance(method: str, dataset: str, size: int, tmp_path: Path) -> None:
    standins.write(dataset, tmp_path, size=size)
    settings = {**SETTINGS, **OWN.get(dataset, {}), f"{dataset}.resolution": "48"}
    settings = {name.replace("nct.", f"{method}."): value for name, value in settings.items()}
    (job,) = expand(Request((method,), (dataset,), (100,), tmp_path, overrides=settings))
    results = tmp_path / "results"
    record = run_job(job, RunOptions(tmp_path, results, isolate=False), lambda progress: None)
    assert record.status is Status.DONE, record.failure
    assert record.job.standin

    # The second iteration's nodes, by class: easy and hard.
    second = torch.tensor(record.details["nct"]["iterations"][1]["node_counts"]).view(2, 2)
    assert int(second.sum()) == size
    assert (second[:, 1] > 0).all(), f"a class has no hard samples: {second.tolist()}"

    predictions = pd.read_parquet(results / "runs" / job.run_id / "predictions.parquet")
    test = predictions[predictions["split"] == "test"]
    by_class = (test["pred"] == test["y"]).groupby(test["y"]).mean()
    assert by_class.mean() > 0.6
    if dataset == "isic":
        assert record.test.get("auroc") > 0.65
    leaves = 2 ** (record.details["nct"]["chosen_iteration"] - 1)
    assert (test["leaf"] // leaves == test["pred"]).all()
