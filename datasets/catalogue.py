"""The datasets by name: those of this package, those that plug-ins bring, and the user's own.

Only names are known here; a dataset's module, and with it pandas where it needs that, is imported
when the dataset is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from datasets.dataset import DATASETS, Dataset, register
from datasets.errors import BenchError, DataCorrupt, UsageError, did_you_mean
from datasets.fetch import data_root_in_use

BUILT_IN: Mapping[str, str] = {
    "waterbirds": "datasets.waterbirds",
    "celeba": "datasets.celeba",
    "isic": "datasets.isic",
    "umnist": "datasets.umnist",
    "cmnist": "datasets.cmnist",
    "dominoes": "datasets.dominoes",
    "cmnist_irm": "datasets.cmnist_irm",
}


def load_datasets() -> dict[str, Dataset]:
    """Import every dataset, also those of plug-ins, and return them in the order of tables.

    Raises:
        UsageError: A plug-in cannot be imported.
    """
    for module in BUILT_IN.values():
        importlib.import_module(module)
    for entry in _plug_ins(tuple(sys.path)):
        _load_plug_in(entry)
    # A name that a plug-in brought later is the plug-in's; the user's own can be renamed.
    every = {**_own_datasets(), **DATASETS}
    ordered = sorted(every.values(), key=lambda dataset: (dataset.order, dataset.name))
    return {dataset.name: dataset for dataset in ordered}


def get_dataset(name: str) -> Dataset:
    """Return a dataset; raise `UsageError` with the nearest name where there is none."""
    if name in BUILT_IN:  # without a look at the others: those of photographs import pandas
        importlib.import_module(BUILT_IN[name])
        return DATASETS[name]
    known = load_datasets()
    if name in known:
        return known[name]
    for folder in _own_folders():
        if folder.name == name:
            _read_own(folder)  # raises with the reason
    raise UsageError(
        f"unknown dataset '{name}'{did_you_mean(name, known)}",
        f"choose from {', '.join(known)}, or all",
    )


def _own_datasets() -> dict[str, Dataset]:
    """Return what users registered; a registration that cannot be read is missing."""
    found: dict[str, Dataset] = {}
    for folder in _own_folders():
        with contextlib.suppress(DataCorrupt):  # raised when it is asked for by name
            found[folder.name] = _read_own(folder)
    return found


def _own_folders() -> list[Path]:
    return sorted(path.parent for path in data_root_in_use().glob("own/*/dataset.toml"))


def _read_own(folder: Path) -> Dataset:
    from datasets.own import read_own  # imports pandas

    return read_own(folder)


def datasets_from(source: str) -> tuple[str, ...]:
    """Return the names of the datasets made from what `bench data get SOURCE` fetches."""
    return tuple(name for name, dataset in load_datasets().items() if dataset.source == source)


def _load_plug_in(entry: EntryPoint) -> None:
    """Import a plug-in: a module whose datasets register themselves, or a dataset class."""
    distribution = entry.dist.name if entry.dist is not None else None
    before = dict(DATASETS)
    try:
        loaded = entry.load()
        if isinstance(loaded, type) and issubclass(loaded, Dataset):
            if not any(type(dataset) is loaded for dataset in DATASETS.values()):
                register(loaded)
        elif not isinstance(loaded, ModuleType):
            raise UsageError("it is neither a module nor a Dataset class")
    except Exception as error:
        cause = error.message if isinstance(error, BenchError) else repr(error)
        raise UsageError(
            f"the plug-in '{entry.name}' ({entry.value}) of "
            f"{distribution or 'an unknown distribution'} cannot be loaded: {cause}",
            f"repair it, or remove it (pip uninstall {distribution or entry.module})",
        ) from error
    package = entry.module.partition(".")[0]
    for name, dataset in DATASETS.items():
        # The package may have been imported, and its datasets registered, before.
        if before.get(name) is not dataset or _package_of(dataset) == package:
            dataset.distribution = distribution or package


def _package_of(dataset: Dataset) -> str:
    return type(dataset).__module__.partition(".")[0]


@cache
def _plug_ins(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Look for plug-ins once for every search path, since every installed package is read."""
    return tuple(entry_points(group="bench.datasets"))
