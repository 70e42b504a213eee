"""Depth curves: how the tree's test accuracy moves with each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report.collection import Run
from bench.report.figures.drawing import (
    Drawn,
    NotDrawn,
    View,
    grid,
    iterations_of,
    palette,
    seeds_text,
)
from bench.report.paper import paper_rows

LINES = {
    "wga": ("worst group", "o", "-"),
    "avg": ("average", "s", "--"),
    "auroc": ("overall AUROC x 100", "s", "--"),
    "auroc_nonpatch": ("non-patch AUROC x 100", "o", "-"),
}


def draw(view: View) -> Drawn | NotDrawn:
    """Draw one panel a dataset: each metric over iterations, ours and the paper's."""
    datasets = view.trees(2)
    if not datasets:
        return NotDrawn("no NCT run has reached iteration 2")
    figure, panels = grid(len(datasets), 3, 2.4)
    for axes, (label, runs) in zip(panels, datasets.items(), strict=True):
        ranked = runs[0].record["metrics"]["test"].get("auroc") is not None
        metrics = ("auroc", "auroc_nonpatch") if ranked else ("wga", "avg")
        for metric, colour in zip(metrics, palette(2), strict=True):
            _line(axes, runs, metric, colour)
            if not view.trial:
                _paper_line(axes, str(runs[0].record["dataset"]), metric, colour)
        _proxy(axes, runs)
        axes.set(title=f"{label}\n{seeds_text(runs)}", xlabel="iteration", ylim=(-3, 104))
        axes.set_xticks(range(1, max(len(iterations_of(run)) for run in runs) + 1))
        axes.legend(loc="lower right", fontsize=7)
    panels[0].set_ylabel("%")
    paper = "" if view.trial else " Hollow markers joined by thin lines are the paper's."
    return Drawn(
        figure,
        "Impact of depth. Test metrics of the tree as it stood at the end of each iteration, mean "
        "over seeds with standard deviation; crosses: the validation proxy pWGA_2 that the depth "
        f"rule sees.{paper}",
        (
            "All iterations are shown, chosen by the depth rule or not.",
            *view.missing(list(datasets)),
        ),
    )


def _line(axes: Any, runs: Sequence[Run], metric: str, colour: Any) -> None:
    name, marker, style = LINES[metric]
    means, spreads, places = [], [], []
    for t in range(1, max(len(iterations_of(run)) for run in runs) + 1):
        values = [
            _percent(iterations_of(run)[t - 1]["test"][metric], metric)
            for run in runs
            if len(iterations_of(run)) >= t
        ]
        places.append(t)
        means.append(float(np.mean(values)))
        spreads.append(float(np.std(values, ddof=1)) if len(values) > 1 else 0.0)
    axes.errorbar(
        places, means, spreads, color=colour, marker=marker, ls=style, label=name, elinewidth=0.8
    )


def _proxy(axes: Any, runs: Sequence[Run]) -> None:
    """Mark the proxy's mean at each iteration that has one."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for iteration in iterations_of(run):
            if iteration["pwga2"] is not None:
                values.setdefault(int(iteration["t"]), []).append(100 * iteration["pwga2"])
    places = sorted(values)
    means = [float(np.mean(values[t])) for t in places]
    axes.plot(places, means, "x", color="0.25", ms=5, label="pWGA$_2$")


def _paper_line(axes: Any, dataset: str, metric: str, colour: Any) -> None:
    rows = [
        (int(row["iteration"]), _percent(float(row["mean"]), metric))
        for row in paper_rows("depth_ablation")
        if (row["dataset"], row["metric"]) == (dataset, metric)
    ]
    if rows:
        x, y = zip(*sorted(rows), strict=True)
        marker = LINES[metric][1]
        axes.plot(x, y, color=colour, marker=marker, mfc="white", ls="-", lw=0.5, ms=4)


def _percent(value: float, metric: str) -> float:
    return 100 * value if metric.startswith("auroc") else value
