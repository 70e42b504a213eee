"""Worst group against average: what robustness costs."""

from __future__ import annotations

from typing import Any

from bench.report.collection import Run
from bench.report.figures.drawing import (
    MARKERS,
    Drawn,
    NotDrawn,
    View,
    grid,
    in_order,
    palette,
    plain,
)
from bench.report.names import method_name
from bench.report.paper import paper_rows
from bench.report.statistics import summarise

AXES = {"isic": ("auroc", "auroc_nonpatch", "overall AUROC", "non-patch AUROC")}
USUAL = ("avg", "wga", "average accuracy (%)", "worst-group accuracy (%)")


def draw(view: View) -> Drawn | NotDrawn:
    """Draw one panel a dataset, one marker a method, the paper's hollow beside ours."""
    datasets = view.by_dataset()
    if not datasets:
        return NotDrawn("no finished run to show")
    methods = in_order({str(run.record["method"]) for runs in datasets.values() for run in runs})
    colours = dict(zip(methods, palette(len(methods)), strict=True))
    markers = {name: MARKERS[place % len(MARKERS)] for place, name in enumerate(methods)}
    figure, panels = grid(len(datasets), 3, 2.5)
    for axes, (label, runs) in zip(panels, datasets.items(), strict=True):
        _panel(axes, runs, colours, markers, paper=not view.trial)
        axes.set_title(label)
    handles = [
        panels[0].plot([], [], markers[name], color=colours[name], label=plain(method_name(name)))[
            0
        ]
        for name in methods
    ]
    if not view.trial:
        handles += panels[0].plot([], [], "o", color="0.4", mfc="none", label="hollow: paper")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    hollow = "" if view.trial else " Hollow markers: the paper's own means, not measured here."
    return Drawn(
        figure,
        "Worst-group against average test accuracy (ISIC: non-patch against overall AUROC). "
        "Markers: mean over seeds; bars: 95% bootstrap interval of the mean over seeds, absent "
        f"with a single seed.{hollow}",
        view.missing(list(datasets)),
    )


def _panel(
    axes: Any, runs: list[Run], colours: dict[str, Any], markers: dict[str, str], *, paper: bool
) -> None:
    dataset = str(runs[0].record["dataset"])
    across, up, x_title, y_title = AXES.get(dataset, USUAL)
    for method in colours:
        tests = [run.record["metrics"]["test"] for run in runs if run.record["method"] == method]
        pairs = [
            (test[across], test[up])
            for test in tests
            if test.get(across) is not None and test.get(up) is not None
        ]
        style = {"color": colours[method], "marker": markers[method]}
        if pairs:
            x, y = (summarise([pair[side] for pair in pairs]) for side in (0, 1))
            axes.errorbar(
                *(x.mean, y.mean),
                xerr=_arms(x.mean, x.ci_low, x.ci_high),
                yerr=_arms(y.mean, y.ci_low, y.ci_high),
                ms=6,
                mec="white",
                mew=0.5,
                elinewidth=0.8,
                **style,
            )
        published = _published(method, dataset) if paper else {}
        if across in published and up in published:
            axes.plot(published[across], published[up], mfc="none", mew=1.0, ms=5, **style)
    axes.set(xlabel=x_title, ylabel=y_title)
    axes.margins(0.12)


def _arms(mean: float, low: float | None, high: float | None) -> list[list[float]] | None:
    return None if low is None or high is None else [[mean - low], [high - mean]]


def _published(method: str, dataset: str) -> dict[str, float]:
    return {
        row["metric"]: float(row["mean"])
        for row in paper_rows("main_results")
        if (row["method"], row["dataset"]) == (method, dataset)
    }
