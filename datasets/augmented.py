"""A training split under its transform, batch by batch; enlarged once where memory allows.

Where a transform resizes whole images of one size and then keeps a random window, the resizing is
the same every time an image is visited. Its result is kept then, in the C order of a batch that is
channels-last, and a visit only copies a window: bit by bit what cutting and resizing at once gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from datasets.images import Images, MemoryImages
from datasets.resident import batches
from datasets.transforms import ResizedRandomCrop, Transform

RESIZED_BYTES = 2**30  # of copies that one training keeps at most; CMNIST's 54,000 take 0.97 of it


class AugmentedImages:
    """A split whose batches come transformed, each as it was drawn."""

    def __init__(self, images: Images, transform: Transform) -> None:
        self.images = images
        self.transform = transform
        self._copies = None
        if isinstance(images, MemoryImages) and copies_bytes(images, transform) <= RESIZED_BYTES:
            self._copies = ResizedCopies(images, transform)

    def batches(
        self, groups: Sequence[Sequence[Tensor]], generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Gather and transform the batches of one group after another, drawing for each alone."""
        joined = [torch.cat(list(group)) if len(group) > 1 else group[0] for group in groups]
        counts = [[len(part) for part in group] for group in groups]
        if self._copies is not None:
            for index, sizes in zip(joined, counts, strict=True):
                yield self._copies.windows(index, self.transform.draw(sizes, generator)[1])
            return
        for raw, sizes in zip(batches(self.images, joined), counts, strict=True):
            images = self.transform.batched(raw, sizes, generator)
            yield images.contiguous(memory_format=torch.channels_last)


def copies_bytes(images: MemoryImages, transform: Transform) -> float:
    """Return what resized copies of a split take; infinite where they are not of use."""
    cut, pixels = transform.cut, images.pixels
    flips = transform.hflip or transform.vflip
    if not isinstance(cut, ResizedRandomCrop) or flips or pixels.device.type != "cpu":
        return float("inf")
    return 4 * len(images) * pixels.shape[1] * cut.resize**2


class ResizedCopies:
    """Images of one size, each resized and normalised when it is first asked for."""

    def __init__(self, images: MemoryImages, transform: Transform) -> None:
        assert isinstance(transform.cut, ResizedRandomCrop)
        count, channels = images.pixels.shape[:2]
        side, output = transform.cut.resize, transform.resolution
        self.images = images
        self.transform = transform
        # Pages of memory are the process's only when they are written to.
        self._copies = torch.empty(count, side, side, channels)
        self._made = torch.zeros(count, dtype=torch.bool)
        image, row, column, _ = self._copies.stride()
        ways = side - output + 1
        shape = count, ways, ways, output, output, channels
        self._windows = self._copies.as_strided(shape, (image, row, column, row, column, 1))

    def windows(self, index: Tensor, offsets: Tensor) -> Tensor:
        """Copy a window of each image at `index`: where it starts, (rows, columns) x count."""
        if len(fresh := index[~self._made[index]].unique()):
            whole = self.transform.resized(self.images.batch(fresh).pixels)
            # Laid out anew first, which is faster than as it is written.
            self._copies[fresh] = whole.permute(0, 2, 3, 1).contiguous()
            self._made[fresh] = True
        rows, columns = offsets
        return self._windows[index, rows, columns].permute(0, 3, 1, 2)
