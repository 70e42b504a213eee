"""Waterbirds: land birds and water birds pasted on land and water backgrounds.

Paper: Sagawa et al. 2020 (GroupDRO), from CUB-200-2011 and Places. The released table is read as
it is (its generator is unseeded, and three land-bird species are labelled waterbird: kept).
Transforms follow the NCT paper, which is GroupDRO's optional augmented branch. Deviations: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pandas as pd

from datasets.base import Facts
from datasets.dataset import register
from datasets.photos import (
    PhotoConfig,
    PhotoDataset,
    photo_network,
    read_table,
    require_columns,
)
from datasets.pixels import Size

RELEASE = "waterbird_complete95_forest2water2"
LABEL_DIGEST = "de7dafdd9139ca95f7d001e82ca286af732a37955aabda616d9f392dbd485ff5"


@dataclass(frozen=True)
class WaterbirdsConfig(PhotoConfig):
    """Which Waterbirds."""


@register
class Waterbirds(PhotoDataset):
    """Birds whose background gives the class away, while training."""

    name: ClassVar[str] = "waterbirds"
    title: ClassVar[str] = "Waterbirds"
    order: ClassVar[int] = 10
    config_type: ClassVar[type[WaterbirdsConfig]] = WaterbirdsConfig
    search_paths: ClassVar[tuple[str, ...]] = (f"waterbirds/{RELEASE}", RELEASE, "waterbirds", ".")

    def facts(self, config: WaterbirdsConfig) -> Facts:
        """Return the protocol's constants."""
        return Facts(
            name=self.name,
            protocol="released",
            task="Bird type (binary)",
            spurious="Background",
            classes=("landbird", "waterbird"),
            codes=("LB", "WB"),
            groups=(
                "landbird_on_land",
                "landbird_on_water",
                "waterbird_on_land",
                "waterbird_on_water",
            ),
            metric="wga",
            counts={"train": 4_795, "val": 1_199, "test": 5_794},
            group_counts={
                "train": (3_498, 184, 56, 1_057),
                "val": (467, 466, 133, 133),
                "test": (2_255, 2_255, 642, 642),
            },
            **photo_network(config),
            label_digest=LABEL_DIGEST,
        )

    def matches(self, folder: Path) -> bool:
        """Return whether the released table is in `folder`."""
        path = folder / "metadata.csv"
        if not path.is_file():
            return False
        with path.open("rb") as table:
            return b"img_filename" in table.readline()

    def table(self, folder: Path, config: WaterbirdsConfig) -> pd.DataFrame:
        """Read metadata.csv."""
        path = folder / "metadata.csv"
        table = read_table(path)
        require_columns(table, {"img_id", "img_filename", "y", "split", "place"}, path)
        return pd.DataFrame(
            {
                "id": table["img_id"],
                "file": table["img_filename"],
                "split": table["split"],
                "y": table["y"],
                "group": 2 * table["y"] + table["place"],
            }
        )

    def why_not_release(self, sizes: Sequence[Size]) -> str:
        """Compare sizes: the released photographs have those of CUB's, which differ."""
        one = [f"all are {w} x {h}, the released ones of many sizes" for w, h in sizes]
        return one[0] if len(one) == 1 else ""
