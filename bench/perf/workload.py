"""What is measured: a dataset's own task on stand-in images made in memory, and how much of it.

No arm's cost depends on what the images show, so nothing has to be on disk. Shapes, transforms,
classes, network and hyperparameters are those of the dataset. The names of datasets and methods
that are measured stand here and nowhere else in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from bench.context import RunContext, RunSettings, StageAccount
from bench.perf.measure import Sample
from bench.process import CpuClock
from datasets.base import BackboneSpec, Facts, LabelledSplit, Labels, LoadedData, Task
from datasets.bounded import Bound, scaled
from datasets.catalogue import get_dataset
from datasets.config import Values
from datasets.decode import decode
from datasets.images import MemoryImages
from datasets.standins import digits
from methods.backbones import LENETS, build_classifier
from methods.base import get_method
from methods.nct.config import NctConfig
from methods.optimisation import TrainConfig
from methods.presets import preset_config

SEED = 100  # seeds below are those of published runs
VALIDATED = 2  # images: an epoch ends with a validation pass, which is measured by itself
PHOTO_SIDE = 224
EPOCHS = 2  # of each training of a tree

AUTHORS_BATCHES: Mapping[str, tuple[int, ...]] = {"umnist": (128, 64), "cmnist": (32, 64)}
"""Batch sizes that a dataset is trained with: the authors' own first."""
LENET_BATCH, PHOTO_BATCH = 64, 8

TREE_METHOD = "nct"
PHASES = {"NCT phase 1": "nct-2-1", "NCT phase 2": "nct-2-2"}
"""The arms of a tree's two phases, and the names of their trainings."""


@dataclass(frozen=True)
class Effort:
    """How many images there are, and how many each turn goes through."""

    split: int  # to draw from; enough that they do not all stay in the processor's caches
    trained: int  # in one turn
    evaluated: int  # in one turn
    grown: int  # in an epoch of a tree, whose turn is a whole fit
    max_repeats: int = 1000  # turns that are enough
    max_tree_repeats: int = 1000


LENET_EFFORT = Effort(split=20_000, trained=3_840, evaluated=4_000, grown=1_920)
PHOTO_EFFORT = Effort(  # a core does 3 images a second, and a turn of a tree takes 25 seconds
    split=24, trained=8, evaluated=8, grown=8, max_repeats=2, max_tree_repeats=1
)


class EpochClock(RunContext):
    """The context of a real run that notes what every epoch did and took.

    An epoch is charged without its validation pass. Nothing is audited, for the audit's time never
    counts. History and checkpoints go to the folder.
    """

    def __init__(self, folder: Path) -> None:
        cpu = torch.device("cpu")
        settings = RunSettings("perf", SEED, cpu, scope={}, stages=folder / "stages")
        super().__init__(settings, StageAccount("perf", folder), [])
        self.epochs: dict[str, list[Sample]] = {}
        self.began = self.account.elapsed()
        self.passes: list[tuple[int, CpuClock]] = []

    def count_passes(self, images: int) -> None:
        """Count, and note when; an epoch's steps are counted first, then its validation."""
        super().count_passes(images)
        self.passes.append((images, self.account.elapsed()))

    def history(self, where: Values, **row: float) -> None:
        """Keep the line, and note the epoch."""
        super().history(where, **row)
        (images, stepped), (_, validated) = self.passes[-2:]
        spent = self.account.elapsed() - self.began - (validated - stepped)
        self.epochs.setdefault(str(where["stage"]), []).append(Sample(images, spent))

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write the checkpoint that ends an epoch; from here on it is the next one."""
        super().save(name, state)
        self.began = self.account.elapsed()

    def later_epochs(self, stage: str) -> Sample:
        """Add up a training's epochs but for the first, before which there was other work."""
        _, *later = self.epochs[stage]
        images = sum(epoch.images for epoch in later)
        return Sample(images, sum((epoch.spent for epoch in later), CpuClock()))


@dataclass(frozen=True)
class Workload:
    """A dataset as the arms see it.

    Attributes:
        photo_size: height and width of photos as their files have them.
        photos: image files that are enlarged to that size; where there are none, photos are drawn.
        bound: what photos are scaled down to after that, if they are.
    """

    dataset: str
    effort: Effort
    photo_size: tuple[int, int] = (PHOTO_SIDE, PHOTO_SIDE)
    photos: tuple[Path, ...] = ()
    bound: Bound | None = None

    @cached_property
    def facts(self) -> Facts:
        """The dataset's constants under its default protocol."""
        known = get_dataset(self.dataset)
        return known.facts(known.config_type())

    @property
    def is_photo(self) -> bool:
        """Whether it takes a network that is not a LeNet."""
        return self.facts.backbone not in LENETS

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes that training is measured with."""
        return AUTHORS_BATCHES.get(self.dataset, (self.tree_batch,))

    @property
    def tree_batch(self) -> int:
        """The batch size that growing a tree is measured with."""
        return PHOTO_BATCH if self.is_photo else LENET_BATCH

    @cached_property
    def pixels(self) -> Tensor:
        """Stand-in images, as the dataset's files have them once decoded: (N, C, H, W) uint8."""
        if self.is_photo:
            drawn = _enlarged if self.photos else _photos
            native = drawn(self.effort.split, self.photo_size, self.photos)
            return native if self.bound is None else _bounded(native, self.bound)
        shown = (np.arange(self.effort.split) % 10).astype(np.uint8)
        grey = torch.from_numpy(digits.draw(shown, np.random.default_rng(SEED)))
        return grey[:, None].repeat(1, self.facts.channels, 1, 1)

    @cached_property
    def y(self) -> Tensor:
        """Classes of the images; of digits in the order of the digits."""
        classes = len(self.facts.classes)
        place = torch.arange(self.effort.split)
        return place % classes if self.is_photo else place % 10 * classes // 10

    def task(self, images: int | None = None) -> Task:
        """Return the task, of the first images only where a number is given."""
        splits = {}
        for name, count in (("train", images), ("val", VALIDATED)):
            part = torch.arange(self.effort.split)[:count]
            labels = Labels(part, self.y[part], torch.zeros_like(part))
            splits[name] = LabelledSplit(labels, MemoryImages(self.pixels[part]))
        data = LoadedData(self.facts, splits, data_kind="standin")
        return data.task(BackboneSpec(self.facts.backbone), train_groups=False, val_groups=False)

    def recipe(self, batch: int) -> TrainConfig:
        """Return ERM's own recipe for this dataset, for one epoch of batches of this size."""
        preset: TrainConfig = preset_config(get_method("erm"), self.dataset)
        return TrainConfig(
            epochs=1,
            batch_size=batch,
            optimizer=preset.optimizer,
            lr=preset.lr,
            weight_decay=preset.weight_decay,
            momentum=preset.momentum,
        )

    def tree_recipe(self, batch: int) -> NctConfig:
        """Return the dataset's preset for trees, with two levels and short phases.

        They neither stop early nor leave images out.
        """
        preset: NctConfig = preset_config(get_method(TREE_METHOD), self.dataset)
        return replace(
            preset,
            iterations=2,
            batch_size=batch,
            epochs=(1, 2 * EPOCHS),
            phase1_ratio=(0.0, 0.5),
            scope="standard",
            sampling="class_weights",
            patience=0,
            phase2_patience=0,
            min_samples=0,
        )

    def network(self, name: str) -> nn.Module:
        """Build the dataset's network as a run does, from random weights."""
        return build_classifier(self.task(1), EpochClock(Path()), name)  # it writes nothing


def workload_of(dataset: str, photos: tuple[Path, ...] = ()) -> Workload:
    """Return a dataset's workload; nothing is made yet."""
    digit_like = Workload(dataset, LENET_EFFORT)
    if not digit_like.is_photo:
        return digit_like
    return Workload(dataset, PHOTO_EFFORT, photos=photos)


def _enlarged(count: int, size: tuple[int, int], files: tuple[Path, ...]) -> Tensor:
    """Read photos, the same again where they are too few, and enlarge them."""
    height, width = size
    pixels = torch.empty(count, 3, height, width, dtype=torch.uint8)
    for place, file in zip(range(count), cycle(files), strict=False):
        image = Image.fromarray(decode(file)).resize((width, height), Image.Resampling.BICUBIC)
        pixels[place] = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return pixels


def _bounded(pixels: Tensor, bound: Bound) -> Tensor:
    """Scale photos of one size down as decoding does."""
    size = bound.size(pixels.shape[3], pixels.shape[2])
    images = (Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()) for one in pixels)
    kept = [torch.from_numpy(np.array(scaled(image, size))) for image in images]
    return torch.stack(kept).permute(0, 3, 1, 2).contiguous()


def _photos(count: int, size: tuple[int, int], _: tuple[Path, ...] = ()) -> Tensor:
    """Draw smooth colours with some grain, which a JPEG file keeps about as a photo."""
    generator = torch.Generator().manual_seed(SEED)
    coarse = torch.rand(count, 3, 14, 14, generator=generator)
    smooth = functional.interpolate(coarse, size=size, mode="bicubic")
    grain = torch.randn(smooth.shape, generator=generator) / 16
    return (255 * (smooth + grain)).clamp(0, 255).byte()
