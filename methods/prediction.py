"""Running a network over a split: batched, without gradients, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from datasets.images import Images, MappedImages, MemoryImages
from datasets.resident import ResidentImages, batches
from datasets.transforms import Transform

BATCH = 500
PHOTO_BATCH = 64  # a network for photos takes many times a batch, beside what training has kept
PHOTO_PIXELS = 64**2  # images from a file with more than these, transformed, are photos
KEPT_BYTES = 256 * 2**20  # transformed splits of a CPU up to this size are kept, larger ones redone
KEPT_SHARE = 0.125  # of a GPU's free memory that a transformed split may take
# Constants, since what a network answers may hang on the size of its batch in the last bits: what
# memory is free at the moment must not enter. A layer may take ten times what a batch does.
BATCH_BYTES = {"cpu": 16 * 2**20, "cuda": 128 * 2**20}  # of a transformed batch
SOURCE_BYTES = 256 * 2**20  # of a batch before its transform, which photographs keep large
CPU = torch.device("cpu")


class EvalImages:
    """A split under its evaluation transform, transformed once where memory allows.

    On a CPU, images from a file never are: resizing them is a small part of a network's pass, and
    what is kept would grow with their number.
    """

    def __init__(self, images: Images, transform: Transform, batch_size: int = BATCH) -> None:
        self.images = images
        self.transform = transform
        self.batch_size = min(batch_size, batch_size_for(transform, images))
        whole = len(images) * _bytes_each(transform)
        self._resident: list[Tensor] | None = [] if whole <= kept_bytes(images) else None

    def __iter__(self) -> Iterator[Tensor]:
        if self._resident:
            yield from self._resident
            return
        fresh = []
        for raw in batches(self.images, torch.arange(len(self.images)).split(self.batch_size)):
            batch = self.transform(raw).contiguous(memory_format=torch.channels_last)
            if self._resident is not None:
                fresh.append(batch)
            yield batch
        if self._resident is not None:
            self._resident = fresh


def batch_size_for(transform: Transform, images: Images) -> int:
    """Choose how many images to run at once: many small ones, few large ones."""
    budget = BATCH_BYTES.get(device_of(images).type, BATCH_BYTES["cpu"])
    fitting = budget // _bytes_each(transform), SOURCE_BYTES // max(1, _source_bytes(images))
    on_cpu = isinstance(images, MappedImages) and device_of(images) == CPU
    photos = on_cpu and transform.pixels > PHOTO_PIXELS
    return max(1, min(PHOTO_BATCH if photos else BATCH, *fitting))


def kept_bytes(images: Images) -> int:
    """Return how large a split may become that is kept transformed, by the memory there is."""
    device = device_of(images)
    if device.type == "cuda":
        return int(KEPT_SHARE * torch.cuda.mem_get_info(device)[0])
    return 0 if isinstance(images, MappedImages) else KEPT_BYTES


def device_of(images: Images) -> torch.device:
    """Return where a split's batches are; images of a plug-in's own kind are on the CPU."""
    return getattr(images, "device", CPU)


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in bfloat16 on a GPU, as far as that is safe; elsewhere change nothing."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


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
    outputs = []
    with torch.no_grad():
        for batch in images:
            with mixed_precision(batch.device):
                outputs.append(function(batch).float())
    return torch.cat(outputs).cpu()


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
