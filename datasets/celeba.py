"""CelebA: is the hair blond, where gender is correlated with the answer.

Paper: Liu et al. 2015; the task is GroupDRO's (Blond_Hair against Male, official partition). The
NCT paper trains with DFR's ImageNet-style transform rather than GroupDRO's; so do we. Label files
are read comma-separated (Kaggle), whitespace-separated (GEORGE, CnC), or as the original text.
Deviations: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from datasets.base import Facts
from datasets.dataset import register
from datasets.errors import DataCorrupt
from datasets.photos import (
    PhotoConfig,
    PhotoDataset,
    photo_network,
    read_table,
    require_columns,
)
from datasets.pixels import Size

WANTED = ("Blond_Hair", "Male")
ALIGNED_SIZE = (178, 218)  # width and height of every aligned and cropped image
LABEL_DIGEST = "8db50d338042021ae56b51d6f59d2d99dbe27b22b549d86240fc3ad8d1334914"


@dataclass(frozen=True)
class CelebaConfig(PhotoConfig):
    """Which CelebA."""


@register
class Celeba(PhotoDataset):
    """Faces whose gender predicts the hair colour."""

    name: ClassVar[str] = "celeba"
    title: ClassVar[str] = "CelebA"
    order: ClassVar[int] = 20
    config_type: ClassVar[type[CelebaConfig]] = CelebaConfig
    search_paths: ClassVar[tuple[str, ...]] = ("celeba", "celebA", ".")

    def facts(self, config: CelebaConfig) -> Facts:
        """Return the protocol's constants."""
        return Facts(
            name=self.name,
            protocol="released",
            task="Hair color (binary)",
            spurious="Gender",
            classes=("not_blond", "blond"),
            codes=("NB", "B"),
            groups=("not_blond_female", "not_blond_male", "blond_female", "blond_male"),
            metric="wga",
            counts={"train": 162_770, "val": 19_867, "test": 19_962},
            group_counts={
                "train": (71_629, 66_874, 22_880, 1_387),
                "val": (8_535, 8_276, 2_874, 182),
                "test": (9_767, 7_535, 2_480, 180),
            },
            **photo_network(config),
            label_digest=LABEL_DIGEST,
        )

    def matches(self, folder: Path) -> bool:
        """Return whether both lists and the image folder are in `folder`."""
        lists = (_list_file(folder, name) for name in ("list_attr_celeba", "list_eval_partition"))
        return all(path is not None for path in lists) and (folder / "img_align_celeba").is_dir()

    def table(self, folder: Path, config: CelebaConfig) -> pd.DataFrame:
        """Join the attribute list and the partition list."""
        joined = read_attributes(folder).join(read_partition(folder), how="outer")
        if joined.isna().any(axis=None):
            raise DataCorrupt(f"the lists in {folder} do not fit together", "replace both of them")
        y = (joined["Blond_Hair"] == 1).astype(int)
        return pd.DataFrame(
            {
                "id": [int(name.partition(".")[0]) for name in joined.index.astype(str)],
                "file": [f"img_align_celeba/{name}" for name in joined.index],
                "split": joined["partition"].to_numpy(),
                "y": y.to_numpy(),
                "group": (2 * y + (joined["Male"] == 1)).to_numpy(),
            }
        )

    def why_not_release(self, sizes: Sequence[Size]) -> str:
        """Compare sizes: all released images have one."""
        other = [f"{w} x {h}" for w, h in sizes if (w, h) != ALIGNED_SIZE]
        return f"there are images of {other[0]}, the released ones are 178 x 218" if other else ""


def _list_file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}{suffix}" for suffix in (".csv", ".txt"))
    return next((path for path in candidates if path.is_file()), None)


def _found(folder: Path, name: str) -> Path:
    path = _list_file(folder, name)
    if path is None:
        raise DataCorrupt(f"{folder} has no {name}.csv or .txt", "python -m bench data get celeba")
    return path


def _first_lines(path: Path) -> tuple[str, str]:
    try:
        with path.open(encoding="utf-8") as lines:
            return lines.readline(), lines.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise DataCorrupt(
            f"{path} is not text: {error}", "replace it by the released file"
        ) from error


def read_attributes(folder: Path) -> pd.DataFrame:
    """Read the two attributes of every image, by file name, from any of the three forms."""
    path = _found(folder, "list_attr_celeba")
    first, second = _first_lines(path)
    # The original text opens with the number of rows, and its header names no first column.
    counted = first.strip().isdigit()
    header = second if counted else first
    separator = "," if "," in header else r"\s+"
    names = [name for name in header.replace(",", " ").split() if name != "image_id"]
    table = read_table(
        path,
        sep=separator,
        skiprows=2 if counted else 1,
        header=None,
        names=["image_id", *names],
        usecols=lambda name: name in ("image_id", *WANTED),  # two of forty: half the time
        index_col="image_id",
    )
    require_columns(table, set(WANTED), path)
    return table[list(WANTED)]


def read_partition(folder: Path) -> pd.DataFrame:
    """Read the split number of every image, by file name, from any of the three forms."""
    path = _found(folder, "list_eval_partition")
    first, _ = _first_lines(path)
    separator = "," if "," in first else r"\s+"
    headed = not first.split("," if "," in first else None)[-1].strip().isdigit()
    return read_table(
        path,
        sep=separator,
        skiprows=1 if headed else 0,
        header=None,
        names=["image_id", "partition"],
        index_col="image_id",
    )
