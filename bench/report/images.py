"""Images of a run's data, where that very data is on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.subsample import quick_subset
from datasets.base import Facts, LabelledSplit
from datasets.catalogue import get_dataset
from datasets.config import build_config
from datasets.errors import DataMissing


def load_split(
    record: dict[str, Any], data_root: Path | None, split: str
) -> tuple[Facts, LabelledSplit]:
    """Load the split a run was evaluated on.

    Raises:
        DataMissing: there is no data root, or it holds other data than the run was made with.
    """
    if data_root is None:
        raise DataMissing("images were not asked for", "give --data-root")
    dataset = get_dataset(str(record["dataset"]))
    settings = build_config(dataset.config_type, record["config"]["dataset"], dataset.name)
    found = dataset.require(data_root)
    if dataset.facts_of(settings, found).fingerprint() != record["data_fingerprint"]:
        raise DataMissing(
            f"{data_root} holds other data than {record['run_id']} was made with",
            "give the --data-root of the run",
        )
    data = dataset.load(data_root, settings)
    if record["quick"]:
        data = quick_subset(data)
    return data.facts, data.splits[split]
