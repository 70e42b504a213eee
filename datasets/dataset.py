"""A dataset: where its files may lie, how they are read, what they must contain.

One subclass a dataset. `facts` needs no disk, `labels` reads the label files, `images` the pixels;
`load` puts them together and checks every count against the protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from datasets.base import SPLITS, Facts, LabelledSplit, Labels, LoadedData, check_counts
from datasets.errors import DataMissing
from datasets.fetch import get_command
from datasets.images import Images
from datasets.standins.marker import Marker, read_marker

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class OnDisk:
    """Where a dataset was found, and whether it is a stand-in."""

    folder: Path
    marker: Marker | None


class Dataset(ABC):
    """One benchmark dataset; instances hold no state."""

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]
    places: ClassVar[tuple[str, ...]]
    """Folders below the data root where the files may lie, in order of preference."""

    @abstractmethod
    def facts(self, config: Any) -> Facts:
        """State the protocol's constants."""

    @abstractmethod
    def holds(self, folder: Path) -> bool:
        """Tell whether `folder` holds this dataset's files."""

    @abstractmethod
    def labels(self, folder: Path, config: Any) -> Mapping[str, Labels]:
        """Read the labels of every split."""

    @abstractmethod
    def images(
        self, folder: Path, config: Any, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Open the images of every split, in the order of its labels."""

    def check_files(self, folder: Path, standin: bool) -> None:
        """Check sums of files that have a pinned one; datasets without such files do nothing."""
        return

    def bad_files(self, folder: Path, config: Any, progress: Progress) -> list[str]:
        """List every unreadable image; datasets without image files have none."""
        return []

    def locate(self, root: Path) -> OnDisk | None:
        """Find the dataset below the data root, or the root itself being its folder."""
        for place in self.places:
            folder = root / place
            if folder.is_dir() and self.holds(folder):
                return OnDisk(folder, read_marker(folder))
        return None

    def require(self, root: Path) -> OnDisk:
        """Find the dataset, or say how to get it."""
        found = self.locate(root)
        if found is None:
            raise DataMissing(f"{self.name} is not in {root}", get_command(self.name, root))
        return found

    def facts_of(self, config: Any, found: OnDisk | None) -> Facts:
        """State the facts of what is on disk: the protocol's, or a stand-in's own."""
        facts = self.facts(config)
        if found is None or found.marker is None:
            return facts
        marker = found.marker
        counts = {split: sum(groups.values()) for split, groups in marker.counts.items()}
        if not facts.counts:  # a protocol that asserts no sizes asserts none of a stand-in
            counts = {}
        return replace(
            facts,
            protocol=f"{facts.protocol}-standin-{marker.size}-{marker.seed}",
            counts=counts,
            group_counts={},
            label_digest=None,
        )

    def check(self, root: Path, config: Any) -> tuple[Facts, OnDisk, Mapping[str, Labels]]:
        """Read the labels and check them against the protocol, without touching images."""
        found = self.require(root)
        self.check_files(found.folder, standin=found.marker is not None)
        labels = self.labels(found.folder, config)
        facts = self.facts_of(config, found)
        chooses = tuple(k for k in ("protocol", "unknown") if hasattr(config, k))
        check_counts(facts, labels, str(found.folder), chooses)
        return facts, found, labels

    def load(self, root: Path, config: Any, progress: Progress = silent) -> LoadedData:
        """Read, check and open everything."""
        facts, found, labels = self.check(root, config)
        images = self.images(found.folder, config, labels, progress)
        splits = {name: LabelledSplit(labels[name], images[name]) for name in SPLITS}
        return LoadedData(facts, splits, standin=found.marker is not None)
