"""ISIC: benign against malignant skin lesions, where coloured patches appear on benign ones only.

Paper: Sohoni et al. 2020 (GEORGE), from the ISIC archive of 2020 with its SONIC study (not the
2019 challenge set, as the NCT paper says). The NCT paper's sizes (N = 23,906) are those of the
archive with unknown diagnoses counted as benign; GEORGE drops them: `unknown` chooses. Transforms
follow the NCT paper; GEORGE's own (no crop, no upsampling) are `pipeline = "george"`.
Both column schemas are read: that of GEORGE's loader and that of its downloader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd

from datasets.base import SPLITS, Facts, PairAuroc
from datasets.dataset import METRIC_TITLES, register
from datasets.errors import DataCorrupt
from datasets.photos import (
    PhotoConfig,
    PhotoDataset,
    photo_bound,
    photo_transforms,
    read_table,
    require_columns,
)
from datasets.transforms import ResizedCentreCrop

MEAN, STD = (0.71826, 0.56291, 0.52548), (0.16318, 0.14502, 0.17271)

PAIR_AUROCS = {
    "auroc_nonpatch": PairAuroc("", 0),
    "auroc_histopath": PairAuroc("histopath", 1),
    "auroc_worst_patch_pair": PairAuroc("", None),
    "auroc_worst_histopath_pair": PairAuroc("histopath", None),
}
"""GEORGE's code takes the worst pair of either grouping; its tables show the two named groups,
which are the ones expected to be worst."""


@dataclass(frozen=True)
class IsicConfig(PhotoConfig):
    """Which ISIC.

    Attributes:
        unknown: count images without a benign or malignant diagnosis as `benign` (the NCT paper's
            sizes) or `drop` them (GEORGE's rule; its sizes are not published, so not asserted).
        pipeline: `paper` (random resized crop, flips) or `george` (flips only, no upsampling).
    """

    unknown: Literal["benign", "drop"] = "benign"
    pipeline: Literal["paper", "george"] = "paper"


@register
class Isic(PhotoDataset):
    """Lesions whose colour patches prove them benign."""

    name: ClassVar[str] = "isic"
    title: ClassVar[str] = "ISIC"
    order: ClassVar[int] = 30
    table_metrics: ClassVar[tuple[str, ...]] = ("auroc", "auroc_nonpatch", "auroc_histopath")
    metric_titles: ClassVar[Mapping[str, str]] = {
        **METRIC_TITLES,
        "auroc_nonpatch": "Non-Patch",
        "auroc_histopath": "Histopath.",
        "auroc_worst_patch_pair": "Worst patch pair",
        "auroc_worst_histopath_pair": "Worst histopath. pair",
        "wga_histopath": "WGA, histopath.",
    }
    config_type: ClassVar[type[IsicConfig]] = IsicConfig
    search_paths: ClassVar[tuple[str, ...]] = ("isic", "isic/processed", ".")

    def facts(self, config: IsicConfig) -> Facts:
        """Return the protocol's constants."""
        train, evaluate = photo_transforms(config.resolution, MEAN, STD, vflip=True)
        if config.pipeline == "george":
            whole = ResizedCentreCrop(config.resolution)
            train, evaluate = replace(train, cut=whole), replace(evaluate, cut=whole)
        published = config.unknown == "benign"
        return Facts(
            name=self.name,
            protocol=f"unknown_{config.unknown}",
            task="Lesion diagnosis (binary)",
            spurious="Colored patches",
            classes=("benign", "malignant"),
            codes=("Ben", "Mal"),
            groups=("benign_no_patch", "benign_patch", "malignant"),
            metric="auroc",
            counts={"train": 19_124, "val": 2_390, "test": 2_392} if published else {},
            group_counts={"train": (9_861, 7_420, 1_843)} if published else {},
            backbone="resnet50",
            channels=3,
            train_transform=train,
            eval_transform=evaluate,
            bound=photo_bound(config.decode, train, evaluate),
            extra_groupings={"histopath": ("benign_no_hist", "benign_hist", "malignant")},
            pair_aurocs=PAIR_AUROCS,
        )

    def matches(self, folder: Path) -> bool:
        """Return whether a label table and its images are in `folder`."""
        return (folder / "labels.csv").is_file() and (folder / "images").is_dir()

    def table(self, folder: Path, config: IsicConfig) -> pd.DataFrame:
        """Read labels.csv in either schema."""
        path = folder / "labels.csv"
        table = _common_columns(read_table(path), path)
        if config.unknown == "drop":
            table = table[table["diagnosis"].isin(["benign", "malignant"])]
        y = (table["diagnosis"] == "malignant").astype(int)
        split = table["split"].map({name: number for number, name in enumerate(SPLITS)})
        if split.isna().any():
            odd = sorted(set(table["split"].astype(str)) - set(SPLITS))
            raise DataCorrupt(f"{path} names unknown splits {odd}", "use train, val and test")
        hist = (table["confirmed"] == "histopathology").to_numpy()
        return pd.DataFrame(
            {
                "id": table.index,
                "file": table["file"],
                "split": split.astype(int),
                "y": y,
                "group": np.where(y == 1, 2, table["patch"].astype(int)),
                "histopath": np.where(y == 1, 2, hist),
            }
        )


def _common_columns(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return both schemas with one set of columns: file, diagnosis, split, patch, confirmed."""
    if "Image Index" in table.columns:
        names = {
            "Image Index": "file",
            "benign_malignant": "diagnosis",
            "fold": "split",
            "patch": "patch",
            "diagnosis_confirm_type": "confirmed",
        }
    else:
        names = {
            "_id": "file",
            "meta.clinical.benign_malignant": "diagnosis",
            "split": "split",
            "patch": "patch",
            "meta.clinical.diagnosis_confirm_type": "confirmed",
        }
    require_columns(table, set(names), path)
    common = table[list(names)].rename(columns=names)
    suffix = common["file"].astype(str).map(lambda name: "" if Path(name).suffix else ".jpg")
    common["file"] = "images/" + common["file"].astype(str) + suffix
    return common
