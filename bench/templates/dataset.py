"""Example Dataset: images in a folder, and a table of their labels. Say here where it is from.

The folder has `labels.csv`, with the columns `file`, `split` (train, val or test), `y` and `place`,
and the images that it names. Replace what is particular to it; the rest reads any such folder.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datasets.base import SPLITS, Facts, Labels
from datasets.config import require
from datasets.dataset import Dataset, Progress, register
from datasets.decode import decode
from datasets.errors import DataCorrupt
from datasets.images import Images, MemoryImages
from datasets.transforms import ResizedCentreCrop, ResizedRandomCrop, Transform

CLASSES = ("round", "square")
PLACES = ("dark", "light")
SIDE = 32  # pixels of the images; a set of photographs of many sizes is a `PhotoDataset`
TABLE = "labels.csv"


@dataclass(frozen=True)
class ExampleDatasetConfig:
    """The settings that choose a protocol; `--set example_dataset.shift=4` changes one.

    Attributes:
        shift: pixels by which training images are moved at random.
    """

    shift: int = 2

    def __post_init__(self) -> None:
        require(0 <= self.shift <= 8, f"shift must be from 0 to 8 but got {self.shift}")


@register
class ExampleDataset(Dataset):
    """Round and square things, most of them where their class usually is."""

    name: ClassVar[str] = "example_dataset"
    title: ClassVar[str] = "Example Dataset"
    config_type: ClassVar[type[ExampleDatasetConfig]] = ExampleDatasetConfig
    search_paths: ClassVar[tuple[str, ...]] = ("example_dataset",)  # below the data root

    def facts(self, config: ExampleDatasetConfig) -> Facts:
        """Return the constants of the protocol, without a look at the disk."""
        mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
        crop = ResizedRandomCrop(SIDE + config.shift)
        return Facts(
            name=self.name,
            protocol="plain",  # another name wherever other samples or labels are meant
            task="Shape",
            spurious="Brightness of the background",
            classes=CLASSES,
            groups=tuple(f"{c}_{place}" for c in CLASSES for place in PLACES),
            metric="wga",
            # The sizes that the released files have, e.g. {"train": 4795, ...}, and the same by
            # group; they are checked when it is loaded. Pin `label_digest` as well, then.
            counts={},
            group_counts={},
            backbone="lenet5",  # or a timm name; photographs start from ImageNet weights
            channels=3,
            train_transform=Transform(crop, SIDE, mean, std),
            eval_transform=Transform(ResizedCentreCrop(SIDE), SIDE, mean, std),
        )

    def matches(self, folder: Path) -> bool:
        """Return whether a folder is this dataset's."""
        return (folder / TABLE).is_file()

    def labels(self, folder: Path, config: ExampleDatasetConfig) -> Mapping[str, Labels]:
        """Read the labels of every split; the id of a sample is its line in the table."""
        rows = read_table(folder)
        found = {}
        for split in SPLITS:
            own = [number for number, row in enumerate(rows) if row["split"] == split]
            y = torch.tensor([CLASSES.index(rows[number]["y"]) for number in own])
            place = torch.tensor([PLACES.index(rows[number]["place"]) for number in own])
            found[split] = Labels(torch.tensor(own), y, len(PLACES) * y + place)
        return found

    def images(
        self,
        folder: Path,
        config: ExampleDatasetConfig,
        labels: Mapping[str, Labels],
        progress: Progress,
    ) -> Mapping[str, Images]:
        """Read the images of the wanted samples, in their order, into memory."""
        rows = read_table(folder)
        opened = {}
        for split, part in labels.items():
            files = [folder / rows[number]["file"] for number in part.ids.tolist()]
            opened[split] = MemoryImages(_read(files, f"{self.name}, {split}", progress))
        return opened

    def write_sample(self, folder: Path) -> None:
        """Write a small sample in the real format, which the contract tests are run on."""
        draws = np.random.default_rng(0)
        lines = ["file,split,y,place"]
        rows, columns = np.mgrid[:SIDE, :SIDE] - SIDE / 2
        shapes = (np.hypot(rows, columns) < 9, np.maximum(abs(rows), abs(columns)) < 8)
        for number in range(360):
            split = SPLITS[0 if number < 240 else 1 if number < 300 else 2]
            y = number % 2
            place = y if draws.random() < (0.9 if split == "train" else 0.5) else 1 - y
            pixels = draws.integers(0, 60, (SIDE, SIDE, 3)) + 100 * place
            pixels += 90 * shapes[y][..., None]
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
            lines.append(f"{number}.png,{split},{CLASSES[y]},{PLACES[place]}")
        (folder / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_table(folder: Path) -> list[dict[str, str]]:
    """Read the table, and check what the rest relies on."""
    with (folder / TABLE).open(newline="", encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    known = {"split": SPLITS, "y": CLASSES, "place": PLACES}
    for number, row in enumerate(rows):
        for column, values in known.items():
            if row.get(column) not in values:
                raise DataCorrupt(
                    f"{folder / TABLE}, row {number + 1}: {column} is {row.get(column)!r}",
                    f"it must be one of {', '.join(values)}",
                )
    return rows


def _read(files: list[Path], what: str, progress: Progress) -> Tensor:
    """Read images of one size as (N, C, H, W) bytes."""
    pixels = torch.empty(len(files), 3, SIDE, SIDE, dtype=torch.uint8)
    for number, file in enumerate(files):
        image = decode(file)
        if image.shape != (SIDE, SIDE, 3):
            raise DataCorrupt(f"{file} has the shape {image.shape}", f"expected {SIDE} x {SIDE}")
        pixels[number] = torch.from_numpy(image.copy()).permute(2, 0, 1)
        progress(what, number + 1, len(files))
    return pixels
