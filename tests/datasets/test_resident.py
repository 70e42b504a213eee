"""Images on a device, and batches made one ahead; tried on the CPU, where they work the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from datasets import resident
from datasets.images import ImageBatch, MappedImages, MemoryImages
from datasets.resident import (
    ResidentImages,
    SideStream,
    batches,
    on_host,
    one_ahead,
    place,
)

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
    whole = ResidentImages.load(mapped, CPU)
    ours, theirs = whole.batch(torch.tensor(index)), mapped.batch(torch.tensor(index))
    assert torch.equal(ours.sizes, theirs.sizes)
    height, width = theirs.pixels.shape[2:]
    assert torch.equal(ours.pixels[:, :, :height, :width], theirs.pixels)
    assert not ours.pixels[:, :, height:].any() and not ours.pixels[..., width:].any()
    assert ours.pixels.shape == (len(index), 3, 9, 7) and ours.pixels.dtype == torch.uint8


def test_a_subset_keeps_its_order(mapped: MappedImages) -> None:
    whole = ResidentImages.load(mapped, CPU)
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


def test_the_index_of_a_batch_is_of_rows(mapped: MappedImages) -> None:
    """One number a row: an index of single bytes would take eight times what it fetches."""
    indices: list[int] = []

    class Indexed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten.index.Tensor:
                indices.extend(index.numel() for index in args[1])
            return func(*args, **(kwargs or {}))

    whole = ResidentImages.load(mapped, CPU)
    with Indexed():
        whole.batch(torch.tensor([0, 1]))
    assert max(indices) == 2 * 9, "two images, as high as the highest of the split"


def test_a_file_is_read_in_pieces(mapped: MappedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ResidentImages.load(mapped, CPU)
    monkeypatch.setattr("datasets.images.READ_BYTES", 50)
    assert torch.equal(ResidentImages.load(mapped, CPU).pixels, whole.pixels)


def test_indices_come_to_the_host_at_once() -> None:
    parts = [torch.tensor([3, 1]), torch.tensor([2])]
    assert [part.tolist() for part in on_host(parts)] == [[3, 1], [2]]
    assert on_host([]) == []


class FakeCuda:
    """Notes what would be asked of a GPU, in order."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def Stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(record_event=lambda: self.log.append("copied") or "event")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("side stream")
        yield
        self.log.append("back")

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(wait_event=lambda event: self.log.append(f"wait for {event}"))


def test_a_batch_is_copied_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation waits for the copy by an event, and the memory is kept for it."""
    log: list[str] = []
    monkeypatch.setattr(resident.torch, "cuda", FakeCuda(log))
    monkeypatch.setattr(
        ImageBatch, "to", lambda self, device: log.append(f"copy to {device}") or self
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: log.append("kept"))
    stream = SideStream(torch.device("cuda"))
    batch = ImageBatch(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]))
    sent = stream.send(batch)
    assert log == ["side stream", "copy to cuda", "copied", "back"]
    assert stream.receive(sent) is batch
    assert log[4:] == ["wait for event", "kept", "kept"]


def test_batches_of_a_file_reach_a_gpu_by_that_stream(
    mapped: MappedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[int]] = []

    class FakeStream:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def send(self, batch: ImageBatch) -> ImageBatch:
            sent.append(batch.sizes.tolist())
            return batch

        def receive(self, batch: ImageBatch) -> ImageBatch:
            return batch

    monkeypatch.setattr(resident, "SideStream", FakeStream)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **how: zeros(*size, **how))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    parts = [torch.tensor([1]), torch.tensor([0, 2])]
    received = list(batches(mapped.to(torch.device("cuda")), parts))
    assert [batch.sizes.tolist() for batch in received] == sent == [[[9, 3]], [[4, 7], [5, 5]]]
