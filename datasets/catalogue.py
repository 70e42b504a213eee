"""The datasets by name."""

from __future__ import annotations

import difflib

from datasets.celeba import Celeba
from datasets.cmnist import Cmnist
from datasets.dataset import Dataset
from datasets.errors import UsageError
from datasets.isic import Isic
from datasets.umnist import Umnist
from datasets.waterbirds import Waterbirds

DATASETS: dict[str, Dataset] = {
    dataset.name: dataset for dataset in (Waterbirds(), Celeba(), Isic(), Umnist(), Cmnist())
}


def get_dataset(name: str) -> Dataset:
    """Find a dataset, or suggest the nearest name."""
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name, DATASETS, n=1)
    raise UsageError(
        f"unknown dataset '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""),
        f"choose from {', '.join(DATASETS)}, or all",
    )
