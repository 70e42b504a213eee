"""Training images enlarged once: the same bits as enlarging them at every visit, within a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from datasets import augmented
from datasets.augmented import RESIZED_BYTES, AugmentedImages, copies_bytes
from datasets.catalogue import get_dataset
from datasets.images import MemoryImages
from datasets.transforms import PaddedRandomCrop, ResizedRandomCrop, Transform

THIRD = (1 / 3, 0.5, 0.7)
CROP = Transform(ResizedRandomCrop(40), 32, THIRD, THIRD)


def images(count: int = 60, channels: int = 3) -> MemoryImages:
    generator = torch.Generator().manual_seed(0)
    shape = count, channels, 28, 28
    pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    pixels[:, :, :6] = 0
    return MemoryImages(pixels)


def transformed(split: AugmentedImages, groups: list[list[Tensor]]) -> list[Tensor]:
    return list(split.batches(groups, torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("resize", [32, 40, 64])
def test_windows_of_copies_are_the_bits_of_cutting_and_resizing_at_once(
    monkeypatch: pytest.MonkeyPatch, resize: int, channels: int
) -> None:
    transform = Transform(ResizedRandomCrop(resize), 32, THIRD[:channels], THIRD[:channels])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    # Two visits, samples that come twice, and an epoch that does not visit all.
    groups = [[order[:32], order[32:40]], [order[40:47]], [order[3:20].repeat(2), order[:1]]]
    copies = AugmentedImages(images(channels=channels), transform)
    monkeypatch.setattr(augmented, "RESIZED_BYTES", 0)
    anew = AugmentedImages(images(channels=channels), transform)
    assert copies._copies is not None and anew._copies is None
    for ours, theirs in zip(transformed(copies, groups), transformed(anew, groups), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous(memory_format=torch.channels_last)
        assert ours.stride() == theirs.stride() or channels == 1  # of one channel any will do


def test_copies_are_made_of_the_images_that_are_visited() -> None:
    split = AugmentedImages(images(), CROP)
    transformed(split, [[torch.tensor([4, 7, 4])], [torch.tensor([7, 9])]])
    assert split._copies is not None
    assert split._copies._made.nonzero().flatten().tolist() == [4, 7, 9]


def test_no_more_than_a_gibibyte_is_kept() -> None:
    cmnist = get_dataset("cmnist")
    facts = cmnist.facts(cmnist.config_type())
    each = copies_bytes(images(1), facts.train_transform)
    assert each == 4 * 3 * 40 * 40
    assert facts.counts["train"] * each <= RESIZED_BYTES == 2**30
    larger = replace(facts.train_transform, cut=ResizedRandomCrop(42))
    assert facts.counts["train"] * copies_bytes(images(1), larger) > RESIZED_BYTES


@pytest.mark.parametrize(
    "transform", [replace(CROP, hflip=True), replace(CROP, cut=PaddedRandomCrop(2))]
)
def test_other_transforms_have_no_copies(transform: Transform) -> None:
    split = AugmentedImages(images(), transform)
    assert split._copies is None
    (batch,) = transformed(split, [[torch.tensor([4, 7, 4])]])
    assert batch.shape == (3, 3, 32, 32)
    assert batch.is_contiguous(memory_format=torch.channels_last)
