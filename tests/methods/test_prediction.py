"""Running a network over a split: how large batches are, and that their size changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datasets.images import MappedImages, MemoryImages
from datasets.resident import ResidentImages
from datasets.transforms import ResizedCentreCrop, Transform
from methods.prediction import (
    BATCH,
    BATCH_BYTES,
    KEPT_SHARE,
    PHOTO_BATCH,
    SOURCE_BYTES,
    EvalImages,
    batch_size_for,
    kept_bytes,
    mixed_precision,
    predict,
)


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
    assert batch_size_for(transform(224), images) == BATCH_BYTES["cpu"] // (4 * 3 * 224**2)


def test_few_photographs_are_run_at_once_where_many_would_fit(tmp_path: Path) -> None:
    """A network for photos takes 24 times a batch of them, and more beside a training's memory."""
    images = photos(tmp_path / "small", (112, 112))
    assert batch_size_for(transform(96), images) == PHOTO_BATCH
    assert batch_size_for(transform(32), images) == BATCH  # a LeNet's


def test_large_photographs_are_bounded_by_what_they_are(tmp_path: Path) -> None:
    images = photos(tmp_path / "large", (10, 10), (2000, 1500))
    expected = SOURCE_BYTES // (4 * 3 * 2000 * 1500)
    assert batch_size_for(transform(224), images) == expected < 10
    resident = ResidentImages.load(images, torch.device("cpu"))
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


def test_photos_of_a_file_are_never_kept_on_a_processor(tmp_path: Path) -> None:
    """What is kept would grow with their number."""
    split = EvalImages(photos(tmp_path / "few", *[(20, 30)] * 3), transform(16))
    first, second = (list(split) for _ in range(2))
    assert first[0] is not second[0] and torch.equal(first[0], second[0])


def test_small_images_are_transformed_once() -> None:
    split = EvalImages(MemoryImages(torch.zeros(3, 3, 20, 20, dtype=torch.uint8)), transform(16))
    first, second = (list(split) for _ in range(2))
    assert first[0] is second[0]


def test_a_gpu_keeps_what_its_free_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8000, 10_000))
    images = SimpleNamespace(device=torch.device("cuda"))
    assert kept_bytes(images) == KEPT_SHARE * 8000  # type: ignore[arg-type]


def test_batches_on_a_gpu_are_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    images = MemoryImages(torch.zeros(2, 3, 28, 28, dtype=torch.uint8))
    each = 4 * 3 * 224**2
    assert batch_size_for(transform(224), images) == BATCH_BYTES["cpu"] // each
    monkeypatch.setattr(MemoryImages, "device", torch.device("cuda"))
    assert batch_size_for(transform(224), images) == BATCH_BYTES["cuda"] // each


def test_precision_is_mixed_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(mixed_precision(torch.device("cpu")), nullcontext)
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch, "autocast", lambda *how: asked.append(how))
    mixed_precision(torch.device("cuda"))
    assert asked == [("cuda", torch.bfloat16)]


def test_predictions_are_made_in_the_precision_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 on a processor stands for what a GPU would do."""
    images = EvalImages(MemoryImages(torch.zeros(3, 3, 20, 20, dtype=torch.uint8)), transform(16))
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 2))
    computed: list[torch.dtype] = []
    network.register_forward_hook(lambda *args: computed.append(args[-1].dtype))
    predict(network, images)
    lower = partial(torch.autocast, "cpu", torch.bfloat16)
    monkeypatch.setattr("methods.prediction.mixed_precision", lambda device: lower())
    assert predict(network, images).dtype == torch.float32
    assert computed == [torch.float32, torch.bfloat16]
