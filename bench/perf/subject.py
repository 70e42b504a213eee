"""What is measured on: a dataset's own task, with stand-in images made in memory.

No arm's cost depends on what the images show, so nothing has to be on disk. Shapes, transforms,
classes, network and hyperparameters are those of the dataset.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.audit import AuditLink
from bench.context import Part, RunContext, RunScope
from datasets.base import BackboneSpec, Facts, LabelledSplit, Labels, LoadedData, Task
from datasets.catalogue import get_dataset
from datasets.cmnist import PALETTE, dyed
from datasets.images import MemoryImages
from datasets.standins import digits
from methods.backbones import LENETS, build_classifier
from methods.base import get_method
from methods.optimisation import TrainConfig
from methods.presets import preset_config

SEED = 100  # seeds below are those of published runs
VALIDATED = 2  # images: an epoch ends with a validation pass, which is measured by itself
PHOTO_SIDE = 224


def facts_of(dataset: str) -> Facts:
    """State the constants of a dataset under its default protocol."""
    known = get_dataset(dataset)
    return known.facts(known.config_type())


def takes_photos(dataset: str) -> bool:
    """Tell whether a dataset needs a network that is not a LeNet."""
    return facts_of(dataset).backbone not in LENETS


@dataclass(frozen=True)
class Effort:
    """How many images there are, and how many each turn goes through.

    Attributes:
        split: images to draw from; enough that they do not all stay in the processor's caches.
        trained, evaluated: images of one turn.
        grown: images of an epoch of NCT, whose turn is a whole fit.
    """

    split: int
    trained: int
    evaluated: int
    grown: int


@dataclass(frozen=True)
class Subject:
    """A dataset as the arms see it."""

    dataset: str
    effort: Effort

    @property
    def facts(self) -> Facts:
        """The dataset's constants."""
        return facts_of(self.dataset)

    @property
    def is_photo(self) -> bool:
        """Whether it takes a network that is not a LeNet."""
        return takes_photos(self.dataset)

    @cached_property
    def pixels(self) -> Tensor:
        """Stand-in images, as the dataset's files have them once decoded: (N, C, H, W) uint8."""
        count, draw = self.effort.split, np.random.default_rng(SEED)
        if self.is_photo:
            return _photos(count)
        grey = torch.from_numpy(digits.draw((np.arange(count) % 10).astype(np.uint8), draw))
        if self.facts.channels == 1:
            return grey[:, None]
        return dyed(grey, torch.arange(count) % len(PALETTE))

    @cached_property
    def y(self) -> Tensor:
        """Classes of the images; of digits in the order of the digits."""
        classes = len(self.facts.classes)
        place = torch.arange(self.effort.split)
        return place % classes if self.is_photo else place % 10 * classes // 10

    def task(self, images: int | None = None) -> Task:
        """Build the task, of the first images only where a number is given."""
        everything = torch.arange(self.effort.split)
        parts = {"train": everything[:images], "val": everything[:VALIDATED]}
        splits = {
            name: LabelledSplit(
                Labels(part, self.y[part], torch.zeros_like(part)), MemoryImages(self.pixels[part])
            )
            for name, part in parts.items()
        }
        backbone = BackboneSpec(self.facts.backbone)
        data = LoadedData(self.facts, splits, standin=True)
        return data.task(backbone, train_groups=False, val_groups=False)

    def recipe(self, batch: int) -> TrainConfig:
        """Give ERM's own recipe for this dataset, for one epoch of batches of this size."""
        preset: TrainConfig = preset_config(get_method("erm"), self.dataset)
        return TrainConfig(
            epochs=1,
            batch_size=batch,
            optimizer=preset.optimizer,
            lr=preset.lr,
            weight_decay=preset.weight_decay,
            momentum=preset.momentum,
        )

    def network(self, name: str) -> nn.Module:
        """Build the dataset's network as a run does, from random weights."""
        with tempfile.TemporaryDirectory() as folder:
            return build_classifier(self.task(1), context(Path(folder)), name)


def _photos(count: int) -> Tensor:
    """Draw smooth colours with some grain, which a JPEG file keeps about as a photo."""
    generator = torch.Generator().manual_seed(SEED)
    coarse = torch.rand(count, 3, 14, 14, generator=generator)
    smooth = functional.interpolate(coarse, size=PHOTO_SIDE, mode="bicubic")
    grain = torch.randn(smooth.shape, generator=generator) / 16
    return (255 * (smooth + grain)).clamp(0, 255).byte()


class NoAudit(AuditLink):
    """The audit's time never counts, so here it does not look."""

    def look(
        self, record: str, where: dict[str, Any], val_outputs: Tensor, module: nn.Module
    ) -> None:
        """Return at once."""


def context(folder: Path) -> RunContext:
    """Make the context of a real run, with its history and checkpoints in a folder."""
    scope = RunScope(
        run_id="perf",
        seed=SEED,
        device=torch.device("cpu"),
        meaning={},
        stages=folder / "stages",
        report=lambda progress: None,
        audit=NoAudit(),
    )
    return RunContext(scope, Part("perf", folder), [])
