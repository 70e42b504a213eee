"""Trees: what a record keeps of one, and what tables, pictures and `bench explain` make of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.arrays import to_batch
from bench.record import Metrics, Record
from bench.reporting import figure as plots
from bench.reporting.collection import Collection, Run
from bench.reporting.figure import INK, FigureInput, escape_mathtext
from bench.reporting.names import group_title
from bench.reporting.table import Cell, CellKey, Table
from datasets.base import Facts, LabelledSplit
from datasets.config import Values, as_plain, build_config, field_types
from datasets.decode import decode
from datasets.errors import BenchError, DataCorrupt, UsageError
from datasets.files import CHOSEN, storage_errors
from datasets.images import ImageBatch
from methods.base import Fitted, Selected

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
METHOD = "nct"  # also the key under which a record's details have the tree
tree_table = partial(
    Table,
    row_headers=("Dataset", "Source"),
    selection=(
        "each iteration at its best checkpoint on validation data (by loss at iteration 1, by "
        "pWGA2 after it); no iteration is chosen over another"
    ),
)
"""A table of trees, by iteration; every dataset as measured and in the paper, if not given."""

LAST_EPOCH, KEPT_EPOCH = "measured, last epoch", "measured, kept epoch"
WHICH_EPOCH = (
    "The paper's figures fit trees after the last epoch of an iteration, which runs record from "
    "version 2 of NCT on; the kept epoch is the one that worst groups and captures are of."
)
NOT_RECORDED = "recorded from version 2 of NCT on"
OF_BOTH_EPOCHS = (
    "none for the last epoch; the kept one is an iteration's best on validation data (by loss at "
    "iteration 1, by pWGA2 after it); no iteration is chosen over another"
)

NODE_WIDTH, NODE_HEIGHT = 0.86, 0.34  # of a node's bar, in units of a leaf and of a level


@dataclass(frozen=True)
class LastEpoch:
    """A tree as an iteration's last epoch left it, kept or not; sequences have an entry a leaf."""

    phase: int
    epoch: int  # within its phase, from 0
    leaves: tuple[str, ...] = ()
    test: Metrics = field(default_factory=Metrics)
    pwga2: float | None = None
    pwga2_predicted: float | None = None
    pwga2_routed: float | None = None
    logit_mean: tuple[float | None, ...] = ()
    logit_std: tuple[float | None, ...] = ()
    margin_mean: tuple[float | None, ...] = ()
    margin_std: tuple[float | None, ...] = ()
    capture: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cell_pwga: float | None = None
    calibration: Values | None = None


@dataclass(frozen=True)
class TreeIteration:
    """A tree as an iteration leaves it, at the epoch that was kept; an entry a leaf."""

    t: int  # from 1
    leaves: tuple[str, ...]  # names: class, then easy (E) or hard (H) at each split
    node_counts: tuple[int, ...]  # training samples routed to each
    merged: tuple[int, ...] = ()  # numbers of the leaves merged into their easy siblings
    trained: Selected | None = None  # which checkpoint the iteration kept, and by what
    test: Metrics = field(default_factory=Metrics)
    phase: int | None = None  # of the epoch that was kept
    pwga2: float | None = None  # the validation proxy, with the groups that the run used
    pwga2_predicted: float | None = None  # with groups by predicted leaf
    pwga2_routed: float | None = None  # with groups by routed label
    n_worst: int | None = None  # samples of the group that attains the proxy
    tolerance: float | None = None  # by how much it may fall below the best before it
    logit_mean: tuple[float | None, ...] = ()  # on test data; none for a merged leaf
    logit_std: tuple[float | None, ...] = ()
    margin_mean: tuple[float | None, ...] = ()  # the winning logit's lead, where the leaf wins
    margin_std: tuple[float | None, ...] = ()
    # The percentage of each group's test samples in each leaf, and each leaf's training samples.
    capture: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    makeup: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    cell_pwga: float | None = None  # of NCT+ only, like the next
    calibration: Values | None = None  # what is added to the leaves' logits, and their scale
    end: LastEpoch | None = None  # of runs from version 2 on


@dataclass(frozen=True)
class TreeRecord:
    """What a record keeps of a tree."""

    chosen_iteration: int  # the depth that the rule chose
    argmax_iteration: int  # the one with the highest proxy
    stop_reason: str
    iterations: tuple[TreeIteration, ...]
    # Rank correlation, over epochs from iteration 2 on, of the proxy with the true worst group.
    spearman_val: float | None = None
    spearman_test: float | None = None

    @property
    def levels(self) -> tuple[TreeIteration, ...]:
        """The iterations up to the chosen one."""
        return self.iterations[: self.chosen_iteration]

    @property
    def chosen(self) -> TreeIteration:
        """The chosen iteration."""
        return self.iterations[self.chosen_iteration - 1]

    def at(self, t: int) -> TreeIteration | None:
        """Return an iteration; none if the tree was not grown that far."""
        return next((one for one in self.iterations if one.t == t), None)

    @staticmethod
    def of(record: Record) -> TreeRecord | None:
        """Read the tree of a record; none if the run has no tree."""
        raw = record.details.get(METHOD)
        if raw is None:
            return None
        if not isinstance(raw, Mapping) or not isinstance(raw.get("iterations"), list):
            raise BenchError(f"'{METHOD}' in the record of {record.run_id} is not a tree")
        iterations = []
        for one in raw["iterations"]:
            level = _iteration_values(TreeIteration, one)
            if isinstance(end := level.get("end"), Mapping):
                level["end"] = _iteration_values(LastEpoch, end)
            iterations.append(level)
        own = {**_known(TreeRecord, raw), "iterations": iterations}
        return build_config(TreeRecord, own, METHOD)


def _known(kind: type, raw: Values) -> dict[str, object]:
    """Return the values that a part of a tree has a field for; others are passed over."""
    names = field_types(kind)
    return {name: value for name, value in raw.items() if name in names}


def _iteration_values(kind: type, raw: Mapping[str, Any]) -> dict[str, object]:
    test = Metrics.from_json(raw.get("test") or {})  # a trial has none
    return {**_known(kind, raw), "test": as_plain(test)}


Reader = Callable[[TreeRecord], float | None]
"""Takes a value from a tree; none where the tree has no such value."""


def of_iteration(t: int, read: Callable[[TreeIteration], float | None]) -> Reader:
    """Return a reader of a value of one iteration."""
    return lambda tree: read(found) if (found := tree.at(t)) is not None else None


def of_last_epoch(t: int, read: Callable[[LastEpoch], float | None]) -> Reader:
    """Return a reader of a value of one iteration's tree after its last epoch."""
    return of_iteration(t, lambda iteration: None if iteration.end is None else read(iteration.end))


@dataclass(frozen=True)
class TreeRun:
    """A run and its tree."""

    run: Run
    tree: TreeRecord


def with_trees(runs: Sequence[Run]) -> list[TreeRun]:
    """Return the runs that have a tree, each with it."""
    return [TreeRun(run, tree) for run in runs if (tree := TreeRecord.of(run.record)) is not None]


@dataclass(frozen=True)
class Trees:
    """The trees that a cell averages, and the reason why there are none."""

    runs: Sequence[TreeRun]
    absence: str = "not run"

    @staticmethod
    def published(runs: Collection, dataset: str) -> Trees:
        """Return a dataset's published trees."""
        found = with_trees(runs.published(METHOD, dataset))
        return Trees(found, runs.absence(METHOD, dataset))

    def cell(
        self, key: CellKey, read: Reader, digits: int | None = None, missing: str = "not reached"
    ) -> Cell:
        """Return the mean of a value over the trees, or an empty cell with the reason.

        `digits` are those of the metric if not given; `missing` is the reason where there are
        trees, but none has the value.
        """
        found = [(read(one.tree), one.run.run_id) for one in self.runs]
        values = [(float(value), run_id) for value, run_id in found if value is not None]
        if not values:
            return key.empty(missing if self.runs else self.absence)
        return key.averaged(values, digits)


def grown_trees(given: FigureInput, depth: int = 1) -> dict[str, list[TreeRun]]:
    """Return the trees that were grown to at least `depth` levels, by dataset."""
    grown = {
        label: [one for one in with_trees(runs) if len(one.tree.iterations) >= depth]
        for label, runs in given.by_dataset(METHOD).items()
    }
    return {label: found for label, found in grown.items() if found}


def draw_tree(axes: Any, record: Record, tree: TreeRecord, *, edges: bool = False) -> None:
    """Draw the chosen tree: one row a level, a bar a node with its size and its true groups.

    `edges` writes beside each edge which samples went along it.
    """
    from matplotlib.patches import Rectangle

    depth, levels = tree.chosen_iteration, tree.levels
    shown, looks = plots.shown_groups(record), group_looks(record)
    leaves = len(levels[-1].leaves)
    for row, level in enumerate(levels):
        width = leaves / len(level.leaves)
        for j, name in enumerate(level.leaves):
            centre, y = (j + 0.5) * width, float(depth - row)
            count = level.node_counts[j]
            if row > 0:
                x0, y0, hard = (j // 2 + 0.5) * width * 2, y + 1 - 0.3, j % 2 == 1
                x1, y1 = centre, y + NODE_HEIGHT
                colour, line = INK if count else "0.75", "--" if hard else "-"
                axes.plot([x0, x1], [y0, y1], zorder=0, color=colour, lw=1.0, ls=line)
                if edges and count:
                    word, side = ("wrong", "left") if hard else ("right", "right")
                    plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                    place = (x0 + 0.42 * (x1 - x0), y0 + 0.42 * (y1 - y0))
                    style = {"fontsize": 6, "ha": side, "va": "center", "color": "0.3"}
                    axes.text(*place, word, bbox=plain, **style)
            makeup: Counter[str] = Counter()
            for group, number in level.makeup.get(name, {}).items():
                makeup[shown[group]] += number
            first = left = centre - NODE_WIDTH / 2
            for family, number in makeup.items():
                part = NODE_WIDTH * number / max(makeup.total(), 1)
                look = {**looks[family], "edgecolor": "white", "lw": 0}
                axes.add_patch(Rectangle((left, y), part, NODE_HEIGHT, **look))
                left += part
            frame = Rectangle((first, y), NODE_WIDTH, NODE_HEIGHT, fill=False, lw=0.8)
            frame.set(linestyle="-" if count else ":", edgecolor=INK if count else "0.6")
            axes.add_patch(frame)
            state = f"{count:,}" if count else "merged" if j in level.merged else "empty"
            text = f"{escape_mathtext(name)}\n{state}"
            size = 7 if leaves <= 12 else 5.5
            axes.text(centre, y - 0.03, text, ha="center", va="top", fontsize=size, color=INK)
    handles = [Rectangle((0, 0), 1, 1, edgecolor="white", lw=0, **look) for look in looks.values()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    axes.set(xlim=(0, leaves), ylim=(0.6, depth + 0.5))
    axes.set_axis_off()


def group_looks(record: Record) -> dict[str, dict[str, Any]]:
    """Return label, colour and hatch of each group, or set of groups, that a run's figure shows."""
    names = list(dict.fromkeys(plots.shown_groups(record).values()))
    colours = plots.palette(len(names))
    return {
        name: {"label": escape_mathtext(group_title(name)), "facecolor": colour, "hatch": hatch}
        for name, colour, hatch in zip(names, colours, cycle(plots.HATCHES), strict=False)
    }


def write_tree_picture(record: Record, tree: TreeRecord, path: Path) -> None:
    """Draw the chosen tree of a run to a file (png, svg, pdf)."""
    if path.suffix not in PICTURE_SUFFIXES:
        endings = ", ".join(PICTURE_SUFFIXES)
        raise UsageError(f"a tree cannot be drawn to {path}", f"end its name with {endings}")
    with plots.house_style(), storage_errors(path, CHOSEN):
        width, height = 0.7 * len(tree.chosen.leaves), 1.2 * len(tree.levels) + 0.8
        figure = plots.new_figure(max(6.0, width), height)
        axes = figure.subplots()
        draw_tree(axes, record, tree)
        note = " (stand-in data)" if record.job.standin else ""
        axes.set_title(f"{escape_mathtext(record.run_id)}{note}: training samples in each node")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


@dataclass(frozen=True)
class ExplainedImage:
    """Where an image went in a tree; true class and group of a sample whose labels are known."""

    id: int | str  # of the sample, or the name of the file
    predicted: str
    leaf: int
    path: str  # name of the leaf
    logits: Mapping[str, float | None]  # of every leaf; none for a merged one
    margin: float | None  # lead of the leaf's logit over the next one
    leaf_makeup: Mapping[str, int]  # training samples of each group in that leaf
    true_class: str | None = None
    group: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the explanation as `bench explain --json` prints it."""
        values = {"class" if name == "predicted" else name: v for name, v in vars(self).items()}
        known = self.true_class is not None
        return {n: v for n, v in values.items() if known or n not in ("true_class", "group")}


def explain_images(
    fitted: Fitted,
    batch: ImageBatch,
    ids: Sequence[int | str],
    facts: Facts,
    makeup: Mapping[str, Mapping[str, int]],
) -> list[ExplainedImage]:
    """Route a batch of raw images through a tree.

    `ids` name the images, `facts` are of the data the tree was trained on, `makeup` as the record
    has it.
    """

    def finite(value: Tensor) -> float | None:
        return float(value) if bool(torch.isfinite(value)) else None

    with torch.no_grad():
        logits = fitted.leaf_logits(facts.eval_transform(batch))
    assert logits is not None
    names = fitted.leaf_names()
    top = logits.topk(2, dim=1).values
    return [
        ExplainedImage(
            id=image,
            predicted=facts.classes[leaf * len(facts.classes) // len(names)],
            leaf=leaf,
            path=names[leaf],
            logits=dict(zip(names, map(finite, own), strict=True)),
            margin=finite(best - second),
            leaf_makeup=makeup.get(names[leaf], {}),
        )
        for image, own, (best, second) in zip(ids, logits, top, strict=True)
        for leaf in [int(own.argmax())]
    ]


def explain_samples(
    fitted: Fitted,
    split: LabelledSplit,
    positions: Tensor,
    facts: Facts,
    makeup: Mapping[str, Mapping[str, int]],
) -> list[ExplainedImage]:
    """Route samples of a split through a tree, and add their true classes and groups."""
    labels, batch = split.labels[positions], split.images.batch(positions)
    explained = explain_images(fitted, batch, labels.ids.tolist(), facts, makeup)
    return [
        replace(image, true_class=facts.classes[y], group=facts.groups[group])
        for image, y, group in zip(explained, labels.y, labels.groups, strict=True)
    ]


def batch_from_files(files: Sequence[Path], facts: Facts) -> ImageBatch:
    """Read images from files, in colour or grey as the dataset has them."""
    images = []
    for file in files:
        if not file.is_file():
            raise UsageError(f"there is no image {file}", "correct --images")
        try:
            images.append(decode(file, facts.bound))
        except DataCorrupt as error:
            raise DataCorrupt(error.message, "give an image that a viewer opens") from error
    return to_batch(images, facts.channels)


def positions_of(split: LabelledSplit, ids: Sequence[int]) -> Tensor:
    """Return the positions of samples in a split; an unknown id is an error."""
    where = {int(sample): position for position, sample in enumerate(split.labels.ids)}
    unknown = [sample for sample in ids if sample not in where]
    if unknown:
        known = ", ".join(str(int(sample)) for sample in split.labels.ids[:5])
        raise UsageError(f"no sample {unknown[0]} in this split", f"its ids begin with {known}")
    return torch.tensor([where[sample] for sample in ids])
