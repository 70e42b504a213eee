"""The batched cuts against the usual per-sample pipeline, given the same crop parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from datasets.images import ImageBatch, MemoryImages
from datasets.transforms import (
    Axis,
    PaddedRandomCrop,
    RandomResizedCrop,
    ResizedCentreCrop,
    ResizedRandomCrop,
    Transform,
    WholeImage,
    resample,
)
from methods.torchvision_shim import declare_missing_operators

declare_missing_operators()

from torchvision.transforms import RandomResizedCrop as Reference  # noqa: E402
from torchvision.transforms import functional as F  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(218, 178), (300, 500), (60, 45), (97, 401), (224, 224)]
"""Native sizes in one batch: some boxes shrink to 96 pixels, those of the third grow."""


def resampled(batch: ImageBatch, rows: Axis, columns: Axis, output: int) -> Tensor:
    height, width = batch.pixels.shape[2:]
    return resample(batch.pixels, rows.matrix(height, output), columns.matrix(width, output))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    """Smooth shades with hard edges and noise on them: every kind of content a filter can meet."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(3, 40) + y / rng.uniform(3, 40)) for _ in range(channels)]
    image = 128 + 90 * np.stack(waves, axis=-1) + rng.normal(0, 12, (height, width, channels))
    image[height // 3 : height // 2, width // 4 : width // 2] = 255
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def batch_of(images: list[np.ndarray]) -> ImageBatch:
    """Pad to the largest with noise, which no cut may ever touch."""
    sizes = torch.tensor([image.shape[:2] for image in images])
    height, width = sizes.max(dim=0).values.tolist()
    shape = (len(images), height, width, images[0].shape[2])
    pixels = np.random.default_rng(9).integers(0, 256, shape, dtype=np.uint8)
    for slot, image in enumerate(images):
        pixels[slot, : image.shape[0], : image.shape[1]] = image
    return ImageBatch(torch.from_numpy(pixels).permute(0, 3, 1, 2), sizes)


def as_pixels(image: Image.Image) -> Tensor:
    values = torch.from_numpy(np.array(image))
    return (values[None] if values.ndim == 2 else values.permute(2, 0, 1)).float()


def assert_same_pixels(ours: Tensor, reference: Tensor) -> None:
    """Equal but for PIL's rounding to whole numbers after each of its two passes."""
    difference = (ours - reference).abs()
    assert difference.max() <= 1.5
    assert difference.mean() <= 0.4, "whole-number rounding alone gives about a quarter"


def box(rows: Axis, columns: Axis, slot: int) -> tuple[int, int, int, int]:
    """Top, left, height, width, as torchvision orders them."""
    parts = (rows.start, columns.start, rows.length, columns.length)
    top, left, height, width = (int(part[slot]) for part in parts)
    return top, left, height, width


@pytest.mark.parametrize("output", [96, 224])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_resized_crop_is_pils(output: int, seed: int) -> None:
    images = [picture(*size, seed=index) for index, size in enumerate(SIZES)]
    batch = batch_of(images)
    rows, columns = RandomResizedCrop((0.3, 1.0)).axes(batch.sizes, output, generator(seed))
    ours = resampled(batch, rows, columns, output)
    scales = set()
    for slot, image in enumerate(images):
        top, left, height, width = box(rows, columns, slot)
        assert 0 <= top <= image.shape[0] - height and 0 <= left <= image.shape[1] - width
        scales |= {height > output, width > output}
        expected = F.resized_crop(
            Image.fromarray(image), top, left, height, width, [output, output], antialias=True
        )
        assert_same_pixels(ours[slot], as_pixels(expected))
        exact = F.resized_crop(
            torch.from_numpy(image).permute(2, 0, 1).float(),
            *(top, left, height, width),
            [output, output],
            antialias=True,
        )
        assert torch.allclose(ours[slot], exact, atol=255e-4)
    assert scales == {True, False}, "both shrinking and growing were met"


@pytest.mark.parametrize("flips", [(True, False), (False, True), (True, True)])
def test_flips_mirror_the_cut_image(flips: tuple[bool, bool]) -> None:
    batch = batch_of([picture(*size, seed=index) for index, size in enumerate(SIZES)])
    rows, columns = RandomResizedCrop().axes(batch.sizes, 64, generator())
    plain = resampled(batch, rows, columns, 64)
    every = torch.ones(len(SIZES), dtype=torch.bool)
    vertical, horizontal = flips
    rows = replace(rows, flip=every & vertical)
    columns = replace(columns, flip=every & horizontal)
    expected = F.vflip(plain) if vertical else plain
    expected = F.hflip(expected) if horizontal else expected
    flipped = resampled(batch, rows, columns, 64)
    assert torch.allclose(flipped, expected, atol=0.01)


@pytest.mark.parametrize("cut", [RandomResizedCrop(), ResizedCentreCrop(72)])
def test_each_image_is_flipped_by_a_coin_of_its_own(cut: RandomResizedCrop) -> None:
    sizes = torch.full((4000, 2), 80)
    transform = Transform(cut, 64, MEAN, STD, hflip=True, vflip=True)
    rows, columns = transform.axes(sizes, generator())
    for axis in (rows, columns):
        assert abs(axis.flip.float().mean() - 0.5) < 0.03
    assert abs((rows.flip == columns.flip).float().mean() - 0.5) < 0.03
    unflipped = Transform(cut, 64, MEAN, STD).axes(sizes, generator())
    assert not any(axis.flip.any() for axis in unflipped)


@pytest.mark.parametrize("seed", range(3))
def test_padded_random_crop_is_georges(seed: int) -> None:
    images = [picture(28, 28, seed=index, channels=1) for index in range(20)]
    batch = batch_of(images)
    transform = Transform(PaddedRandomCrop(4), 32, (0.0,), (1 / 255,), hflip=True)
    rows, columns = transform.axes(batch.sizes, generator(seed))
    ours = transform(batch, generator(seed))
    for slot, image in enumerate(images):
        padded = F.pad(Image.fromarray(image[:, :, 0]), [4], fill=0)
        top, left, height, width = box(rows, columns, slot)
        assert (height, width) == (28, 28) and 0 <= top + 4 <= 8 and 0 <= left + 4 <= 8
        cropped = F.crop(padded, top + 4, left + 4, 28, 28)
        cropped = F.hflip(cropped) if columns.flip[slot] else cropped
        assert_same_pixels(ours[slot], as_pixels(cropped.resize((32, 32), Image.BILINEAR)))


def test_padded_random_crop_takes_every_shift_equally() -> None:
    rows, columns = PaddedRandomCrop(4).axes(torch.full((9000, 2), 28), 32, generator())
    for axis in (rows, columns):
        counts = torch.bincount((axis.start + 4).long(), minlength=9)
        assert len(counts) == 9 and counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize("seed", range(3))
def test_resized_random_crop_is_cncs_on_float_tensors(seed: int) -> None:
    images = [picture(28, 28, seed=index) for index in range(20)]
    batch = batch_of(images)
    half = (0.5, 0.5, 0.5)
    transform = Transform(ResizedRandomCrop(40), 32, half, half)
    rows, columns = transform.axes(batch.sizes, generator(seed))
    ours = transform(batch, generator(seed))
    for slot, image in enumerate(images):
        tensor = torch.from_numpy(image).permute(2, 0, 1).float() / 255
        top, left = int(rows.offset[slot]), int(columns.offset[slot])
        assert 0 <= top <= 8 and 0 <= left <= 8
        cropped = F.crop(F.resize(tensor, [40, 40], antialias=True), top, left, 32, 32)
        expected = F.normalize(cropped, list(half), list(half))
        assert torch.allclose(ours[slot], expected, atol=1e-4)
    offsets = ResizedRandomCrop(40).axes(torch.full((9000, 2), 28), 32, generator())
    for axis in offsets:
        counts = torch.bincount(axis.offset.long(), minlength=9)
        assert len(counts) == 9 and counts.min() > 850 and counts.max() < 1150


@pytest.mark.parametrize(
    ("resize", "output", "sizes"),
    [(256, 224, SIZES), (224, 224, SIZES), (73, 64, SIZES), (32, 32, [(28, 28)])],
)
def test_resized_centre_crop_is_pils(
    resize: int, output: int, sizes: list[tuple[int, int]]
) -> None:
    images = [picture(*size, seed=index) for index, size in enumerate(sizes)]
    transform = Transform(ResizedCentreCrop(resize), output, (0.0,) * 3, (1 / 255,) * 3)
    ours = transform(batch_of(images))
    for slot, image in enumerate(images):
        resized = F.resize(Image.fromarray(image), [resize, resize])
        assert_same_pixels(ours[slot], as_pixels(F.center_crop(resized, [output, output])))


def test_resized_centre_crop_of_digits_on_float_tensors() -> None:
    images = [picture(28, 28, seed=index) for index in range(5)]
    batch = batch_of(images)
    ours = Transform(ResizedCentreCrop(40), 32, MEAN, STD)(batch)
    resized = F.resize(batch.pixels.float() / 255, [40, 40], antialias=True)
    expected = F.normalize(F.center_crop(resized, [32, 32]), list(MEAN), list(STD))
    assert torch.allclose(ours, expected, atol=1e-4)


def moments(boxes: Tensor, height: int, width: int) -> Tensor:
    """Area share, log aspect ratio and relative place: means, then mean absolute deviations."""
    top, left, tall, wide = boxes.double().T
    facts = torch.stack(
        [
            tall * wide / (height * width),
            (wide / tall).log(),
            (top + 0.5) / (height - tall + 1),
            (left + 0.5) / (width - wide + 1),
        ]
    )
    mean = facts.mean(dim=1)
    return torch.cat([mean, (facts - mean[:, None]).abs().mean(dim=1)])


@pytest.mark.parametrize("size", [(218, 178), (300, 500), (224, 224), (100, 145)])
def test_boxes_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    draws, cut = 4000, RandomResizedCrop()
    height, width = size
    rows, columns = cut.axes(torch.tensor([size]).expand(draws, 2), 224, generator(3))
    ours = torch.stack([rows.start, columns.start, rows.length, columns.length], dim=1)
    blank = torch.empty(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        drawn = [Reference.get_params(blank, [*cut.scale], [*cut.ratio]) for _ in range(draws)]
    theirs = torch.tensor(drawn)
    difference = (moments(ours, height, width) - moments(theirs, height, width)).abs()
    # Standard errors at this many draws are below 0.005 for each of the figures.
    assert difference.max() < 0.02, difference


@pytest.mark.parametrize("size", [(20, 400), (400, 20), (37, 1000), (1000, 37)])
def test_a_very_long_image_gets_torchvisions_fallback(size: tuple[int, int]) -> None:
    cut = RandomResizedCrop()
    rows, columns = cut.axes(torch.tensor([size, (200, 200)]), 64, generator())
    expected = Reference.get_params(torch.empty(1, *size), [*cut.scale], [*cut.ratio])
    assert box(rows, columns, 0) == expected
    assert box(rows, columns, 1) != expected


def test_a_long_image_falls_back_as_often_as_torchvisions() -> None:
    size, draws, cut = (100, 182), 4000, RandomResizedCrop()
    central = (0, math.floor((182 - 133) / 2), 100, 133)
    rows, columns = cut.axes(torch.tensor([size]).expand(draws, 2), 64, generator())
    ours = sum(box(rows, columns, slot) == central for slot in range(draws)) / draws
    with torch.random.fork_rng():
        torch.manual_seed(0)
        blank = torch.empty(1, *size)
        theirs = [Reference.get_params(blank, [*cut.scale], [*cut.ratio]) for _ in range(draws)]
    share = sum(found == central for found in theirs) / draws
    assert 0.05 < share < 0.95, "some draws fit and some fall back"
    assert abs(ours - share) < 0.04


@pytest.mark.parametrize("cut", [RandomResizedCrop(), PaddedRandomCrop(4), ResizedRandomCrop(40)])
def test_the_generator_alone_decides(
    cut: RandomResizedCrop | PaddedRandomCrop | ResizedRandomCrop,
) -> None:
    batch = batch_of([picture(28, 28, seed=index) for index in range(8)])
    transform = Transform(cut, 32, MEAN, STD, hflip=True)
    torch.manual_seed(1)
    first = transform(batch, generator(5))
    before = torch.get_rng_state()
    assert torch.equal(first, transform(batch, generator(5)))
    assert not torch.equal(first, transform(batch, generator(6)))
    assert torch.equal(torch.get_rng_state(), before), "the global state is not touched"


@pytest.mark.parametrize(
    "transform",
    [
        Transform(RandomResizedCrop(), 32, MEAN, STD),
        Transform(PaddedRandomCrop(4), 32, MEAN, STD),
        Transform(ResizedRandomCrop(40), 32, MEAN, STD),
        Transform(ResizedCentreCrop(40), 32, MEAN, STD, hflip=True),
        Transform(ResizedCentreCrop(40), 32, MEAN, STD, vflip=True),
    ],
)
def test_a_random_transform_insists_on_a_generator(transform: Transform) -> None:
    batch = batch_of([picture(28, 28, seed=0)])
    with pytest.raises(ValueError, match="needs a generator"):
        transform(batch)


def test_weights_sum_to_one_inside_and_padding_is_black() -> None:
    white = ImageBatch(
        torch.full((2, 3, 50, 70), 255, dtype=torch.uint8), torch.tensor([[50, 70]] * 2)
    )
    rows, columns = RandomResizedCrop().axes(white.sizes, 33, generator())
    assert torch.allclose(resampled(white, rows, columns, 33), torch.tensor(255.0))
    rows, columns = PaddedRandomCrop(9).axes(white.sizes, 33, generator(1))
    shifted = resampled(white, rows, columns, 33)
    assert shifted.min() == 0 and torch.isclose(shifted.max(), torch.tensor(255.0))


@pytest.mark.parametrize("cut", [PaddedRandomCrop(4), ResizedRandomCrop(40)])
def test_weights_that_are_looked_up_are_those_that_are_computed(
    cut: PaddedRandomCrop | ResizedRandomCrop,
) -> None:
    pixels = torch.randint(0, 256, (64, 3, 28, 26), dtype=torch.uint8)
    sizes = torch.tensor([28, 26]).expand(64, 2)
    transform = Transform(cut, 32, (0.5,) * 3, (0.5,) * 3, hflip=True, vflip=True)
    looked_up, computed = (
        transform(ImageBatch(pixels, sizes, one_size), torch.Generator().manual_seed(0))
        for one_size in (True, False)
    )
    assert torch.equal(looked_up, computed)
    assert len({picture.numpy().tobytes() for picture in looked_up}) == 64


@pytest.mark.parametrize("one_size", [True, False])
def test_several_batches_at_once_are_drawn_and_cut_as_if_each_came_alone(one_size: bool) -> None:
    pixels = torch.randint(0, 256, (67, 3, 28, 28), dtype=torch.uint8)
    batch = ImageBatch(pixels, torch.tensor([28, 28]).expand(67, 2), one_size)
    transform = Transform(ResizedRandomCrop(40), 32, (0.5,) * 3, (0.5,) * 3, hflip=True)
    alone, together = generator(), generator()
    parts = [transform(batch[start : start + 32], alone) for start in (0, 32, 64)]
    assert torch.equal(transform.batched(batch, [32, 32, 3], together), torch.cat(parts))
    assert torch.equal(alone.get_state(), together.get_state())


def oblong(cut: PaddedRandomCrop | WholeImage, **more: bool) -> Transform:
    return Transform(cut, 12, (0.0,), (1 / 255,), columns=6, **more)


def test_an_oblong_crop_is_a_shift_of_the_image() -> None:
    """Of images that are 12 x 6 already: padded, cut and mirrored, pixel for pixel."""
    pixels = torch.randint(0, 256, (40, 1, 12, 6), generator=generator(5), dtype=torch.uint8)
    images = MemoryImages(pixels).batch(torch.arange(40))
    transform = oblong(PaddedRandomCrop(2), hflip=True)
    found = transform(images, generator(6))
    flips, ways = transform.draw([40], generator(6))
    padded = functional.pad(pixels.float(), (2, 2, 2, 2))
    assert {(row, column) for row, column in ways.T.tolist()} > {(0, 4), (4, 0)}
    for image, source, mirrored, (row, column) in zip(
        found, padded, flips[1], ways.T.tolist(), strict=True
    ):
        # The box is of the image's own size, and what lies outside the image is black.
        own = source[:, row : row + 12, column : column + 6]
        torch.testing.assert_close(image, own.flip(-1) if mirrored else own)


def test_an_oblong_image_is_resized_along_each_axis() -> None:
    images = MemoryImages(torch.full((3, 1, 24, 24), 9, dtype=torch.uint8))
    batch = images.batch(torch.arange(3))
    assert torch.equal(oblong(WholeImage())(batch), torch.full((3, 1, 12, 6), 9.0))
    native = torch.randint(0, 256, (3, 1, 12, 6), generator=generator(), dtype=torch.uint8)
    kept = oblong(WholeImage())(MemoryImages(native).batch(torch.arange(3)))
    torch.testing.assert_close(kept, native.float())


def test_sizes_of_the_output() -> None:
    assert oblong(WholeImage()).shape == (12, 6)
    assert oblong(WholeImage()).pixels == oblong(WholeImage()).values == 72
    square = Transform(PaddedRandomCrop(4), 32, MEAN, STD)
    assert (square.shape, square.pixels, square.values) == ((32, 32), 1024, 3 * 1024)
    with pytest.raises(ValueError, match="ResizedCentreCrop cannot make images"):
        Transform(ResizedCentreCrop(32), 32, MEAN, STD, columns=16)
