"""Why an image got its class: the leaf it reached, the route there, who else is in that leaf."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.base import Facts, LabelledSplit
from datasets.decode import decode
from datasets.errors import UsageError
from datasets.images import ImageBatch
from methods.nct.fitted import FittedTree


def explain_batch(
    fitted: FittedTree, batch: ImageBatch, ids: Sequence[Any], facts: Facts, makeup: dict[str, Any]
) -> list[dict[str, Any]]:
    """Route a batch of raw images through the tree and describe where each one went."""
    with torch.no_grad():
        logits = fitted.leaf_logits(facts.eval_transform(batch))
    depth = fitted.tree.depth
    names = fitted.paths()
    top = logits.topk(2, dim=1).values
    explained = []
    for row, image in enumerate(ids):
        leaf = int(logits[row].argmax())
        explained.append(
            {
                "id": image,
                "class": facts.classes[leaf >> (depth - 1)],
                "leaf": leaf,
                "path": names[leaf],
                "logits": {name: _finite(logits[row, j]) for j, name in enumerate(names)},
                "margin": _finite(top[row, 0] - top[row, 1]),
                "leaf_makeup": makeup.get(names[leaf], {}),
            }
        )
    return explained


def batch_from_files(files: Sequence[Path], facts: Facts) -> ImageBatch:
    """Read images from files, in colour or grey as the dataset has them, at their own sizes."""
    arrays = [decode(file) for file in files]
    height = max(array.shape[0] for array in arrays)
    width = max(array.shape[1] for array in arrays)
    pixels = np.zeros((len(arrays), height, width, 3), dtype=np.uint8)
    for slot, array in enumerate(arrays):
        pixels[slot, : array.shape[0], : array.shape[1]] = array
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    if facts.channels == 1:
        batch = batch.float().mean(dim=1, keepdim=True).round().to(torch.uint8)
    return ImageBatch(batch, torch.tensor([array.shape[:2] for array in arrays]))


def positions_of(split: LabelledSplit, ids: Sequence[int]) -> Tensor:
    """Find samples by id."""
    where = {int(sample): position for position, sample in enumerate(split.labels.ids)}
    unknown = [sample for sample in ids if sample not in where]
    if unknown:
        known = ", ".join(str(int(sample)) for sample in split.labels.ids[:5])
        raise UsageError(f"no sample {unknown[0]} in this split", f"its ids begin with {known}")
    return torch.tensor([where[sample] for sample in ids])


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None
