"""Datasets that are folders of photographs with a table of labels beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd
import torch

from datasets.base import SPLITS, Labels
from datasets.dataset import Dataset, Progress, silent
from datasets.decode import (
    FOLDER_NAME,
    decode,
    decode_all,
    decoded_folder,
    find_mapped,
    mapped_images,
    remove_damaged,
)
from datasets.errors import DataCorrupt, UsageError
from datasets.images import Images
from datasets.pixels import SAMPLED, ImageCheck, PixelDigest, spread
from datasets.transforms import RandomResizedCrop, ResizedCentreCrop, Transform

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PhotoConfig:
    """Which photographs.

    Attributes:
        resolution: side of the images the network sees; the paper's is 224.
    """

    resolution: int = 224

    def __post_init__(self) -> None:
        if self.resolution < 32:
            raise UsageError(f"resolution must be at least 32 but got {self.resolution}")


class PhotoDataset(Dataset):
    """A dataset whose subclass only has to read its table of labels."""

    @abstractmethod
    def table(self, folder: Path, config: Any) -> pd.DataFrame:
        """Read one row an image: id, file in `folder`, split (0/1/2), y, group, extra groupings."""

    def labels(self, folder: Path, config: Any) -> Mapping[str, Labels]:
        """Read the labels of every split."""
        facts = self.facts(config)
        parts = _by_split(self._whole_numbers(folder, config))
        for name, part in parts.items():
            if part.empty:
                raise DataCorrupt(f"{folder} names no {name} images", "get the released table")
            for column, names in (("y", facts.classes), ("group", facts.groups)):
                if not part[column].between(0, len(names) - 1).all():
                    raise DataCorrupt(
                        f"{folder} has a {column} outside of 0..{len(names) - 1}",
                        "get the released table",
                    )
        return {name: _labels(part, tuple(facts.extra_groupings)) for name, part in parts.items()}

    def _whole_numbers(self, folder: Path, config: Any) -> pd.DataFrame:
        """Read the table, refusing one in which a number is missing or is none."""
        try:
            table = self.table(folder, config)
            return table.astype({name: "int64" for name in table.columns if name != "file"})
        except (ValueError, TypeError) as error:
            raise DataCorrupt(
                f"the labels in {folder} are not all whole numbers: {error}",
                "replace the table by the released file",
            ) from error

    def images(
        self, folder: Path, config: Any, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Open the decoded images, decoding them first where that was not done before."""
        parts = _by_split(self._whole_numbers(folder, config))
        # Protocols differ in which images they take, and must not overwrite each other's pixels.
        stem = f"{self.name}-{self.facts(config).protocol}"
        return {
            name: _open(
                folder,
                parts[name],
                part.ids,
                f"{stem}-{name}",
                partial(progress, f"decoding {self.name} {name}"),
            )
            for name, part in labels.items()
        }

    def prepare(
        self,
        root: Path,
        config: Any,
        progress: Progress = silent,
        *,
        splits: Sequence[str] = SPLITS,
        quick: bool = False,
    ) -> None:
        """Check the labels and decode the images that were not decoded before."""
        self.load(root, config, progress, splits=splits, quick=quick)

    def check_images(self, folder: Path, config: Any, progress: Progress) -> ImageCheck:
        """Decode every image file, digest the pixels, and check what was decoded before."""
        parts = _by_split(self._whole_numbers(folder, config))
        ordered = {name: part.sort_values("id")["file"].tolist() for name, part in parts.items()}
        files = [folder / file for part in ordered.values() for file in part]
        sampled = {
            folder / part[place]
            for part in ordered.values()
            for place in spread(len(part), SAMPLED)
        }
        sample, whole, sizes, bad = PixelDigest(), PixelDigest(), set(), []
        decoded = zip(files, decode_all(files, _image_or_error), strict=True)
        for done, (file, image) in enumerate(decoded, start=1):
            progress(f"checking {self.name}", done, len(files))
            if isinstance(image, str):
                bad.append(f"{file}: {image}")
                continue
            whole.add(image)
            sizes.add((image.shape[1], image.shape[0]))
            if file in sampled:
                sample.add(image)
        places = dict.fromkeys((decoded_folder(folder), folder / FOLDER_NAME))
        notes = [note for place in places for note in remove_damaged(place, f"{self.name}-")]
        digests = ("", "") if bad else (sample.hexdigest(), whole.hexdigest())
        return ImageCheck(*digests, sorted(sizes), bad, notes)


def _image_or_error(file: Path) -> np.ndarray | str:
    """Decode an image, or return why that cannot be done."""
    try:
        return decode(file)
    except DataCorrupt as error:
        return str(error.__cause__)


def _open(
    folder: Path,
    part: pd.DataFrame,
    ids: torch.Tensor,
    name: str,
    progress: Callable[[int, int], None],
) -> Images:
    """Open the images of a split, or only those with the given ids, which are in its order."""
    cache, beside = decoded_folder(folder), folder / FOLDER_NAME
    files = [folder / file for file in part["file"]]
    if len(ids) == len(files):
        return mapped_images(files, cache / name, progress, elsewhere=beside / name)
    chosen = part["id"].isin(ids.tolist()).to_numpy()
    if chosen.sum() != len(ids):
        raise DataCorrupt(f"{folder} has images with the same id", "get the released table")
    whole = find_mapped(files, cache / name, beside / name)
    if whole is not None:
        return whole.subset(torch.from_numpy(chosen.nonzero()[0]))
    few = [file for file, wanted in zip(files, chosen, strict=True) if wanted]
    part_name = f"{name}-part"
    return mapped_images(few, cache / part_name, progress, elsewhere=beside / part_name)


def photo_transforms(
    resolution: int,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    *,
    vflip: bool = False,
) -> tuple[Transform, Transform]:
    """Build the paper's pipelines: random crops and flips, or the centre of a resize to 8/7."""
    look = resolution, mean, std
    train = Transform(RandomResizedCrop(), *look, hflip=True, vflip=vflip, rounded=True)
    evaluate = Transform(ResizedCentreCrop(round(resolution * 256 / 224)), *look, rounded=True)
    return train, evaluate


class PhotoNetwork(TypedDict):
    """The facts of a set that is trained on as the paper trains on photographs."""

    backbone: str
    channels: int
    train_transform: Transform
    eval_transform: Transform


def photo_network(resolution: int) -> PhotoNetwork:
    """Return the paper's network and pipelines for photographs."""
    train, evaluate = photo_transforms(resolution)
    return {
        "backbone": "resnet50",
        "channels": 3,
        "train_transform": train,
        "eval_transform": evaluate,
    }


def read_table(path: Path, **options: Any) -> pd.DataFrame:
    """Read a label file; raise `DataCorrupt` if it is broken."""
    try:
        table: pd.DataFrame = pd.read_csv(path, **options)
        return table
    except (ValueError, OSError) as error:
        raise DataCorrupt(
            f"{path} cannot be read as a table: {error}", "replace it by the released file"
        ) from error


def require_columns(table: pd.DataFrame, columns: set[str], path: Path) -> None:
    """Raise `DataCorrupt` with the names of the columns that are missing."""
    missing = sorted(columns - set(table.columns))
    if missing:
        there = ", ".join(map(str, table.columns))
        raise DataCorrupt(
            f"{path} has no column {', '.join(missing)}; it has {there}",
            "replace it by the released file",
        )


def _by_split(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {name: table[table["split"] == number] for number, name in enumerate(SPLITS)}


def _labels(part: pd.DataFrame, groupings: tuple[str, ...]) -> Labels:
    def column(name: str) -> torch.Tensor:
        return torch.tensor(part[name].to_numpy(dtype="int64"))

    return Labels(
        column("id"), column("y"), column("group"), {name: column(name) for name in groupings}
    )
