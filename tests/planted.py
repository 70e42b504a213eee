"""Data of one's own with a planted shortcut: which samples break it is known to the test alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 32
CLASSES = ("round", "square")
TINTS = ((200, 90, 60), (60, 110, 200))


@dataclass(frozen=True)
class Planted:
    """One sample: its class, and whether its tint is that of the other class."""

    label: int
    minority: bool
    pixels: np.ndarray


def planted(count: int, share: float, seed: int) -> Iterator[Planted]:
    """Draw shapes on a tinted ground: the tint nearly gives the class away, the shape does."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        label, minority = number % 2, bool(rng.random() < share)
        tint = np.array(TINTS[label ^ minority]) + rng.integers(-25, 26, 3)
        image = Image.new("RGB", (SIDE, SIDE), tuple(int(c) for c in tint))
        draw, half = ImageDraw.Draw(image), int(rng.integers(6, 10))
        x, y = (int(v) for v in rng.integers(half + 1, SIDE - half - 1, 2))
        grey = int(rng.integers(120, 180))
        box = (x - half, y - half, x + half, y + half)
        (draw.ellipse if label == 0 else draw.rectangle)(box, fill=(grey, grey, grey))
        noise = rng.normal(0, 18, (SIDE, SIDE, 3))
        pixels = np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)
        yield Planted(label, minority, pixels)


def write_planted(folder: Path, count: int = 900, share: float = 0.08, seed: int = 0) -> set[str]:
    """Write a folder for each class; return the files that break the shortcut."""
    minority = set()
    for number, sample in enumerate(planted(count, share, seed)):
        name = f"{CLASSES[sample.label]}/{number:05d}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sample.pixels).save(folder / name)
        if sample.minority:
            minority.add(name)
    return minority
