"""What a dataset consists of, and what a method may see of it.

`Facts` are a protocol's constants and need no disk. `LoadedData` is for the harness alone and has
every label. `Task` is what `fit` receives: it is built from copies, so that hidden group labels and
the test split are not merely out of sight but not reachable from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from datasets.bounded import Bound
from datasets.config import added
from datasets.errors import BenchError, DataCorrupt
from datasets.features import RowTransform
from datasets.images import Images, MemoryImages
from datasets.resident import place
from datasets.transforms import Transform

SPLITS = ("train", "val", "test")

DataKind = Literal["release", "standin", "rebuilt", "subset", "own"]
"""What data is; only runs on a release are published."""

HeadlineMetric = Literal["wga", "auroc", "worst_class"]
"""What a dataset is judged by first; without group labels of the test split it is worst_class."""


class GroupLabelsHidden(BenchError):
    """A method read group labels that its supervision tier does not grant."""

    kind = "group_labels_hidden"


@dataclass(frozen=True)
class PairAuroc:
    """An AUROC of one group of negatives against all positives.

    Attributes:
        grouping: the name of an extra grouping, or "" for the groups themselves.
        group: the negative group, or None for the one with the lowest AUROC.
    """

    grouping: str
    group: int | None


@dataclass(frozen=True)
class Facts:
    """The constants of one dataset under one protocol.

    Attributes:
        extra_groupings: further groupings of the same samples, by name, that only evaluation uses.
        group_counts: expected samples per group and split; a split with no published counts is
            left out.
        label_digest: pinned digest of all labels, where the real files were at hand to pin it.
        pixel_digest: pinned digest of the images that a run samples, where it is known.
        full_pixel_digest: pinned digest of all images, where it is known.
        codes: short class names, for the names of leaves and for plots.
        group_sets: named sets of groups, where there are too many groups to take in at a glance.
        pair_aurocs: the AUROCs that are evaluated besides the overall one, by metric name, where
            the dataset's metric is an AUROC.
        group_splits: the splits whose group labels are known. Where none are, the groups are the
            classes; where only some are, the others' groups are -1.
        pretrained: whether the network starts from ImageNet weights by default.
        bound: what photos are scaled down to when they are decoded; none keeps them as they are.
    """

    name: str
    protocol: str
    task: str
    spurious: str
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    metric: HeadlineMetric
    counts: Mapping[str, int]
    group_counts: Mapping[str, tuple[int, ...]]
    backbone: str
    channels: int
    train_transform: Transform
    eval_transform: Transform
    extra_groupings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label_digest: str | None = None
    pixel_digest: str | None = None
    full_pixel_digest: str | None = None
    codes: tuple[str, ...] = ()
    group_sets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pair_aurocs: Mapping[str, PairAuroc] = field(default_factory=dict)
    group_splits: tuple[str, ...] = SPLITS
    pretrained: bool = True
    bound: Bound | None = None

    @property
    def rows(self) -> bool:
        """Whether samples are rows of features instead of images."""
        return isinstance(self.eval_transform, RowTransform)

    @property
    def worst_group_metric(self) -> str:
        """Name of the metric of the worst group: WGA, or the lowest AUROC of a pair of groups."""
        if self.metric == "wga":
            return "wga"
        worst = PairAuroc("", None)
        return next((name for name, pair in self.pair_aurocs.items() if pair == worst), self.metric)

    def fingerprint(self) -> str:
        """Hash the constants that determine which samples carry which labels, and their pixels.

        Transforms are left out: they are configuration and enter a job's id by themselves. So are
        names and groupings that only evaluation uses. Digests of pixels count where they are known,
        so that a protocol without any keeps the fingerprint it had before there were such digests.
        """
        pixels = {"pixels": self.pixel_digest, "all_pixels": self.full_pixel_digest}
        identity = {
            "name": self.name,
            "protocol": self.protocol,
            "classes": self.classes,
            "groups": self.groups,
            "counts": dict(self.counts),
            "group_counts": {split: list(n) for split, n in self.group_counts.items()},
            "label_digest": self.label_digest,
            **{name: pinned for name, pinned in pixels.items() if pinned is not None},
            **({"group_splits": self.group_splits} if self.group_splits != SPLITS else {}),
            **({"bound": asdict(self.bound)} if self.bound is not None else {}),
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Labels:
    """Everything known of one split's samples except their pixels."""

    ids: Tensor
    y: Tensor
    groups: Tensor
    extra_groupings: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Tensor) -> Labels:
        extra = {name: values[index] for name, values in self.extra_groupings.items()}
        return Labels(self.ids[index], self.y[index], self.groups[index], extra)


@dataclass(frozen=True)
class LabelledSplit:
    """One split with all its labels; never handed to a method."""

    labels: Labels
    images: Images

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Tensor) -> LabelledSplit:
        """Return the samples at `index`, in that order."""
        return LabelledSplit(self.labels[index], self.images.subset(index))


class Split:
    """One split as a method may see it: images, classes, ids, and groups if the tier grants them.

    Hidden labels are absent rather than private, so that no attribute, pickle or reference walk
    leads to them.
    """

    __slots__ = ("_granted", "_name", "ids", "images", "y")

    def __init__(
        self, name: str, images: Images, y: Tensor, ids: Tensor, granted: Tensor | None
    ) -> None:
        self._name = name
        self.images = images
        self.y = y
        self.ids = ids
        self._granted = granted

    @property
    def groups(self) -> Tensor:
        """Group labels, or `GroupLabelsHidden` where the method's tier does not grant them."""
        if self._granted is None:
            raise GroupLabelsHidden(
                f"group labels of the {self._name} split are hidden from this method",
                f"declare {self._name}_groups=True in the method's supervision() if it needs them",
            )
        return self._granted

    def narrowed(self, *, groups: bool) -> Split:
        """Return the split with or without its group labels.

        Raises:
            GroupLabelsHidden: Group labels are asked for that are hidden here already.
        """
        if groups:
            return Split(self._name, self.images, self.y, self.ids, self.groups)
        return Split(self._name, self.images, self.y, self.ids, None)

    def subset(self, index: Tensor) -> Split:
        """Return the samples at `index`, in that order, with the group labels that are granted."""
        granted = None if self._granted is None else self._granted[index]
        images = self.images.subset(index)
        return Split(self._name, images, self.y[index], self.ids[index], granted)

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, slots=True)
class BackboneSpec:
    """The network that turns images into features.

    Attributes:
        name: `lenet4`, `lenet5`, or any timm model name.
        pretrained: start from ImageNet weights (ignored by the LeNets).
        weights: a weights file; None means the one `bench data get weights` fetched.
        frozen: keep the network as its weights are, and train a head on its features.
        head: the network that is trained on features then, `linear` or `mlp`.
        input: whether images are brought to it as the dataset says (`data`) or as its weights
            expect (`network`); `auto` is `network` for a user's own data, whose protocol says
            nothing of that, and else `data`.
    """

    name: str
    pretrained: bool = False
    weights: str | None = None
    frozen: bool = added(False)
    head: Literal["linear", "mlp"] = added("linear")
    input: Literal["auto", "data", "network"] = added("auto")


@dataclass(frozen=True, slots=True)
class Task:
    """What `fit` receives: two splits and the names that belong to them; no test split."""

    name: str
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    metric: HeadlineMetric
    channels: int
    train: Split
    val: Split
    train_transform: Transform
    eval_transform: Transform
    backbone: BackboneSpec
    codes: tuple[str, ...] = ()

    def narrowed(self, *, train_groups: bool, val_groups: bool) -> Task:
        """Return the task with no more group labels than asked for.

        Raises:
            GroupLabelsHidden: Group labels are asked for that are hidden here already.
        """
        return replace(
            self,
            train=self.train.narrowed(groups=train_groups),
            val=self.val.narrowed(groups=val_groups),
        )


@dataclass(frozen=True)
class LoadedData:
    """The loaded splits of a dataset with all their labels, for the harness.

    Attributes:
        label_digest: digest of the labels of every split, also of those that were not loaded;
            empty where the data was not read from disk.
        pixel_digest: digest of a sample of the loaded images; empty likewise.
    """

    facts: Facts
    splits: Mapping[str, LabelledSplit]
    data_kind: DataKind = "release"
    label_digest: str = ""
    pixel_digest: str = ""

    @property
    def standin(self) -> bool:
        """Whether the data is a synthetic stand-in."""
        return self.data_kind == "standin"

    def to(self, device: torch.device) -> LoadedData:
        """Return the same data with image batches on `device`; labels stay on the CPU."""
        splits = {
            name: LabelledSplit(split.labels, place(split.images, device))
            for name, split in self.splits.items()
        }
        return replace(self, splits=splits)

    def grouping(self, split: str) -> tuple[tuple[str, ...], Tensor]:
        """Return names and labels of a split's groups; its classes where these are not known."""
        labels = self.splits[split].labels
        if split in self.facts.group_splits:
            return self.facts.groups, labels.groups
        return self.facts.classes, labels.y

    def task(self, backbone: BackboneSpec, *, train_groups: bool, val_groups: bool) -> Task:
        """Return what a supervision tier may see, and nothing else."""
        return _task(
            self.facts,
            backbone,
            _split("train", self.splits["train"], granted=train_groups),
            _split("val", self.splits["val"], granted=val_groups),
        )


def outline_task(facts: Facts, backbone: BackboneSpec) -> Task:
    """Return a task without samples, for what needs only its names, as a search space does."""
    images = MemoryImages(torch.empty(0, facts.channels, 1, 1, dtype=torch.uint8))
    none = torch.empty(0, dtype=torch.int64)
    empty = LabelledSplit(Labels(none, none, none), images)
    train, val = (_split(name, empty, granted=False) for name in ("train", "val"))
    return _task(facts, backbone, train, val)


def _split(name: str, split: LabelledSplit, *, granted: bool) -> Split:
    labels = split.labels
    groups = labels.groups.clone() if granted else None
    return Split(name, split.images, labels.y.clone(), labels.ids.clone(), groups)


def _task(facts: Facts, backbone: BackboneSpec, train: Split, val: Split) -> Task:
    return Task(
        name=facts.name,
        classes=facts.classes,
        codes=facts.codes or facts.classes,
        groups=facts.groups,
        metric=facts.metric,
        channels=facts.channels,
        train=train,
        val=val,
        train_transform=facts.train_transform,
        eval_transform=facts.eval_transform,
        backbone=backbone,
    )


def label_digest(labels: Mapping[str, Labels]) -> str:
    """Digest which samples are in which split with which class, group and further groupings."""
    digest = hashlib.sha256()
    for name in SPLITS:
        part = labels[name]
        order = torch.argsort(part.ids)
        for column in (part.ids, part.y, part.groups, *part.extra_groupings.values()):
            digest.update(column[order].to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def check_counts(
    facts: Facts, labels: Mapping[str, Labels], where: str, knobs: tuple[str, ...] = ()
) -> None:
    """Raise `DataCorrupt` with both numbers where the data is not what the protocol requires.

    Args:
        facts: what is expected.
        labels: what was found.
        where: the folder they were found in.
        knobs: settings of the dataset that choose what is expected, for the remedy.
    """

    def compare(what: str, expected: object, found: object) -> None:
        if expected != found:
            raise DataCorrupt(
                f"{facts.name} ({facts.protocol} protocol) in {where}: expected {what} "
                f"{expected}, found {found}",
                f"get the released files again (python -m bench data get {facts.name})"
                + "".join(f", or choose another --set {facts.name}.{knob}=..." for knob in knobs),
            )

    for name in SPLITS:
        if name in facts.counts:
            compare(f"{name} size", facts.counts[name], len(labels[name]))
        if name in facts.group_counts:
            found = torch.bincount(labels[name].groups, minlength=len(facts.groups))
            compare(f"{name} group counts", tuple(facts.group_counts[name]), tuple(found.tolist()))
    if facts.label_digest is not None:
        compare("label digest", facts.label_digest, label_digest(labels))
