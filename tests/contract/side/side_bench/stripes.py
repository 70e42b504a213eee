"""Stripes: upright against lying ones, whose brightness gives most of them away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from datasets.base import Facts, Labels
from datasets.dataset import Dataset, Progress, register
from datasets.images import Images, MemoryImages
from datasets.transforms import PaddedRandomCrop, ResizedCentreCrop, Transform

SIZES = {"train": 200, "val": 80, "test": 80}
GROUPS = ("upright_dark", "upright_bright", "lying_dark", "lying_bright")


@dataclass(frozen=True)
class StripesConfig:
    """Nothing to choose."""


@register
class Stripes(Dataset):
    """Generated, not read: a marker file stands for the data."""

    name: ClassVar[str] = "stripes"
    title: ClassVar[str] = "Stripes"
    config_type: ClassVar[type[StripesConfig]] = StripesConfig
    search_paths: ClassVar[tuple[str, ...]] = ("stripes",)

    def facts(self, config: StripesConfig) -> Facts:
        """Return the protocol's constants."""
        mean, std = (0.5,), (0.25,)
        return Facts(
            name=self.name,
            protocol="plain",
            task="Direction of stripes",
            spurious="Brightness",
            classes=("upright", "lying"),
            groups=GROUPS,
            metric="wga",
            counts=SIZES,
            group_counts={},
            backbone="lenet4",
            channels=1,
            train_transform=Transform(PaddedRandomCrop(4), 32, mean, std),
            eval_transform=Transform(ResizedCentreCrop(32), 32, mean, std),
        )

    def matches(self, folder: Path) -> bool:
        """Return whether the marker is there."""
        return (folder / "marker").is_file()

    def labels(self, folder: Path, config: StripesConfig) -> Mapping[str, Labels]:
        """Draw classes and brightness."""
        found, first = {}, 0
        for split, size in SIZES.items():
            ids = torch.arange(first, first + size)
            y = ids % 2
            bright = torch.where(ids % 10 < 8, y, 1 - y)
            found[split] = Labels(ids, y, 2 * y + bright)
            first += size
        return found

    def images(
        self, folder: Path, config: StripesConfig, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Draw the images of the wanted samples."""
        return {split: MemoryImages(_drawn(part)) for split, part in labels.items()}


def _drawn(labels: Labels) -> Tensor:
    stripes = (torch.arange(28) // 3 % 2).float()
    upright, lying = stripes.expand(28, 28), stripes.expand(28, 28).t()
    shapes = torch.where((labels.y == 0)[:, None, None], upright, lying)
    light = torch.where(labels.groups % 2 == 1, 200.0, 80.0)[:, None, None]
    return (shapes * light + 20).to(torch.uint8)[:, None]
