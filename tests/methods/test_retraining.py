"""Retraining the last layer: balancing, the sparse fits, the penalty, the average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from datasets.errors import UsageError
from methods.logistic import Floats, Ints, Layer
from methods.retraining import (
    MOST_WIDER,
    Choice,
    RetrainConfig,
    Samples,
    Standardiser,
    average_layer,
    balanced_subset,
    choose_penalty,
    next_penalty,
)


def samples(count: int, classes: int, seed: int = 0) -> tuple[Floats, Ints]:
    """Noisy features of far from equal scales, of which the first few tell the classes apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % classes
    features = rng.normal(size=(count, 7))
    features[:, :classes] += 1.5 * np.eye(classes)[y][:, :7]
    return features * rng.uniform(0.1, 10, 7) + rng.uniform(-5, 5, 7), y


def lasso(penalty: float, seed: int) -> Any:
    """The second solver, at a tight tolerance."""
    return LogisticRegression(
        l1_ratio=1.0, C=penalty, solver="liblinear", tol=1e-8, max_iter=10_000, random_state=seed
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
        layer = Layer(rng.normal(size=(3, 7)), rng.normal(size=3), violation=0.5)
        scale = Standardiser.of(features[:20])
        folded = scale.folded(layer)
        np.testing.assert_allclose(folded.scores(features), layer.scores(scale(features)))
        assert folded.violation == 0.5


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
        means = dict.fromkeys(found.scores, 0.0)  # those beyond the grid included
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
        assert found.scores == pytest.approx(means)
        assert {*self.config.penalties} < {*means} and found.penalty in means
        assert means[found.penalty] == max(means.values())
        assert len(set(means.values())) > 1, "nothing to choose"
        assert found.violation < 1e-7

    def test_weaker_one_wins_a_tie(self) -> None:
        features, y = samples(40, 2)
        found = choose_penalty(
            Samples(features, y, 2), y, self.config, lambda *_: 0.5, np.random.default_rng(0)
        )
        assert (found.penalty, found.scores[found.penalty]) == (1.0, 0.5)


class TestWiderGrid:
    """The score of a C is made up here; what is fitted with it does not matter."""

    @staticmethod
    def choose(
        penalties: tuple[float, ...], score: Any, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Choice, list[float]]:
        """Choose by a score that depends on C alone; return the fitted Cs beside the choice."""
        fitted: list[float] = []

        def fit(features: Floats, y: Ints, classes: int, penalty: float, seed: int) -> Layer:
            fitted.append(penalty)
            return Layer(np.zeros((2, 7)), np.zeros(2), violation=penalty)

        monkeypatch.setattr("methods.retraining.fit_layer", fit)
        features, y = samples(40, 2)
        choice = choose_penalty(
            Samples(features, y, 2),
            y,
            RetrainConfig(penalties=penalties, splits=2),
            lambda scores, rows: score(fitted[-1]),
            np.random.default_rng(0),
        )
        return choice, fitted[::2]

    def test_not_where_the_best_is_inside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choice, fitted = self.choose((1.0, 0.1, 0.01), lambda c: -abs(c - 0.1), monkeypatch)
        assert (choice.penalty, choice.edge, fitted) == (0.1, None, [1.0, 0.1, 0.01])

    def test_weaker_while_that_is_better(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choice, fitted = self.choose((0.5, 10.0, 2.0), lambda c: -abs(c - 240), monkeypatch)
        assert fitted == pytest.approx([0.5, 10.0, 2.0, 50.0, 250.0, 1250.0])
        assert (choice.penalty, choice.edge) == (pytest.approx(250.0), "largest")
        assert sorted(choice.scores) == sorted(fitted)
        assert choice.violation == pytest.approx(1250.0)

    def test_stronger_while_that_is_better(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choice, fitted = self.choose((1.0, 0.1), lambda c: -c if c > 0.005 else -1.0, monkeypatch)
        assert fitted == pytest.approx([1.0, 0.1, 0.01, 0.001])
        assert (choice.penalty, choice.edge) == (pytest.approx(0.01), "smallest")

    def test_not_for_an_equal_score(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Separable data score alike for every large C, which leads nowhere."""
        choice, fitted = self.choose((1.0, 0.1), lambda c: min(c, 1.0), monkeypatch)
        assert fitted == pytest.approx([1.0, 0.1, 10.0])
        assert (choice.penalty, choice.edge) == (1.0, "largest")

    def test_not_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        choice, fitted = self.choose((1.0, 0.1), lambda c: c, monkeypatch)
        assert choice.penalty == max(fitted) == pytest.approx(10.0**MOST_WIDER)
        assert choice.edge == "largest"

    def test_not_of_one_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That is what a tuning trial sets, and it is what the trial is about."""
        choice, fitted = self.choose((0.3,), lambda c: c, monkeypatch)
        assert (choice.penalty, choice.edge, fitted) == (0.3, None, [0.3])

    @pytest.mark.parametrize(
        ("grid", "chosen", "expected"),
        [
            ((0.01, 3.0, 10.0), 10.0, 100 / 3),
            ((0.7, 1.0), 1.0, 1 / 0.7),
            ((0.01, 0.03, 1.0), 0.01, 0.01 / 3),
            ((0.01, 0.03, 1.0), 0.03, None),
            ((0.3,), 0.3, None),
        ],
    )
    def test_goes_on_by_the_last_factor(
        self, grid: tuple[float, ...], chosen: float, expected: float | None
    ) -> None:
        assert next_penalty(grid, chosen) == (expected and pytest.approx(expected))


class TestProgress:
    def test_every_fit_is_reported(self) -> None:
        features, y = samples(60, 2)
        config, told = RetrainConfig(penalties=(0.1, 1.0), splits=2, retrains=3), list[str]()
        own = Samples(features, y, 2), y, config
        choice = choose_penalty(*own, lambda *_: 0.5, np.random.default_rng(0), told.append)
        assert told[:2] == ["C = 0.1, halving 1/2", "C = 0.1, halving 2/2"]
        assert len(told) == 2 * len(choice.scores)
        scale = Standardiser.of(features)
        average_layer(*own, 0.1, scale, np.random.default_rng(0), told.append)
        assert told[-3:] == [f"C = 0.1, fit {number}/3" for number in (1, 2, 3)]


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
    np.testing.assert_allclose(layer.scores(features), scores, atol=1e-5)


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
