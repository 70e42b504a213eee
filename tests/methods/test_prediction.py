"""Running a network over a split: how large batches are, and that their size changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from datasets.images import MappedImages, MemoryImages
from datasets.resident import ResidentImages
from datasets.transforms import ResizedCentreCrop, Transform
from methods.prediction import BATCH, SOURCE_BYTES, EvalImages, batch_size_for


def transform(side: int, channels: int = 3) -> Transform:
    return Transform(ResizedCentreCrop(side), side, (0.5,) * channels, (0.25,) * channels)


def photos(path: Path, *sizes: tuple[int, int]) -> MappedImages:
    lengths = [3 * height * width for height, width in sizes]
    np.random.default_rng(0).integers(0, 256, sum(lengths), dtype=np.uint8).tofile(path)
    offsets = torch.tensor([0, *np.cumsum(lengths)[:-1].tolist()])
    return MappedImages(str(path), offsets, torch.tensor(sizes))


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_digits_are_run_in_large_batches(side: int, channels: int) -> None:
    images = MemoryImages(torch.zeros(2, channels, 28, 28, dtype=torch.uint8))
    assert batch_size_for(transform(side, channels), images) == BATCH


def test_small_photographs_are_bounded_by_what_they_become(tmp_path: Path) -> None:
    images = photos(tmp_path / "small", (218, 178))
    assert batch_size_for(transform(224), images) == 64 * 2**20 // (4 * 3 * 224**2)


def test_large_photographs_are_bounded_by_what_they_are(tmp_path: Path) -> None:
    images = photos(tmp_path / "large", (10, 10), (2000, 1500))
    expected = SOURCE_BYTES // (4 * 3 * 2000 * 1500)
    assert batch_size_for(transform(224), images) == expected < 10
    resident = ResidentImages(images.pixels(), images.offsets, images.sizes, images.channels)
    assert batch_size_for(transform(224), resident) == expected


def test_one_image_always_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("methods.prediction.SOURCE_BYTES", 100)
    assert batch_size_for(transform(8), photos(tmp_path / "one", (50, 50))) == 1


def test_batches_are_that_large_and_hold_the_same_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = photos(tmp_path / "some", *[(20, 30 + i) for i in range(7)])
    whole = torch.cat(list(EvalImages(images, transform(16))))
    monkeypatch.setattr("methods.prediction.SOURCE_BYTES", 3 * 4 * 3 * 20 * 36)
    split = EvalImages(images, transform(16))
    assert [len(batch) for batch in split] == [3, 3, 1]
    torch.testing.assert_close(torch.cat(list(split)), whole)


def test_no_images_at_all() -> None:
    nothing = MemoryImages(torch.empty(0, 3, 1, 1, dtype=torch.uint8))
    assert EvalImages(nothing, transform(16)).batch_size > 0
