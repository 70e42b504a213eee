"""Datasets that are folders of photographs with a table of labels beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pandas as pd
import torch

from datasets.base import SPLITS, Labels
from datasets.bounded import Bound, Decoding, bound_of
from datasets.config import added
from datasets.dataset import Dataset, Progress, silent
from datasets.decode import (
    FOLDER_NAME,
    Cache,
    decode,
    decode_all,
    decoded_folder,
    missing_files,
    open_all,
    remove_damaged,
)
from datasets.errors import DataCorrupt, UsageError
from datasets.images import Images
from datasets.pixels import SAMPLED, ImageCheck, PixelDigest, spread
from datasets.transforms import RandomResizedCrop, ResizedCentreCrop, Transform

OF_FILES = ("file", "content")  # columns of a table that are no numbers
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PhotoConfig:
    """Which photographs.

    Attributes:
        resolution: side of the images the network sees; the paper's is 224.
        decode: `bounded` keeps photos scaled down as far as no crop loses resolution, `native` as
            they are, so that crops are those of the published pipelines to the last bit.
    """

    resolution: int = 224
    decode: Decoding = added("native", default="bounded")

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
            return table.astype({name: "int64" for name in table.columns if name not in OF_FILES})
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
        facts, stem = self.facts(config), self._stem(config)
        caches = {}
        opened: dict[str, Images] = {}
        for name, part in labels.items():
            cache = _cache(folder, parts[name], f"{stem}-{name}", facts.bound)
            if len(part) < len(parts[name]):
                chosen = _chosen(folder, parts[name], part.ids)
                if (whole := cache.find()) is not None:
                    opened[name] = whole.subset(torch.from_numpy(chosen.nonzero()[0]))
                    continue
                some = f"{stem}-{name}-part"
                cache = _cache(folder, parts[name][chosen], some, facts.bound)
            caches[name] = cache
        decoded = open_all(
            caches,
            lambda name, *at: progress(f"decoding {self.name} {name}", *at),
            self.name,
            self.if_missing(folder),
        )
        return {name: opened[name] if name in opened else decoded[name] for name in labels}

    def _stem(self, config: Any) -> str:
        """Return what the names of decoded images begin with.

        Protocols differ in which images they take, and must not overwrite each other's pixels.
        """
        return f"{self.name}-{self.facts(config).protocol}"

    def undecoded_bytes(self, folder: Path, config: Any) -> int:
        """Estimate how much room the images need that are not decoded yet."""
        bound, stem = self.facts(config).bound, self._stem(config)
        parts = _by_split(self._whole_numbers(folder, config)).items()
        caches = [_cache(folder, part, f"{stem}-{name}", bound) for name, part in parts]
        return sum(cache.missing_bytes() for cache in caches if cache.find() is None)

    def absent(self, folder: Path, config: Any) -> Mapping[str, torch.Tensor]:
        """Return the ids of each split whose image files are not there."""
        parts = _by_split(self._whole_numbers(folder, config))
        gone = {
            name: set(missing_files(folder / file for file in part["file"]))
            for name, part in parts.items()
        }
        return {
            name: torch.tensor(
                part["id"][[folder / file in gone[name] for file in part["file"]]].to_numpy("int64")
            )
            for name, part in parts.items()
        }

    def prepare(
        self,
        root: Path,
        config: Any,
        progress: Progress = silent,
        **what: Any,
    ) -> None:
        """Check the labels and decode the images that were not decoded before."""
        self.load(root, config, progress, **what)

    def check_images(self, folder: Path, config: Any, progress: Progress) -> ImageCheck:
        """Decode every image file, digest the pixels, and check what was decoded before."""
        parts = _by_split(self._whole_numbers(folder, config))
        ordered = {name: part.sort_values("id")["file"].tolist() for name, part in parts.items()}
        every = [folder / file for part in ordered.values() for file in part]
        absent = missing_files(every)
        lacking = set(absent)
        files = [file for file in every if file not in lacking]
        sampled = {
            folder / part[place]
            for part in ordered.values()
            for place in spread(len(part), SAMPLED)
        }
        bound = self.facts(config).bound
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
                sample.add(image if bound is None else decode(file, bound))
        places = dict.fromkeys((decoded_folder(folder), folder / FOLDER_NAME))
        notes = [note for place in places for note in remove_damaged(place, f"{self.name}-")]
        digests = ("", "") if bad or absent else (sample.hexdigest(), whole.hexdigest())
        missing = [str(file) for file in absent]
        return ImageCheck(*digests, sorted(sizes), bad, notes, missing, decoded_folder(folder))


def _image_or_error(file: Path) -> np.ndarray | str:
    """Decode an image, or return why that cannot be done."""
    try:
        return decode(file)
    except DataCorrupt as error:
        return str(error.__cause__)


def _cache(folder: Path, part: pd.DataFrame, name: str, bound: Bound | None) -> Cache:
    """Return the cache of the images of a table."""
    own, beside = decoded_folder(folder), folder / FOLDER_NAME
    name = name if bound is None else f"{name}-{bound}"
    files = [folder / file for file in part["file"]]
    digests = part["content"].tolist() if "content" in part else None
    return Cache(files, own / name, beside / name, bound, digests)


def _chosen(folder: Path, part: pd.DataFrame, ids: torch.Tensor) -> np.ndarray:
    """Return which images of a split have the given ids, which are in its order."""
    chosen: np.ndarray = part["id"].isin(ids.tolist()).to_numpy()
    if chosen.sum() != len(ids):
        raise DataCorrupt(f"{folder} has images with the same id", "get the released table")
    return chosen


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


def photo_bound(decode: Decoding, *transforms: Transform) -> Bound | None:
    """Return what photos are scaled down to for some pipelines, if they are."""
    return bound_of(*transforms) if decode == "bounded" else None


class PhotoNetwork(TypedDict):
    """The facts of a set that is trained on as the paper trains on photographs."""

    backbone: str
    channels: int
    train_transform: Transform
    eval_transform: Transform
    bound: Bound | None


def photo_network(config: PhotoConfig) -> PhotoNetwork:
    """Return the paper's network and pipelines for photographs."""
    train, evaluate = photo_transforms(config.resolution)
    return {
        "backbone": "resnet50",
        "channels": 3,
        "train_transform": train,
        "eval_transform": evaluate,
        "bound": photo_bound(config.decode, train, evaluate),
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
