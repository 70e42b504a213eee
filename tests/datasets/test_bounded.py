"""How far photos are scaled down: no crop loses resolution, and JPEGs are decoded at a fraction."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import decode as decoding
from datasets.base import Facts
from datasets.bounded import Bound, bound_of
from datasets.decode import Cache, decode
from datasets.images import ImageBatch, MappedImages
from datasets.isic import Isic, IsicConfig
from datasets.photos import photo_transforms
from datasets.transforms import (
    PaddedRandomCrop,
    RandomResizedCrop,
    ResizedCentreCrop,
    ResizedRandomCrop,
    Transform,
)
from datasets.waterbirds import Waterbirds, WaterbirdsConfig

MANY = 400  # crops of each shape


@pytest.mark.parametrize("side", [32, 96, 224])
@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (1200, 1200), (240, 2000), (2400, 300)])
def test_no_crop_of_a_bounded_photo_has_less_than_the_resolution(
    side: int, shape: tuple[int, int]
) -> None:
    height, width = shape
    train, evaluate = photo_transforms(side)
    new = bound_of(train, evaluate).size(width, height)
    sizes = torch.tensor([[new[1], new[0]]]).repeat(MANY, 1)
    rows, columns = train.cut.axes(sizes, side, torch.Generator().manual_seed(0))
    native = torch.tensor([shape]).repeat(MANY, 1)
    as_it_was = train.cut.axes(native, side, torch.Generator().manual_seed(0))
    for axis, before, kept, had in zip((rows, columns), as_it_was, new[::-1], shape, strict=True):
        # Where the photo itself has less, it is kept as it is.
        assert (axis.length >= min(side, float(before.length.min()))).all() or kept == had
    whole = evaluate.cut
    assert isinstance(whole, ResizedCentreCrop)
    assert min(new) >= min(whole.resize, *shape)


@pytest.mark.parametrize("side", [32, 224])
def test_the_bound_is_no_larger_than_it_has_to_be(side: int) -> None:
    train, evaluate = photo_transforms(side)
    bound = bound_of(train, evaluate)
    assert bound.short == evaluate.cut.resize  # type: ignore[union-attr]
    sizes = torch.tensor([[bound.mean, bound.mean]]).repeat(20_000, 1)
    rows, _ = train.cut.axes(sizes, side, torch.Generator().manual_seed(0))
    assert side <= rows.length.min() <= 1.1 * side


def test_every_kind_of_cut_has_a_bound() -> None:
    cuts = {
        RandomResizedCrop((0.25, 1.0), (0.5, 2.0)): (100, math.ceil(100 / math.sqrt(0.125))),
        PaddedRandomCrop(2): (100, 100),
        ResizedRandomCrop(120): (120, 120),
        ResizedCentreCrop(110): (110, 110),
    }
    for cut, (short, mean) in cuts.items():
        assert bound_of(Transform(cut, 100, (0,), (1,))) == Bound(short, mean)


def test_small_photos_stay_as_they_are_and_no_shape_is_bent() -> None:
    bound = Bound(short=256, mean=310)
    assert bound.size(178, 218) == (178, 218)
    assert bound.size(310, 310) == (310, 310)
    assert bound.size(500, 375) == (358, 269)
    assert bound.size(4000, 400) == (2560, 256), "the shorter side counts as well"
    for width, height in ((499, 331), (3000, 2000), (801, 777)):
        new = bound.size(width, height)
        assert abs(new[0] / new[1] - width / height) < 0.01


def test_the_bound_is_part_of_facts_and_fingerprint() -> None:
    def facts(**settings: object) -> Facts:
        return Waterbirds().facts(WaterbirdsConfig(**settings))  # type: ignore[arg-type]

    native = facts(decode="native")
    assert native.bound is None and facts().bound == Bound(256, 310, "lanczos")
    assert native.fingerprint() == "7a123ebcd64d939e", "that of before there was a choice"
    prints = {f.fingerprint() for f in (native, facts(), facts(resolution=96))}
    assert len(prints) == 3
    assert Isic().facts(IsicConfig(pipeline="george")).bound == Bound(224, 224)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A JPEG of 1,000 x 750 with detail that scaling has to average."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((1000, 750), Image.Resampling.BICUBIC), dtype=np.int64)
    noisy = smooth + rng.integers(-20, 20, smooth.shape)
    file = tmp_path / "photo.jpg"
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, quality=90)
    return file


def test_a_bounded_photo_is_the_native_one_scaled(photo: Path) -> None:
    """Decoded at a half by its DCT where that is enough: close to the whole, and still sharp."""
    native = decode(photo)
    for bound, exact in ((Bound(600, 700), True), (Bound(100, 120), False)):
        size = bound.size(1000, 750)
        scaled = Image.fromarray(native).resize(size, Image.Resampling.LANCZOS)
        found = decode(photo, bound)
        assert found.shape == (*size[::-1], 3)
        difference = np.abs(found.astype(int) - np.asarray(scaled))
        assert (difference.max() == 0) == exact
        assert difference.mean() < 4, "of pixels with a deviation of 70"


def test_what_the_network_sees_is_nearly_what_it_saw(photo: Path) -> None:
    _, evaluate = photo_transforms(64)
    bound = bound_of(*photo_transforms(64))
    seen = []
    for image in (decode(photo), decode(photo, bound)):
        pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]
        seen.append(evaluate(ImageBatch(pixels, torch.tensor([image.shape[:2]]))))
    assert (seen[0] - seen[1]).square().mean().sqrt() < 0.1
    assert (seen[0] - seen[0].roll(1, 3)).square().mean().sqrt() > 0.2, "a pixel off would show"


@pytest.mark.parametrize(("mode", "suffix"), [("L", "jpg"), ("P", "png"), ("RGBA", "png")])
def test_other_modes_are_bounded_too(tmp_path: Path, mode: str, suffix: str) -> None:
    file = tmp_path / f"one.{suffix}"
    Image.linear_gradient("L").resize((400, 300)).convert("RGB").convert(mode).save(file)
    assert decode(file, Bound(30, 40)).shape == (35, 47, 3)
    deep = Image.fromarray((np.arange(40_000).reshape(200, 200) + 20_000).astype(np.uint16))
    deep.save(tmp_path / "deep.png")
    kept = decode(tmp_path / "deep.png", Bound(20, 20))
    assert kept.shape == (20, 20, 3) and 75 < kept.min() < kept.max() < 240


def test_a_cache_is_of_one_bound_and_knows_the_sizes_of_files(photo: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache"
    bounds = (None, Bound(100, 120), Bound(100, 130), None)
    for bound in bounds:
        cache = Cache([photo], target, bound=bound)
        assert cache.find() is None
        images = cache.open(lambda done, total: None)
        expected = (1000, 750) if bound is None else bound.size(1000, 750)
        assert images.sizes.tolist() == [[expected[1], expected[0]]]
        assert file_sizes(images) == [(1000, 750)]
        assert file_sizes(images.subset(torch.tensor([], dtype=torch.long))) == []


def file_sizes(images: MappedImages) -> list[tuple[int, int]]:
    from datasets.base import LabelledSplit, Labels

    none = torch.zeros(len(images), dtype=torch.long)
    return decoding.file_sizes({"train": LabelledSplit(Labels(none, none, none), images)})
