"""Drawing helpers the photo stand-ins share: smooth outlines, soft noise, an antialiased canvas.

Shapes are lists of points in coordinates of their own (a bird is about two units wide); the canvas
places, turns and mirrors them. It draws at twice the size and shrinks the result, which is the
cheapest antialiasing Pillow offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

Points = NDArray[np.float64]
Pixels = NDArray[np.float32]
Colour = tuple[float, float, float]

OVERSAMPLING = 2
JPEG_QUALITY = 88


@lru_cache(maxsize=256)
def spline_matrix(count: int, per_span: int = 6, closed: bool = False) -> Points:
    """Return the matrix that turns `count` control points into a Catmull-Rom curve.

    The curve is linear in its control points, so one matrix serves a whole batch of shapes.
    """
    spans = count if closed else count - 1
    step = np.arange(per_span) / per_span
    square, cube = step**2, step**3
    basis = 0.5 * np.stack(
        [
            -step + 2 * square - cube,
            2 - 5 * square + 3 * cube,
            step + 4 * square - 3 * cube,
            cube - square,
        ],
        axis=1,
    )
    matrix = np.zeros((spans * per_span + (0 if closed else 1), count))
    for span in range(spans):
        rows = slice(span * per_span, (span + 1) * per_span)
        for offset in range(4):
            neighbour = span + offset - 1
            column = neighbour % count if closed else min(max(neighbour, 0), count - 1)
            matrix[rows, column] += basis[:, offset]
    if not closed:
        matrix[-1, -1] = 1.0
    return matrix


def curve(points: ArrayLike, closed: bool = False) -> Points:
    """Return a smooth curve through the points."""
    control = np.asarray(points, dtype=np.float64)
    smooth: Points = spline_matrix(len(control), closed=closed) @ control
    return smooth


def ellipse(x: float, y: float, width: float, height: float, degrees: float = 0.0) -> Points:
    """Return the outline of an ellipse with the given half axes, turned about its centre."""
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    turn = np.deg2rad(degrees)
    along, across = width * np.cos(angle), height * np.sin(angle)
    return np.stack(
        [
            x + along * np.cos(turn) - across * np.sin(turn),
            y + along * np.sin(turn) + across * np.cos(turn),
        ],
        axis=1,
    )


def noise(
    rng: np.random.Generator, width: int, height: int, cells_x: float, cells_y: float
) -> Pixels:
    """Return smooth noise of mean 0 and deviation about 1, with so many bumps along each side."""
    coarse = rng.standard_normal((max(2, round(cells_y)), max(2, round(cells_x))))
    image = Image.fromarray(coarse.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)


def varied(rng: np.random.Generator, colour: Colour, spread: float = 10.0) -> Colour:
    """Return a neighbour of the colour: lighter or darker, and a little off in hue."""
    red, green, blue = np.asarray(colour) + rng.normal(0, spread) + rng.normal(0, spread / 2, 3)
    return float(red), float(green), float(blue)


def mixed(one: Colour, other: Colour, share: float) -> Colour:
    """Return the colour a `share` of the way from one to the other."""
    red, green, blue = np.asarray(one) * (1 - share) + np.asarray(other) * share
    return float(red), float(green), float(blue)


class Canvas:
    """A picture to draw on, in coordinates that `place` chooses."""

    def __init__(self, background: Pixels, coarseness: int = 1) -> None:
        """Start from a background, which may be coarser than the picture, for speed."""
        height, width = (side * coarseness for side in background.shape[:2])
        self.width, self.height = width, height
        image = Image.fromarray(np.clip(background, 0, 255).astype(np.uint8))
        enlarged = (width * OVERSAMPLING, height * OVERSAMPLING)
        self._image = image.resize(enlarged, Image.Resampling.BILINEAR)
        self._draw = ImageDraw.Draw(self._image)
        self.place_scene()

    def place_scene(self) -> None:
        """Make both coordinates run from 0 to 1 over the whole picture."""
        self._origin = np.zeros(2)
        self._matrix = np.diag([self.width, self.height]).astype(np.float64)
        self._unit = float(min(self.width, self.height))

    def place(
        self, x: float, y: float, unit: float, degrees: float = 0.0, mirrored: bool = False
    ) -> None:
        """Put the origin of the shapes to come at (x, y), and make their unit so many pixels."""
        turn = np.deg2rad(degrees)
        rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
        flip = np.diag([-1.0 if mirrored else 1.0, 1.0])
        self._origin = np.array([x, y])
        self._matrix = rotation @ flip * unit
        self._unit = unit

    def fill(self, outline: ArrayLike, colour: Colour) -> None:
        """Fill the shape inside the outline."""
        self._draw.polygon(self._pixels(outline), fill=_rgb(colour))

    def stroke(self, line: ArrayLike, thickness: float, colour: Colour) -> None:
        """Draw a line with round ends; its thickness is in the units of the placement."""
        pixels = self._pixels(line)
        broad = max(1.0, thickness * self._unit * OVERSAMPLING)
        self._draw.line(pixels, fill=_rgb(colour), width=round(broad), joint="curve")
        for x, y in (pixels[0], pixels[-1]):
            radius = broad / 2
            self._draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_rgb(colour))

    def finish(self, rng: np.random.Generator, grain: float = 5.0) -> Image.Image:
        """Return the picture at its real size, with uneven light and the grain of a camera."""
        drawn = np.asarray(self._image.reduce(OVERSAMPLING), dtype=np.float32)
        light = 1 + 0.05 * noise(rng, self.width, self.height, 4, 4)
        specks = rng.standard_normal((self.height, self.width), dtype=np.float32)
        return as_image(drawn * light[..., None] + grain * specks[..., None])

    def _pixels(self, points: ArrayLike) -> list[tuple[float, float]]:
        placed = np.asarray(points, dtype=np.float64) @ self._matrix + self._origin
        return [(x, y) for x, y in (placed * OVERSAMPLING).tolist()]


def as_image(pixels: Pixels) -> Image.Image:
    """Return pixels in the range 0 to 255 as a picture."""
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def flat(width: int, height: int, colour: Colour) -> Pixels:
    """Return a background of one colour."""
    return np.full((height, width, 3), colour, dtype=np.float32)


def pick(rng: np.random.Generator, colours: Sequence[Colour]) -> Colour:
    """Return one of the colours, each as likely as the others."""
    return colours[int(rng.integers(len(colours)))]


def _rgb(colour: Colour) -> tuple[int, int, int]:
    red, green, blue = (round(min(max(channel, 0.0), 255.0)) for channel in colour)
    return red, green, blue
