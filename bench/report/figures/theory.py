"""The theory section's two formulas, as curves, with points from simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.report.figures.drawing import (
    LINES,
    MARKERS,
    WIDTH,
    Drawn,
    View,
    new_figure,
    palette,
)
from methods.nct.theory import approximation_gap, enrichment

SAMPLES = 20_000
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2)
CORES = (0.5, 1.0, 2.0)
ANGLES = np.linspace(0, math.pi / 2, 181)


def draw(view: View) -> Drawn:
    """Draw Theorem 1 on the left and the closed form of Theorem 2's gap on the right."""
    figure = new_figure(WIDTH, 3.1)
    left, right = figure.subplots(1, 2)
    _enrichment(left, np.random.default_rng(0))
    _gap(right, np.random.default_rng(1))
    return Drawn(
        figure,
        "Theory. Left: share of minority samples among the errors of iteration 1 (Theorem 1) "
        "against the strength of the spurious correlation, for several shares of predictions that "
        "do not follow the spurious attribute; the grey line is their share among all samples. "
        "Right: what a single linear classifier loses in its worst group against two specialists "
        "(closed form of the gap). Lines are the formulas, points are simulated.",
        (
            f"Each point is one simulation of {SAMPLES:,} samples a group with a fixed generator; "
            "the simulated single classifier is the best of 181 directions on those samples.",
        ),
    )


def _enrichment(axes: Any, draws: np.random.Generator) -> None:
    aligned = np.linspace(0.5, 0.995, 200)
    for place, (error, colour) in enumerate(zip(ERRORS, palette(len(ERRORS)), strict=True)):
        curve = [100 * enrichment(float(rho), error) for rho in aligned]
        axes.plot(aligned, curve, color=colour, linestyle=LINES[place % len(LINES)])
        points = np.linspace(0.55, 0.98, 8)
        shares = [100 * simulated_share(float(rho), error, draws) for rho in points]
        label = f"$\\epsilon$ = {error:g}"
        axes.plot(points, shares, MARKERS[place], color=colour, mec="white", mew=0.4, label=label)
    axes.plot(aligned, 100 * (1 - aligned), color="0.5", lw=1)
    axes.text(0.72, 22, "among all samples", color="0.35", rotation=-16, fontsize=7)
    axes.set(xlabel=r"alignment $\rho = P(a = y)$", ylabel="minority among errors (%)")
    axes.set(title="Minority enrichment", ylim=(0, 104), xlim=(0.5, 1.0))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def _gap(axes: Any, draws: np.random.Generator) -> None:
    magnitudes = np.linspace(0, 4, 200)
    for place, (core, colour) in enumerate(zip(CORES, palette(len(CORES)), strict=True)):
        curve = [100 * approximation_gap(float(spurious), core) for spurious in magnitudes]
        axes.plot(magnitudes, curve, color=colour, linestyle=LINES[place])
        points = np.linspace(0.25, 3.75, 8)
        gaps = [100 * simulated_gap(float(spurious), core, draws) for spurious in points]
        label = f"$\\mu_c$ = {core:g}"
        axes.plot(points, gaps, MARKERS[place], color=colour, mec="white", mew=0.4, label=label)
    axes.set(xlabel=r"spurious magnitude $\mu_s$", ylabel=r"gap $\Delta$ (points of error)")
    axes.set(title="Gap of a single classifier", ylim=(0, None), xlim=(0, 4))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


def simulated_share(aligned: float, error: float, draws: np.random.Generator) -> float:
    """Draw two classes and a model that reads the attribute, and count the minority's errors."""
    minority = draws.random(SAMPLES) >= aligned
    misread = draws.random(SAMPLES) < error
    wrong = minority != misread  # a misread attribute is the other one of two
    return float(minority[wrong].mean())


def simulated_gap(spurious: float, core: float, draws: np.random.Generator) -> float:
    """Draw both groups of the Gaussian model and compare one classifier with two specialists.

    The easy group has the spurious feature with the class, the hard one against it; a classifier is
    a direction, and the specialists are the directions of the two groups' own means.
    """
    noise = draws.standard_normal((2, SAMPLES, 2))
    easy, hard = noise + np.array([[[spurious, core]], [[-spurious, core]]])
    directions = np.stack([np.sin(ANGLES), np.cos(ANGLES)])
    both = np.concatenate([directions * [[-1], [1]], directions], axis=1)
    errors = np.stack([(group @ both < 0).mean(axis=0) for group in (easy, hard)])
    own = np.array([[spurious], [core]]), np.array([[-spurious], [core]])
    specialists = [
        float((group @ mean < 0).mean()) for group, mean in zip((easy, hard), own, strict=True)
    ]
    return float(errors.max(axis=0).min() - max(specialists))
