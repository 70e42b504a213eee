"""Images as uint8: whole in memory, or decoded once into a memory-mapped file.

The loop asks for `batch(index)` and gets pixels and sizes; it never sees a path, a decoder or a
worker. Each split has a file of its own, so that what a method holds leads to its own splits only.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

READ_BYTES = 2**26  # of a file that are in memory at once on their way to a GPU


@dataclass(frozen=True)
class ImageBatch:
    """Images of one batch: (B, C, H, W) uint8, padded to the largest, and each one's size.

    Attributes:
        one_size: known to be all of one size, without asking the device.
    """

    pixels: Tensor
    sizes: Tensor
    one_size: bool = False

    def __getitem__(self, part: slice) -> ImageBatch:
        return ImageBatch(self.pixels[part], self.sizes[part], self.one_size)

    def to(self, device: torch.device) -> ImageBatch:
        """Move the batch to `device`; from pinned memory that waits for nothing."""
        pixels, sizes = (part.to(device, non_blocking=True) for part in (self.pixels, self.sizes))
        return ImageBatch(pixels, sizes, self.one_size)


class Images(Protocol):
    """A sequence of images that can be asked for by index."""

    def __len__(self) -> int: ...

    def batch(self, index: Tensor) -> ImageBatch:
        """Gather the images at `index`."""
        ...

    def subset(self, index: Tensor) -> Images:
        """Restrict to the images at `index`, in that order."""
        ...

    def to(self, device: torch.device) -> Images:
        """Hand out batches on `device`."""
        ...


class MemoryImages:
    """Images of one size, resident in memory (or on the GPU) as one (N, C, H, W) uint8 tensor."""

    def __init__(self, pixels: Tensor) -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise ValueError(f"expected (N, C, H, W) uint8 but got {pixels.dtype} {pixels.shape}")
        self.pixels = pixels
        self.size = torch.tensor(pixels.shape[-2:], device=pixels.device)

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.pixels.device

    def batch(self, index: Tensor) -> ImageBatch:
        """Gather the images at `index`."""
        pixels = self.pixels[index.to(self.pixels.device)]
        return ImageBatch(pixels, self.size.expand(len(pixels), 2), one_size=True)

    def subset(self, index: Tensor) -> MemoryImages:
        """Copy the images at `index`, so that nothing of the rest stays reachable."""
        return MemoryImages(self.pixels[index])

    def to(self, device: torch.device) -> MemoryImages:
        """Move the images to `device`."""
        return MemoryImages(self.pixels.to(device))


class MappedFile:
    """A file as an array of bytes that need not stay in this process's memory."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.pixels = np.frombuffer(self._map, dtype=np.uint8)

    def release(self) -> None:
        """Release the pages that were read, which would add up to the whole file.

        The system still has them in its cache, but they are no longer this process's.
        """
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system
            self._map.madvise(mmap.MADV_DONTNEED)


class MappedImages:
    """Images of any sizes in one memory-mapped file: H x W x C pixels one image after another.

    Native sizes are kept because RandomResizedCrop must sample the pixels the published pipelines
    sample, not those of an already resized copy. Memory use is bounded by the batch.
    """

    def __init__(
        self,
        path: str,
        offsets: Tensor,
        sizes: Tensor,
        channels: int = 3,
        device: torch.device | None = None,
    ) -> None:
        self.path = path
        self.offsets = offsets
        self.sizes = sizes
        self.channels = channels
        self.device = device or torch.device("cpu")
        self._bytes = MappedFile(path)

    def __len__(self) -> int:
        return len(self.offsets)

    def batch(self, index: Tensor) -> ImageBatch:
        """Copy the images at `index` into one batch padded to the largest of them."""
        return self.gather(index.cpu()).to(self.device)

    def gather(self, index: Tensor) -> ImageBatch:
        """Do so in the host's memory, which is pinned if the batch is bound for a GPU.

        A copy from other memory would wait for the device.
        """
        pinned = self.device.type == "cuda"
        sizes = self.sizes[index]
        height, width = sizes.max(dim=0).values.tolist()
        shape = len(index), height, width, self.channels
        batch = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
        pixels = batch.numpy()
        for slot, (start, (h, w)) in enumerate(
            zip(self.offsets[index].tolist(), sizes.tolist(), strict=True)
        ):
            stop = start + h * w * self.channels
            pixels[slot, :h, :w] = self._bytes.pixels[start:stop].reshape(h, w, self.channels)
        self._bytes.release()
        return ImageBatch(batch.permute(0, 3, 1, 2), sizes.pin_memory() if pinned else sizes)

    @property
    def nbytes(self) -> int:
        """Size of the file, which may hold more images than these."""
        return len(self._bytes.pixels)

    def read_into(self, target: Tensor) -> None:
        """Copy the whole file to the beginning of a tensor of bytes, on any device, in pieces."""
        for start in range(0, self.nbytes, READ_BYTES):
            piece = np.array(self._bytes.pixels[start : start + READ_BYTES])
            target[start : start + len(piece)] = torch.from_numpy(piece)
            self._bytes.release()

    def subset(self, index: Tensor) -> MappedImages:
        """Restrict to the images at `index`."""
        return MappedImages(
            self.path, self.offsets[index], self.sizes[index], self.channels, self.device
        )

    def to(self, device: torch.device) -> MappedImages:
        """Deliver batches on `device`; the file stays where it is."""
        return MappedImages(self.path, self.offsets, self.sizes, self.channels, device)

    def __getstate__(self) -> dict[str, object]:
        """Leave the open file out: it is opened again where the object arrives."""
        return {name: value for name, value in self.__dict__.items() if name != "_bytes"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._bytes = MappedFile(self.path)
