"""The usual way of writing it: one image at a time through torchvision, and a torch DataLoader.

It is written as the authors' loops are (GEORGE for UMNIST, Correct-n-Contrast for CMNIST, GroupDRO
for photos): the same per-sample transforms on the same kind of stored image, and loss and accuracy
read every step. It gets our network, memory format and fused optimiser, which theirs do without,
and workers that live on from epoch to epoch, so that nothing but the loop is compared.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from bench.context import Spent
from bench.perf.measure import Contender, Sample, Samples, timed
from bench.perf.subject import Subject
from datasets.transforms import (
    PaddedRandomCrop,
    RandomResizedCrop,
    ResizedCentreCrop,
    ResizedRandomCrop,
    Transform,
)
from methods.optimisation import build_optimizer
from methods.torchvision_shim import declare_missing_operators

WORKERS = (0, 4)
EVALUATED_AT_ONCE = 128  # the authors' evaluation batches


def arm_name(workers: int) -> str:
    """Name the arm."""
    return f"ordinary, {workers} workers"


def pipeline(transform: Transform, side: int, *, of_tensors: bool) -> Callable[[Any], Tensor]:
    """Spell a transform of ours as torchvision's, for images whose sides have this length."""
    declare_missing_operators()
    from torchvision import transforms

    size, cut = transform.resolution, transform.cut
    steps: list[Any]
    if isinstance(cut, PaddedRandomCrop):
        steps = [transforms.RandomCrop(side, padding=cut.padding), transforms.Resize((size, size))]
    elif isinstance(cut, ResizedRandomCrop):
        steps = [transforms.Resize((cut.resize, cut.resize)), transforms.RandomCrop(size)]
    elif isinstance(cut, ResizedCentreCrop):
        steps = [transforms.Resize((cut.resize, cut.resize)), transforms.CenterCrop(size)]
    else:
        assert isinstance(cut, RandomResizedCrop)
        steps = [transforms.RandomResizedCrop(size, cut.scale, cut.ratio)]
    steps += [transforms.RandomHorizontalFlip()] * transform.hflip
    steps += [transforms.RandomVerticalFlip()] * transform.vflip
    steps += [] if of_tensors else [transforms.ToTensor()]
    composed: Callable[[Any], Tensor] = transforms.Compose(
        [*steps, transforms.Normalize(transform.mean, transform.std)]
    )
    return composed


@dataclass(frozen=True)
class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """Images as the authors keep them, read and transformed one by one."""

    stored: Any
    y: Tensor
    read: Callable[[Any], Any]
    transform: Transform
    side: int

    @cached_property
    def transformed(self) -> Callable[[Any], Tensor]:
        """Made on first use, which is in the worker: torchvision is not ready to be pickled."""
        return pipeline(self.transform, self.side, of_tensors=self.read is _as_is)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.transformed(self.read(self.stored[place])), self.y[place]


def stored_images(subject: Subject, count: int, transform: Transform) -> PerSample:
    """Store the first images as the authors do: JPEG files, grey bytes, or float colours."""
    pixels, y = subject.pixels[:count], subject.y[:count]
    side = pixels.shape[-1]
    if subject.is_photo:
        return PerSample([_jpeg(image) for image in pixels], y, _decoded, transform, side)
    if subject.facts.channels == 1:
        return PerSample(pixels[:, 0], y, _grey, transform, side)
    return PerSample(pixels.float() / 255, y, _as_is, transform, side)


def _jpeg(pixels: Tensor) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(content, "JPEG", quality=90)
    return content.getvalue()


def _decoded(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def _grey(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.numpy())


def _as_is(image: Tensor) -> Tensor:
    return image


def _collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, int, float]:
    """Collate, and add which worker did it and the processor time that it has used so far."""
    images, y = default_collate(samples)
    worker = get_worker_info()
    return images, y, *((-1, 0.0) if worker is None else (worker.id, time.process_time()))


@contextmanager
def _as_many_workers_as_wanted() -> Iterator[None]:
    """Keep torch from warning of more workers than cores: they are the authors' own number."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


class Loader:
    """A DataLoader whose workers' processor time is known."""

    def __init__(self, data: PerSample, batch: int, workers: int, shuffled: int | None) -> None:
        sampler = (
            SequentialSampler(data)
            if shuffled is None
            else RandomSampler(data, num_samples=shuffled)
        )
        with _as_many_workers_as_wanted():
            self.loader = DataLoader(
                data,
                batch_size=batch,
                sampler=sampler,
                num_workers=workers,
                collate_fn=_collate,
                persistent_workers=workers > 0,
            )
        self.used: dict[int, float] = {}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with _as_many_workers_as_wanted():
            batches = iter(self.loader)
        for images, y, worker, used in batches:
            self.used[worker] = used
            yield images.contiguous(memory_format=torch.channels_last), y

    def timed(self, work: Callable[[], int]) -> Sample:
        """Time work on the batches, and add what the workers spent on them.

        A worker tells its time with every batch. What it does after the last one, which is to send
        it, is counted with the next turn, as that of the turn before was with this one.
        """
        before = sum(self.used.values())
        sample = timed(work)
        workers = sum(self.used.values()) - before
        return Sample(sample.images, sample.spent + Spent(cpu=workers))


def training(subject: Subject, batch: int, workers: int) -> Contender:
    """Train on a DataLoader."""
    images = subject.effort.trained // batch * batch
    data = stored_images(subject, subject.effort.split, subject.facts.train_transform)
    loader = Loader(data, batch, workers, shuffled=images)
    model = subject.network("ordinary").train()
    optimizer = build_optimizer(subject.recipe(batch), model)

    def epoch() -> int:
        seen, correct, total = 0, 0, 0.0
        for images, y in loader:
            logits = model(images)
            loss = functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
            correct += int((logits.argmax(dim=1) == y).sum().item())
            seen += len(y)
        return seen

    def turn() -> Samples:
        return {arm_name(workers): loader.timed(epoch)}

    return turn


def evaluation(subject: Subject, workers: int) -> Contender:
    """Evaluate on a DataLoader."""
    data = stored_images(subject, subject.effort.evaluated, subject.facts.eval_transform)
    loader = Loader(data, EVALUATED_AT_ONCE, workers, shuffled=None)
    model = subject.network("ordinary").eval()

    def passes() -> int:
        seen, correct, total = 0, 0, 0.0
        with torch.no_grad():
            for images, y in loader:
                logits = model(images)
                total += functional.cross_entropy(logits, y).item() * len(y)
                correct += int((logits.argmax(dim=1) == y).sum().item())
                seen += len(y)
        return seen

    def turn() -> Samples:
        return {arm_name(workers): loader.timed(passes)}

    return turn
