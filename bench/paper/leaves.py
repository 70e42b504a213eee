"""Leaves: which groups' samples they capture, and how their heads' logits and margins lie."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import numpy as np

from bench.paper.numbers import paper_by, paper_cell, paper_rows
from bench.paper.trees import (
    KEPT_EPOCH,
    LAST_EPOCH,
    METHOD,
    NOT_RECORDED,
    OF_BOTH_EPOCHS,
    WHICH_EPOCH,
    LastEpoch,
    TreeIteration,
    TreeRun,
    Trees,
    group_looks,
    grown_trees,
    of_iteration,
    of_last_epoch,
    tree_table,
)
from bench.reporting import figure as plots
from bench.reporting.collection import ReportInput, grouped
from bench.reporting.figure import Drawn, FigureInput, FigureSpec, SkippedFigure, escape_mathtext
from bench.reporting.names import dataset_title
from bench.reporting.table import Cell, CellKey, Column, Row, Table, columns, paired_rows
from datasets.base import Facts
from datasets.catalogue import get_dataset

STACK_FROM = 3  # own-class groups from which the minority ones share one stacked bar
HEADS = ((1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3))
TWO_CLASSES = ("waterbirds", "celeba", "isic", "umnist")
ORDER = "Heads in the order of the leaves: of iteration 2, easy and hard of the first class first."
WITHIN = (
    "the spread is the standard deviation within a head over test samples, not over seeds; mean "
    "and spread are averaged over seeds (n beside them), and the CSV's interval is over seeds"
)
UNUSED = "merged or never chosen in every run"
QUANTITIES: dict[str, tuple[str, Callable[[list[float]], float], str]] = {
    "logit_mean_lowest": ("logit_mean", min, "Lowest head mean"),
    "logit_mean_highest": ("logit_mean", max, "Highest head mean"),
    "logit_std_average": ("logit_std", statistics.fmean, "Average std within a head"),
    "margin_mean_lowest": ("margin_mean", min, "Lowest mean margin"),
}
"""What the paper's text says of all heads together: a figure by leaf, how it is reduced, title."""


def capture_rates(given: ReportInput) -> Table:
    """Compare the share of a group that reaches a leaf with the paper's, where its text has one."""
    published = cache(partial(Trees.published, given.runs))
    rows = []
    for row in paper_rows("capture_rates"):
        name, t = row["dataset"], int(row["iteration"])
        dataset = get_dataset(name)
        facts = dataset.facts(dataset.config_type())
        key = CellKey(METHOD, name, "capture", f"iteration {t} {row['group']} in {row['leaf']}")
        read = partial(captured_share, facts, row["group"], row["leaf"])
        measured = published(name).cell(key, of_iteration(t, read), 1)
        header = (dataset_title(name), row["group"], row["leaf"])
        rows.append(Row(header, (measured, paper_cell(row, key)), section=f"Iteration {t}"))
    return tree_table(
        label="capture_rates",
        title="Capture rates",
        caption=(
            "Share of a group's test samples (percent) that a leaf captures, for the groups and "
            "leaves that the paper's text names, at the epoch that the iteration kept. E: easy, H: "
            "hard, by iteration; a star stands for any letters, so that *H* are all leaves with a "
            "hard split; `own' is the leaf of the sample's own class."
        ),
        row_headers=("Dataset", "Group", "Leaf"),
        columns=(Column("Measured"), Column("Paper")),
        rows=tuple(rows),
        notes=(
            "The paper calls two of its figures approximate: 79 (malignant) and 85 (digit 8).",
            "CMNIST: mean over the 5 aligned and over the 20 conflicting groups.",
        ),
        in_paper=False,
        section_titles=True,
    )


def captured_share(facts: Facts, group: str, leaf: str, iteration: TreeIteration) -> float:
    """Return a group's share in the leaves that a pattern names.

    A set of groups is averaged over its groups; `own` is the class a group belongs to, which only
    a dataset with sets of groups needs.
    """
    members = facts.group_sets.get(group) or (facts.groups.index(group),)
    shares = []
    for member in members:
        pattern = leaf
        if leaf.startswith("own:"):
            own_class = member // (len(facts.groups) // len(facts.classes))
            pattern = leaf.replace("own", facts.codes[own_class])
        reached = iteration.capture.get(facts.groups[member], {})
        shares.append(sum(part for name, part in reached.items() if fnmatchcase(name, pattern)))
    return statistics.fmean(shares)


def _at_last_epoch(trees: Trees, key: CellKey, t: int, read: Callable[[Any], Any]) -> Cell:
    """Return a figure of the heads after the last epoch, or say why there is none."""
    ends = [i.end for one in trees.runs for i in one.tree.iterations if i.end is not None]
    own = replace(key, variant=f"{key.variant}, last epoch")
    return trees.cell(own, of_last_epoch(t, read), 2, UNUSED if ends else NOT_RECORDED)


def _at_kept_epoch(trees: Trees, key: CellKey, t: int, read: Callable[[Any], Any]) -> Cell:
    return trees.cell(key, of_iteration(t, read), 2, UNUSED)


EPOCHS = {LAST_EPOCH: _at_last_epoch, KEPT_EPOCH: _at_kept_epoch}


def _by_head(given: ReportInput, label: str, quantity: str, title: str, caption: str) -> Table:
    """Compare mean and spread of a figure of every head with the paper's."""
    paper = paper_by(label, "dataset", "iteration", "head")
    rows: list[Row] = []
    for name in TWO_CLASSES:
        trees = Trees.published(given.runs, name)
        own: dict[str, list[Cell]] = {word: [] for word in EPOCHS}
        theirs = []
        for t, head in HEADS:
            key = CellKey(METHOD, name, quantity, f"iteration {t} head {head}")
            for word, of_epoch in EPOCHS.items():
                means, spreads = (
                    of_epoch(trees, key, t, partial(_of_head, f"{quantity}_{moment}", head))
                    for moment in ("mean", "std")
                )
                own[word].append(replace(means, std=spreads.mean))
            theirs.append(paper_cell(paper[name, str(t), str(head)], key, 2))
        rows += paired_rows((dataset_title(name),), own, theirs, name)
    return tree_table(
        label=label,
        title=title,
        caption=f"{caption} {ORDER}",
        columns=tuple(Column(f"H{head}", f"Iteration {t}") for t, head in HEADS),
        rows=tuple(rows),
        uncertainty=WITHIN,
        selection=OF_BOTH_EPOCHS,
        notes=(
            WHICH_EPOCH,
            "CMNIST has more heads than columns: see the table of its calibration.",
        ),
    )


def _of_head(figure: str, head: int, iteration: TreeIteration | LastEpoch) -> float | None:
    """Return one head's figure; a merged head has none."""
    by_leaf: Sequence[float | None] = getattr(iteration, figure)
    return by_leaf[head] if head < len(by_leaf) else None


def _over_heads(
    figure: str, reduce: Callable[[list[float]], float], iteration: TreeIteration | LastEpoch
) -> float | None:
    known = [value for value in getattr(iteration, figure) if value is not None]
    return float(reduce(known)) if known else None


logit_stats = partial(
    _by_head,
    label="logit_stats",
    quantity="logit",
    title="Logits by head",
    caption="Mean ± standard deviation of each head's logit on the test set.",
)
margins = partial(
    _by_head,
    label="margins",
    quantity="margin",
    title="Decision margins",
    caption="Winning logit minus the second best, by predicted leaf: mean ± std.",
)


def cmnist_calibration(given: ReportInput) -> Table:
    """Sum up CMNIST's heads as the paper's prose does; unused heads are left out."""
    paper = paper_by("cmnist_calibration", "quantity", "iteration")
    trees = Trees.published(given.runs, "cmnist")
    rows = []
    for name, (figure, reduce, title) in QUANTITIES.items():
        read, cells = partial(_over_heads, figure, reduce), []
        for t in (1, 2):
            key = CellKey(METHOD, "cmnist", name, f"iteration {t}")
            cells += [of_epoch(trees, key, t, read) for of_epoch in EPOCHS.values()]
            cells.append(Cell("paper", key, mean=float(paper[name, str(t)]["value"]), digits=2))
        rows.append(Row((title,), tuple(cells)))
    return tree_table(
        label="cmnist_calibration",
        title="Calibration of CMNIST's heads",
        caption="The 5 heads of iteration 1 and the 10 of iteration 2, in the paper's figures.",
        row_headers=("Over the heads",),
        columns=columns(("Iteration 1", "Iteration 2"), ("Last epoch", "Kept epoch", "Paper")),
        rows=tuple(rows),
        selection=OF_BOTH_EPOCHS,
        notes=(
            WHICH_EPOCH,
            "The paper gives these in its text, without a spread.",
        ),
        in_paper=False,
    )


def draw_captures(iteration: int, given: FigureInput) -> Drawn:
    """Draw one panel a dataset: bars by leaf, groups side by side, many minority groups stacked."""
    datasets = grown_trees(given, iteration)
    if not datasets:
        raise SkippedFigure(f"no NCT run has reached iteration {iteration}")
    shown = [found[0].tree.iterations[iteration - 1] for found in datasets.values()]
    widths = [max(len(level.leaves), 4) for level in shown]
    figure = plots.new_figure(max(3.6, min(11.0, 1.1 + 0.55 * sum(widths))), 2.9)
    panels = figure.subplots(1, len(datasets), squeeze=False, width_ratios=widths, sharey=True)
    for axes, (label, found) in zip(panels[0], datasets.items(), strict=True):
        _panel(axes, found, iteration, published=not given.smoke)
        title = f"{label}\n{plots.seeds_text(found)}"
        axes.set(title=title, ylim=(0, 112), yticks=range(0, 101, 20))
    panels[0][0].set_ylabel("% of the group's test samples")
    missing = given.missing(list(datasets))
    return Drawn(
        figure,
        f"Iteration-{iteration} capture rates. Bar height: percentage of a group's test samples "
        "that end in each leaf of their own class (mean over seeds; whiskers: standard deviation); "
        "what is missing to 100 ends in leaves of other classes. E is easy, H hard"
        + (", read from the first split on. " if iteration > 2 else ". ")
        + "On CMNIST each leaf shows the class's matching colour (left) and the four others "
        "stacked, as shares of all mismatched samples of the class (right).",
        ("A cross marks a leaf in which no test sample of its class ends.", *missing),
    )


CAPTURE_FIGURES = tuple(
    FigureSpec(
        *(f"capture_rates_{t}", f"Capture rates at iteration {t}", partial(draw_captures, t)),
        look="Where routing works, the majority stands tall on easy leaves, the minority on hard.",
    )
    for t in (2, 3)
)


def _panel(axes: Any, found: Sequence[TreeRun], iteration: int, *, published: bool) -> None:
    record, first = found[0].run.record, found[0].tree
    leaves = first.iterations[iteration - 1].leaves
    shown, looks = plots.shown_groups(record), group_looks(record)
    paper = paper_by("capture_rates", "dataset", "iteration", "group", "leaf")
    for place, leaf in enumerate(leaves):
        # The groups of the leaf's class: iteration 1 puts every training sample under its own.
        of_class, _, path = leaf.partition(":")
        own = list(first.iterations[0].makeup.get(of_class, {}))
        bars = [[group] for group in own]
        if len(own) > STACK_FROM and any(shown[group] != group for group in own):
            bars = sorted(grouped(own, shown.__getitem__).values(), key=len)  # a set a bar
        width, captured = 0.8 / max(len(bars), 1), False
        for slot, groups in enumerate(bars):
            x = place - 0.4 + (slot + 0.5) * width
            shares = _shares(found, groups, leaf, iteration)
            base = 0.0
            for group, height in zip(groups, shares.mean(axis=0).tolist(), strict=True):
                look = {**looks[shown[group]], "edgecolor": plots.INK, "linewidth": 0.4}
                axes.bar(x, height, 0.94 * width, bottom=base, **look)
                base += height
            captured |= base > 0
            group_key = (record.job.dataset, str(iteration), shown[groups[0]])
            said = paper.get((*group_key, leaf)) or paper.get((*group_key, f"own:{path}"))
            if published and said:
                look = {"color": "white", "mec": "black", "ms": 4, "label": "the paper's text"}
                axes.plot(x, float(said["mean"]), "D", zorder=4, **look)
            if len(found) > 1 and base > 0:
                spread = float(shares.sum(axis=1).std(ddof=1))
                axes.errorbar(x, base, spread, color=plots.INK, lw=0.8, capsize=1.5)
        if not captured:
            axes.plot(place, 3, "x", color="0.5", markersize=5)
    few = len(leaves) <= 4
    axes.set_xticks(range(len(leaves)), map(escape_mathtext, leaves), rotation=0 if few else 90)
    axes.grid(False, axis="x")
    legend: dict[str, Any] = {}
    for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
        legend.setdefault(name, handle)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.26), "handlelength": 1.4}
    axes.legend(list(legend.values()), list(legend), ncols=1 if few else 2, **below)


def _shares(found: Sequence[TreeRun], groups: Sequence[str], leaf: str, iteration: int) -> Any:
    """Return (runs x groups) percentages; several groups count as one population together."""
    table = []
    for one in found:
        capture, sizes = one.tree.iterations[iteration - 1].capture, one.run.record.test.group_count
        whole = sum(sizes[group] for group in groups)
        table.append([capture.get(g, {}).get(leaf, 0.0) * sizes[g] / whole for g in groups])
    return np.asarray(table)
