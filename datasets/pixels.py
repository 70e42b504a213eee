"""Digests of decoded pixels: of a few images at fixed positions, or of all of them.

Labels are pinned by their digest, but photographs can be exchanged behind them. A run digests a
sample of what it has loaded, which costs next to nothing; `bench data verify` digests every image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from datasets.base import SPLITS, LabelledSplit

SAMPLED = 22  # images of each split in the digest of a run
BATCH = 64  # images that are read at once

Size = tuple[int, int]
"""Width and height."""


@dataclass(frozen=True)
class ImageCheck:
    """What came of checking every image of a dataset.

    Attributes:
        sample_digest: what a run on all three splits records; empty where an image is bad.
        full_digest: digest of all images; empty where an image is bad.
        sizes: the different widths and heights, where the images lie in files of their own.
        bad_files: every image file that cannot be read, with the reason.
        notes: what was found and put right.
        missing: every image file that is not there.
        folder: where a list of them can be written; none where images have no files of their own.
    """

    sample_digest: str
    full_digest: str
    sizes: list[Size] = field(default_factory=list)
    bad_files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    folder: Path | None = None


class PixelDigest:
    """A digest over images one after another, with their sizes."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, image: npt.NDArray[np.uint8]) -> None:
        """Go on with the next image, H x W x C."""
        self._digest.update(f"{image.shape}".encode())
        self._digest.update(np.ascontiguousarray(image).data)

    def hexdigest(self) -> str:
        """Return the digest of the images so far."""
        return self._digest.hexdigest()


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` positions out of `count`, the first among them, evenly spread."""
    return [place * count // min(count, most) for place in range(min(count, most))]


def pixel_digest(splits: Mapping[str, LabelledSplit], *, whole: bool = False) -> str:
    """Digest images of every loaded split in the order of their ids: a sample, or the whole."""
    digest = PixelDigest()
    for name in SPLITS:
        if name not in splits:
            continue
        images, order = splits[name].images, torch.argsort(splits[name].labels.ids)
        chosen = order if whole else order[spread(len(order), SAMPLED)]
        for part in chosen.split(BATCH):
            batch = images.batch(part)
            pixels = batch.pixels.permute(0, 2, 3, 1).cpu().numpy()
            for image, (height, width) in zip(pixels, batch.sizes.tolist(), strict=True):
                digest.add(image[:height, :width])
    return digest.hexdigest()
