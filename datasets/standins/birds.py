"""Birds on land or water, in the layout of Waterbirds.

The class is in the bird: a landbird is small, round and brown, red or yellow; a waterbird has a
long neck, a long bill and a white, grey or black body. The shortcut is in the scene behind it.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.standins import canvas as ink
from datasets.standins.canvas import JPEG_QUALITY, Canvas, Colour, Pixels
from datasets.standins.marker import Counts
from datasets.standins.skew import SPLITS, Skew, shuffled_members

SKEW = Skew(
    groups=("landbird_on_land", "landbird_on_water", "waterbird_on_land", "waterbird_on_water"),
    train=(3498, 184, 56, 1057),
    val=(467, 466, 133, 133),
    test=(2255, 2255, 642, 642),
)
COLUMNS = ("img_id", "img_filename", "y", "split", "place", "place_filename")
LABELS = "metadata.csv"
SHORTEST_SIDE, LONGEST_SIDE = 120, 200

SPECIES: tuple[tuple[tuple[str, Colour], ...], ...] = (
    (
        ("Brown_Thicket_Sparrow", (134, 88, 48)),
        ("Scarlet_Hedge_Finch", (196, 44, 36)),
        ("Golden_Wood_Warbler", (232, 188, 40)),
        ("Rusty_Garden_Robin", (206, 108, 40)),
    ),
    (
        ("White_Marsh_Heron", (240, 240, 236)),
        ("Grey_Harbour_Gull", (150, 156, 164)),
        ("Black_Cliff_Cormorant", (38, 38, 46)),
    ),
)
"""Names and plumage, by class; invented, none of them is in CUB."""

PLACES = (("b/bamboo_forest", "f/forest/broadleaf"), ("o/ocean", "l/lake/natural"))


def write_into(folder: Path, size: int, seed: int) -> Counts:
    """Write the pictures and metadata.csv; return the counts by split and group."""
    rng = np.random.default_rng([seed, size, 2])
    counts = SKEW.counts(size)
    rows: list[tuple[str, int, int, int, str]] = []
    for split, name in enumerate(SPLITS):
        for group in shuffled_members(counts, name, rng):
            label, place = divmod(group, 2)
            kind = int(rng.integers(len(SPECIES[label])))
            species, plumage = SPECIES[label][kind]
            number = 1 + kind + label * len(SPECIES[0])
            scene = int(rng.integers(2))
            file = f"{number:03d}.{species}/{species}_{len(rows) + 1:04d}.jpg"
            (folder / file).parent.mkdir(exist_ok=True)
            picture = draw(label, place, plumage, scene, rng)
            picture.save(folder / file, quality=JPEG_QUALITY)
            backdrop = f"/{PLACES[place][scene]}/{rng.integers(5000):08d}.jpg"
            rows.append((file, label, split, place, backdrop))
    # Sorted by species, as released: the splits are interleaved and must be read from the column.
    with (folder / LABELS).open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(COLUMNS)
        table.writerows((index, *row) for index, row in enumerate(sorted(rows), start=1))
    return counts


def draw(
    label: int, place: int, plumage: Colour, scene: int, rng: np.random.Generator
) -> Image.Image:
    """Return one picture: the bird of the label before the place, in a size of its own."""
    width, height = (int(side) for side in rng.integers(SHORTEST_SIDE, LONGEST_SIDE + 1, size=2))
    if width == height:
        width -= 1  # Never square, so that a loader that mixes up the sides is found out.
    canvas = (_land, _water)[place](width, height, scene, rng)
    unit = min(width, height) * rng.uniform(0.36, 0.44)
    x, y = width * rng.uniform(0.44, 0.56), height * rng.uniform(0.46, 0.56)
    canvas.place(x, y, unit, degrees=rng.normal(0, 5), mirrored=bool(rng.random() < 0.5))
    (_landbird, _waterbird)[label](canvas, ink.varied(rng, plumage, 8), rng)
    return canvas.finish(rng)


def _land(width: int, height: int, scene: int, rng: np.random.Generator) -> Canvas:
    """Return a bamboo grove (scene 0) or a broadleaf wood (scene 1)."""
    base = ink.varied(rng, ((96, 136, 62), (74, 106, 50))[scene], 12)
    backdrop = ink.flat(width, height, base)
    leaves = ink.noise(rng, width, height, 16, 16) + ink.noise(rng, width, height, 40, 40)
    backdrop += leaves[..., None] * np.array([14, 18, 9], dtype=np.float32)
    if scene == 1:
        ground = np.arange(height) > height * rng.uniform(0.72, 0.85)
        soil = np.array(ink.varied(rng, (104, 78, 48)), dtype=np.float32)
        backdrop[ground] = 0.25 * backdrop[ground] + 0.75 * soil
    canvas = Canvas(backdrop)
    for x in np.arange(rng.uniform(0, 0.12), 1.0, 0.12 if scene == 0 else 0.27):
        foot, top = x + rng.normal(0, 0.02), x + rng.normal(0, 0.04)
        if scene == 0:
            stalk = ink.varied(rng, (138, 168, 74), 14)
            canvas.stroke([(top, -0.1), (foot, 1.1)], 0.045, stalk)
            for knot in np.arange(rng.uniform(0, 0.2), 1.0, 0.2):
                at = top + (foot - top) * knot
                canvas.stroke([(at - 0.02, knot), (at + 0.02, knot)], 0.012, (84, 104, 44))
        else:
            bark, broad = ink.varied(rng, (82, 58, 38)), rng.uniform(0.06, 0.12)
            canvas.stroke([(top, -0.1), (foot, 0.88)], broad, bark)
            groove = [(top + 0.02, -0.1), (foot + 0.02, 0.88)]
            canvas.stroke(groove, 0.015, ink.mixed(bark, (0, 0, 0), 0.4))
    return canvas


def _water(width: int, height: int, scene: int, rng: np.random.Generator) -> Canvas:
    """Return the open sea (scene 0) or a lake with a far shore (scene 1)."""
    horizon = rng.uniform(0.18, 0.36)
    sea = ink.varied(rng, ((34, 96, 158), (52, 116, 150))[scene], 12)
    backdrop: Pixels = ink.flat(width, height, ink.varied(rng, (178, 208, 232)))
    wet = np.arange(height) > height * horizon
    waves = ink.noise(rng, width, height, 7, 36)
    depth = np.linspace(1.15, 0.85, height, dtype=np.float32)[:, None, None]
    water = np.array(sea, dtype=np.float32) * depth + 13 * waves[..., None]
    backdrop[wet] = water[wet]
    canvas = Canvas(backdrop)
    if scene == 1:
        crests = [(x, horizon - rng.uniform(0.02, 0.07)) for x in np.linspace(-0.1, 1.1, 9)]
        canvas.fill([(-0.1, horizon), *crests, (1.1, horizon)], ink.varied(rng, (92, 112, 120)))
    for _ in range(14 if scene == 0 else 6):
        x, y = rng.uniform(-0.1, 1.0), rng.uniform(horizon + 0.04, 1.0)
        ripple = [(x, y), (x + 0.06, y - 0.012), (x + 0.12, y), (x + 0.18, y - 0.01)]
        canvas.stroke(ink.curve(ripple), 0.01, ink.mixed(sea, (255, 255, 255), 0.5))
    return canvas


def _landbird(canvas: Canvas, plumage: Colour, rng: np.random.Generator) -> None:
    """Draw a songbird that faces right: round body, big head, short bill and short legs."""
    dark, light = ink.mixed(plumage, (30, 18, 8), 0.5), ink.mixed(plumage, (255, 240, 200), 0.45)
    for foot in (-0.02, 0.16):
        canvas.stroke([(foot, 0.45), (foot + 0.03, 0.82), (foot + 0.16, 0.84)], 0.04, (90, 60, 40))
    canvas.fill([(-0.4, 0.02), (-1.05, 0.26), (-1.0, 0.46), (-0.35, 0.38)], dark)
    canvas.fill(ink.ellipse(0.0, 0.16, 0.56, 0.44, -24), plumage)
    canvas.fill(ink.ellipse(0.16, 0.28, 0.36, 0.27, -40), light)
    canvas.fill(ink.ellipse(0.38, -0.3, 0.31, 0.29), plumage)
    bill = rng.uniform(0.84, 0.94)
    canvas.fill([(0.62, -0.42), (bill, -0.27), (0.62, -0.18)], (70, 56, 44))
    wing = [(0.12, -0.08), (-0.2, -0.06), (-0.72, 0.3), (-0.25, 0.36), (0.1, 0.2)]
    canvas.fill(ink.curve(wing, closed=True), dark)
    canvas.stroke([(-0.5, 0.24), (-0.05, 0.12)], 0.03, light)
    canvas.fill(ink.ellipse(0.46, -0.36, 0.065, 0.065), (12, 10, 10))
    canvas.fill(ink.ellipse(0.48, -0.38, 0.02, 0.02), (245, 245, 245))


def _waterbird(canvas: Canvas, plumage: Colour, rng: np.random.Generator) -> None:
    """Draw a wader or swimmer that faces right: long low body, long neck, long bill."""
    shade, pale = ink.mixed(plumage, (60, 66, 78), 0.4), ink.mixed(plumage, (255, 255, 255), 0.3)
    bill_colour = ink.varied(rng, (226, 160, 48))
    if rng.random() < 0.6:
        for foot in (-0.3, -0.1):
            leg = [(foot, 0.35), (foot + 0.04, 0.98)]
            canvas.stroke(leg, 0.045, ink.mixed(bill_colour, shade, 0.4))
    canvas.fill([(-0.7, 0.12), (-1.1, 0.2), (-1.0, 0.34), (-0.6, 0.4)], shade)
    back = [(0.4, 0.1), (0.1, -0.02), (-0.4, 0.02), (-0.86, 0.2)]
    belly = [(-0.5, 0.5), (0.1, 0.52), (0.42, 0.34)]
    canvas.fill(ink.curve([*back, *belly], closed=True), plumage)
    bend = rng.uniform(0.1, 0.2)
    neck = [(0.24, 0.26), (0.42, 0.02), (0.42 - bend, -0.38), (0.36, -0.74), (0.48, -0.8)]
    canvas.stroke(ink.curve(neck), 0.19, plumage)
    canvas.fill(ink.ellipse(0.5, -0.8, 0.19, 0.145), plumage)
    tip = rng.uniform(1.1, 1.25)
    canvas.fill([(0.64, -0.88), (tip, -0.7), (0.62, -0.71)], bill_colour)
    wing = [(0.12, 0.12), (-0.3, 0.06), (-0.82, 0.24), (-0.35, 0.4), (0.05, 0.34)]
    canvas.fill(ink.curve(wing, closed=True), shade)
    canvas.stroke([(-0.6, 0.25), (0.0, 0.22)], 0.03, pale)
    canvas.fill(ink.ellipse(0.55, -0.83, 0.04, 0.04), (200, 30, 20))
