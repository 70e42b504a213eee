"""Batched augmentation: every cut, flip and resize is one pair of matrices per image.

Cropping, zero padding, flipping and antialiased bilinear resizing are all linear in the pixels and
separable, so an augmented image is `rows @ pixels @ columns^T`. The matrices of a whole batch are
computed at once from a few numbers per image, and two batched products do the rest, on any device
and for images of different sizes. The filter is the triangle filter of PIL (and of torchvision
with antialias), or their cubic one where a network's weights expect that, so a given crop box gives
the same pixels as the usual per-sample pipeline.

Photographs are large against what is left of them, so that nearly all weights of such a matrix are
zero. On a processor they are resized one after another, by torch's own filter on bytes, which skips
the zeros and rounds to whole numbers after each axis as PIL does: a tenth of the time or less. The
products on a GPU round in the same places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from datasets.images import ImageBatch

Interpolation = Literal["bilinear", "bicubic"]

CUBIC = -0.5  # sharpness of the cubic filter, as PIL has it
TRIES = 10  # as torchvision: this many draws of a crop box before falling back to the centre


@dataclass(frozen=True)
class Axis:
    """How one axis of each image is cut: a box, resized, of which one window is kept.

    Attributes:
        start, length: the source box, in pixels; it may reach outside the image (zero padding).
        resized: the length the box is resized to.
        offset: where the output window starts within the resized box.
        flip: whether the output is reversed.
        padding: how far, at most, the box reaches outside the image.
    """

    start: Tensor
    length: Tensor
    resized: int
    offset: Tensor
    flip: Tensor
    padding: int = 0

    def matrix(self, source: int, output: int, interpolation: Interpolation = "bilinear") -> Tensor:
        """Weights, one (output x source) matrix per image."""
        device = self.start.device
        position = torch.arange(output, device=device, dtype=torch.float32)
        position = torch.where(self.flip[:, None], output - 1 - position, position)
        scale = (self.length / self.resized)[:, None]
        centre = self.start[:, None] + (position + self.offset[:, None] + 0.5) * scale
        # The filter is normalised over the whole box, and what lies outside the image is black:
        # the border takes part in the sum and is then left out of the product.
        pixel = torch.arange(-self.padding, source + self.padding, device=device).float()
        inside = (pixel >= self.start[:, None]) & (pixel < (self.start + self.length)[:, None])
        distance = (pixel + 0.5) - centre[:, :, None]
        distance = distance.abs() / scale.clamp(min=1.0)[:, :, None]
        weight = cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0.0)
        weight *= inside[:, None, :]
        weight /= weight.sum(-1, keepdim=True)
        return weight[:, :, self.padding : self.padding + source]


def cubic(distance: Tensor) -> Tensor:
    """Return the cubic filter's weights at distances of at least 0, in pixels."""
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance.square() + 1
    far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


@dataclass(frozen=True)
class RandomResizedCrop:
    """A box of random area and aspect ratio, resized to the output (torchvision's rule)."""

    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)

    def axes(self, sizes: Tensor, output: int, generator: torch.Generator) -> tuple[Axis, Axis]:
        """Draw one box per image."""
        device = sizes.device
        count = len(sizes)
        height, width = sizes[:, 0].float(), sizes[:, 1].float()
        draw = torch.rand(4, count, TRIES, generator=generator, device=device)
        area = height * width
        target = area[:, None] * (self.scale[0] + (self.scale[1] - self.scale[0]) * draw[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = torch.exp(low + (high - low) * draw[1])
        box_w = (target * aspect).sqrt().round()
        box_h = (target / aspect).sqrt().round()
        fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])
        first = fits.int().argmax(dim=1, keepdim=True)  # the first try that fits, else try 0
        box_w, box_h = box_w.gather(1, first)[:, 0], box_h.gather(1, first)[:, 0]
        place_y, place_x = draw[2].gather(1, first)[:, 0], draw[3].gather(1, first)[:, 0]
        top = (place_y * (height - box_h + 1)).floor()
        left = (place_x * (width - box_w + 1)).floor()
        # No try fitted: the largest central box whose aspect ratio is allowed.
        none = ~fits.any(dim=1)
        wide = torch.minimum(width, (height * self.ratio[1]).round())
        tall = torch.minimum(height, (width / self.ratio[0]).round())
        box_w, box_h = torch.where(none, wide, box_w), torch.where(none, tall, box_h)
        top = torch.where(none, ((height - box_h) / 2).floor(), top)
        left = torch.where(none, ((width - box_w) / 2).floor(), left)
        zero, no_flip = torch.zeros_like(top), torch.zeros(count, dtype=torch.bool, device=device)
        return (
            Axis(top, box_h, output, zero, no_flip),
            Axis(left, box_w, output, zero, no_flip),
        )


@dataclass(frozen=True)
class PaddedRandomCrop:
    """A box of the image's own size, shifted by up to `padding` into a black border, resized."""

    padding: int

    def axes(self, sizes: Tensor, output: int, generator: torch.Generator) -> tuple[Axis, Axis]:
        """Draw one shift per image."""
        shift = (self.draw(len(sizes), generator) - self.padding).float()
        zero = torch.zeros_like(shift[0])
        length = sizes.float()
        return (
            Axis(shift[0], length[:, 0], output, zero, zero.bool(), self.padding),
            Axis(shift[1], length[:, 1], output, zero, zero.bool(), self.padding),
        )

    def draw(self, count: int, generator: torch.Generator, output: int = 0) -> Tensor:
        """Draw which of `every` cut the rows and the columns of each image take."""
        ways, device = 2 * self.padding + 1, generator.device
        return torch.randint(ways, (2, count), generator=generator, device=device)

    def every(self, length: int, output: int, device: torch.device) -> Axis:
        """List the cuts an axis of this length can take."""
        shift = torch.arange(-self.padding, self.padding + 1, device=device).float()
        zero = torch.zeros_like(shift)
        return Axis(shift, zero + length, output, zero, zero.bool(), self.padding)


@dataclass(frozen=True)
class ResizedRandomCrop:
    """The whole image resized to a square, of which a random window is kept."""

    resize: int

    def axes(self, sizes: Tensor, output: int, generator: torch.Generator) -> tuple[Axis, Axis]:
        """Draw one window per image."""
        offset = self.draw(len(sizes), generator, output).float()
        return _whole_image(sizes, self.resize, offset)

    def draw(self, count: int, generator: torch.Generator, output: int) -> Tensor:
        """Draw which of `every` cut the rows and the columns of each image take."""
        ways, device = self.resize - output + 1, generator.device
        return torch.randint(ways, (2, count), generator=generator, device=device)

    def every(self, length: int, output: int, device: torch.device) -> Axis:
        """List the cuts an axis of this length can take."""
        offset = torch.arange(self.resize - output + 1, device=device).float()
        zero = torch.zeros_like(offset)
        return Axis(zero, zero + length, self.resize, offset, zero.bool())


@dataclass(frozen=True)
class ResizedCentreCrop:
    """The whole image resized to a square, of which the central window is kept; no randomness."""

    resize: int

    def axes(
        self, sizes: Tensor, output: int, generator: torch.Generator | None = None
    ) -> tuple[Axis, Axis]:
        """Place the window in the centre, rounding as torchvision does."""
        offset = round((self.resize - output) / 2.0)
        window = torch.full((2, len(sizes)), float(offset), device=sizes.device)
        return _whole_image(sizes, self.resize, window)


@dataclass(frozen=True)
class WholeImage:
    """The whole image, each axis resized to the output's; no randomness."""

    def axes(
        self, sizes: Tensor, output: int, generator: torch.Generator | None = None
    ) -> tuple[Axis, Axis]:
        """Take all of both axes."""
        return _whole_image(sizes, output, torch.zeros((2, len(sizes)), device=sizes.device))


def _whole_image(sizes: Tensor, resize: int, offset: Tensor) -> tuple[Axis, Axis]:
    zero = torch.zeros_like(offset[0])
    length = sizes.float()
    return (
        Axis(zero, length[:, 0], resize, offset[0], zero.bool()),
        Axis(zero, length[:, 1], resize, offset[1], zero.bool()),
    )


Cut = RandomResizedCrop | PaddedRandomCrop | ResizedRandomCrop | ResizedCentreCrop | WholeImage
FIXED = (ResizedCentreCrop, WholeImage)
OBLONG = (PaddedRandomCrop, WholeImage)


@dataclass(frozen=True)
class Transform:
    """From uint8 images to the normalised batch a network takes.

    Attributes:
        cut: which part of an image is kept, and how large.
        resolution: rows of the output, and columns too unless `columns` says how many.
        mean: of each channel, on the scale from 0 to 1.
        std: likewise.
        hflip: whether half of the images are mirrored.
        vflip: whether half of them are put upside down.
        columns: of the output, where these are not as many as its rows; the cut has to be one that
            resizes each axis to the output's, since the others go through a square.
        rounded: whether resizing rounds to whole numbers after each axis, as PIL does.
    """

    cut: Cut
    resolution: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    hflip: bool = False
    vflip: bool = False
    columns: int = 0
    rounded: bool = False
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if self.columns and not isinstance(self.cut, OBLONG):
            raise ValueError(f"{type(self.cut).__name__} cannot make images that are not square")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        return self.resolution, self.columns or self.resolution

    @property
    def pixels(self) -> int:
        """How many pixels the output has."""
        return math.prod(self.shape)

    @property
    def values(self) -> int:
        """How many numbers the network takes of each image."""
        return len(self.mean) * self.pixels

    def __call__(self, batch: ImageBatch, generator: torch.Generator | None = None) -> Tensor:
        """Cut, flip, resize and normalise a batch; random cuts and flips need a generator."""
        if self._has_discrete_offsets(batch):
            return self.batched(batch, [len(batch.pixels)], generator)
        rows, columns = self.axes(batch.sizes, generator)
        (height, width), (tall, wide) = batch.pixels.shape[2:], self.shape
        if self.rounded and batch.pixels.device.type == "cpu":
            sides = tall, wide, self.interpolation
            return self._normalised(resize_one_by_one(batch.pixels, rows, columns, *sides))
        matrices = (
            rows.matrix(height, tall, self.interpolation),
            columns.matrix(width, wide, self.interpolation),
        )
        return self._normalised(resample(batch.pixels, *matrices, rounded=self.rounded))

    def batched(
        self, batch: ImageBatch, counts: Sequence[int], generator: torch.Generator | None
    ) -> Tensor:
        """Transform batches that lie one after another, drawing for each as if it came alone.

        Small images take longer to draw for than to cut, so that many at once are faster.
        """
        if not self._has_discrete_offsets(batch):
            ends = list(accumulate(counts))
            parts = [batch[end - count : end] for end, count in zip(ends, counts, strict=True)]
            return torch.cat([self(part, generator) for part in parts])
        chosen = self.draw(counts, _given(generator))
        matrices = [
            self._matrices(source, output, chosen.device)[flips, ways]
            for source, output, flips, ways in zip(
                batch.pixels.shape[2:], self.shape, *chosen, strict=True
            )
        ]
        return self._normalised(resample(batch.pixels, *matrices))

    def _has_discrete_offsets(self, batch: ImageBatch) -> bool:
        """Return whether all weights are known beforehand, to be looked up instead of computed."""
        return batch.one_size and isinstance(self.cut, PaddedRandomCrop | ResizedRandomCrop)

    def draw(self, counts: Sequence[int], generator: torch.Generator) -> Tensor:
        """Draw what `axes` draws for each batch, as numbers: (flip, cut) x (rows, columns) x all.

        Only for images of one size.
        """
        drawn = [self._draw(count, generator) for count in counts]
        return torch.cat(drawn, dim=2) if len(drawn) > 1 else drawn[0]

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw for one batch."""
        assert isinstance(self.cut, PaddedRandomCrop | ResizedRandomCrop)
        ways = self.cut.draw(count, generator, self.resolution)
        flips = torch.zeros_like(ways)
        for axis, flipped in enumerate((self.vflip, self.hflip)):
            if flipped:
                flips[axis] = torch.rand(count, generator=generator, device=ways.device) < 0.5
        return torch.stack([flips, ways])

    def resized(self, pixels: Tensor) -> Tensor:
        """Resize whole images of one size, and normalise them, for windows to be cut of them."""
        assert isinstance(self.cut, ResizedRandomCrop)
        side = self.cut.resize
        matrices = [
            self._matrices(source, side, pixels.device)[0].expand(len(pixels), -1, -1)
            for source in pixels.shape[2:]
        ]
        return self._normalised(resample(pixels, *matrices))

    def _matrices(self, source: int, output: int, device: torch.device) -> Tensor:
        return _every_matrix(self.cut, source, output, device, self.interpolation)

    def _normalised(self, pixels: Tensor) -> Tensor:
        if self.interpolation == "bicubic":  # it goes beyond what a pixel can be, beside edges
            pixels = pixels.clamp_(0.0, 255.0)
        factor, shift = _normalisation(self.mean, self.std, pixels.device)
        return pixels.mul_(factor).sub_(shift)

    def axes(self, sizes: Tensor, generator: torch.Generator | None) -> tuple[Axis, Axis]:
        """Draw where each image is cut and whether it is flipped."""
        if isinstance(self.cut, FIXED):
            rows, columns = self.cut.axes(sizes, self.resolution)
        else:
            rows, columns = self.cut.axes(sizes, self.resolution, _given(generator))
        if self.columns:
            columns = replace(columns, resized=self.columns)
        if self.vflip:
            rows = _flipped(rows, _given(generator))
        if self.hflip:
            columns = _flipped(columns, _given(generator))
        return rows, columns


@cache
def _every_matrix(
    cut: Cut, source: int, output: int, device: torch.device, interpolation: Interpolation
) -> Tensor:
    """Weights of every way to cut an axis, first as it is, then flipped."""
    assert isinstance(cut, PaddedRandomCrop | ResizedRandomCrop)
    every = cut.every(source, output, device)
    flipped = replace(every, flip=~every.flip)
    return torch.stack([axis.matrix(source, output, interpolation) for axis in (every, flipped)])


def _given(generator: torch.Generator | None) -> torch.Generator:
    """Insist on a generator: torch would silently take the global one for None."""
    if generator is None:
        raise ValueError("a random transform needs a generator")
    return generator


@cache
def _normalisation(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return factor and shift; kept on the device, since copying them there would wait for it."""
    shape = (1, len(mean), 1, 1)
    centre = torch.tensor(mean, device=device).view(shape)
    spread = torch.tensor(std, device=device).view(shape)
    return 1 / (255 * spread), centre / spread


def _flipped(axis: Axis, generator: torch.Generator) -> Axis:
    coin = torch.rand(len(axis.start), generator=generator, device=axis.start.device) < 0.5
    return replace(axis, flip=coin)


def resample(
    pixels: Tensor, row_matrix: Tensor, column_matrix: Tensor, *, rounded: bool = False
) -> Tensor:
    """Apply the matrices of both axes to a (B, C, H, W) uint8 batch; values stay in 0..255."""
    count, channels, height, width = pixels.shape
    rows, columns = row_matrix.shape[1], column_matrix.shape[1]
    if rounded:  # columns first, as PIL: here the order counts
        flat = pixels.to(row_matrix.dtype).reshape(count, channels * height, width)
        wide = _to_whole(torch.bmm(flat, column_matrix.transpose(1, 2)))
        wide = wide.view(count, channels, height, columns)
        return _to_whole(torch.matmul(row_matrix[:, None], wide))
    flat = pixels.to(row_matrix.dtype).permute(0, 2, 1, 3).reshape(count, height, channels * width)
    tall = torch.bmm(row_matrix, flat).view(count, rows * channels, width)
    both = torch.bmm(tall, column_matrix.transpose(1, 2))
    return both.view(count, rows, channels, columns).permute(0, 2, 1, 3)


def _to_whole(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0.0, 255.0)  # a cubic filter goes beyond both


def resize_one_by_one(
    pixels: Tensor,
    rows: Axis,
    columns: Axis,
    tall: int,
    wide: int,
    interpolation: Interpolation = "bilinear",
) -> Tensor:
    """Cut and resize each image of a (B, C, H, W) uint8 batch by torch's filter for bytes.

    Boxes lie inside of the images and begin at whole pixels.
    """
    assert not rows.padding and not columns.padding
    shape = len(pixels), pixels.shape[1], tall, wide
    result = torch.empty(shape, memory_format=torch.channels_last)
    boxes = torch.stack([part for a in (rows, columns) for part in (a.start, a.length, a.offset)])
    flips = torch.stack([rows.flip, columns.flip])
    for slot, (box, flip) in enumerate(zip(boxes.T.int().tolist(), flips.T.tolist(), strict=True)):
        top, height, down, left, width, right = box
        part = pixels[slot : slot + 1, :, top : top + height, left : left + width]
        size = rows.resized, columns.resized
        resized = functional.interpolate(part, size=size, mode=interpolation, antialias=True)
        window = resized[0, :, down : down + tall, right : right + wide]
        turned = [axis for axis, flipped in enumerate(flip, start=1) if flipped]
        result[slot] = window.flip(turned) if turned else window
    return result
