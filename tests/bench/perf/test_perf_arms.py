"""That the arms do the same work, and that all of it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from bench.cli.perf import photos_in
from bench.perf import dataloader, photos
from bench.perf.arms import cases_of, erm_training, our_training, tree_training
from bench.perf.measure import Sample, one_thread, summarise
from bench.perf.workload import (
    LENET_BATCH,
    PHOTO_BATCH,
    Effort,
    EpochClock,
    Workload,
    workload_of,
)
from bench.process import CpuClock
from datasets.errors import UsageError
from datasets.images import ImageBatch
from datasets.transforms import Transform
from methods import training

TINY = Effort(split=160, trained=128, evaluated=64, grown=64)


def test_our_arms_count_the_images_they_train_on() -> None:
    workload = Workload("umnist", TINY)
    with one_thread():
        (sample,) = our_training(workload, 64)().values()
        phases = tree_training(workload, 64)()
        (erm,) = erm_training(workload, 64)().values()
    assert sample.images == TINY.trained
    assert {s.images for s in (*phases.values(), erm)} == {TINY.grown}  # one epoch after the first


def test_an_epoch_is_charged_whole_where_it_reports_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long epoch reports its progress between steps; the clock must not start anew there."""
    monkeypatch.setattr(training, "PROGRESS_SECONDS", 0.0)
    workload = Workload("umnist", TINY)
    task, config = workload.task(), workload.recipe(64)
    clock = EpochClock(tmp_path)
    model = workload.network("ours")
    objective = Slow(0.05)
    training.Training(model, task, config, clock, name="erm", objective=objective).run()
    (epoch,) = clock.epochs["erm"]
    assert epoch.images == TINY.split
    assert epoch.spent.cpu >= 3 * 0.05  # all three steps, the last of 32 images


class Slow(training.CrossEntropy):
    """An objective that keeps the processor busy."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, model: torch.nn.Module, batch: training.Batch) -> Tensor:
        burn(self.seconds)(batch.images)
        return super().forward(model, batch)


def test_a_workload_follows_the_network_of_its_dataset() -> None:
    digits, photos = workload_of("umnist"), workload_of("waterbirds")
    assert not digits.is_photo and photos.is_photo
    assert (digits.tree_batch, photos.batches) == (LENET_BATCH, (PHOTO_BATCH,))
    assert photos.effort.max_repeats < digits.effort.max_repeats


@pytest.mark.parametrize("dataset", ["umnist", "cmnist", "waterbirds"])
def test_the_dataloader_arm_makes_the_images_that_ours_makes(dataset: str) -> None:
    workload = Workload(dataset, replace(TINY, split=6))
    transform = workload.facts.eval_transform
    theirs = dataloader.stored_images(workload, 6, transform)
    side = int(workload.pixels.shape[-1])
    mine = transform(ImageBatch(_pixels(workload, theirs), torch.full((6, 2), side)))
    grey_level = 1 / 255 / min(transform.std)
    for index in range(6):  # PIL rounds to whole grey levels, once for each axis
        assert (theirs[index][0] - mine[index]).abs().max() < 1.6 * grey_level


def _pixels(workload: Workload, theirs: dataloader.PerSample) -> Tensor:
    """The stored images as both read them; a JPEG file does not keep every pixel."""
    if not workload.is_photo:
        return workload.pixels[:6]
    from torchvision.transforms.functional import pil_to_tensor

    return torch.stack([pil_to_tensor(theirs.read(index)) for index in range(6)])


def test_the_dataloader_arm_augments_as_ours_does() -> None:
    for name in ("umnist", "cmnist", "waterbirds"):
        transform: Transform = Workload(name, TINY).facts.train_transform
        steps = str(dataloader.pipeline(transform, 28, of_tensors=False))
        assert "Normalize" in steps and "ToTensor" in steps
        assert ("RandomHorizontalFlip" in steps) == transform.hflip
        crop = "RandomResizedCrop" if name == "waterbirds" else "RandomCrop"
        assert crop in steps
    workload = Workload("waterbirds", replace(TINY, split=6))
    image, y = dataloader.stored_images(workload, 2, workload.facts.train_transform)[1]
    assert image.shape == (3, 224, 224) and y == 1


def burn(seconds: float) -> Callable[[Any], Tensor]:
    def read(stored: Tensor) -> Tensor:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return stored

    return read


def test_processor_time_of_workers_is_counted() -> None:
    workload = Workload("cmnist", TINY)
    slow = dataloader.stored_images(workload, 8, workload.facts.eval_transform)
    object.__setattr__(slow, "transformed", burn(0.03))
    turn = dataloader.loader_arm(slow, 2, 2, torch.nn.Flatten())
    for _ in range(2):
        before = time.process_time()
        (sample,) = turn().values()
        here = time.process_time() - before
        assert sample.images == 8
    assert 8 * 0.03 <= sample.spent.cpu - here < 0.45


def test_photos_of_native_size_reach_batches_on_every_road() -> None:
    workload = workload_of("waterbirds")
    tiny = replace(photos.EFFORT, split=16)
    native = replace(workload, effort=tiny, photo_size=photos.NATIVE)
    mapped = photos.in_a_file(native.pixels)
    index = torch.tensor([5, 2])
    assert torch.equal(mapped.batch(index).pixels, native.pixels[index])
    assert tuple(mapped.sizes[0].tolist()) == photos.NATIVE
    (sample,) = photos.our_batches(native, "ours, native")().values()
    assert sample.images == 16
    bound = native.facts.bound
    assert bound is not None
    kept = replace(native, bound=bound)
    assert kept.pixels.shape == (16, 3, 269, 358)
    (sample,) = photos.our_batches(kept, "ours")().values()
    assert sample.images == 16
    stored = dataloader.stored_images(native, 16, native.facts.train_transform)
    assert photos.decoded(stored, bound) == photos.decoded(stored, None) == 16
    assert stored.read(0).size == photos.NATIVE[::-1]
    assert stored[0][0].shape == (3, 224, 224)


def test_given_photos_are_enlarged(tmp_path: Path) -> None:
    for number in range(3):
        Image.linear_gradient("L").rotate(90 * number).convert("RGB").save(
            tmp_path / f"{number}.jpg"
        )
    files = photos_in(tmp_path)
    assert [file.name for file in files] == ["0.jpg", "1.jpg", "2.jpg"]
    effort = replace(photos.EFFORT, split=4)
    workload = replace(workload_of("waterbirds", files), effort=effort, photo_size=photos.NATIVE)
    pixels = workload.pixels
    assert pixels.shape == (4, 3, *photos.NATIVE)
    assert torch.equal(pixels[0], pixels[3]) and not torch.equal(pixels[0], pixels[1])
    assert pixels[0, 0, 20, 250] < 20 < 230 < pixels[0, 0, 360, 250], "a gradient, as it was"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no JPEG files"):
        photos_in(tmp_path / "empty")


def test_ratios_are_taken_against_the_limit_of_the_case() -> None:
    case = next(c for c in cases_of(workload_of("waterbirds")) if "to batches" in c.name)
    turn = {
        "ours": Sample(40, CpuClock(1.0, 1.0)),
        dataloader.arm_name(0): Sample(10, CpuClock(1.0, 1.0)),
    }
    first, ours = summarise(case, [turn])
    assert (first.arm, first.ratio, ours.ratio) == (dataloader.arm_name(0), 1.0, 4.0)
    assert not [c for c in cases_of(workload_of("umnist")) if "photos" in c.name]
