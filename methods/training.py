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
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.errors import BenchError
from datasets.resident import batches
from methods.averaging import WeightAverage
from methods.base import Context
from methods.batching import augmented_together, in_batches
from methods.optimisation import TrainConfig, build_optimizer, build_schedule, step_schedule
from methods.prediction import EvalImages, predict_with
from methods.randomness import isolated_randomness
from methods.selection import Selection, selection

NORM_BATCHES = 20  # from which an averaged model's batch-norm statistics are taken


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


@dataclass(frozen=True)
class Trained:
    """How a training ended; the model itself holds the selected weights."""

    rule: str
    value: float
    epoch: int
    epochs_run: int

    def as_facts(self) -> dict[str, Any]:
        """Give what a record keeps of it."""
        return asdict(self)


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
    where: dict[str, Any] = field(default_factory=dict)
    average: float = 0.0
    predict: Callable[[nn.Module, EvalImages], Tensor] = predict_with

    def run(self) -> Trained:
        """Train, and leave the selected weights in the model."""
        self.begin()
        while self.unfinished:
            self._one_epoch()
        return self.finish()

    def begin(self) -> None:
        """Prepare for the first epoch that is not done yet."""
        self._prepare()
        self._restore()

    @property
    def unfinished(self) -> bool:
        """Whether there is an epoch to come."""
        return self.epoch < self.config.epochs and not 0 < self.config.patience <= self.stale

    def finish(self) -> Trained:
        """Put the selected weights into the model."""
        self.model.load_state_dict(self.best_state)
        return Trained(self.rule.rule, self.best_value, self.best_epoch, self.epoch)

    def _prepare(self) -> None:
        device = self.ctx.device
        self.loss = (self.objective or CrossEntropy()).to(device)
        self.draw = self.sampler or shuffled(len(self.task.train))
        self.rule = self.select or selection(self.config.selection, self.task)
        self.model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups = self.model if self.parameters is None else self.parameters
        self.optimizer = build_optimizer(self.config, groups)
        self.schedule = build_schedule(self.config, self.optimizer, self.rule.higher_is_better)
        self.labels = self.task.train.y.to(device)
        self.val = EvalImages(self.task.val.images, self.task.eval_transform)
        self.averaged = WeightAverage(self.model, self.average) if self.average > 0 else None
        self.epoch, self.best_epoch, self.stale = 0, 0, 0
        self.best_value = math.nan
        self.best_state: dict[str, Tensor] = {}

    def _one_epoch(self) -> None:
        began = time.perf_counter()
        rate = self.optimizer.param_groups[0]["lr"]
        self.conclude(self._steps(), rate, began)

    def conclude(self, loss: float, rate: float, began: float) -> None:
        """End an epoch whose steps were taken: judge it, and write it down."""
        judged = self._judged()
        outputs = self.predict(judged, self.val)
        self.ctx.count_passes(len(self.task.val))
        value = self.rule.score(outputs)
        step_schedule(self.schedule, value)
        self.stale += 1
        if self.rule.better(value, self.best_value) or not self.best_state:
            self.best_value, self.best_epoch, self.stale = value, self.epoch, 0
            self.best_state = {k: v.detach().clone() for k, v in judged.state_dict().items()}
        where = {"stage": self.name, "epoch": self.epoch, **self.where}
        seconds = time.perf_counter() - began
        self.ctx.history(where, loss=loss, selection=value, lr=rate, seconds=seconds)
        self.ctx.audit(where, outputs, judged)
        self.epoch += 1
        self.ctx.save(self.name, self._state())
        self.ctx.report(
            stage=self.name,
            epoch=self.epoch,
            epochs=self.config.epochs,
            selection=value,
            rule=self.rule.rule,
            **self.where,
        )

    def _steps(self) -> float:
        """Take one epoch's optimiser steps and return the mean loss."""
        device = self.ctx.device
        parts = self.draw_epoch()
        self.set_mode(self.model)
        total = torch.zeros((), device=device)
        with isolated_randomness(self.ctx.seed(self.name, "dropout", self.epoch), device):
            self.optimizer.zero_grad(set_to_none=True)
            for number, batch in enumerate(self.batches(parts), start=1):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = self.loss(self.model, batch)
                (loss / self.accumulate if self.accumulate > 1 else loss).backward()
                if number % self.accumulate == 0 or number == len(parts):
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if self.averaged is not None:
                        self.averaged.update(self.model)
                total += loss.detach() * len(batch.y)
        return self.mean_loss(total, sum(len(part) for part in parts))

    def draw_epoch(self) -> list[Tensor]:
        """Draw which samples the epoch visits, batch by batch."""
        index = self.draw(self.epoch, self.ctx.generator(self.name, "sample", self.epoch))
        return in_batches(index, self.config.batch_size)

    def mean_loss(self, total: Tensor, images: int) -> float:
        """Count the images of an epoch's steps, and give the mean of their losses."""
        self.ctx.count_passes(images)
        mean = float(total) / images  # the one place an epoch waits for the device
        if not math.isfinite(mean):
            raise NonFiniteLoss(
                f"the loss became {mean} in epoch {self.epoch} of '{self.name}' "
                f"(lr {self.optimizer.param_groups[0]['lr']:g})",
                "lower the learning rate with --set <method>.lr=...",
            )
        return mean

    def _judged(self) -> nn.Module:
        """Give the model that the epoch is scored by: the averaged one, where there is one."""
        if self.averaged is None:
            return self.model
        with isolated_randomness(self.ctx.seed(self.name, "norms", self.epoch), self.ctx.device):
            return self.averaged.settle(self.model, self.set_mode, self._norm_images())

    def _norm_images(self) -> Iterator[Tensor]:
        """Draw batches as an epoch would, for the statistics of batch-norms."""
        index = self.draw(self.epoch, self.ctx.generator(self.name, "norms", self.epoch))
        index = index[: NORM_BATCHES * self.config.batch_size]
        self.ctx.count_passes(len(index))
        for batch in self.batches(in_batches(index, self.config.batch_size), "norms-augment"):
            yield batch.images

    def batches(self, parts: list[Tensor], stream: str = "augment") -> Iterator[Batch]:
        """Gather and augment the images of one batch after another."""
        generator = self.ctx.generator(self.name, stream, self.epoch)
        several = augmented_together(parts, self.task.train_transform.resolution)
        joined = [torch.cat(group) if len(group) > 1 else group[0] for group in several]
        for group, raw in zip(several, batches(self.task.train.images, joined), strict=True):
            counts = [len(part) for part in group]
            images = self.task.train_transform.several(raw, counts, generator)
            images = images.contiguous(memory_format=torch.channels_last)
            for part, own in zip(group, images.split(counts), strict=True):
                yield Batch(own, self.labels[part], part)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "averaged": self.averaged.state_dict() if self.averaged is not None else None,
            "best_state": self.best_state,
            "progress": [self.epoch, self.best_epoch, self.stale, self.best_value],
        }

    def _restore(self) -> None:
        state = self.ctx.restore(self.name)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.loss.load_state_dict(state["loss"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        self.best_state = state["best_state"]
        self.epoch, self.best_epoch, self.stale, self.best_value = state["progress"]
