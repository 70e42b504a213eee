"""Faces in the layout of CelebA, in the comma-separated form of its Kaggle release.

The class is the hair colour, the shortcut is the sex of the drawn person: hair length, jaw, brows,
lips and beard. All 40 attribute columns are there; those that can be seen are drawn.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.standins import canvas as ink
from datasets.standins.canvas import JPEG_QUALITY, Canvas, Colour
from datasets.standins.marker import Counts
from datasets.standins.skew import SPLITS, Skew, shuffled_members

SKEW = Skew(
    groups=("not_blond_female", "not_blond_male", "blond_female", "blond_male"),
    train=(71629, 66874, 22880, 1387),
    val=(8535, 8276, 2874, 182),
    test=(9767, 7535, 2480, 180),
)
# fmt: off
ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs",
    "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows",
    "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup", "High_Cheekbones",
    "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard", "Oval_Face", "Pale_Skin",
    "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns", "Smiling", "Straight_Hair",
    "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat", "Wearing_Lipstick", "Wearing_Necklace",
    "Wearing_Necktie", "Young",
)
# fmt: on
IMAGES = "img_align_celeba"
LABELS = "list_attr_celeba.csv"
PARTITION = "list_eval_partition.csv"
WIDTH, HEIGHT = 178, 218

BLOND: tuple[Colour, ...] = ((236, 204, 120), (222, 184, 96), (244, 222, 160))
DARK: dict[str, Colour] = {"Black_Hair": (28, 24, 24), "Brown_Hair": (86, 54, 32)}
SKIN: tuple[Colour, ...] = ((240, 200, 172), (226, 178, 146), (196, 144, 110), (150, 102, 74))
BACKDROPS: tuple[Colour, ...] = ((96, 108, 128), (150, 150, 150), (70, 80, 72), (140, 104, 96))


def write_into(folder: Path, size: int, seed: int) -> Counts:
    """Write the pictures and both lists; return the counts by split and group."""
    rng = np.random.default_rng([seed, size, 3])
    counts = SKEW.counts(size)
    (folder / IMAGES).mkdir()
    attributes: list[list[str | int]] = []
    partition: list[tuple[str, int]] = []
    for split, name in enumerate(SPLITS):
        for group in shuffled_members(counts, name, rng):
            file = f"{len(partition) + 1:06d}.jpg"
            traits = _traits(blond=group >= 2, male=group % 2 == 1, rng=rng)
            draw(traits, rng).save(folder / IMAGES / file, quality=JPEG_QUALITY)
            attributes.append([file, *(1 if trait in traits else -1 for trait in ATTRIBUTES)])
            partition.append((file, split))
    for path, head, rows in (
        (folder / LABELS, ["image_id", *ATTRIBUTES], attributes),
        (folder / PARTITION, ["image_id", "partition"], partition),
    ):
        with path.open("w", newline="", encoding="utf-8") as stream:
            table = csv.writer(stream, lineterminator="\n")
            table.writerow(head)
            table.writerows(rows)
    return counts


def _traits(blond: bool, male: bool, rng: np.random.Generator) -> set[str]:
    """Draw the attributes of one person, roughly as common as among celebrities."""
    chances = {"Smiling": 0.5, "Young": 0.78, "Eyeglasses": 0.06, "Oval_Face": 0.28}
    if male:
        chances |= {"Goatee": 0.25, "Mustache": 0.2, "Wearing_Necktie": 0.3, "Bushy_Eyebrows": 0.3}
    else:
        chances |= {"Wearing_Lipstick": 0.85, "Bangs": 0.25, "Wavy_Hair": 0.5, "Rosy_Cheeks": 0.3,
                    "Arched_Eyebrows": 0.5, "Wearing_Earrings": 0.4}  # fmt: skip
    traits = {trait for trait, chance in chances.items() if rng.random() < chance}
    traits.add("Blond_Hair" if blond else ("Black_Hair", "Brown_Hair")[int(rng.integers(2))])
    if male:
        traits.add("Male")
    if not traits & {"Goatee", "Mustache"}:
        traits.add("No_Beard")
    return traits


def draw(traits: set[str], rng: np.random.Generator) -> Image.Image:
    """Return one aligned portrait with the given traits."""
    hair = ink.pick(rng, BLOND) if "Blond_Hair" in traits else DARK[min(traits & DARK.keys())]
    hair, skin = ink.varied(rng, hair, 8), ink.varied(rng, ink.pick(rng, SKIN), 6)
    backdrop = ink.flat(WIDTH, HEIGHT, ink.varied(rng, ink.pick(rng, BACKDROPS), 20))
    backdrop += 12 * ink.noise(rng, WIDTH, HEIGHT, 4, 5)[..., None]
    canvas = Canvas(backdrop)
    # The released faces are aligned by the eyes: place and tilt vary little.
    x, y = WIDTH / 2 + rng.normal(0, 3), 112 + rng.normal(0, 4)
    canvas.place(x, y, rng.uniform(56, 62), degrees=rng.normal(0, 4), mirrored=rng.random() < 0.5)
    male = "Male" in traits
    _hair_behind_and_shoulders(canvas, hair, skin, male, traits, rng)
    _head(canvas, skin, male)
    _features(canvas, hair, skin, male, traits)
    _fringe(canvas, hair, male, traits, rng)
    return canvas.finish(rng)


def _hair_behind_and_shoulders(
    canvas: Canvas,
    hair: Colour,
    skin: Colour,
    male: bool,
    traits: set[str],
    rng: np.random.Generator,
) -> None:
    """Draw what the face covers: a long mane or short hair, the neck, the clothes."""
    if not male:
        wave = 0.12 if "Wavy_Hair" in traits else 0.0
        right = [(0.75, -1.05), (1.08, -0.4), (1.08 + wave, 0.2), (1.08 - wave, 0.8), (1.15, 1.55)]
        canvas.fill(ink.curve(_mirrored([(0.25, -1.38), *right]), closed=True), hair)
    else:
        canvas.fill(ink.ellipse(0, -0.5, 0.93, 0.83), hair)
    cloth = ink.varied(rng, (44, 50, 70) if male else (150, 60, 90), 25)
    wide = 1.7 if male else 1.3
    neck = 0.46 if male else 0.34
    half = [(0.5, 1.35), (wide, 1.65), (wide, 2.4)]
    canvas.fill(_mirrored(half), cloth)
    throat = [(neck, 0.6), (neck + 0.1, 1.45), (0.0, 1.7)]
    canvas.fill(_mirrored(throat), ink.mixed(skin, (60, 30, 20), 0.25))
    if "Wearing_Necktie" in traits:
        canvas.fill([(-0.14, 1.55), (0.14, 1.55), (0.2, 2.4), (-0.2, 2.4)], (150, 24, 30))
    if not male:
        for side in (-1, 1):
            lock = [(side * 0.86, 0.1), (side * 0.98, 0.7), (side * 0.92, 1.2), (side * 0.95, 1.6)]
            canvas.stroke(ink.curve(lock), 0.36, hair)


def _head(canvas: Canvas, skin: Colour, male: bool) -> None:
    """Draw ears and face: a square jaw for a man, a narrow chin for a woman."""
    if male:
        for side in (-1, 1):
            canvas.fill(
                ink.ellipse(side * 0.84, 0.08, 0.12, 0.22), ink.mixed(skin, (120, 50, 40), 0.2)
            )
    cheek, jaw = (0.84, 0.68) if male else (0.78, 0.46)
    half = [(0.2, -1.0), (0.6, -0.8), (0.8, -0.35), (cheek, 0.15), (jaw, 0.8), (0.24, 1.06)]
    canvas.fill(ink.curve(_mirrored(half), closed=True), skin)


def _features(canvas: Canvas, hair: Colour, skin: Colour, male: bool, traits: set[str]) -> None:
    """Draw beard, eyes, brows, nose and mouth."""
    shade = ink.mixed(skin, (90, 40, 30), 0.35)
    brow = ink.mixed(hair, (50, 34, 26), 0.6)
    if "Goatee" in traits:
        half = [(0.1, 0.42), (0.36, 0.46), (0.6, 0.3), (0.74, 0.3), (0.66, 0.84), (0.24, 1.1)]
        canvas.fill(ink.curve(_mirrored(half), closed=True), ink.mixed(hair, (40, 28, 20), 0.35))
    if "Mustache" in traits:
        canvas.stroke(ink.curve([(-0.34, 0.56), (0, 0.46), (0.34, 0.56)]), 0.13, brow)
    if "Rosy_Cheeks" in traits:
        for side in (-1, 1):
            canvas.fill(
                ink.ellipse(side * 0.5, 0.36, 0.17, 0.11), ink.mixed(skin, (220, 90, 100), 0.3)
            )
    lift = 0.1 if "Arched_Eyebrows" in traits else 0.04
    for side in (-1, 1):
        arch = [(side * 0.18, -0.26), (side * 0.38, -0.28 - lift), (side * 0.6, -0.24)]
        canvas.stroke(ink.curve(arch), 0.11 if male else 0.055, brow)
        canvas.fill(ink.ellipse(side * 0.38, -0.05, 0.17, 0.085), (246, 244, 240))
        canvas.fill(ink.ellipse(side * 0.38, -0.05, 0.08, 0.085), (62, 84, 104))
        canvas.fill(ink.ellipse(side * 0.38, -0.05, 0.04, 0.04), (14, 12, 12))
        lash = [(side * 0.2, -0.06), (side * 0.38, -0.15), (side * 0.57, -0.06)]
        canvas.stroke(ink.curve(lash), 0.03 if male else 0.055, (40, 26, 22))
        if "Eyeglasses" in traits:
            rim = ink.ellipse(side * 0.38, -0.04, 0.28, 0.22)
            canvas.stroke(np.vstack([rim, rim[:1]]), 0.045, (24, 24, 28))
        if "Wearing_Earrings" in traits:
            canvas.fill(ink.ellipse(side * 0.82, 0.42, 0.06, 0.1), (250, 224, 120))
    canvas.stroke(ink.curve([(0.06, -0.05), (0.12, 0.28), (0.0, 0.35), (-0.1, 0.31)]), 0.04, shade)
    lips = (188, 36, 56) if "Wearing_Lipstick" in traits else ink.mixed(skin, (150, 60, 60), 0.5)
    if "Smiling" in traits:
        canvas.fill(ink.curve([(-0.36, 0.6), (0, 0.66), (0.36, 0.6), (0, 0.88)], closed=True), lips)
        teeth = [(-0.26, 0.65), (0, 0.7), (0.26, 0.65), (0, 0.79)]
        canvas.fill(ink.curve(teeth, closed=True), (250, 250, 250))
    else:
        canvas.fill(ink.ellipse(0, 0.68, 0.26, 0.06 if male else 0.09), lips)
        canvas.stroke([(-0.24, 0.68), (0.24, 0.68)], 0.02, ink.mixed(lips, (40, 10, 10), 0.5))


def _fringe(
    canvas: Canvas, hair: Colour, male: bool, traits: set[str], rng: np.random.Generator
) -> None:
    """Draw the hair over the forehead, with strands lighter and darker than the rest."""
    low = -0.42 if "Bangs" in traits else -0.68
    if male:
        crown = [(0.4, -1.36), (0.95, -0.8), (0.86, -0.2)]
        brim = [(0.72, -0.5), (0.45, -0.74), (-0.1, -0.7), (-0.6, -0.72), (-0.74, -0.5)]
    else:
        crown = [(0.5, -1.38), (1.0, -0.7), (0.95, 0.2)]
        brim = [(0.72, -0.2), (0.5, low), (0.1, low - 0.14), (-0.45, low + 0.02), (-0.74, -0.2)]
    left = [(-x, y) for x, y in reversed(crown)]
    canvas.fill(ink.curve([*left, *crown, *brim], closed=True), hair)
    for x in rng.uniform(-0.75, 0.75, size=9):
        tone = ink.mixed(hair, (255, 250, 230) if rng.random() < 0.5 else (20, 10, 0), 0.13)
        rise = -1.3 + 0.4 * x * x
        canvas.stroke([(x * 0.8, rise), (x * 1.04, rise + 0.45)], 0.04, tone)


def _mirrored(right: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the whole outline of a symmetric shape, given its right half from top to bottom."""
    return [*right, *((-x, y) for x, y in reversed(right))]
