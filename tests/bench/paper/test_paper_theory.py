"""The two theorems' formulas against simulation and numerical search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from bench.paper.theory import approximation_gap, enrichment, simulated_gap
from bench.paper.theory import simulated_share as drawn_share

SAMPLES = 400_000


def simulated_share(
    aligned: float, error: float, classes: int, seed: int = 0
) -> tuple[float, float]:
    """Minority share among the errors of a model that reads the attribute, and its spread.

    Whatever is not the class's own attribute, and whatever the model reads wrongly, is uniform over
    the other values.
    """
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, SAMPLES)
    other = rng.integers(1, classes, SAMPLES)
    attribute = np.where(rng.random(SAMPLES) < aligned, y, (y + other) % classes)
    misread = rng.integers(1, classes, SAMPLES)
    right = rng.random(SAMPLES) < 1 - error
    predicted = np.where(right, attribute, (attribute + misread) % classes)
    wrong = predicted != y
    share = float((attribute != y)[wrong].mean())
    return share, math.sqrt(share * (1 - share) / wrong.sum())


class TestEnrichment:
    def test_example_of_the_paper(self) -> None:
        assert enrichment(0.95, 0.02) == pytest.approx(0.0490 / 0.0680)
        assert enrichment(0.95, 0.02) == pytest.approx(0.72, abs=0.005)
        assert enrichment(0.95, 0.02) / 0.05 == pytest.approx(14, abs=0.5)

    @pytest.mark.parametrize(("aligned", "error"), [(0.95, 0.02), (0.8, 0.1), (0.6, 0.3)])
    def test_simulation(self, aligned: float, error: float) -> None:
        share, spread = simulated_share(aligned, error, classes=2)
        assert abs(enrichment(aligned, error) - share) < 4 * spread

    @pytest.mark.parametrize("classes", [2, 3, 5, 10])
    @pytest.mark.parametrize(("aligned", "error"), [(0.95, 0.02), (0.5, 0.3)])
    def test_simulation_with_more_classes(self, classes: int, aligned: float, error: float) -> None:
        share, spread = simulated_share(aligned, error, classes)
        assert abs(enrichment(aligned, error, classes) - share) < 4 * spread

    def test_simulation_tells_two_classes_from_five(self) -> None:
        share, spread = simulated_share(0.5, 0.3, classes=5)
        assert abs(enrichment(0.5, 0.3, 2) - share) > 10 * spread

    def test_perfect_reader_errs_on_the_minority_only(self) -> None:
        assert enrichment(0.95, 0.0) == 1.0
        assert enrichment(0.95, 0.0, 5) == 1.0

    @pytest.mark.parametrize("classes", [2, 3, 5])
    @pytest.mark.parametrize("aligned", [0.1, 0.5, 0.95])
    def test_enriches_while_errors_are_rarer_than_chance(
        self, aligned: float, classes: int
    ) -> None:
        """Whatever the alignment: at an error of (C - 1) / C the reader is a coin."""
        chance = (classes - 1) / classes
        assert enrichment(aligned, chance - 0.01, classes) > 1 - aligned
        assert enrichment(aligned, chance, classes) == pytest.approx(1 - aligned)
        assert enrichment(aligned, chance + 0.01, classes) < 1 - aligned

    @pytest.mark.parametrize(
        ("aligned", "error"), [(0.0, 0.1), (1.0, 0.1), (1.5, 0.1), (0.9, 1.0), (0.9, -0.1)]
    )
    def test_wrong_arguments(self, aligned: float, error: float) -> None:
        with pytest.raises(ValueError, match="need 0 < aligned < 1"):
            enrichment(aligned, error)
        with pytest.raises(ValueError, match="need 0 < aligned < 1"):
            enrichment(aligned, error, 3)


def worst_risk(angle: np.ndarray, spurious: float, core: float) -> np.ndarray:
    """Risk of each direction in the worse of the two subgroups."""
    along, across = np.cos(angle) * core, np.sin(angle) * spurious
    return np.maximum(norm.cdf(-(along + across)), norm.cdf(-(along - across)))


class TestGap:
    def test_example_of_the_paper(self) -> None:
        assert approximation_gap(2, 1) == pytest.approx(0.146, abs=5e-4)

    @pytest.mark.parametrize(("spurious", "core"), [(2, 1), (0.3, 1), (1, 0.2), (3, 2)])
    def test_no_direction_does_better(self, spurious: float, core: float) -> None:
        angles = np.linspace(-math.pi, math.pi, 20_001)
        specialist = norm.cdf(-math.hypot(spurious, core))
        best = worst_risk(angles, spurious, core).min()
        assert approximation_gap(spurious, core) == pytest.approx(best - specialist, abs=1e-9)

    def test_simulation(self) -> None:
        """Draw both subgroups; the core feature alone against each subgroup's own direction."""
        rng = np.random.default_rng(0)
        y = rng.choice([-1.0, 1.0], SAMPLES)
        noise = rng.normal(size=(2, SAMPLES))
        single, specialists = [], []
        for agreement in (1, -1):
            spurious, core = noise[0] + 2 * agreement * y, noise[1] + y
            single.append(np.mean(core * y < 0))
            specialists.append(np.mean((2 * agreement * spurious + core) * y < 0))
        assert max(single) - max(specialists) == pytest.approx(approximation_gap(2, 1), abs=0.003)

    def test_grows_with_the_spurious_feature_from_nothing(self) -> None:
        gaps = [approximation_gap(spurious, 1) for spurious in (0, 0.5, 1, 2, 4)]
        assert gaps[0] == 0
        assert gaps == sorted(set(gaps))

    @pytest.mark.parametrize(("spurious", "core"), [(-1, 1), (1, 0), (1, -1)])
    def test_wrong_arguments(self, spurious: float, core: float) -> None:
        with pytest.raises(ValueError, match="need spurious >= 0 and core > 0"):
            approximation_gap(spurious, core)


def test_simulated_points_of_the_figure_lie_on_the_curves() -> None:
    draws = np.random.default_rng(5)
    assert drawn_share(0.95, 0.02, draws) == pytest.approx(enrichment(0.95, 0.02), abs=0.05)
    assert simulated_gap(2.0, 1.0, draws) == pytest.approx(approximation_gap(2.0, 1.0), abs=0.015)
