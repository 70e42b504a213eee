"""Cars and trucks in the IDX files that CIFAR-10 is converted to, with digits for them beside.

The class is in the outline: a car is low, with a roof in the middle and glass all around it; a
truck has a box behind an upright cab. Colours, roads and skies are drawn alike for both. Only the
two vehicles and the two digits that Dominoes pairs are written, in one folder, so that no real file
is ever paired with a drawn one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.cifar_source import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from datasets.standins import canvas as ink
from datasets.standins import digits
from datasets.standins.canvas import Canvas, Colour, ellipse, pick, varied
from datasets.standins.marker import Counts

SIDE = 32
LABELS = TRAIN_LABELS
VEHICLES = (1, 9)  # CIFAR-10's labels of automobiles and trucks
PAINTS: tuple[Colour, ...] = (
    *((190, 40, 36), (36, 72, 160), (232, 232, 228), (52, 54, 60)),
    *((216, 170, 40), (60, 120, 70), (150, 154, 160)),
)
SKIES: tuple[Colour, ...] = ((186, 208, 230), (214, 216, 218), (160, 176, 150), (228, 206, 180))
ROADS: tuple[Colour, ...] = ((104, 104, 108), (136, 128, 116), (92, 108, 84))
GLASS: Colour = (44, 56, 72)
TYRE: Colour = (24, 24, 26)
HUB: Colour = (176, 178, 182)


def write_into(folder: Path, size: int, seed: int) -> Counts:
    """Write both halves' files; the counts are empty, as these know neither val nor groups."""
    rng = np.random.default_rng([seed, size, 6])
    tested = max(digits.SMALLEST_TEST, size // 4)
    for prefix, images, labels, count in (
        ("train", TRAIN_IMAGES, TRAIN_LABELS, size),
        ("t10k", TEST_IMAGES, TEST_LABELS, tested),
    ):
        kinds = rng.permutation(np.arange(count) % 2)
        photos = np.stack([draw(int(kind), rng) for kind in kinds])
        digits.write_idx(folder / images, photos)
        digits.write_idx(folder / labels, np.array(VEHICLES, dtype=np.uint8)[kinds])
        numbers = rng.permutation(np.arange(count) % 2).astype(np.uint8)
        digits.write_idx(folder / f"{prefix}-images-idx3-ubyte", digits.draw(numbers, rng))
        digits.write_idx(folder / f"{prefix}-labels-idx1-ubyte", numbers)
    return {}


def draw(kind: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return one 32 x 32 picture of a car (0) or a truck (1), seen from the side."""
    backdrop = ink.flat(SIDE, SIDE, varied(rng, pick(rng, SKIES), 14))
    horizon = int(SIDE * rng.uniform(0.52, 0.7))
    backdrop[horizon:] = varied(rng, pick(rng, ROADS), 12)
    backdrop += 7 * ink.noise(rng, SIDE, SIDE, 6, 6)[..., None]
    canvas = Canvas(backdrop)
    unit = SIDE * rng.uniform(0.4, 0.47)
    x, y = SIDE * rng.uniform(0.46, 0.54), SIDE * rng.uniform(0.66, 0.76)
    canvas.place(x, y, unit, degrees=rng.normal(0, 2), mirrored=bool(rng.random() < 0.5))
    (_car, _truck)[kind](canvas, varied(rng, pick(rng, PAINTS), 14), rng)
    return np.asarray(canvas.finish(rng, grain=4.0), dtype=np.uint8)


def _car(canvas: Canvas, paint: Colour, rng: np.random.Generator) -> None:
    """Draw a car about two units long, its wheels on the line y = 0.2."""
    roof, front, back = rng.uniform(-0.52, -0.42), rng.uniform(0.28, 0.4), rng.uniform(-0.5, -0.36)
    shade = ink.mixed(paint, (0, 0, 0), 0.35)
    canvas.fill(
        [(back - 0.3, -0.1), (back, roof), (front - 0.22, roof), (front + 0.12, -0.1)], paint
    )
    canvas.fill(
        [(back - 0.2, -0.12), (back + 0.03, roof + 0.08), (-0.06, roof + 0.08), (-0.06, -0.12)],
        GLASS,
    )
    canvas.fill(
        [(0.02, -0.12), (0.02, roof + 0.08), (front - 0.25, roof + 0.08), (front + 0.02, -0.12)],
        GLASS,
    )
    body = [(-1.0, 0.16), (-1.0, -0.08), (-0.8, -0.14), (0.6, -0.14), (0.98, -0.02), (1.0, 0.16)]
    canvas.fill(body, paint)
    canvas.stroke([(-0.96, 0.13), (0.96, 0.13)], 0.07, shade)
    _wheels(canvas, (-0.58, 0.6), 0.2)


def _truck(canvas: Canvas, paint: Colour, rng: np.random.Generator) -> None:
    """Draw a truck about two units long: a tall box, and an upright cab before it."""
    top, cab = rng.uniform(-1.02, -0.86), rng.uniform(-0.66, -0.54)
    box = varied(rng, pick(rng, PAINTS), 14)
    canvas.fill([(-1.0, 0.06), (-1.0, top), (0.38, top), (0.38, 0.06)], box)
    rib = ink.mixed(box, (0, 0, 0), 0.3)
    for at in np.linspace(-0.8, 0.2, 4):
        canvas.stroke([(at, top + 0.06), (at, 0.0)], 0.03, rib)
    canvas.fill([(0.44, 0.12), (0.44, cab), (0.82, cab), (1.0, -0.2), (1.0, 0.12)], paint)
    canvas.fill([(0.58, -0.22), (0.58, cab + 0.1), (0.78, cab + 0.1), (0.9, -0.22)], GLASS)
    canvas.stroke([(-0.98, 0.1), (0.98, 0.1)], 0.08, TYRE)
    _wheels(canvas, (-0.72, -0.3, 0.7), 0.19)


def _wheels(canvas: Canvas, places: tuple[float, ...], radius: float) -> None:
    for x in places:
        canvas.fill(ellipse(x, 0.18, radius, radius), TYRE)
        canvas.fill(ellipse(x, 0.18, radius * 0.45, radius * 0.45), HUB)
