"""The one training loop.

Every method that trains a network does it here: sampling by index, batched augmentation, one
validation pass an epoch that serves selection and the audit, checkpoints after every epoch. An
epoch draws all its randomness from generators named after it, so a resumed run needs no saved
random state to be bit-identical. Inside a step nothing waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.augmented import AugmentedImages
from datasets.base import Task
from datasets.errors import BenchError
from methods.averaging import WeightAverage
from methods.base import Context, Selected
from methods.optimisation import (
    Schedule,
    TrainConfig,
    build_optimizer,
    build_schedule,
    step_schedule,
)
from methods.prediction import EvalImages, mixed_precision, predict_with
from methods.selection import Selection, selection

NORM_BATCHES = 20  # from which an averaged model's batch-norm statistics are taken
AUGMENTED_PIXELS = 512 * 32**2  # that are augmented together, or a whole batch if that has more
PROGRESS_SECONDS = 10.0  # between two reports within an epoch


class NonFiniteLoss(BenchError):
    """Training diverged."""

    kind = "non_finite_loss"


@dataclass(frozen=True)
class Batch:
    """Transformed images, their classes, and their positions in the training split."""

    images: Tensor
    y: Tensor
    index: Tensor


class CrossEntropy(nn.Module):
    """Plain mean cross-entropy; the objective of ERM and the pattern for others.

    An objective is a module so that its state (group weights, say) is kept with the checkpoint.
    """

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch."""
        return functional.cross_entropy(model(batch.images), batch.y)


Sampler = Callable[[int, torch.Generator], Tensor]
"""The training positions of one epoch, in order, given its number and a generator."""


def shuffled(count: int) -> Sampler:
    """Visit every sample once, in random order."""
    return lambda epoch, generator: torch.randperm(
        count, generator=generator, device=generator.device
    )


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generator for a while, for code that takes no other (dropout, init)."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def in_batches(index: Tensor, size: int) -> list[Tensor]:
    """Split into parts of `size`; a last part of one joins its neighbour.

    Batch-norm cannot train on a single sample.
    """
    parts = list(index.split(size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def augmented_together(parts: list[Tensor], pixels: int) -> list[list[Tensor]]:
    """Put batches of small images together, to be gathered and augmented at once.

    `pixels` are those of an image after augmentation.
    """
    size = max(1, AUGMENTED_PIXELS // (len(parts[0]) * pixels)) if parts else 1
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's weights and buffers as they are."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@dataclass
class Training:
    """One training of one model; `run` carries it out, from the last checkpoint if there is one.

    Attributes:
        name: of its checkpoint, its random streams and its history rows.
        sampler: which samples an epoch visits; every one once by default.
        objective: the loss.
        parameters: optimiser parameter groups; all of the model by default.
        select: which epoch is kept; the config's rule by default.
        set_mode: puts the model into training mode; a method may keep parts of it frozen.
        accumulate: batches whose gradients are averaged into one optimiser step.
        where: further columns of the history rows, such as iteration and phase.
        predict: how the model's outputs on a split are computed.
        average: decay of a moving average of the weights, which is then what is scored, kept and
            shown instead of the weights themselves; 0 is none.
        at_end: is shown the model of the last epoch, before the selected weights are put back.
        keep_after: numbers of epochs after which the weights are kept, in `kept`.
    """

    model: nn.Module
    task: Task
    config: TrainConfig
    ctx: Context
    name: str = "train"
    sampler: Sampler | None = None
    objective: nn.Module | None = None
    parameters: Iterable[dict[str, Any]] | None = None
    select: Selection | None = None
    set_mode: Callable[[nn.Module], Any] = nn.Module.train
    accumulate: int = 1
    where: dict[str, object] = field(default_factory=dict)
    average: float = 0.0
    predict: Callable[[nn.Module, EvalImages], Tensor] = predict_with
    at_end: Callable[[nn.Module], object] | None = None
    keep_after: tuple[int, ...] = ()
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    _loss: nn.Module = field(init=False, repr=False)
    _draw: Sampler = field(init=False, repr=False)
    _rule: Selection = field(init=False, repr=False)
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)
    _schedule: Schedule = field(init=False, repr=False)
    _labels: Tensor = field(init=False, repr=False)
    _train: AugmentedImages = field(init=False, repr=False)
    _val: EvalImages = field(init=False, repr=False)
    _averaged: WeightAverage | None = field(init=False, repr=False)
    _epoch: int = field(init=False, repr=False)  # how many are finished
    _best_epoch: int = field(init=False, repr=False)
    _best_value: float = field(init=False, repr=False)
    _best_state: dict[str, Tensor] = field(init=False, repr=False)
    _epochs_without_improvement: int = field(init=False, repr=False)

    def run(self) -> Selected:
        """Train, and leave the selected weights in the model."""
        self._prepare()
        self._restore()
        while not self._ends_after(self._epoch):
            self._one_epoch()
        if self.at_end is not None:
            # Both have what the last epoch was scored with, in a resumed run as well.
            self.at_end(self.model if self._averaged is None else self._averaged.averaged_model)
        self.model.load_state_dict(self._best_state)
        return Selected(self._rule.rule, self._best_value, self._best_epoch, self._epoch)

    def _ends_after(self, epochs: int) -> bool:
        """Return whether this many finished epochs are all."""
        idle = 0 < self.config.patience <= self._epochs_without_improvement
        return idle or epochs >= self.config.epochs

    def _prepare(self) -> None:
        device = self.ctx.device
        self._loss = (self.objective or CrossEntropy()).to(device)
        self._draw = self.sampler or shuffled(len(self.task.train))
        self._rule = self.select or selection(self.config.selection, self.task)
        self.model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups = self.model if self.parameters is None else self.parameters
        self._optimizer = build_optimizer(self.config, groups)
        self._schedule = build_schedule(self.config, self._optimizer, self._rule.higher_is_better)
        self._labels = self.task.train.y.to(device)
        self._train = AugmentedImages(self.task.train.images, self.task.train_transform)
        self._val = EvalImages(self.task.val.images, self.task.eval_transform)
        self._averaged = WeightAverage(self.model, self.average) if self.average > 0 else None
        self._epoch, self._best_epoch, self._epochs_without_improvement = 0, 0, 0
        self._best_value = math.nan
        self._best_state = {}

    def _one_epoch(self) -> None:
        began = time.perf_counter()
        rate = self._optimizer.param_groups[0]["lr"]
        self._end_epoch(self._steps(), rate, began)

    def _end_epoch(self, loss: float, rate: float, began: float) -> None:
        """Score an epoch whose steps were taken, write it down, and save a checkpoint."""
        model = self._evaluated_model()
        outputs = self.predict(model, self._val)
        self.ctx.count_passes(len(self.task.val))
        value = self._rule.score(outputs)
        step_schedule(self._schedule, value)
        self._epochs_without_improvement += 1
        if self._rule.better(value, self._best_value) or not self._best_state:
            self._best_value, self._best_epoch = value, self._epoch
            self._epochs_without_improvement = 0
            self._best_state = copied(model)
        where = {"stage": self.name, "epoch": self._epoch, **self.where}
        seconds = time.perf_counter() - began
        self.ctx.history(where, loss=loss, selection=value, lr=rate, seconds=seconds)
        self.ctx.audit(where, outputs, model, last=self._ends_after(self._epoch + 1))
        self._epoch += 1
        if self._epoch in self.keep_after:
            self.kept[self._epoch] = copied(model)
        self.ctx.save(self.name, self._state())
        self._report(selection=value, rule=self._rule.rule)

    def _steps(self) -> float:
        """Take one epoch's optimiser steps and return the mean loss."""
        device = self.ctx.device
        parts = self._draw_epoch()
        self.set_mode(self.model)
        total = torch.zeros((), device=device)
        seen, began = 0, time.monotonic()
        reported = began
        with isolated_randomness(self.ctx.seed(self.name, "dropout", self._epoch), device):
            self._optimizer.zero_grad(set_to_none=True)
            for number, batch in enumerate(self._batches(parts), start=1):
                with mixed_precision(device):
                    loss = self._loss(self.model, batch)
                (loss / self.accumulate if self.accumulate > 1 else loss).backward()
                if number % self.accumulate == 0 or number == len(parts):
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)
                    if self._averaged is not None:
                        self._averaged.update(self.model)
                total += loss.detach() * len(batch.y)
                seen += len(batch.y)
                if (now := time.monotonic()) - reported >= PROGRESS_SECONDS:
                    speed = seen / (now - began)
                    self._report(step=number, steps=len(parts), images_per_second=speed)
                    reported = now
        if reported > began:  # validation takes long as well
            self._report(activity="validating", step=len(parts), steps=len(parts))
        return self._mean_loss(total, sum(len(part) for part in parts))

    def _report(self, **progress: object) -> None:
        known = {"activity": "training", "epoch": self._epoch, "epochs": self.config.epochs}
        self.ctx.report(stage=self.name, **{**known, **progress}, **self.where)

    def _draw_epoch(self) -> list[Tensor]:
        """Draw which samples the epoch visits, batch by batch."""
        index = self._draw(self._epoch, self.ctx.generator(self.name, "sample", self._epoch))
        return in_batches(index, self.config.batch_size)

    def _mean_loss(self, total: Tensor, images: int) -> float:
        """Count the images of an epoch's steps, and return the mean of their losses."""
        self.ctx.count_passes(images)
        mean = float(total) / images  # the one place an epoch waits for the device
        if not math.isfinite(mean):
            raise NonFiniteLoss(
                f"the loss became {mean} in epoch {self._epoch} of '{self.name}' "
                f"(lr {self._optimizer.param_groups[0]['lr']:g})",
                "lower the learning rate with --set <method>.lr=...",
            )
        return mean

    def _evaluated_model(self) -> nn.Module:
        """Return the model that the epoch is scored by: the averaged one, where there is one."""
        if self._averaged is None:
            return self.model
        device, seed = self.ctx.device, self.ctx.seed(self.name, "norms", self._epoch)
        with isolated_randomness(seed, device), mixed_precision(device):
            return self._averaged.update_batch_norm(self.model, self.set_mode, self._norm_images())

    def _norm_images(self) -> Iterator[Tensor]:
        """Draw batches as an epoch would, for the statistics of batch-norms."""
        index = self._draw(self._epoch, self.ctx.generator(self.name, "norms", self._epoch))
        index = index[: NORM_BATCHES * self.config.batch_size]
        self.ctx.count_passes(len(index))
        for batch in self._batches(in_batches(index, self.config.batch_size), "norms-augment"):
            yield batch.images

    def _batches(self, parts: list[Tensor], stream: str = "augment") -> Iterator[Batch]:
        """Gather and augment the images of one batch after another."""
        generator = self.ctx.generator(self.name, stream, self._epoch)
        groups = augmented_together(parts, self.task.train_transform.pixels)
        for group, images in zip(groups, self._train.batches(groups, generator), strict=True):
            counts = [len(part) for part in group]
            for part, own in zip(group, images.split(counts), strict=True):
                yield Batch(own, self._labels[part], part)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "loss": self._loss.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict() if self._schedule is not None else None,
            "averaged": self._averaged.state_dict() if self._averaged is not None else None,
            "best_state": self._best_state,
            **({"kept": self.kept} if self.keep_after else {}),
            "progress": [
                self._epoch,
                self._best_epoch,
                self._epochs_without_improvement,
                self._best_value,
            ],
        }

    def _restore(self) -> None:
        state = self.ctx.restore(self.name)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self._loss.load_state_dict(state["loss"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._schedule is not None:
            self._schedule.load_state_dict(state["schedule"])
        if self._averaged is not None:
            self._averaged.load_state_dict(state["averaged"])
        self._best_state = state["best_state"]
        self.kept = state.get("kept", {})
        self._epoch, self._best_epoch, idle, self._best_value = state["progress"]
        self._epochs_without_improvement = idle
