"""The datasets by name."""

from __future__ import annotations

from datasets.celeba import Celeba
from datasets.cmnist import Cmnist
from datasets.dataset import Dataset
from datasets.errors import UsageError, did_you_mean
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
    raise UsageError(
        f"unknown dataset '{name}'{did_you_mean(name, DATASETS)}",
        f"choose from {', '.join(DATASETS)}, or all",
    )
