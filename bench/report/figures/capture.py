"""Capture rates: where the samples of each true group end up in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bench.report.collection import Run
from bench.report.figures.drawing import (
    HATCHES,
    INK,
    Drawn,
    NotDrawn,
    View,
    iterations_of,
    new_figure,
    palette,
    plain,
    seeds_text,
    shown_groups,
)
from bench.report.names import group_name
from bench.report.paper import paper_rows

STACK_FROM = 3  # own-class groups from which the minority ones share one stacked bar


def draw(view: View, iteration: int) -> Drawn | NotDrawn:
    """Draw one panel a dataset: bars by leaf, groups side by side, many minority groups stacked."""
    datasets = view.trees(iteration)
    if not datasets:
        return NotDrawn(f"no NCT run has reached iteration {iteration}")
    widths = [_leaf_count(runs[0], iteration) for runs in datasets.values()]
    figure = new_figure(max(3.6, min(11.0, 1.1 + 0.55 * sum(widths))), 2.9)
    panels = figure.subplots(1, len(datasets), squeeze=False, width_ratios=widths, sharey=True)
    for axes, (label, runs) in zip(panels[0], datasets.items(), strict=True):
        _panel(axes, runs, iteration, view)
        axes.set_title(f"{label}\n{seeds_text(runs)}")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 20))
    panels[0][0].set_ylabel("% of the group's test samples")
    return Drawn(
        figure,
        f"Iteration-{iteration} capture rates. Bar height: percentage of a group's test samples "
        "that end in each leaf of their own class (mean over seeds; whiskers: standard deviation); "
        "what is missing to 100 ends in leaves of other classes. E is easy, H hard"
        + (", read from the first split on. " if iteration > 2 else ". ")
        + "On CMNIST each leaf shows the class's matching colour (left) and the four others "
        "stacked, as shares of all mismatched samples of the class (right).",
        (
            "A cross marks a leaf in which no test sample of its class ends.",
            *view.missing(list(datasets)),
        ),
    )


iteration_2 = partial(draw, iteration=2)
iteration_3 = partial(draw, iteration=3)


def _panel(axes: Any, runs: Sequence[Run], iteration: int, view: View) -> None:
    first = runs[0].record
    leaves = iterations_of(runs[0])[iteration - 1]["leaves"]
    shown = shown_groups(first)
    families = list(dict.fromkeys(shown.values()))
    colours = dict(zip(families, palette(len(families)), strict=True))
    hatches = dict(zip(families, HATCHES, strict=False))
    seen: set[str] = set()
    for place, leaf in enumerate(leaves):
        own = _own_groups(runs[0], leaf)
        stacked = [group for group in own if shown[group] != group and len(own) > STACK_FROM]
        bars = _bars(own, shown) if stacked else [[group] for group in own]
        width = 0.8 / max(len(bars), 1)
        any_shown = False
        for slot, groups in enumerate(bars):
            x = place - 0.4 + (slot + 0.5) * width
            shares = _shares(runs, groups, leaf, iteration)
            base = 0.0
            for group, values in zip(groups, shares.T, strict=True):
                name = shown[group]
                label = None if name in seen else plain(group_name(name))
                seen.add(name)
                height = float(values.mean())
                axes.bar(
                    *(x, height, 0.94 * width),
                    bottom=base,
                    color=colours[name],
                    hatch=hatches.get(name, ""),
                    edgecolor=INK,
                    linewidth=0.4,
                    label=label,
                )
                base += height
            any_shown |= base > 0
            published = None if view.trial else _published(first, shown[groups[0]], leaf, iteration)
            if published is not None:
                label = None if "paper" in seen else "the paper's text"
                seen.add("paper")
                axes.plot(
                    x, published, "D", color="white", mec="black", ms=4, label=label, zorder=4
                )
            if len(runs) > 1 and base > 0:
                spread = float(shares.sum(axis=1).std(ddof=1))
                axes.errorbar(x, base, spread, color=INK, lw=0.8, capsize=1.5)
        if not any_shown:
            axes.plot(place, 3, "x", color="0.5", markersize=5)
    axes.set_xticks(range(len(leaves)), map(plain, leaves), rotation=90 if len(leaves) > 4 else 0)
    axes.grid(False, axis="x")
    columns = 1 if len(leaves) <= 4 else 2
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=columns, handlelength=1.4)


def _bars(own: Sequence[str], shown: dict[str, str]) -> list[list[str]]:
    """Put the groups of one union into one bar, unions in the order of their first group."""
    bars: dict[str, list[str]] = {}
    for group in own:
        bars.setdefault(shown[group], []).append(group)
    return sorted(bars.values(), key=len)


def _own_groups(run: Run, leaf: str) -> list[str]:
    """List the groups of a leaf's class: iteration 1 puts every training sample under its own."""
    makeup: dict[str, dict[str, int]] = iterations_of(run)[0]["makeup"]
    return list(makeup.get(leaf.split(":")[0], {}))


def _shares(runs: Sequence[Run], groups: Sequence[str], leaf: str, iteration: int) -> Any:
    """Give (runs x groups) percentages; several groups count as one population together."""
    table = []
    for run in runs:
        capture = iterations_of(run)[iteration - 1]["capture"]
        sizes = run.record["metrics"]["test"]["group_count"]
        whole = sum(sizes[group] for group in groups)
        table.append(
            [capture.get(group, {}).get(leaf, 0.0) * sizes[group] / whole for group in groups]
        )
    return np.asarray(table)


def _published(record: dict[str, Any], group: str, leaf: str, iteration: int) -> float | None:
    """Look up what the paper's text says of a group's share in a leaf, if it says anything."""
    own = f"own:{leaf.split(':')[-1]}"
    for row in paper_rows("capture_rates"):
        if (
            (row["dataset"], row["iteration"]) == (record["dataset"], str(iteration))
            and row["group"] == group
            and row["leaf"] in (leaf, own)
        ):
            return float(row["mean"])
    return None


def _leaf_count(run: Run, iteration: int) -> int:
    return max(len(iterations_of(run)[iteration - 1]["leaves"]), 4)
