"""Counting the data again: what is on disk, where it is the real thing, else what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.report.cells import Source
from datasets.base import Facts
from datasets.catalogue import DATASETS
from datasets.dataset import Dataset
from datasets.errors import BenchError


@dataclass(frozen=True)
class Counted:
    """The sizes of one dataset under its usual protocol.

    Attributes:
        source: `measured` where labels on disk were counted, else `expected`.
        reason: why they were not counted.
    """

    facts: Facts
    splits: Mapping[str, int]
    groups: Mapping[str, tuple[int, ...]]
    source: Source
    reason: str = ""


def recount(root: Path) -> dict[str, Counted]:
    """Count every dataset whose real labels lie below the data root."""
    return {name: _counted(dataset, root) for name, dataset in DATASETS.items()}


def _counted(dataset: Dataset, root: Path) -> Counted:
    config = dataset.config_type()
    facts = dataset.facts(config)
    found = dataset.locate(root)
    if found is None:
        return _expected(facts, "expected by the protocol; the data is not on disk")
    if found.marker is not None:
        return _expected(facts, "expected by the protocol; only a stand-in is on disk")
    try:
        _, _, labels = dataset.check(root, config)
    except (BenchError, OSError) as error:
        return _expected(facts, f"expected by the protocol; the data on disk is not it: {error}")
    groups = {
        split: tuple(torch.bincount(part.groups, minlength=len(facts.groups)).tolist())
        for split, part in labels.items()
    }
    return Counted(facts, {split: len(part) for split, part in labels.items()}, groups, "measured")


def _expected(facts: Facts, reason: str) -> Counted:
    return Counted(facts, facts.counts, facts.group_counts, "expected", reason)
