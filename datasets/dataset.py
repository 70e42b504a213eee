"""A dataset: where its files may lie, how they are read, what they must contain.

One subclass a dataset, under `@register`. `facts` needs no disk, `labels` reads the label files,
`images` opens the pixels; `load` puts them together and checks every count against the protocol.
Datasets outside this repository register through the entry-point group `bench.datasets`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from datasets.base import (
    SPLITS,
    DataKind,
    Facts,
    LabelledSplit,
    Labels,
    LoadedData,
    check_counts,
    label_digest,
)
from datasets.decode import IF_MISSING, file_sizes
from datasets.errors import BenchError, DataCorrupt, DataMissing, UsageError
from datasets.fetch import Log, get_command
from datasets.images import Images
from datasets.pixels import ImageCheck, Size, pixel_digest
from datasets.standins.marker import (
    ORIGIN_EXAMPLE,
    ORIGIN_NAME,
    Marker,
    Origin,
    read_marker,
    read_origin,
)

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""

NAME = re.compile("[a-z][a-z0-9_]{,39}")
RESERVED = ("all", "backbone", "cifar10", "mnist", "weights")
"""Words of the command line that stand where a dataset's name could."""

QUICK_SIZES = {"train": 1500, "val": 500, "test": 500}
QUICK_GROUP_MINIMUM = 8  # samples kept of a small group, as far as it has them

TABLE_METRICS = {"wga": ("wga", "avg"), "auroc": ("auroc",), "worst_class": ("worst_class", "avg")}
"""What a table shows of a dataset by default, by the dataset's metric."""

METRIC_TITLES: Mapping[str, str] = {
    "wga": "WGA",
    "avg": "Avg",
    "avg_train_weighted": "Avg, train-weighted",
    "worst_class": "Worst class",
    "auroc": "Overall",
    "balanced": "Balanced",
    "ece": "ECE",
}
"""How tables spell the metrics that every dataset can have."""

_loading_forbidden = False


def forbid_loading() -> None:
    """Make every later `load` in this process fail: a fit is given its data."""
    global _loading_forbidden
    _loading_forbidden = True


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Subset:
    """What is there of a dataset some of whose images are missing.

    Attributes:
        label_digest: of the samples that are there.
    """

    counts: Mapping[str, int]
    group_counts: Mapping[str, tuple[int, ...]]
    label_digest: str


@dataclass(frozen=True)
class OnDisk:
    """Where a dataset was found, and what says that it is a stand-in or rebuilt, if it is.

    Attributes:
        own: whether a user registered it (`datasets.own`).
        subset: what of it is used because more is not there, where a user allowed that.
    """

    folder: Path
    marker: Marker | None
    origin: Origin | None = None
    own: bool = False
    subset: Subset | None = None

    @property
    def data_kind(self) -> DataKind:
        """What the data is, as far as its folder says."""
        if self.marker is not None:
            return "standin"
        if self.own:
            return "own"
        if self.subset is not None:
            return "subset"
        return "release" if self.origin is None else "rebuilt"

    @property
    def standin(self) -> bool:
        """Whether it is a synthetic stand-in."""
        return self.marker is not None


class Dataset(ABC):
    """One benchmark dataset; instances hold no state.

    Attributes:
        name: lower-case letters, digits and underscores, a letter first.
        config_type: a frozen dataclass of the settings that choose a protocol.
        search_paths: folders below the data root where the files may lie, in order of preference.
        title: how tables and figures spell it; the name by default.
        order: its place in tables, lowest first; the paper's datasets have 10 to 50.
        table_metrics: the metrics that tables show, the headline first; by default the dataset's
            own metric, and the average accuracy beside a worst-group accuracy.
        metric_titles: how tables spell the metrics.
        source: what `bench data get` fetches for it; the name by default.
        extended: whether it stands in tables of the whole field alone, and not in the main table
            and what belongs to that.
        files_pinned: whether `check_files` compares all files with known sums, pixels among them.
        distribution: the installed package that brought it, or else the module that registered it;
            None for those of this repository.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]
    search_paths: ClassVar[tuple[str, ...]]
    title: ClassVar[str] = ""
    order: ClassVar[int] = 100
    table_metrics: ClassVar[tuple[str, ...]] = ()
    metric_titles: ClassVar[Mapping[str, str]] = METRIC_TITLES
    source: ClassVar[str] = ""
    extended: ClassVar[bool] = False
    files_pinned: ClassVar[bool] = False
    distribution: str | None = None

    @abstractmethod
    def facts(self, config: Any) -> Facts:
        """Return the protocol's constants."""

    @abstractmethod
    def matches(self, folder: Path) -> bool:
        """Return whether `folder` holds this dataset's files."""

    @abstractmethod
    def labels(self, folder: Path, config: Any) -> Mapping[str, Labels]:
        """Read the labels of every split."""

    @abstractmethod
    def images(
        self, folder: Path, config: Any, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Open the images of the given samples.

        Args:
            folder: where the files are.
            config: the settings.
            labels: the splits that are wanted. A split may have been cut down: its `ids` are the
                samples that are wanted, in the order of `labels(...)`.
            progress: called while images are decoded.
        """

    def check_files(self, folder: Path, standin: bool) -> None:
        """Check sums of files that have a pinned one; datasets without such files do nothing."""
        return

    def check_images(self, folder: Path, config: Any, progress: Progress) -> ImageCheck:
        """Read every image and digest the pixels of all."""
        labels = self.labels(folder, config)
        images = self.images(folder, config, labels, progress)
        splits = {name: LabelledSplit(part, images[name]) for name, part in labels.items()}
        return ImageCheck(pixel_digest(splits), pixel_digest(splits, whole=True))

    def why_not_release(self, sizes: Sequence[Size]) -> str:
        """Return why images of these sizes cannot be the released ones, if that is known.

        Says something of a release whose pixels are not pinned.
        """
        return ""

    def fetch(self, root: Path, log: Log) -> bool:
        """Fetch the dataset if that needs no person; return whether it is there now.

        Most datasets have to be downloaded by hand or with `bench data get`.
        """
        return False

    def prepare(
        self,
        root: Path,
        config: Any,
        progress: Progress = silent,
        *,
        splits: Sequence[str] = SPLITS,
        quick: bool = False,
        allow_subset: bool = False,
    ) -> None:
        """Check the labels and decode the images once, before many processes need them.

        By default there is nothing to decode.
        """
        self.check(root, config, allow_subset=allow_subset)

    def absent(self, folder: Path, config: Any) -> Mapping[str, Tensor]:
        """Return, by split, the ids of samples whose image files are not there.

        By default images have no files of their own.
        """
        return {}

    def if_missing(self, folder: Path) -> str:
        """Return what to do about image files that are not there; a stand-in has no subsets."""
        if read_marker(folder) is not None:
            return f"write the stand-in again: python -m bench data standin {self.name} --root DIR"
        return IF_MISSING

    def metadata(self, folder: Path, config: Any) -> pd.DataFrame | None:
        """Return what else is known of the samples: a row for each `id`, or none if nothing is."""
        return None

    def metric_title(self, metric: str) -> str:
        """Return how tables spell a metric."""
        if metric in self.metric_titles:
            return self.metric_titles[metric]
        grouping = metric.removeprefix("wga_")
        return metric if grouping == metric else f"WGA, {grouping}"

    def locate(self, root: Path) -> OnDisk | None:
        """Find the dataset below the data root, or the root itself being its folder."""
        for path in self.search_paths:
            folder = root / path
            if folder.is_dir() and self.matches(folder):
                return OnDisk(folder, read_marker(folder), read_origin(folder))
        return None

    def require(self, root: Path) -> OnDisk:
        """Find the dataset; raise `DataMissing` with the command that gets it."""
        found = self.locate(root)
        if found is None:
            raise DataMissing(f"{self.name} is not in {root}", get_command(self.name, root))
        return found

    def info_on_disk(self, config: Any, found: OnDisk | None) -> Facts:
        """Return the facts of what is on disk: the protocol's, or those of what stands for it.

        Rebuilt data has the labels of the release, and is checked against them.
        """
        facts = self.facts(config)
        if found is None or found.data_kind in ("release", "own"):
            return facts
        facts = replace(facts, pixel_digest=None, full_pixel_digest=None)
        if found.origin is not None:
            facts = replace(facts, protocol=f"{facts.protocol}-rebuilt-{found.origin.name}")
        if (some := found.subset) is not None:
            return replace(
                facts,
                protocol=f"{facts.protocol}-subset-{some.label_digest[:8]}",
                counts=some.counts,
                group_counts=some.group_counts,
                label_digest=some.label_digest,
            )
        if found.marker is None:
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

    def subset(self, found: OnDisk, config: Any) -> OnDisk:
        """Return what is there of a dataset some of whose images are missing.

        Raises:
            DataCorrupt: A group has no image left in a split.
        """
        if found.data_kind not in ("release", "rebuilt"):
            return found
        every, absent = self.labels(found.folder, config), self.absent(found.folder, config)
        labels = self._without(every, absent) if absent else every
        if all(len(labels[name]) == len(own) for name, own in every.items()):
            return found
        facts = self.facts(config)
        group_counts = {
            name: tuple(torch.bincount(own.groups, minlength=len(facts.groups)).tolist())
            for name, own in labels.items()
        }
        for name, counts in group_counts.items():
            before = torch.bincount(every[name].groups, minlength=len(facts.groups)).tolist()
            for group, left, had in zip(facts.groups, counts, before, strict=True):
                if had and not left:
                    raise DataCorrupt(
                        f"of the {had:,} images of {group} in the {name} split of {self.name} none "
                        f"is in {found.folder}: what is there is no subset to judge a model by",
                        "get more of the images",
                    )
        counted = {name: len(own) for name, own in labels.items()}
        return replace(found, subset=Subset(counted, group_counts, label_digest(labels)))

    @staticmethod
    def _without(
        labels: Mapping[str, Labels], absent: Mapping[str, Tensor]
    ) -> Mapping[str, Labels]:
        """Return the labels without those of samples that are absent."""
        return {
            name: own[(~torch.isin(own.ids, absent[name])).nonzero()[:, 0]]
            if name in absent
            else own
            for name, own in labels.items()
        }

    def check(
        self, root: Path, config: Any, *, allow_subset: bool = False
    ) -> tuple[Facts, OnDisk, Mapping[str, Labels]]:
        """Read the labels and check them against the protocol, without reading images.

        With `allow_subset`, samples whose images are missing are left out.
        """
        if _loading_forbidden:
            raise BenchError("a fit is given its data; it cannot load a dataset")
        found = self.require(root)
        self.check_files(found.folder, standin=found.standin)
        labels = self.labels(found.folder, config)
        facts = self.info_on_disk(config, found)
        chooses = tuple(k for k in ("protocol", "unknown") if hasattr(config, k))
        check_counts(facts, labels, str(found.folder), chooses)
        if allow_subset and (some := self.subset(found, config)).subset is not None:
            labels = self._without(labels, self.absent(found.folder, config))
            return self.info_on_disk(config, some), some, labels
        return facts, found, labels

    def load(
        self,
        root: Path,
        config: Any,
        progress: Progress = silent,
        *,
        splits: Sequence[str] = SPLITS,
        quick: bool = False,
        allow_subset: bool = False,
    ) -> LoadedData:
        """Read and check the labels of every split, and open the images of the wanted ones.

        Args:
            root: the data root.
            config: the settings.
            progress: called while images are decoded.
            splits: the splits whose images are opened; the others are left out of the result.
            quick: keep a small part of every split, before any image is decoded.
            allow_subset: leave out what has no image file, instead of raising.
        """
        facts, found, labels = self.check(root, config, allow_subset=allow_subset)
        if quick:
            labels = {name: quick_subset(part, QUICK_SIZES[name]) for name, part in labels.items()}
        wanted = {name: labels[name] for name in SPLITS if name in splits}
        images = self.images(found.folder, config, wanted, progress)
        opened = {name: LabelledSplit(part, images[name]) for name, part in wanted.items()}
        digest = pixel_digest(opened)
        if found.data_kind == "release":
            comparable = not quick and len(opened) == len(SPLITS)
            pinned = facts.pixel_digest if comparable else None
            self.require_release(found, pinned, digest, file_sizes(opened))
        return LoadedData(
            facts,
            opened,
            data_kind=found.data_kind,
            label_digest=label_digest(labels),
            pixel_digest=digest,
        )

    def require_release(
        self, found: OnDisk, pinned: str | None, digest: str, sizes: Sequence[Size]
    ) -> None:
        """Raise `DataCorrupt` where images are not the released ones and nothing says so.

        Args:
            found: where they are.
            pinned: the digest of the release's pixels, where it is known.
            digest: the digest that was found.
            sizes: the different sizes of the images.
        """
        why = self.why_not_release(sizes)
        if pinned not in (None, digest):
            why = f"expected pixel digest {pinned}, found {digest}"
        if why:
            raise DataCorrupt(
                f"the images of {self.name} in {found.folder} are not the released ones: {why}",
                f"get the release (python -m bench data get {self.name}); to use these images, "
                "labelled as rebuilt and kept out of published tables, put a file "
                f"{ORIGIN_NAME} into that folder that says {ORIGIN_EXAMPLE}",
            )


def quick_subset(labels: Labels, size: int) -> Labels:
    """Return the first samples of every group, in proportion; the same ones every time."""
    if len(labels) <= size:
        return labels
    share = size / len(labels)
    strata = torch.where(labels.groups < 0, labels.y, labels.groups)  # classes, where none is known
    kept = [_first(strata == stratum, share) for stratum in strata.unique()]
    return labels[torch.cat(kept).sort().values]


def _first(mine: Tensor, share: float) -> Tensor:
    positions = mine.nonzero()[:, 0]
    return positions[: max(round(share * len(positions)), min(QUICK_GROUP_MINIMUM, len(positions)))]


DATASETS: dict[str, Dataset] = {}
"""The datasets that were imported so far; `datasets.catalogue` finds all of them."""

DatasetType = TypeVar("DatasetType", bound=type[Dataset])


def register(dataset: DatasetType) -> DatasetType:
    """Add a dataset under its name, and complete what it leaves to the defaults."""
    name = dataset.name
    if NAME.fullmatch(name) is None or name in RESERVED:
        raise UsageError(
            f"'{name}' cannot be the name of a dataset",
            "use up to 40 lower-case letters, digits and underscores, beginning with a letter, and "
            f"none of {', '.join(RESERVED)}",
        )
    known = DATASETS.get(name)
    if known is not None and type(known).__qualname__ != dataset.__qualname__:
        raise UsageError(
            f"'{name}' is the name of two datasets: in {type(known).__module__} and in "
            f"{dataset.__module__}",
            "rename one of them",
        )
    added = dataset()
    dataset.title = dataset.title or name
    dataset.source = dataset.source or name
    if not dataset.table_metrics:
        dataset.table_metrics = TABLE_METRICS[added.facts(dataset.config_type()).metric]
    added.distribution = outside(dataset, "datasets")
    DATASETS[name] = added
    return dataset


def outside(kind: type, package: str) -> str | None:
    """Return the package or module that a class is from, or none if that is this repository's."""
    own = kind.__module__.partition(".")[0]
    return None if own == package else own
