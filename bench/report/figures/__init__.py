"""Figures of the report: each a function from the runs it may show to a drawing, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.report.figures import (
    architecture,
    attribution,
    capture,
    cost,
    depth,
    pareto,
    proxy,
    ranks,
    theory,
)
from bench.report.figures.drawing import Drawn, NotDrawn, View


@dataclass(frozen=True)
class FigureKind:
    """One figure of the report.

    Attributes:
        name: of its files.
        of_runs: whether it shows runs; the theory does not, and is drawn once.
    """

    name: str
    title: str
    draw: Callable[[View], Drawn | NotDrawn]
    of_runs: bool = True


FIGURES = (
    FigureKind("architecture", "Inference through a tree", architecture.draw),
    FigureKind("routing", "Routing", architecture.draw_routing),
    FigureKind("capture_rates_2", "Capture rates at iteration 2", capture.iteration_2),
    FigureKind("capture_rates_3", "Capture rates at iteration 3", capture.iteration_3),
    FigureKind("attribution", "LayerGradCAM by leaf", attribution.draw_leaves),
    FigureKind("attribution_paired", "LayerGradCAM, same images", attribution.draw_paired),
    FigureKind("pareto", "Worst group against average", pareto.draw),
    FigureKind("depth_curves", "Impact of depth", depth.draw),
    FigureKind("proxy", "The proxy against the truth", proxy.draw),
    FigureKind("training_time", "Training time", cost.draw),
    FigureKind("critical_difference", "Average ranks", ranks.draw),
    FigureKind("theory", "Enrichment and gap", theory.draw, of_runs=False),
)
