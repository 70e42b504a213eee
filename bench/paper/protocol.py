"""The tables of the protocol: sizes of the data, preprocessing, and NCT's hyperparameters.

Sizes are counted again where the real data is on disk; transforms and hyperparameters are read from
code and presets. Each stands above the paper's own table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Literal

import torch

from bench.paper.numbers import PAPER_DATASETS, paper_by, paper_rows
from bench.paper.trees import METHOD
from bench.reporting.collection import ReportInput, grouped
from bench.reporting.names import dataset_columns, dataset_title
from bench.reporting.table import Cell, CellKey, Column, Row, Table, paired_rows
from datasets import transforms
from datasets.base import SPLITS, Facts
from datasets.catalogue import get_dataset
from datasets.dataset import Dataset
from datasets.errors import BenchError
from datasets.photos import IMAGENET_MEAN, IMAGENET_STD
from datasets.transforms import Transform
from methods.base import get_method
from methods.nct.config import NctConfig
from methods.presets import preset_config

protocol_table = partial(
    Table,
    row_headers=("Dataset", "Source"),
    uncertainty="none, these are facts of the protocol and not estimates",
    selection="none, no model takes part",
)
COUNTED = (
    "Recounted: from the labels on disk. Expected: the protocol's constants, asserted when the "
    "data is loaded; it is not on disk here."
)


@dataclass(frozen=True)
class DataCounts:
    """The sizes of one dataset under its usual protocol."""

    facts: Facts
    splits: Mapping[str, int]
    groups: Mapping[str, Sequence[int]]
    source: Literal["measured", "expected"]  # measured where labels on disk were counted
    reason: str = ""  # why they were not counted


def count_data(root: Path) -> dict[str, DataCounts]:
    """Count every dataset of the paper whose real labels lie below the data root."""
    return {name: _counts_of(get_dataset(name), root) for name in PAPER_DATASETS}


def _counts_of(dataset: Dataset, root: Path) -> DataCounts:
    config = dataset.config_type()
    facts, found = dataset.facts(config), dataset.locate(root)
    if found is None:
        reason = "the data is not on disk"
    else:
        only = "a stand-in" if found.standin else f"{found.data_kind} data"
        reason = f"only {only} is on disk"
    if found is not None and found.data_kind == "release":
        try:
            _, _, labels = dataset.check(root, config)
            sizes = {split: len(part) for split, part in labels.items()}
            count = partial(torch.bincount, minlength=len(facts.groups))
            groups = {split: count(part.groups).tolist() for split, part in labels.items()}
            return DataCounts(facts, sizes, groups, "measured")
        except (BenchError, OSError) as error:
            reason = f"the data on disk is not it: {error}"
    reason = f"expected by the protocol; {reason}"
    return DataCounts(facts, facts.counts, facts.group_counts, "expected", reason)


def dataset_summary(given: ReportInput) -> Table:
    """Put each dataset's task and sizes above the paper's."""
    counted = count_data(given.data_root)
    rows: list[Row] = []
    for row in paper_rows("dataset_summary"):
        name, own = row["dataset"], counted[row["dataset"]]
        task, spurious = (CellKey("", name, word) for word in ("task", "spurious"))
        sizes = {split: CellKey("", name, "samples", split) for split in SPLITS}
        here = [
            Cell("measured", task, label=own.facts.task),
            Cell("measured", spurious, label=own.facts.spurious),
            *(_count(own, key, own.splits.get(split), split) for split, key in sizes.items()),
        ]
        theirs = [
            *(Cell("paper", key, label=row[key.metric]) for key in (task, spurious)),
            *(Cell("paper", k, mean=float(row[s]), digits=0) for s, k in sizes.items()),
        ]
        word = "recounted" if own.source == "measured" else "expected"
        rows += paired_rows((dataset_title(name),), {word: here}, theirs, name)
    return protocol_table(
        label="dataset_summary",
        title="Dataset summary",
        caption="Tasks, spurious attributes and split sizes.",
        columns=(
            Column("Task", align="l"),
            Column("Spurious attribute", align="l"),
            *(Column(split.title(), align="r") for split in SPLITS),
        ),
        rows=tuple(rows),
        notes=(COUNTED,),
    )


def group_distributions(given: ReportInput) -> Table:
    """Put the training set's groups beside the paper's; many small groups are added up."""
    counted = count_data(given.data_root)
    paper = grouped(paper_rows("group_distributions"), itemgetter("dataset"))
    rows = []
    for name, theirs in paper.items():
        own, facts = counted[name], counted[name].facts
        named = facts.group_sets or {group: (i,) for i, group in enumerate(facts.groups)}
        sizes = own.groups.get("train")
        for row, (group, members) in zip(theirs, named.items(), strict=True):
            size = None if sizes is None else sum(sizes[i] for i in members)
            share = None if size is None else 100 * size / own.splits["train"]
            number, percent = (CellKey("", name, what, group) for what in ("samples", "percent"))
            cells = (
                _count(own, number, size, "train"),
                Cell(own.source, percent, mean=share, reason=own.reason),
                Cell("paper", number, mean=float(row["count"]), digits=0),
                Cell("paper", percent, mean=float(row["percent"])),
            )
            title = row["group"] + " (minority)" * (row["minority"] == "1")
            rows.append(Row((dataset_title(name), title), cells, section=name))
    here = [dataset_title(name) for name, own in counted.items() if own.source == "measured"]
    return protocol_table(
        label="group_distributions",
        title="Group distributions",
        caption="Training samples of each group; CMNIST's 25 groups as aligned and conflicting.",
        row_headers=("Dataset", "Group"),
        columns=tuple(
            Column(title, side, "r") for side in ("Here", "Paper") for title in ("Count", "%")
        ),
        rows=tuple(rows),
        notes=(COUNTED, f"Recounted here: {', '.join(here) or 'none'}."),
    )


def _count(own: DataCounts, key: CellKey, size: int | None, split: str) -> Cell:
    if size is None:
        return Cell("expected", key, reason=f"no published {split} count, and none on disk")
    return Cell(own.source, key, mean=float(size), reason=own.reason, digits=0)


def preprocessing(given: ReportInput) -> Table:
    """Describe each dataset's transforms as the code has them, above the paper's words."""
    rows: list[Row] = []
    for row in paper_rows("preprocessing"):
        name = row["dataset"]
        dataset = get_dataset(name)
        facts = dataset.facts(dataset.config_type())
        here = {
            "resolution": str(facts.train_transform.resolution),
            "train": describe_transform(facts.train_transform, training=True),
            "eval": describe_transform(facts.eval_transform, training=False),
            "normalization": _normalisation(facts.train_transform),
        }
        keys = [CellKey("", name, column) for column in here]
        own = [Cell("measured", key, label=here[key.metric]) for key in keys]
        theirs = [Cell("paper", key, label=row[key.metric]) for key in keys]
        rows += paired_rows((dataset_title(name),), {"here": own}, theirs, name)
    return protocol_table(
        label="preprocessing",
        title="Preprocessing",
        caption=(
            "Transforms as the code applies them, above the paper's. RRC: random resized crop; "
            "RC(s, p): random crop of size s with padding p; CC: central crop; HFlip, VFlip: "
            "mirrored with probability one half."
        ),
        columns=(
            Column("Res."),
            *(Column(title, align="l") for title in ("Training", "Evaluation", "Normalisation")),
        ),
        rows=tuple(rows),
        notes=(
            "UMNIST is not mirrored by default: the paper's own first-iteration figures are only "
            "reached without; umnist.hflip=true switches it on.",
        ),
    )


def describe_transform(transform: Transform, *, training: bool) -> str:
    """Return a transform in the paper's shorthand."""
    cut, side = transform.cut, transform.resolution
    if isinstance(cut, transforms.RandomResizedCrop):
        scale, ratio = (f"[{low:.3g}, {high:.3g}]" for low, high in (cut.scale, cut.ratio))
        text = f"RRC({side}), scale {scale}, ratio {ratio}"
    elif isinstance(cut, transforms.PaddedRandomCrop):
        text = f"RC(own size, {cut.padding}) -> Resize {side}"
    elif isinstance(cut, transforms.ResizedRandomCrop):
        text = f"Resize {cut.resize} -> RC({side}, 0)"
    else:
        assert isinstance(cut, transforms.ResizedCentreCrop)
        text = f"Resize {cut.resize}" + (f" -> CC {side}" if cut.resize != side else "")
    if not training:
        return text
    flips = [name for name, on in (("HFlip", transform.hflip), ("VFlip", transform.vflip)) if on]
    return f"{text}; {', '.join(flips) or 'no flip'}"


def _normalisation(transform: Transform) -> str:
    if (transform.mean, transform.std) == (IMAGENET_MEAN, IMAGENET_STD):
        return "ImageNet"
    mean, std = (
        ", ".join(f"{value:g}" for value in dict.fromkeys(values))
        for values in (transform.mean, transform.std)
    )
    return f"mean ({mean}), std ({std})"


def _power(value: float) -> str:
    """Return a rate as the paper writes it: 2.7e-5, but 0.1."""
    if value >= 0.05 or value == 0:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


PAPER_PARAMETERS: dict[str, Callable[[NctConfig], str]] = {
    "Head hidden dim": lambda c: str(c.hidden),
    "Head dropout": lambda c: f"{c.dropout:g}",
    "Backbone LR": lambda c: _power(c.backbone_lr),
    "Head LR": lambda c: _power(c.head_lr),
    "LR decay factor": lambda c: f"{c.lr_decay_factor:.1f}",
    "Weight decay": lambda c: _power(c.weight_decay),
    "Batch size": lambda c: str(c.batch_size),
    "Epochs (iter 1/2/3)": lambda c: "/".join(map(str, c.epochs)),
    "Phase 1 ratio (iter 1/2/3)": lambda c: "/".join(map(str, c.phase1_ratio)),
    "Scheduler": lambda c: c.scheduler.capitalize(),
    "Early stop patience": lambda c: str(c.patience),
    "Sampling strategy": lambda c: c.sampling.replace("_", " ").capitalize(),
    "Aux loss weight": lambda c: f"{c.aux_weight:.1f}",
    "Class weight cap": lambda c: f"{c.weight_cap:g}",
}
"""The rows of the paper's table, each with how it writes a preset's value."""

OTHER_PARAMETERS: dict[str, Callable[[NctConfig], str]] = {
    "Optimiser": lambda c: c.optimizer,
    "Head of iteration 1": lambda c: c.first_head,
    "Children's heads": lambda c: c.heads,
    "Patience in phase 2 (0: none)": lambda c: str(c.phase2_patience),
    "Schedule's factor": lambda c: f"{c.decay:g}" if c.scheduler != "none" else "none",
    "Plateau patience": lambda c: str(c.plateau_patience) if c.scheduler == "plateau" else "none",
    "Best checkpoint of each": lambda c: c.checkpoint,
    "Routing images": lambda c: c.routing_images,
    "Groups of pWGA2": lambda c: c.pwga,
    "Merging threshold": lambda c: str(c.min_samples),
    "z of the depth rule": lambda c: f"{c.z:g}",
}
"""What the paper says in its text or leaves open."""


def hyperparams(given: ReportInput) -> Table:
    """Put NCT's presets above the paper's table, and below it what had to be read or chosen."""
    presets = {name: preset_config(get_method(METHOD), name) for name in PAPER_DATASETS}
    paper = paper_by("hyperparams", "parameter", "dataset")
    rows: list[Row] = []
    for parameter, written in (PAPER_PARAMETERS | OTHER_PARAMETERS).items():
        own, theirs = [], []
        for name, config in presets.items():
            key, here, note = CellKey(METHOD, name, "setting", parameter), written(config), ""
            if (parameter, name) in paper:
                value = paper[parameter, name]["value"]
                note = "" if same_value(here, value) else "differs"
                theirs.append(Cell("paper", key, label=value))
            own.append(Cell("measured", key, label=here, note=note))
        section = parameter if theirs else "In the paper's text, or left open"
        rows += paired_rows((parameter,), {"here": own}, theirs, section)
    return protocol_table(
        label="hyperparams",
        title="Hyperparameters of NCT",
        caption=(
            "The presets that runs use, above the paper's table; the lower part is what the paper "
            "says in its text or leaves open. Presets name the source of every value."
        ),
        row_headers=("Parameter", "Source"),
        columns=dataset_columns(PAPER_DATASETS),
        rows=tuple(rows),
        selection="tuned in the paper against pWGA2 on validation data; taken over here",
    )


def same_value(here: str, paper: str) -> bool:
    """Return whether two texts say the same, numbers by value."""
    try:
        return float(here) == float(paper)
    except ValueError:
        return here.lower() == paper.lower()
