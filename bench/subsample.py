"""Cutting a dataset down for a smoke run, keeping something of every group."""

from __future__ import annotations

import torch
from torch import Tensor

from datasets.base import LabelledSplit, LoadedData

QUICK = {"train": 1500, "val": 500, "test": 500}
AT_LEAST = 8  # samples kept of a small group, as far as it has them


def quick_subset(data: LoadedData) -> LoadedData:
    """Keep the first samples of every group, in proportion; the same ones every time."""
    splits = {name: _cut(split, QUICK[name]) for name, split in data.splits.items()}
    return LoadedData(data.facts, splits, data.standin)


def _cut(split: LabelledSplit, size: int) -> LabelledSplit:
    if len(split) <= size:
        return split
    share = size / len(split)
    kept = [_first(split.labels.groups == group, share) for group in split.labels.groups.unique()]
    return split.subset(torch.cat(kept).sort().values)


def _first(mine: Tensor, share: float) -> Tensor:
    positions = mine.nonzero()[:, 0]
    return positions[: max(round(share * len(positions)), min(AT_LEAST, len(positions)))]
