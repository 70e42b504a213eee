"""Running a network over a split: batched, without gradients, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from datasets.images import Images, MappedImages, MemoryImages
from datasets.resident import ResidentImages
from datasets.transforms import Transform

BATCH = 500
RESIDENT_BYTES = 256 * 2**20  # transformed splits up to this size are kept, larger ones redone
BATCH_BYTES = 64 * 2**20  # of a transformed batch
SOURCE_BYTES = 256 * 2**20  # of a batch before its transform, which photographs keep large


class EvalImages:
    """A split under its evaluation transform, transformed once where it fits in memory."""

    def __init__(self, images: Images, transform: Transform, batch_size: int = BATCH) -> None:
        self.images = images
        self.transform = transform
        self.batch_size = min(batch_size, batch_size_for(transform, images))
        whole = len(images) * _bytes_each(transform)
        self._resident: list[Tensor] | None = [] if whole <= RESIDENT_BYTES else None

    def __iter__(self) -> Iterator[Tensor]:
        if self._resident:
            yield from self._resident
            return
        fresh = []
        for index in torch.arange(len(self.images)).split(self.batch_size):
            batch = self.transform(self.images.batch(index))
            batch = batch.contiguous(memory_format=torch.channels_last)
            if self._resident is not None:
                fresh.append(batch)
            yield batch
        if self._resident is not None:
            self._resident = fresh


def batch_size_for(transform: Transform, images: Images) -> int:
    """Choose how many images to run at once: many small ones, few large ones."""
    fitting = BATCH_BYTES // _bytes_each(transform), SOURCE_BYTES // max(1, _source_bytes(images))
    return max(1, min(BATCH, *fitting))


def _bytes_each(transform: Transform) -> int:
    """Return the size of a transformed image."""
    return 4 * transform.values


def _source_bytes(images: Images) -> int:
    """Return the size of the largest image of a split before its transform; 0 if unknown.

    A batch is padded to its largest image, and a transform begins by making the pixels floats.
    """
    if len(images) == 0:
        return 0
    if isinstance(images, MemoryImages):
        return 4 * images.pixels[0].numel()
    if isinstance(images, MappedImages | ResidentImages):
        height, width = images.sizes.max(dim=0).values.tolist()
        return int(4 * images.channels * height * width)
    return 0


def predict(function: Callable[[Tensor], Tensor], images: EvalImages) -> Tensor:
    """Apply a function to every batch and return the results in order, on the CPU."""
    with torch.no_grad():
        return torch.cat([function(batch).float() for batch in images]).cpu()


def predict_with(module: nn.Module, images: EvalImages) -> Tensor:
    """Run a module over a split in evaluation mode, and leave its mode as it was."""
    with evaluation_mode(module):
        return predict(module, images)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode for a while, then every part back into its own."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
