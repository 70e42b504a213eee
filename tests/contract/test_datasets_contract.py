"""The dataset contract, on every registered dataset whose stand-in a small network takes."""

from __future__ import annotations

from bench.testing import contracts_of
from datasets.catalogue import load_datasets
from methods.backbones import SMALL_NETWORKS

for _name, _dataset in load_datasets().items():
    if _dataset.facts(_dataset.config_type()).backbone in SMALL_NETWORKS:
        globals().update(contracts_of(_name))
