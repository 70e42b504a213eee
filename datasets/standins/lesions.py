"""Skin lesions in the layout of ISIC that GEORGE's loader reads.

Malignant lesions are large, ragged, dark and of several colours; benign ones are round, small and
even. The shortcut is a coloured patch at the border, which only benign pictures have. Some benign
lesions were confirmed by histopathology, as all malignant ones were, and look less innocent; some
have no diagnosis at all, so that a loader's treatment of those is exercised.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.standins.canvas import (
    JPEG_QUALITY,
    Canvas,
    Colour,
    Pixels,
    curve,
    ellipse,
    flat,
    mixed,
    noise,
    pick,
    varied,
)
from datasets.standins.marker import Counts
from datasets.standins.skew import SPLITS, Skew, shuffled_members

_SHARES = (9861, 7420, 1843)
SKEW = Skew(("benign_no_patch", "benign_patch", "malignant"), _SHARES, _SHARES, _SHARES)
# fmt: off
COLUMNS = ("Image Index", "Diagnosis", "fold", "patch", "diagnosis_confirm_type",
           "benign_malignant")
# fmt: on
LABELS = "labels.csv"
IMAGES = "images"
SIDE = 224
GRID = 112
"""Skin and lesion are soft, so half the resolution is enough for them."""
NO_PATCH, PATCH, MALIGNANT = range(3)
CONFIRMED_EVERY = 3
UNKNOWN_EVERY = 8
"""Among benign lesions without a patch: every third is confirmed, every eighth is undiagnosed."""

SKIN: tuple[Colour, ...] = ((236, 190, 172), (226, 176, 150), (214, 164, 150), (240, 204, 190))
PATCHES: tuple[Colour, ...] = ((24, 84, 220), (20, 160, 70), (250, 206, 20), (240, 90, 20))
MOLE: tuple[Colour, ...] = ((150, 96, 66), (132, 82, 58), (168, 112, 82))
STAINS: tuple[Colour, ...] = ((24, 16, 18), (112, 40, 36), (78, 80, 100), (60, 30, 20))


def write_into(folder: Path, size: int, seed: int) -> Counts:
    """Write the pictures and labels.csv; return the counts by split and group."""
    rng = np.random.default_rng([seed, size, 4])
    counts = SKEW.counts(size)
    (folder / IMAGES).mkdir()
    names = rng.permutation(sum(sum(part.values()) for part in counts.values()))
    rows: list[tuple[str, int, str, int, str, str]] = []
    for fold in SPLITS:
        plain = 0
        for group in shuffled_members(counts, fold, rng):
            confirmed, known = group == MALIGNANT, True
            if group == NO_PATCH:
                plain += 1
                known = plain % UNKNOWN_EVERY != 0
                confirmed = known and plain % CONFIRMED_EVERY == 0
            file = f"ISIC_{names[len(rows)]:07d}.jpg"
            picture = draw(group == MALIGNANT, group == PATCH, confirmed, rng)
            picture.save(folder / IMAGES / file, quality=JPEG_QUALITY)
            verdict = ("malignant" if group == MALIGNANT else "benign") if known else ""
            method = "histopathology" if confirmed else "single image expert consensus"
            diagnosis, patch = int(group == MALIGNANT), int(group == PATCH)
            rows.append((file, diagnosis, fold, patch, method if known else "", verdict))
    with (folder / LABELS).open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows(sorted(rows))
    return counts


def draw(malignant: bool, patch: bool, confirmed: bool, rng: np.random.Generator) -> Image.Image:
    """Return one dermoscopic picture; a confirmed benign lesion is a little ragged itself."""
    skin = flat(GRID, GRID, varied(rng, pick(rng, SKIN), 8))
    pores = 3 * noise(rng, GRID, GRID, 60, 60) + 5 * noise(rng, GRID, GRID, 6, 6)
    skin += pores[..., None] * np.array([0.7, 1.0, 1.0], dtype=np.float32)
    raggedness = rng.uniform(0.8, 1.2) if malignant else rng.uniform(0, 0.2) + 0.2 * confirmed
    canvas = Canvas(_with_lesion(skin, malignant, float(raggedness), rng), SIDE // GRID)
    if patch:
        _patches(canvas, rng)
    for _ in range(int(rng.integers(0, 7))):
        x, y = rng.uniform(0, 1, 2)
        towards, bend = rng.uniform(0, 2 * np.pi), rng.normal(0, 0.3)
        turns = towards + bend * np.arange(4)
        steps = 0.14 * np.stack([np.cos(turns), np.sin(turns)], axis=1)
        canvas.stroke(curve(np.array([x, y]) + np.cumsum(steps, axis=0)), 0.006, (64, 44, 36))
    return canvas.finish(rng, grain=3.0)


def _with_lesion(
    skin: Pixels, malignant: bool, raggedness: float, rng: np.random.Generator
) -> Pixels:
    """Return the skin with a lesion near its centre, whose edge fades into it."""
    rows, columns = np.mgrid[0:GRID, 0:GRID].astype(np.float32)
    x0, y0 = (float(shift) for shift in GRID / 2 + rng.normal(0, GRID / 25, 2))
    stretch = float(rng.uniform(0.85, 1.15))
    x, y = (columns - x0) * stretch, (rows - y0) / stretch
    distance = np.hypot(x, y)
    size = rng.uniform(0.22, 0.32) if malignant else rng.uniform(0.13, 0.21)
    # The outline is a function of the angle alone, so it is tabulated by degrees.
    outline = GRID * _outline(size, raggedness, rng)
    radius = outline[np.rad2deg(np.arctan2(y, x)).astype(np.int16) % 360]
    radius *= 1 + 0.05 * raggedness * noise(rng, GRID, GRID, 24, 24)
    fade = GRID / 45 if malignant else GRID / 32
    cover = np.clip((radius - distance) / fade + 0.5, 0, 1)[..., None]

    brown = varied(rng, pick(rng, MOLE), 8)
    if malignant:
        brown = mixed(brown, (48, 26, 20), 0.55)
    lesion = flat(GRID, GRID, brown)
    lesion -= 14 * np.clip(1 - distance / radius, 0, 1)[..., None]
    lesion += (3 + 6 * raggedness) * noise(rng, GRID, GRID, 28, 28)[..., None]
    if malignant:
        for stain in STAINS:
            spread = np.clip(noise(rng, GRID, GRID, 7, 7) - 0.3, 0, 0.75)[..., None]
            lesion = lesion * (1 - spread) + np.array(stain, dtype=np.float32) * spread
    blended: Pixels = (skin * (1 - cover) + lesion * cover).astype(np.float32)
    return blended


def _outline(mean: float, raggedness: float, rng: np.random.Generator) -> Pixels:
    """Return the radius of a lesion at each degree: a circle with a few random waves on it."""
    angle = np.deg2rad(np.arange(360))
    radius = np.full(360, mean)
    for waves in range(2, 9):
        swing = raggedness * rng.normal(0, 0.16) / np.sqrt(waves)
        radius *= 1 + swing * np.cos(waves * angle + rng.uniform(0, 2 * np.pi))
    return radius.astype(np.float32)


def _patches(canvas: Canvas, rng: np.random.Generator) -> None:
    """Draw one to three big round stickers that the border of the picture cuts off in part."""
    for side in rng.permutation(4)[: int(rng.integers(1, 4))]:
        along, beyond = rng.uniform(0.2, 0.8), rng.uniform(0.0, 0.06)
        x, y = ((along, beyond), (1 - beyond, along), (along, 1 - beyond), (beyond, along))[side]
        colour, radius = varied(rng, pick(rng, PATCHES), 6), rng.uniform(0.2, 0.28)
        canvas.fill(ellipse(x, y, radius, radius), mixed(colour, (0, 0, 0), 0.3))
        canvas.fill(ellipse(x, y, radius - 0.02, radius - 0.02), colour)
