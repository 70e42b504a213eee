"""Datasets that are folders of photographs with a table of labels beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from datasets.base import SPLITS, Labels
from datasets.dataset import Dataset, Progress
from datasets.decode import BESIDE, decode_error, decoded_folder, mapped_images
from datasets.errors import DataCorrupt, UsageError
from datasets.images import Images
from datasets.transforms import RandomResizedCrop, ResizedCentreCrop, Transform

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PhotoDataset(Dataset):
    """A dataset whose subclass only has to read its table of labels."""

    @abstractmethod
    def table(self, folder: Path, config: Any) -> pd.DataFrame:
        """Read one row per image: id, file below `folder`, split (0/1/2), y, group, alternates."""

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
        return {name: _labels(part, tuple(facts.alternates)) for name, part in parts.items()}

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
        cache = decoded_folder(folder)
        # Protocols differ in which images they take, and must not overwrite each other's pixels.
        stem = f"{self.name}-{self.facts(config).protocol}"
        return {
            name: mapped_images(
                [folder / file for file in part["file"]],
                cache / f"{stem}-{name}",
                partial(progress, f"decoding {self.name} {name}"),
                elsewhere=folder / BESIDE / f"{stem}-{name}",
            )
            for name, part in parts.items()
        }

    def bad_files(self, folder: Path, config: Any, progress: Progress) -> list[str]:
        """Decode every image and list those that fail, with the reason."""
        files = [folder / file for file in self.table(folder, config)["file"]]
        bad = []
        with ThreadPoolExecutor() as pool:
            for done, (file, error) in enumerate(
                zip(files, pool.map(decode_error, files), strict=True), start=1
            ):
                progress(f"checking {self.name}", done, len(files))
                if error is not None:
                    bad.append(f"{file}: {error}")
        return bad


def photo_transforms(
    resolution: int,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    *,
    vflip: bool = False,
) -> tuple[Transform, Transform]:
    """Build the paper's pipelines: random crops and flips, or the centre of a resize to 8/7."""
    train = Transform(RandomResizedCrop(), resolution, mean, std, hflip=True, vflip=vflip)
    evaluate = Transform(ResizedCentreCrop(round(resolution * 256 / 224)), resolution, mean, std)
    return train, evaluate


def check_resolution(resolution: int) -> None:
    """Refuse a resolution no network here can take."""
    if resolution < 32:
        raise UsageError(f"resolution must be at least 32 but got {resolution}")


def read_table(path: Path, **options: Any) -> pd.DataFrame:
    """Read a label file, or say that it is broken."""
    try:
        table: pd.DataFrame = pd.read_csv(path, **options)
        return table
    except (ValueError, OSError) as error:
        raise DataCorrupt(
            f"{path} cannot be read as a table: {error}", "replace it by the released file"
        ) from error


def require_columns(table: pd.DataFrame, columns: set[str], path: Path) -> None:
    """Fail with the names of the columns that are missing."""
    missing = sorted(columns - set(table.columns))
    if missing:
        there = ", ".join(map(str, table.columns))
        raise DataCorrupt(
            f"{path} has no column {', '.join(missing)}; it has {there}",
            "replace it by the released file",
        )


def _by_split(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {name: table[table["split"] == number] for number, name in enumerate(SPLITS)}


def _labels(part: pd.DataFrame, alternates: tuple[str, ...]) -> Labels:
    def column(name: str) -> torch.Tensor:
        return torch.tensor(part[name].to_numpy(dtype="int64"))

    return Labels(
        column("id"), column("y"), column("group"), {name: column(name) for name in alternates}
    )
