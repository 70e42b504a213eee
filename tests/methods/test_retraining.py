"""Retraining the last layer: balancing, the sparse fits, the penalty, the average."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import StandardScaler

from bench.process import CpuClock
from datasets.errors import UsageError
from methods.logistic import (
    TOLERANCE,
    Floats,
    Ints,
    LogisticFit,
    Samples,
    Standardiser,
    fit_layer,
    fit_layers,
)
from methods.retraining import (
    RetrainConfig,
    apply_layer,
    average_layer,
    balanced_subset,
    choose_penalty,
)


def samples(count: int, classes: int, seed: int = 0) -> tuple[Floats, Ints]:
    """Noisy features of far from equal scales, of which the first few tell the classes apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    features = rng.normal(size=(count, 7))
    features[:, :classes] += 1.5 * np.eye(classes)[y][:, :7]
    return features * rng.uniform(0.1, 10, 7) + rng.uniform(-5, 5, 7), y


def lasso(penalty: float, seed: int) -> Any:
    return LogisticRegression(
        l1_ratio=1.0, C=penalty, solver="liblinear", tol=TOLERANCE, random_state=seed
    )


class TestBalancing:
    def drawn(self, sizes: list[int], min_group: int = 6, seed: int = 0) -> tuple[Ints, list[int]]:
        groups = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
        chosen = balanced_subset(groups, min_group, np.random.default_rng(seed))
        assert len(set(chosen.tolist())) == len(chosen), "drawn with replacement"
        return chosen, np.bincount(groups[chosen], minlength=len(sizes)).tolist()

    def test_every_group_is_cut_to_the_smallest(self) -> None:
        assert self.drawn([467, 466, 133, 133])[1] == [133, 133, 133, 133]

    def test_draws_differ(self) -> None:
        first, again, other = (self.drawn([40, 20], seed=s)[0] for s in (0, 0, 1))
        assert np.array_equal(first, again)
        assert set(first) != set(other)

    def test_tiny_group_does_not_shrink_the_others(self) -> None:
        assert self.drawn([50, 5, 40])[1] == [40, 5, 40]
        assert self.drawn([50, 6, 40])[1] == [6, 6, 6]
        assert self.drawn([50, 5, 40], min_group=5)[1] == [5, 5, 5]

    def test_nothing_but_tiny_groups(self) -> None:
        assert self.drawn([3, 2, 4])[1] == [2, 2, 2]

    def test_group_without_samples_does_not_empty_the_subset(self) -> None:
        assert self.drawn([30, 0, 20, 0, 25])[1] == [20, 0, 20, 0, 20]


class TestStandardiser:
    def test_equals_scikit_learns(self) -> None:
        features = samples(50, 2)[0]
        expected = StandardScaler().fit_transform(features)
        np.testing.assert_allclose(Standardiser.of(features)(features), expected, atol=1e-12)

    @pytest.mark.parametrize("constant", [0.0, 3.0, 0.1])  # the mean of 0.1s is not quite 0.1
    def test_constant_feature_is_only_shifted(self, constant: float) -> None:
        features = samples(50, 2)[0]
        features[:, 2] = constant
        scale = Standardiser.of(features)
        np.testing.assert_allclose(scale(features)[:, 2], 0.0, atol=1e-12)
        np.testing.assert_allclose(scale(features + 2.0)[:, 2], 2.0)

    def test_folded_layer_does_the_same_in_one_step(self) -> None:
        rng = np.random.default_rng(0)
        features = samples(50, 2)[0]
        layer = rng.normal(size=(3, 7)), rng.normal(size=3)
        scale = Standardiser.of(features[:20])
        expected = apply_layer(layer, scale(features))
        np.testing.assert_allclose(apply_layer(scale.folded(layer), features), expected)


class TestFit:
    def test_two_classes_are_one_fit(self) -> None:
        features, y = samples(80, 2)
        layer = fit_layer(features, y, 2, 0.3, seed=4)
        direct = lasso(0.3, 4).fit(features, y)
        scores = apply_layer(layer, features)
        np.testing.assert_allclose(scores[:, 1] - scores[:, 0], direct.decision_function(features))
        np.testing.assert_array_equal(scores.argmax(axis=1), direct.predict(features))

    def test_five_classes_are_five_fits(self) -> None:
        features, y = samples(200, 5)
        weights, intercepts = fit_layer(features, y, 5, 0.3, seed=4)
        assert weights.shape == (5, 7)
        for label in range(5):
            alone = lasso(0.3, 4).fit(features, (y == label).astype(int))
            np.testing.assert_array_equal(weights[label], alone.coef_[0])
            assert intercepts[label] == alone.intercept_[0]
        wrapped = OneVsRestClassifier(lasso(0.3, 4)).fit(features, y)
        predicted = apply_layer((weights, intercepts), features).argmax(axis=1)
        np.testing.assert_array_equal(predicted, wrapped.predict(features))
        assert (predicted == y).mean() > 0.5

    def test_loss_is_a_sum_and_the_intercept_penalised(self) -> None:
        """Its optimum, to which no small step leads further down."""
        features, y = samples(60, 2)
        scaled = Standardiser.of(features)(features)
        weights, intercepts = fit_layer(scaled, y, 2, 0.1, seed=0)

        def objective(point: Floats) -> float:
            margins = (2 * y - 1) * (scaled @ point[:-1] + point[-1])
            return float(np.abs(point).sum() + 0.1 * np.log1p(np.exp(-margins)).sum())

        found = np.append(weights[1], intercepts[1])
        assert (found == 0).any(), "nothing is sparse"
        rng = np.random.default_rng(0)
        for step in rng.normal(0, 0.03, (200, 8)) * rng.integers(0, 2, (200, 8)):
            assert objective(found) <= objective(found + step) + 1e-4


class TestPenalty:
    config = RetrainConfig(penalties=(0.01, 1.0, 0.1), splits=3, retrains=4)

    def test_is_judged_on_the_halves_that_were_not_fitted(self) -> None:
        """The whole choice, computed a second time in plain steps."""
        features, y = samples(90, 2)
        groups = 2 * y + (np.arange(90) % 3 == 0)

        def worst(scores: Floats, positions: Ints) -> float:
            right = scores.argmax(axis=1) == y[positions]
            own = groups[positions]
            return float(min(right[own == g].mean() for g in np.unique(own)))

        found = choose_penalty(
            Samples(features, y, 2), groups, self.config, worst, np.random.default_rng(5)
        )
        rng = np.random.default_rng(5)
        means = dict.fromkeys(self.config.penalties, 0.0)
        for _ in range(3):
            order = rng.permutation(90)
            half, rest = order[:45], order[45:]
            subset = half[balanced_subset(groups[half], 6, rng)]
            seed = int(rng.integers(2**31))
            scaler = StandardScaler().fit(features[subset])
            for penalty in means:
                model = lasso(penalty, seed).fit(scaler.transform(features[subset]), y[subset])
                right = model.predict(scaler.transform(features[rest])) == y[rest]
                by_group = [right[groups[rest] == g].mean() for g in range(4)]
                means[penalty] += min(by_group) / 3
        best = max(means, key=lambda penalty: (means[penalty], penalty))
        assert found == (best, pytest.approx(means[best]))
        assert len(set(means.values())) > 1, "nothing to choose"

    def test_weaker_one_wins_a_tie(self) -> None:
        features, y = samples(40, 2)
        found = choose_penalty(
            Samples(features, y, 2), y, self.config, lambda *_: 0.5, np.random.default_rng(0)
        )
        assert found == (1.0, 0.5)


class TestCores:
    """More cores change nothing, not even the last bit."""

    @staticmethod
    def fits(samples: Samples, count: int) -> list[LogisticFit]:
        """Fits of all kinds: each on rows, at a penalty and from a seed of its own."""
        drawn = [np.random.default_rng(seed).permutation(300)[:200] for seed in range(count)]
        return [
            LogisticFit(rows, Standardiser.of(samples.features[rows]), (0.1, 1.0)[seed % 2], seed)
            for seed, rows in enumerate(drawn)
        ]

    @pytest.fixture
    def samples(self) -> Samples:
        return Samples(*samples(300, 5), 5)

    @pytest.mark.parametrize(("count", "cores"), [(5, 2), (4, 3), (1, 4)])
    def test_layers_are_the_same_bit_for_bit(
        self, samples: Samples, monkeypatch: pytest.MonkeyPatch, count: int, cores: int
    ) -> None:
        fits = self.fits(samples, count)
        alone = fit_layers(samples, fits)
        assert len(alone) == count
        assert len({layer[0].tobytes() for layer in alone}) == count, "fits are not told apart"
        here: list[LogisticFit] = []
        own = LogisticFit.layer
        monkeypatch.setattr(
            LogisticFit, "layer", lambda fit, seen: (here.append(fit), own(fit, seen))[1]
        )
        shared = fit_layers(samples, fits, cores)
        assert list(map(id, here)) == list(map(id, fits[::cores])), "helpers did not do their share"
        for (weights, intercepts), (others, other) in zip(alone, shared, strict=True):
            np.testing.assert_array_equal(weights, others)
            np.testing.assert_array_equal(intercepts, other)

    def test_one_core_starts_no_process(
        self, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subprocess, "Popen", None)
        assert len(fit_layers(samples, self.fits(samples, 2))) == 2
        with pytest.raises(TypeError):
            fit_layers(samples, self.fits(samples, 2), cores=2)

    def test_what_a_dead_helper_left_is_done_here(
        self, samples: Samples, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits = self.fits(samples, 3)
        alone = fit_layers(samples, fits)
        monkeypatch.setattr(sys, "executable", shutil.which("false"))
        for (weights, _), (others, _) in zip(alone, fit_layers(samples, fits, 2), strict=True):
            np.testing.assert_array_equal(weights, others)

    def test_the_time_of_helpers_is_charged(self, samples: Samples) -> None:
        """Starting one alone takes a tenth of a second of the processor."""
        fits = self.fits(samples, 2)
        fit_layers(samples, fits)
        spent = []
        for cores in (1, 2):
            before = CpuClock.now()
            fit_layers(samples, fits, cores)
            spent.append((CpuClock.now() - before).cpu)
        assert spent[1] > 2 * spent[0]


@pytest.mark.parametrize("classes", [2, 5])
def test_average_equals_a_direct_computation(classes: int) -> None:
    """DFR's golden case: the mean of separate fits, each on its own balanced subset."""
    features, y = samples(300, classes)
    groups = 2 * y + (np.arange(300) % 5 == 0)
    config = RetrainConfig(retrains=6)
    scale = Standardiser.of(samples(50, classes, seed=9)[0])  # DFR's is that of training
    layer = average_layer(
        Samples(features, y, classes), groups, config, 0.3, scale, np.random.default_rng(5)
    )
    rng = np.random.default_rng(5)
    scores = np.zeros((300, classes))
    for _ in range(6):
        subset = balanced_subset(groups, config.min_group, rng)
        seed = int(rng.integers(2**31))
        scaled = (features - scale.mean) / scale.std
        for label in range(1, 2) if classes == 2 else range(classes):
            model = lasso(0.3, seed).fit(scaled[subset], y[subset] == label)
            scores[:, label] += (scaled @ model.coef_[0] + model.intercept_[0]) / 6
    np.testing.assert_allclose(apply_layer(layer, features), scores, atol=1e-9)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("penalties", ()),
        ("penalties", (1.0, 0.0)),
        ("splits", 0),
        ("retrains", 0),
        ("min_group", 0),
    ],
)
def test_wrong_values_are_refused(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=knob):
        replace(RetrainConfig(), **{knob: value})
