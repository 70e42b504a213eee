"""The usual way of writing it: one image at a time through torchvision, and a torch DataLoader.

The loop is written as the authors' loops are (GEORGE for UMNIST, Correct-n-Contrast for CMNIST,
GroupDRO for photos): the same per-sample transforms on the same kind of stored image, and loss and
accuracy read every step. It gets our network, memory format and fused optimiser, which theirs do
without, and workers that live on from epoch to epoch, so that nothing but the loop is compared.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, default_collate, get_worker_info

from bench.perf.measure import Arm, Sample, Samples, timed
from bench.perf.workload import Workload
from bench.process import CpuClock
from datasets import transforms as ours
from methods.optimisation import build_optimizer
from methods.torchvision_shim import declare_missing_operators

WORKERS = (0, 4)
EVALUATION_BATCH = 128  # the authors' evaluation batches


def arm_name(workers: int) -> str:
    """Return the name of the arm."""
    return f"DataLoader, {workers} workers"


def pipeline(transform: ours.Transform, side: int, *, of_tensors: bool) -> Callable[[Any], Tensor]:
    """Return torchvision's form of a transform of ours, for images of this side length."""
    declare_missing_operators()
    from torchvision import transforms

    size, cut = transform.resolution, transform.cut
    steps: list[Any]
    if isinstance(cut, ours.PaddedRandomCrop):
        steps = [transforms.RandomCrop(side, padding=cut.padding)]
        steps += [transforms.Resize(transform.shape)]
    elif isinstance(cut, ours.WholeImage):
        steps = [transforms.Resize(transform.shape)]
    elif isinstance(cut, ours.RandomResizedCrop):
        steps = [transforms.RandomResizedCrop(size, cut.scale, cut.ratio)]
    else:
        assert isinstance(cut, ours.ResizedRandomCrop | ours.ResizedCentreCrop)
        random = isinstance(cut, ours.ResizedRandomCrop)
        crop = transforms.RandomCrop if random else transforms.CenterCrop
        steps = [transforms.Resize((cut.resize, cut.resize)), crop(size)]
    steps += [transforms.RandomHorizontalFlip()] * transform.hflip
    steps += [transforms.RandomVerticalFlip()] * transform.vflip
    steps += [] if of_tensors else [transforms.ToTensor()]
    steps += [transforms.Normalize(transform.mean, transform.std)]
    composed: Callable[[Any], Tensor] = transforms.Compose(steps)
    return composed


@dataclass(frozen=True)
class PerSample(Dataset[tuple[Tensor, Tensor]]):
    """Images as the authors keep them, read and transformed one by one."""

    stored: Sequence[bytes] | Tensor  # by image a JPEG file, grey bytes or float colours
    y: Tensor
    transform: ours.Transform
    side: int

    @cached_property
    def transformed(self) -> Callable[[Any], Tensor]:
        """Made on first use, which is in the worker: torchvision is not ready to be pickled."""
        of_tensors = isinstance(self.read(0), Tensor)
        return pipeline(self.transform, self.side, of_tensors=of_tensors)

    def read(self, index: int) -> Image.Image | Tensor:
        """Return a stored image as its transform takes it."""
        stored = self.stored[index]
        if isinstance(stored, bytes):
            return Image.open(io.BytesIO(stored)).convert("RGB")
        return stored if stored.is_floating_point() else Image.fromarray(stored.numpy())

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transformed(self.read(index)), self.y[index]


def stored_images(workload: Workload, count: int, transform: ours.Transform) -> PerSample:
    """Store the first images as the authors do: JPEG files, grey bytes, or float colours."""
    pixels, side = workload.pixels[:count], workload.pixels.shape[-1]
    stored: Sequence[bytes] | Tensor = pixels.float() / 255
    if workload.is_photo:
        stored = [_jpeg(image) for image in pixels]
    elif workload.facts.channels == 1:
        stored = pixels[:, 0]
    return PerSample(stored, workload.y[:count], transform, side)


def _jpeg(pixels: Tensor) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(content, "JPEG", quality=90)
    return content.getvalue()


def training(workload: Workload, batch: int, workers: int) -> Arm:
    """Return the arm that trains on a DataLoader."""
    images = workload.effort.trained // batch * batch
    data = stored_images(workload, workload.effort.split, workload.facts.train_transform)
    model = workload.network("dataloader").train()
    optimizer = build_optimizer(workload.recipe(batch), model)
    sampler = RandomSampler(data, num_samples=images)
    return loader_arm(data, batch, workers, model, sampler=sampler, optimizer=optimizer)


def evaluation(workload: Workload, workers: int) -> Arm:
    """Return the arm that evaluates on a DataLoader."""
    data = stored_images(workload, workload.effort.evaluated, workload.facts.eval_transform)
    return loader_arm(data, EVALUATION_BATCH, workers, workload.network("dataloader").eval())


def loader_arm(
    data: PerSample,
    batch: int,
    workers: int,
    model: nn.Module,
    *,
    sampler: RandomSampler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Arm:
    """Return the arm that passes over a DataLoader, and trains if there is an optimiser."""
    worker_seconds: dict[int, float] = {}
    # Torch warns of more workers than cores, but they are the authors' own number.
    quietly = partial(warnings.catch_warnings, action="ignore")
    make = partial(DataLoader, data, batch, num_workers=workers, persistent_workers=workers > 0)
    with quietly():
        loader = make(sampler=sampler, collate_fn=_collate)

    def epoch() -> int:
        """Take a step with every batch, and read loss and accuracy each time."""
        seen, correct, total = 0, 0, 0.0
        for images, y, worker, used in loader:
            worker_seconds[worker] = used
            logits = model(images.contiguous(memory_format=torch.channels_last))
            loss = functional.cross_entropy(logits, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += loss.item() * len(y)
            correct += int((logits.argmax(dim=1) == y).sum().item())
            seen += len(y)
        return seen

    def turn() -> Samples:
        """Add to the time of an epoch what the workers spent on it.

        A worker sends its time with every batch. What it does after the last one, which is to send
        it, is counted with the next turn, as that of the turn before was with this one.
        """
        before = sum(worker_seconds.values())
        with quietly(), torch.set_grad_enabled(optimizer is not None):
            sample = timed(epoch)
        in_workers = CpuClock(cpu=sum(worker_seconds.values()) - before)
        return {arm_name(workers): Sample(sample.images, sample.spent + in_workers)}

    return turn


def _collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, int, float]:
    """Collate, and add which worker did it and the processor time that it has used so far."""
    images, y = default_collate(samples)
    worker = get_worker_info()
    return images, y, *((-1, 0.0) if worker is None else (worker.id, time.process_time()))
