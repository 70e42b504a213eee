"""Training time: what a method costs by itself, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.report.collection import Run
from bench.report.figures.drawing import (
    HATCHES,
    INK,
    Drawn,
    NotDrawn,
    View,
    grid,
    in_order,
    palette,
    plain,
)
from bench.report.names import method_name


def draw(view: View) -> Drawn | NotDrawn:
    """Draw one panel a dataset: a bar a method, its shared first stages and its own part apart."""
    datasets = view.by_dataset()
    if not datasets:
        return NotDrawn("no finished run to show")
    parts = ("first stages", "the method's own part")
    figure, panels = grid(len(datasets), 3, 2.5)
    colours = palette(2)
    for axes, (label, runs) in zip(panels, datasets.items(), strict=True):
        methods = in_order({str(run.record["method"]) for run in runs})
        for place, method in enumerate(methods):
            own = [run for run in runs if run.record["method"] == method]
            left = 0.0
            for part, name in enumerate(parts):
                minutes = float(np.mean([_minutes(run)[part] for run in own]))
                axes.barh(
                    *(place, minutes),
                    left=left,
                    color=colours[part],
                    hatch=HATCHES[part],
                    edgecolor=INK,
                    linewidth=0.5,
                    height=0.7,
                    label=name if place == 0 else None,
                )
                left += minutes
            if len(own) > 1:
                totals = [sum(_minutes(run)) for run in own]
                spread = float(np.std(totals, ddof=1))
                axes.errorbar(left, place, xerr=spread, color=INK, lw=0.8)
        axes.set_yticks(range(len(methods)), [plain(method_name(name)) for name in methods])
        axes.set_ylim(max(len(methods), 3) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set(title=label, xlabel="minutes")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    runs = [run for own in datasets.values() for run in own]
    return Drawn(
        figure,
        "Training time of one run by itself, as if nothing were shared between methods: stages "
        "that other methods can share (such as a first ERM) and the method's own part; mean over "
        "seeds, whiskers: standard deviation. Auditing and evaluation are not counted.",
        (
            f"Measured on: {_machines(runs)}. Runs may have shared the machine with others, so "
            "differences of a few tens of percent mean nothing; the paper's times are of one H100.",
            *view.missing(list(datasets)),
        ),
    )


def _minutes(run: Run) -> tuple[float, float]:
    """Split a run's stand-alone minutes into shared stages and its own part."""
    stages: list[dict[str, Any]] = run.record["stages"]
    own = sum(stage["seconds_standalone"] for stage in stages if stage["name"] == "fit")
    whole = sum(stage["seconds_standalone"] for stage in stages)
    return (whole - own) / 60, own / 60


def _machines(runs: Sequence[Run]) -> str:
    seen = {
        f"{run.record['environment'].get('gpu') or run.record['environment']['processor']}, "
        f"{run.record['threads']} thread{'s' if run.record['threads'] != 1 else ''}"
        for run in runs
    }
    return "; ".join(sorted(seen))
