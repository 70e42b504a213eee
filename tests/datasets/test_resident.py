"""Images on a device, and batches made one ahead; tried on the CPU, where they work the same."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import resident
from datasets.images import MappedImages, MemoryImages
from datasets.resident import ResidentImages, batches, one_ahead, place

SIZES = [(4, 7), (9, 3), (5, 5), (1, 1)]
CPU = torch.device("cpu")


@pytest.fixture
def mapped(tmp_path: Path) -> MappedImages:
    lengths = [h * w * 3 for h, w in SIZES]
    pixels = np.random.default_rng(0).integers(1, 256, sum(lengths), dtype=np.uint8)
    pixels.tofile(tmp_path / "pixels")
    offsets = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    return MappedImages(str(tmp_path / "pixels"), offsets, torch.tensor(SIZES))


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [2, 0, 2], [3]])
def test_resident_images_are_those_of_the_file(mapped: MappedImages, index: list[int]) -> None:
    whole = ResidentImages(mapped.pixels(), mapped.offsets, mapped.sizes, mapped.channels)
    ours, theirs = whole.batch(torch.tensor(index)), mapped.batch(torch.tensor(index))
    assert torch.equal(ours.sizes, theirs.sizes)
    height, width = theirs.pixels.shape[2:]
    assert torch.equal(ours.pixels[:, :, :height, :width], theirs.pixels)
    assert not ours.pixels[:, :, height:].any() and not ours.pixels[..., width:].any()
    assert ours.pixels.shape == (len(index), 3, 9, 7) and ours.pixels.dtype == torch.uint8


def test_a_subset_keeps_its_order(mapped: MappedImages) -> None:
    whole = ResidentImages(mapped.pixels(), mapped.offsets, mapped.sizes, mapped.channels)
    part = whole.to(CPU).subset(torch.tensor([3, 1]))
    assert len(part) == 2
    assert part.batch(torch.tensor([1])).sizes.tolist() == [[9, 3]]


def test_images_move_whole_only_where_they_fit(
    mapped: MappedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(place(mapped, CPU), MappedImages)
    asked: list[int] = []
    monkeypatch.setattr(resident, "_fits", lambda size, device: asked.append(size) or True)
    assert isinstance(place(mapped, CPU), ResidentImages)
    assert asked == [sum(h * w * 3 for h, w in SIZES)]
    memory = MemoryImages(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    assert isinstance(place(memory, CPU), MemoryImages)


def test_batches_come_in_order(mapped: MappedImages) -> None:
    parts = [torch.tensor([1]), torch.tensor([0, 2])]
    assert [len(batch.pixels) for batch in batches(mapped, parts)] == [1, 2]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_one_ahead_keeps_the_order(count: int) -> None:
    assert list(one_ahead(lambda number: number * 2, range(count))) == [2 * i for i in range(count)]


def test_the_next_one_is_made_while_this_one_is_in_use() -> None:
    started = [threading.Event() for _ in range(3)]

    def make(number: int) -> int:
        started[number].set()
        return number

    results = one_ahead(make, range(3))
    assert next(results) == 0
    assert started[1].wait(5)
    assert not started[2].is_set()


def test_an_error_is_raised_where_it_is_due() -> None:
    results = one_ahead(lambda number: 1 // (1 - number), range(3))
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
