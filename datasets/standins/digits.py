"""Handwritten-looking digits in the IDX files of MNIST, shared by all that is made of these.

Each digit is a handful of strokes. A copy is bent by a smooth warp, slanted, turned, fitted to the
20-pixel box of MNIST, centred by its ink and drawn with a pen of random thickness: a pixel's grey
is a function of its distance to the nearest stroke, for a whole batch at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.standins.canvas import Points, spline_matrix
from datasets.standins.marker import Counts

SIDE = 28
BOX = 20.0
BATCH = 128
SMALLEST_TEST = 100
LABELS = "train-labels-idx1-ubyte"
LABELS_HEADER = 8
"""Bytes before the first label of an IDX label file."""

Stroke = Sequence[tuple[float, float]]
Bytes = NDArray[np.uint8]

_OVAL: Stroke = [(0.35, 0), (0.08, 0.17), (0, 0.5), (0.08, 0.83), (0.35, 1), (0.62, 0.83),
                 (0.7, 0.5), (0.62, 0.17), (0.35, 0)]  # fmt: skip
_ONE: Stroke = [(0.35, 0), (0.35, 1)]
_TWO: Stroke = [(0.03, 0.24), (0.2, 0.03), (0.48, 0.03), (0.62, 0.25), (0.45, 0.57), (0.2, 0.82),
                (0, 1)]  # fmt: skip
_THREE_TOP: Stroke = [(0.04, 0.1), (0.34, 0), (0.6, 0.2), (0.48, 0.41), (0.22, 0.48)]
_THREE_BOTTOM: Stroke = [(0.22, 0.48), (0.54, 0.56), (0.66, 0.77), (0.42, 1), (0.02, 0.92)]
_FIVE: Stroke = [(0.1, 0.43), (0.4, 0.37), (0.64, 0.62), (0.5, 0.93), (0.22, 1), (0, 0.9)]
_SIX: Stroke = [(0.52, 0), (0.2, 0.28), (0.03, 0.65), (0.14, 0.93), (0.4, 1), (0.62, 0.8),
                (0.5, 0.58), (0.25, 0.58), (0.05, 0.76)]  # fmt: skip
_SEVEN: Stroke = [(0.66, 0.04), (0.44, 0.46), (0.28, 1)]
_EIGHT: Stroke = [(0.34, 0.47), (0.1, 0.22), (0.35, 0), (0.6, 0.22), (0.34, 0.47), (0.05, 0.76),
                  (0.35, 1), (0.64, 0.76), (0.34, 0.47)]  # fmt: skip
_NINE: Stroke = [(0.6, 0.2), (0.35, 0), (0.06, 0.21), (0.22, 0.47), (0.48, 0.41), (0.6, 0.2)]

TEMPLATES: dict[int, tuple[tuple[Stroke, ...], ...]] = {
    0: ((_OVAL,),),
    1: ((_ONE,), (_ONE, [(0.12, 0.22), (0.35, 0)])),
    2: ((_TWO, [(0, 1), (0.68, 0.96)]), (_TWO, [(0, 1), (0.2, 0.86), (0.42, 0.98), (0.7, 0.9)])),
    3: ((_THREE_TOP, _THREE_BOTTOM),),
    4: (
        ([(0.42, 0), (0, 0.62)], [(0, 0.62), (0.7, 0.62)], [(0.5, 0.3), (0.5, 1)]),
        ([(0.06, 0.04), (0.02, 0.52)], [(0.02, 0.52), (0.6, 0.5)], [(0.6, 0), (0.56, 1)]),
    ),
    5: (([(0.62, 0.02), (0.14, 0.03)], [(0.14, 0.03), (0.1, 0.43)], _FIVE),),
    6: ((_SIX,),),
    7: (
        ([(0, 0.05), (0.66, 0.04)], _SEVEN),
        ([(0, 0.05), (0.66, 0.04)], _SEVEN, [(0.2, 0.5), (0.64, 0.48)]),
    ),
    8: ((_EIGHT,),),
    9: (
        (_NINE, [(0.6, 0.2), (0.57, 0.6), (0.5, 1)]),
        (_NINE, [(0.6, 0.2), (0.6, 0.7), (0.4, 0.98), (0.1, 0.94)]),
    ),
}
"""For each digit the ways to write it, in a box of height 1 with y downwards."""


def write_into(folder: Path, size: int, seed: int) -> Counts:
    """Write the four IDX files; the counts are empty, for IDX files know neither val nor groups."""
    rng = np.random.default_rng([seed, size, 1])
    for prefix, count in (("train", size), ("t10k", max(SMALLEST_TEST, size // 4))):
        labels = rng.permutation(np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{prefix}-images-idx3-ubyte", draw(labels, rng))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", labels)
    return {}


def draw(labels: Bytes, rng: np.random.Generator) -> Bytes:
    """Return one 28x28 grey picture for each label."""
    pictures = np.zeros((len(labels), SIDE, SIDE), dtype=np.uint8)
    ways = rng.integers(0, 2, size=len(labels))
    for digit, variants in TEMPLATES.items():
        for index, strokes in enumerate(variants):
            wanted = np.flatnonzero((labels == digit) & (ways % len(variants) == index))
            for start in range(0, len(wanted), BATCH):
                batch = wanted[start : start + BATCH]
                begin, end = _placed_segments(strokes, len(batch), rng)
                pictures[batch] = _inked(begin, end, rng)
    return pictures


def _placed_segments(
    strokes: Sequence[Stroke], copies: int, rng: np.random.Generator
) -> tuple[Points, Points]:
    """Return both ends of every segment of every copy, in pixels: two copies x segments x 2."""
    lines = []
    for stroke in strokes:
        # A straight stroke is sampled as well, or the warp could not bend it.
        line = spline_matrix(len(stroke), 3 if len(stroke) > 3 else 5) @ np.asarray(stroke)
        lines.append(line - (0.35, 0.5))
    begin = np.concatenate([line[:-1] for line in lines])
    end = np.concatenate([line[1:] for line in lines])
    points = np.repeat(np.concatenate([begin, end])[None], copies, axis=0)

    # A warp of the plane, unlike jitter of the points, keeps joined strokes joined.
    for _ in range(2):
        frequency = rng.normal(0, 3.5, size=(copies, 2, 1))
        phase = rng.uniform(0, 2 * np.pi, size=(copies, 1, 1))
        push = rng.normal(0, 0.035, size=(copies, 1, 2))
        points = points + np.sin(points @ frequency + phase) * push

    slant, turn = rng.normal(0.12, 0.16, copies), rng.normal(0, 0.08, copies)
    wide = rng.uniform(0.8, 1.2, copies)
    x, y = points[..., 0] * wide[:, None] - points[..., 1] * slant[:, None], points[..., 1]
    cosine, sine = np.cos(turn)[:, None], np.sin(turn)[:, None]
    points = np.stack([x * cosine - y * sine, x * sine + y * cosine], axis=-1)

    extent = np.ptp(points, axis=1).max(axis=1)
    points *= ((BOX - 2.0) * rng.uniform(0.94, 1.02, copies) / extent)[:, None, None]
    begin, end = points[:, : len(begin)], points[:, len(begin) :]
    length = np.linalg.norm(end - begin, axis=-1, keepdims=True)
    ink_centre = ((begin + end) / 2 * length).sum(axis=1) / length.sum(axis=1)
    shift = (SIDE - 1) / 2 - ink_centre[:, None] + rng.normal(0, 0.4, size=(copies, 1, 2))
    # Off-centre ink must not push the far end of a stroke out of the picture.
    margin = (SIDE - BOX) / 2 - 1.0
    lowest, highest = points.min(axis=1, keepdims=True), points.max(axis=1, keepdims=True)
    shift = np.clip(shift, margin - lowest, SIDE - 1 - margin - highest)
    return begin + shift, end + shift


def _inked(begin: Points, end: Points, rng: np.random.Generator) -> Bytes:
    """Return the pictures of copies of one digit: dark paper, light ink, a soft edge."""
    copies, segments = begin.shape[:2]
    grid = np.arange(SIDE, dtype=np.float32)
    nearest = np.full((copies, SIDE, SIDE), np.inf, dtype=np.float32)
    for index in range(segments):
        x0, y0 = begin[:, index].astype(np.float32).T[:, :, None, None]
        dx, dy = (end[:, index] - begin[:, index]).astype(np.float32).T[:, :, None, None]
        x, y = grid[None, None, :] - x0, grid[None, :, None] - y0
        along = np.clip((x * dx + y * dy) / (dx * dx + dy * dy + 1e-6), 0, 1)
        np.minimum(nearest, (x - along * dx) ** 2 + (y - along * dy) ** 2, out=nearest)
    radius = rng.uniform(0.75, 1.6, size=(copies, 1, 1)).astype(np.float32)
    edge = rng.uniform(0.9, 1.5, size=(copies, 1, 1)).astype(np.float32)
    ink = np.clip((radius - np.sqrt(nearest)) / edge + 0.5, 0, 1)
    return np.asarray(np.rint(255 * ink), dtype=np.uint8)


def write_idx(path: Path, values: Bytes) -> None:
    """Write bytes in IDX: two zeros, the type code of bytes, the sizes as big-endian integers."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.tobytes())
