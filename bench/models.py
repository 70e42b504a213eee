"""Kept models: from a run on disk back to something that predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from safetensors.torch import load_file

from bench.plan import backbone_spec
from bench.store import Store
from datasets.catalogue import get_dataset
from datasets.config import build_config
from datasets.errors import DataMissing
from methods.base import Fitted, Shape, get_method


def load_fitted(store: Store, run_id: str) -> tuple[Fitted, dict[str, Any]]:
    """Load a run's model and its record."""
    record = store.record(run_id)
    path = store.runs / run_id / "model.safetensors"
    if record is None or not path.is_file():
        command = record["command"] if record else "python -m bench run ..."
        raise DataMissing(
            f"{run_id} was run without keeping its model",
            f"{command} --rerun always --keep-models",
        )
    method, dataset = get_method(record["method"]), get_dataset(record["dataset"])
    config = build_config(method.config_type, record["config"]["method"], method.name)
    settings = build_config(dataset.config_type, record["config"]["dataset"], dataset.name)
    facts = dataset.facts(settings)
    # The kept weights are complete: ImageNet's are not needed again.
    backbone = replace(backbone_spec(record["config"]["backbone"]), pretrained=False, weights=None)
    shape = Shape(backbone, facts.channels, facts.codes or facts.classes)
    return method.revive(shape, config, load_file(path)), record
