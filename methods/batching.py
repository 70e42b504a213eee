"""Cutting an epoch into batches, and putting small ones together to be augmented at once."""

from __future__ import annotations

import torch
from torch import Tensor

AT_ONCE = 512 * 32**2  # pixels that are augmented together, or a whole batch if that has more


def in_batches(index: Tensor, size: int) -> list[Tensor]:
    """Split into parts of `size`; a last part of one joins its neighbour.

    Batch-norm cannot train on a single sample.
    """
    parts = list(index.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def augmented_together(parts: list[Tensor], side: int) -> list[list[Tensor]]:
    """Put batches of small images together, to be gathered and augmented at once."""
    size = max(1, AT_ONCE // (len(parts[0]) * side**2)) if parts else 1
    return [parts[start : start + size] for start in range(0, len(parts), size)]
