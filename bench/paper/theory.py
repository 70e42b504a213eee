"""The paper's two results: their formulas, simulations of both, and the figure of all that."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.reporting.figure import LINES, MARKERS, WIDTH, Drawn, FigureInput, new_figure, palette

SIMULATED_SAMPLES = 20_000
ERRORS = (0.01, 0.02, 0.05, 0.1, 0.2)
CORES = (0.5, 1.0, 2.0)
ANGLES = np.linspace(0, math.pi / 2, 181)


def enrichment(aligned: float, error: float, classes: int = 2) -> float:
    """Return the share of minority samples among the errors of iteration 1 (Theorem 1).

    Among C classes a misread attribute may be any other one, so that a minority sample is still
    predicted right with probability error / (C - 1); the share is then among the errors of one
    class. The paper claims enrichment whenever the majority attribute's probability exceeds 1 / C;
    what the formula needs is a small error, below 1/2 for two classes: `enrichment(0.9, 0.6)` is
    less than the minority's share of 0.1.

    `aligned` is rho, the probability that the spurious attribute agrees with the class, `error` is
    epsilon, the probability that the prediction differs from the attribute.
    """
    if not (0 < aligned < 1 and 0 <= error < 1):
        raise ValueError(f"need 0 < aligned < 1 and 0 <= error < 1, got {aligned} and {error}")
    minority = (1 - error / (classes - 1)) * (1 - aligned)
    return minority / (error * aligned + minority)


def approximation_gap(spurious: float, core: float) -> float:
    """Return the worst-group risk a single linear classifier pays over two specialists.

    The closed form is Phi(-mu_c) - Phi(-sqrt(mu_s^2 + mu_c^2)), with the magnitudes of the spurious
    (mu_s) and of the core feature (mu_c).
    """
    from scipy.stats import norm  # slow to import

    if spurious < 0 or core <= 0:
        raise ValueError(f"need spurious >= 0 and core > 0, got {spurious} and {core}")
    return float(norm.cdf(-core) - norm.cdf(-((spurious**2 + core**2) ** 0.5)))


def draw_theory(given: FigureInput) -> Drawn:
    """Draw Theorem 1 on the left and the closed form of Theorem 2's gap on the right."""
    figure = new_figure(WIDTH, 3.1)
    left, right = figure.subplots(1, 2)
    aligned, magnitudes = np.linspace(0.5, 0.995, 200), np.linspace(0, 4, 200)
    sides: tuple[tuple[Any, ...], ...] = (
        (left, r"\epsilon", ERRORS, enrichment, aligned, simulated_share, (0.55, 0.98)),
        (right, r"\mu_c", CORES, approximation_gap, magnitudes, simulated_gap, (0.25, 3.75)),
    )
    for seed, (axes, symbol, values, formula, x, simulated, ends) in enumerate(sides):
        draws, points = np.random.default_rng(seed), np.linspace(ends[0], ends[1], 8)
        for place, (value, colour) in enumerate(zip(values, palette(len(values)), strict=True)):
            curve = [100 * formula(float(at), value) for at in x]
            axes.plot(x, curve, color=colour, linestyle=LINES[place % len(LINES)])
            drawn = [100 * simulated(float(at), value, draws) for at in points]
            look = {"color": colour, "mec": "white", "mew": 0.4}
            label = f"${symbol}$ = {value:g}"
            axes.plot(points, drawn, MARKERS[place], label=label, **look)
    left.plot(aligned, 100 * (1 - aligned), color="0.5", lw=1)
    left.text(0.72, 22, "among all samples", color="0.35", rotation=-16, fontsize=7)
    left.set(xlabel=r"alignment $\rho = P(a = y)$", ylabel="minority among errors (%)")
    left.set(title="Minority enrichment", ylim=(0, 104), xlim=(0.5, 1.0))
    right.set(xlabel=r"spurious magnitude $\mu_s$", ylabel=r"gap $\Delta$ (points of error)")
    right.set(title="Gap of a single classifier", ylim=(0, None), xlim=(0, 4))
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return Drawn(
        figure,
        "Theory. Left: share of minority samples among the errors of iteration 1 (Theorem 1) "
        "against the strength of the spurious correlation, for several shares of predictions that "
        "do not follow the spurious attribute; the grey line is their share among all samples. "
        "Right: what a single linear classifier loses in its worst group against two specialists "
        "(closed form of the gap). Lines are the formulas, points are simulated.",
        (
            f"Each point is one simulation of {SIMULATED_SAMPLES:,} samples a group with a fixed "
            "generator; the simulated single classifier is the best of 181 directions on those "
            "samples.",
        ),
    )


def simulated_share(aligned: float, error: float, draws: np.random.Generator) -> float:
    """Return the minority's share among the errors of a model that reads the attribute."""
    minority = draws.random(SIMULATED_SAMPLES) >= aligned
    misread = draws.random(SIMULATED_SAMPLES) < error
    wrong = minority != misread  # a misread attribute is the other one of two
    return float(minority[wrong].mean())


def simulated_gap(spurious: float, core: float, draws: np.random.Generator) -> float:
    """Draw both groups of the Gaussian model and compare one classifier with two specialists.

    The easy group has the spurious feature with the class, the hard one against it; a classifier is
    a direction, and the specialists are the directions of the two groups' own means.
    """
    noise = draws.standard_normal((2, SIMULATED_SAMPLES, 2))
    easy, hard = noise + np.array([[[spurious, core]], [[-spurious, core]]])
    directions = np.stack([np.sin(ANGLES), np.cos(ANGLES)])
    both = np.concatenate([directions * [[-1], [1]], directions], axis=1)
    errors = np.stack([(group @ both < 0).mean(axis=0) for group in (easy, hard)])
    specialists = [
        float((group @ [[sign * spurious], [core]] < 0).mean())
        for group, sign in ((easy, 1), (hard, -1))
    ]
    return float(errors.max(axis=0).min() - max(specialists))
