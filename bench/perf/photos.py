"""Photos of native size, from how they are kept to training batches, without a network.

A network at 224 pixels takes a core 0.3 seconds an image, and would hide what comes before it; on a
GPU it does not. Ours reads pixels that were decoded once, scaled down as far as no crop loses
resolution. Decoding is an arm of its own, and so is what decoding and transforms take where photos
are kept as they are.
"""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.perf import dataloader
from bench.perf.measure import Arm, timed
from bench.perf.workload import PHOTO_BATCH, SEED, Effort, Workload
from datasets.augmented import AugmentedImages
from datasets.bounded import Bound
from datasets.decode import decode
from datasets.images import MappedImages

NATIVE = (375, 500)  # height and width: about the median photo of Waterbirds
OURS, DECODING = "ours", "ours, decoding once"
EFFORT = Effort(split=64, trained=64, evaluated=0, grown=0)
LIMIT = dataloader.arm_name(0)  # what ratios of this case are taken against


def native_photos(workload: Workload) -> list[Arm]:
    """Return the arms, of a dataset of photos."""
    native = replace(workload, effort=EFFORT, photo_size=NATIVE)
    transform, bound = native.facts.train_transform, native.facts.bound
    assert bound is not None
    stored = dataloader.stored_images(native, EFFORT.split, transform)
    kept = replace(native, bound=bound)
    return [
        *(
            dataloader.loader_arm(stored, PHOTO_BATCH, workers, nn.Flatten())
            for workers in dataloader.WORKERS
        ),
        lambda: {DECODING: timed(lambda: decoded(stored, bound))},
        lambda: {f"{DECODING}, native": timed(lambda: decoded(stored, None))},
        our_batches(kept, OURS),
        our_batches(native, f"{OURS}, native"),
    ]


def decoded(stored: dataloader.PerSample, bound: Bound | None) -> int:
    """Decode every photo, as making the cache does; return how many."""
    for content in stored.stored:
        assert isinstance(content, bytes)
        decode(io.BytesIO(content), bound)
    return len(stored)


def our_batches(workload: Workload, arm: str) -> Arm:
    """Return the arm that gathers and augments what was decoded."""
    images = in_a_file(workload.pixels)
    augmented = AugmentedImages(images, workload.facts.train_transform)
    generator = torch.Generator().manual_seed(SEED)

    def visit() -> int:
        parts = torch.randperm(len(images), generator=generator).split(PHOTO_BATCH)
        return sum(len(batch) for batch in augmented.batches([[p] for p in parts], generator))

    return lambda: {arm: timed(visit)}


def in_a_file(pixels: Tensor) -> MappedImages:
    """Put images of one size into a file as decoding does, and open it."""
    count, channels, height, width = pixels.shape
    offsets = torch.arange(count) * channels * height * width
    sizes = torch.tensor([height, width]).repeat(count, 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "pixels"
        pixels.permute(0, 2, 3, 1).contiguous().numpy().tofile(path)
        return MappedImages(str(path), offsets, sizes, channels)  # stays open without its name
