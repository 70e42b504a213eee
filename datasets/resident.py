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
    """Pixels of all images one after another on a device, H x W x C each.

    A batch is gathered by rows: each row of an image is one piece of the pixels, so that there is
    one index a row instead of one a pixel.
    """

    def __init__(self, pixels: Tensor, offsets: Tensor, sizes: Tensor, channels: int) -> None:
        self.channels = channels
        # The largest of the split, not of the batch: to ask the device for that would be a wait.
        self.height, self.width = sizes.max(dim=0).values.tolist()
        # The last row of a narrow image ends before a row of the widest would.
        lacking = int((offsets + sizes.prod(1) * channels).max()) + self.row_bytes - len(pixels)
        self.pixels = torch.cat([pixels, pixels.new_zeros(lacking)]) if lacking > 0 else pixels
        self.offsets = offsets.to(pixels.device)
        self.sizes = sizes.to(pixels.device)
        shape = len(self.pixels) - self.row_bytes + 1, self.row_bytes
        self._rows = self.pixels.as_strided(shape, (1, 1))  # those that begin at each byte

    @staticmethod
    def load(images: MappedImages, device: torch.device) -> ResidentImages:
        """Read the images of a file, with room at the end for a row of the widest."""
        room = images.channels * int(images.sizes[:, 1].max())
        pixels = torch.zeros(images.nbytes + room, dtype=torch.uint8, device=device)
        images.read_into(pixels)
        return ResidentImages(pixels, images.offsets, images.sizes, images.channels)

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.pixels.device

    @property
    def row_bytes(self) -> int:
        """Length of a row of the widest image."""
        return int(self.width * self.channels)

    def batch(self, index: Tensor) -> ImageBatch:
        """Gather the images at `index`, padded with black."""
        index = index.to(self.device)
        sizes, starts = self.sizes[index], self.offsets[index]
        heights, widths = sizes[:, 0, None], sizes[:, 1, None] * self.channels
        rows = torch.arange(self.height, device=self.device)
        columns = torch.arange(self.row_bytes, device=self.device)
        inside = rows < heights
        taken = self._rows[torch.where(inside, starts[:, None] + rows * widths, 0)]
        taken.mul_(inside[:, :, None]).mul_((columns < widths)[:, None])
        batch = taken.view(len(index), self.height, self.width, self.channels)
        return ImageBatch(batch.permute(0, 3, 1, 2), sizes)

    def subset(self, index: Tensor) -> ResidentImages:
        """Restrict to the images at `index`."""
        index = index.to(self.device)
        return ResidentImages(self.pixels, self.offsets[index], self.sizes[index], self.channels)

    def to(self, device: torch.device) -> ResidentImages:
        """Move the images to `device`."""
        return ResidentImages(self.pixels.to(device), self.offsets, self.sizes, self.channels)


class SideStream:
    """Copies batches to a GPU on a stream of their own, beside what is being computed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def send(self, batch: ImageBatch) -> tuple[ImageBatch, torch.cuda.Event]:
        """Begin to copy a batch from pinned memory; the event marks the end of that."""
        with torch.cuda.stream(self.stream):
            return batch.to(self.device), self.stream.record_event()

    def receive(self, sent: tuple[ImageBatch, torch.cuda.Event]) -> ImageBatch:
        """Have the computation wait for a batch; the processor goes on."""
        batch, copied = sent
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for part in (batch.pixels, batch.sizes):  # else their memory is given out again too early
            part.record_stream(computing)
        return batch


def place(images: Images, device: torch.device) -> Images:
    """Hand out batches on `device`; a file's images move there whole where they fit."""
    if isinstance(images, MappedImages) and _fits(images.nbytes, device):
        return ResidentImages.load(images, device)
    return images.to(device)


def _fits(size: int, device: torch.device) -> bool:
    """Return whether a GPU has room for a split of `size` bytes beside the training itself."""
    return device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(device)[0]


def batches(images: Images, parts: Sequence[Tensor]) -> Iterator[ImageBatch]:
    """Gather one part after another; from a file to a GPU, each while the one before is in use."""
    if not isinstance(images, MappedImages) or images.device.type != "cuda":
        return map(images.batch, parts)
    stream = SideStream(images.device)
    sent = one_ahead(lambda part: stream.send(images.gather(part)), on_host(parts))
    return map(stream.receive, sent)


def on_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copy indices to the host all at once: each copy from a GPU waits for it."""
    return list(torch.cat(list(parts)).cpu().split([len(part) for part in parts])) if parts else []


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
