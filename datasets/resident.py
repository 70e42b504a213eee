"""Images of any sizes resident on a device, for GPUs with room for a whole split.

A step then copies nothing from the host and waits for nothing: the batch is gathered by index
arithmetic on the device. Where a split does not fit, batches come from the memory-mapped file
through pinned memory, one ahead of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from datasets.images import ImageBatch, Images, MappedImages

SHARE = 0.25  # of a device's free memory that the images of one split may take

Item = TypeVar("Item")
Result = TypeVar("Result")


class ResidentImages:
    """Pixels of all images one after another on a device, H x W x C each."""

    def __init__(self, pixels: Tensor, offsets: Tensor, sizes: Tensor, channels: int) -> None:
        self.pixels = pixels
        self.offsets = offsets.to(pixels.device)
        self.sizes = sizes.to(pixels.device)
        self.channels = channels
        # The largest of the split, not of the batch: to ask the device for that would be a wait.
        self.height, self.width = sizes.max(dim=0).values.tolist()

    def __len__(self) -> int:
        return len(self.offsets)

    def batch(self, index: Tensor) -> ImageBatch:
        """Gather the images at `index`, padded with black."""
        index = index.to(self.pixels.device)
        sizes, starts = self.sizes[index], self.offsets[index]
        rows = torch.arange(self.height, device=self.pixels.device)[:, None]
        columns = torch.arange(self.width, device=self.pixels.device)
        heights, widths = sizes[:, 0, None, None], sizes[:, 1, None, None]
        inside = (rows < heights) & (columns < widths)
        first = starts[:, None, None] + (rows * widths + columns) * self.channels
        first = torch.where(inside, first, 0)[:, None]
        channel = torch.arange(self.channels, device=self.pixels.device)[:, None, None]
        return ImageBatch(self.pixels[first + channel] * inside[:, None], sizes)

    def subset(self, index: Tensor) -> ResidentImages:
        """Restrict to the images at `index`."""
        index = index.to(self.pixels.device)
        return ResidentImages(self.pixels, self.offsets[index], self.sizes[index], self.channels)

    def to(self, device: torch.device) -> ResidentImages:
        """Move the images to `device`."""
        return ResidentImages(self.pixels.to(device), self.offsets, self.sizes, self.channels)


def place(images: Images, device: torch.device) -> Images:
    """Hand out batches on `device`; a file's images move there whole where they fit."""
    if isinstance(images, MappedImages) and _fits(images.nbytes, device):
        pixels = images.pixels().to(device)
        return ResidentImages(pixels, images.offsets, images.sizes, images.channels)
    return images.to(device)


def _fits(size: int, device: torch.device) -> bool:
    """Return whether a GPU has room for a split of `size` bytes beside the training itself."""
    return device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(device)[0]


def batches(images: Images, parts: Sequence[Tensor]) -> Iterator[ImageBatch]:
    """Gather one part after another; from a file to a GPU, each while the one before is in use."""
    if isinstance(images, MappedImages) and images.device.type == "cuda":
        return one_ahead(images.batch, [part.cpu() for part in parts])
    return map(images.batch, parts)


def one_ahead(make: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Make each result while the one before it is in use; an error is raised where it is due."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        pending = [worker.submit(make, item) for item in items[:1]]
        for item in items[1:]:
            result = pending.pop().result()
            pending.append(worker.submit(make, item))
            yield result
        for last in pending:
            yield last.result()
