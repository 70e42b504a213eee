"""Every baseline on the photo datasets, end to end from JPEG files, with a small timm network."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

from bench.job import Request, expand
from bench.record import Status
from bench.runner import RunOptions, run_job
from datasets import standins
from methods.base import load_methods

pytestmark = pytest.mark.slow


def of(owner: str, **knobs: str) -> dict[str, str]:
    return {f"{owner}.{knob}": value for knob, value in knobs.items()}


SMALL = of("backbone", name="test_resnet", pretrained="false")  # timm's smallest ResNet

# From scratch on few images: higher rates than the presets', which start from ImageNet weights.
RATES = {"batch_size": "32", "optimizer": "adam", "lr": "0.001", "weight_decay": "0.0001"}
TRAINING = {**RATES, "scheduler": "none", "epochs": "6"}
BRIEF = {**TRAINING, "epochs": "1"}  # a first stage that still errs

# Methods with the same first stage share it, as in any other set of runs.
SETTINGS = {
    "erm": of("erm", **TRAINING),
    "groupdro": of("groupdro", **TRAINING),
    "jtt": of("jtt", **TRAINING, identification_epoch="0", upweight="3"),
    "cnc": of("cnc.erm", **BRIEF)
    | of("cnc", epochs="3", lr="0.003", weight_decay="0.0001", per_role="8")
    | of("cnc", batch_factor="1", anchor_ratio="0.3"),
    "eiil": of("eiil.erm", **BRIEF) | of("eiil", **TRAINING, inference_steps="2000"),
    "dfr": of("dfr.erm", **TRAINING),
    "george": of("george.erm", **TRAINING) | of("george", **TRAINING),
    "exmap": of("exmap.erm", **TRAINING) | of("exmap", heatmap_side="16"),
}


@pytest.fixture(scope="module", params=["waterbirds", "celeba", "isic"])
def dataset(request: pytest.FixtureRequest, photos: Path) -> str:
    name: str = request.param
    standins.write(name, photos, size=400)
    return name


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("photos")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def weights(dataset: str, photos: Path, results: Path) -> Path:
    """Weights to start from, as ImageNet's would be: CnC freezes batch-norms as it finds them."""
    settings = SETTINGS["erm"] | of(dataset, resolution="48") | SMALL
    (job,) = expand(Request(("erm",), (dataset,), (101,), photos, overrides=settings))
    options = RunOptions(photos, results, keep_models=True, isolate=False)
    run_job(job, options, lambda progress: None)
    kept = load_file(results / "runs" / job.run_id / "model.safetensors")
    prefix = "backbone.body."
    body = {k.removeprefix(prefix): v for k, v in kept.items() if k.startswith(prefix)}
    path = photos / f"{dataset}.safetensors"
    save_file(body, path)
    return path


@pytest.mark.parametrize("method", [name for name in SETTINGS if name in load_methods()])
def test_trains_above_chance(
    method: str, dataset: str, photos: Path, results: Path, request: pytest.FixtureRequest
) -> None:
    settings = SETTINGS[method] | of(dataset, resolution="48") | SMALL
    if method == "cnc":
        start = request.getfixturevalue("weights")
        settings |= of("backbone", pretrained="true", weights=str(start))
    (job,) = expand(Request((method,), (dataset,), (100,), photos, overrides=settings))
    record = run_job(job, RunOptions(photos, results, isolate=False), lambda progress: None)
    assert record.status is Status.DONE, record.failure
    assert record.job.standin
    if dataset == "isic":
        assert record.test.get("auroc") > 0.65
    else:
        predictions = pd.read_parquet(results / "runs" / job.run_id / "predictions.parquet")
        test = predictions[predictions["split"] == "test"]
        by_class = (test["pred"] == test["y"]).groupby(test["y"]).mean()
        assert by_class.mean() > 0.6
