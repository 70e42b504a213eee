"""Rows of numbers in the place of images: embeddings, tables, hashed text.

A row is an image of one pixel with as many channels as it has numbers, so that sampling, training,
evaluation and every method that asks for nothing of an image go the way they go with images. The
transform leaves rows as they are; the networks for rows (`linear` and `mlp`) begin by bringing each
number to mean 0 and variance 1, by what the training rows have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from datasets.images import ImageBatch
from datasets.transforms import Cut, ResizedCentreCrop, Transform


class FeatureRows:
    """Feature vectors of one length, resident in memory as one (N, D) float32 tensor."""

    def __init__(self, rows: Tensor) -> None:
        if rows.dtype != torch.float32 or rows.ndim != 2:
            raise ValueError(f"expected (N, D) float32 but got {rows.dtype} {tuple(rows.shape)}")
        self.rows = rows
        self.size = torch.ones(2, dtype=torch.int64, device=rows.device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.rows.device

    def batch(self, index: Tensor) -> ImageBatch:
        """Gather the rows at `index`, as (B, D, 1, 1)."""
        rows = self.rows[index.to(self.rows.device)]
        return ImageBatch(rows[:, :, None, None], self.size.expand(len(rows), 2), one_size=True)

    def subset(self, index: Tensor) -> FeatureRows:
        """Copy the rows at `index`, so that nothing of the rest stays reachable."""
        return FeatureRows(self.rows[index])

    def to(self, device: torch.device) -> FeatureRows:
        """Move the rows to `device`."""
        return FeatureRows(self.rows.to(device))


class MappedRows(FeatureRows):
    """Feature vectors in a file of float32 numbers, which need not stay in memory.

    Between processes it travels as a path. What is cut out of them is copied.
    """

    def __init__(self, path: Path, count: int, length: int) -> None:
        self.path, self.length = path, length
        numbers = count * length
        rows = torch.empty(0)
        if numbers:
            rows = torch.from_file(str(path), shared=False, size=numbers, dtype=torch.float32)
        super().__init__(rows.view(count, length))

    def to(self, device: torch.device) -> FeatureRows:
        """Read the rows onto a device; on a CPU they stay where they are."""
        return self if device.type == "cpu" else super().to(device)

    def __reduce__(self) -> tuple[type[MappedRows], tuple[Path, int, int]]:
        """Leave the numbers out: they are read again where the object arrives."""
        return MappedRows, (self.path, len(self), self.length)


@dataclass(frozen=True)
class RowTransform(Transform):
    """Leaves rows of a given length as they are; what a transform has for images stays unused.

    Attributes:
        resolution: side of a square of as many numbers, by which batches are put together.
    """

    length: int = 1
    cut: Cut = field(default=ResizedCentreCrop(1), init=False)
    resolution: int = field(default=1, init=False)
    mean: tuple[float, ...] = field(default=(0.0,), init=False)
    std: tuple[float, ...] = field(default=(1.0,), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "resolution", max(1, math.isqrt(self.length)))

    @property
    def values(self) -> int:
        """How many numbers a row has."""
        return self.length

    def __call__(self, batch: ImageBatch, generator: torch.Generator | None = None) -> Tensor:
        """Return the rows."""
        return batch.pixels

    def batched(
        self, batch: ImageBatch, counts: object, generator: torch.Generator | None
    ) -> Tensor:
        """Return the rows; nothing is drawn."""
        return batch.pixels
