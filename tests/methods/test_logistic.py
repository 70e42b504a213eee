"""L1 logistic regression: the optimum, against second solvers and by its own conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from torch import Tensor

from methods.logistic import (
    LIBLINEAR_VIOLATION,
    WIDE,
    Floats,
    Ints,
    fit_layer,
    gradient,
    lasso,
    liblinear,
    objective,
    proximal_newton,
    solver_for,
    violation,
)
from methods.retraining import Standardiser

FEATURES = Path(__file__).with_name("cmnist_features.npz")
"""Features of 30 validation images of each CMNIST group, from ERM's network of seed 100."""
PENALTIES = (100.0, 10.0, 1.0, 0.1, 0.01)


def with_intercept(features: Floats) -> Tensor:
    return torch.from_numpy(np.column_stack([features, np.ones(len(features))]))


def stored() -> tuple[Floats, Ints]:
    content = np.load(FEATURES)
    features = content["features"].astype(np.float64)
    return Standardiser.of(features)(features), content["y"].astype(np.int64)


def drawn(count: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Standard normal features, of which a few tell the classes apart, with noise."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, width))
    tells = features[:, :4] @ np.array([1.0, -1.0, 0.5, 0.25])
    return with_intercept(features), torch.from_numpy(
        np.where(tells + 0.5 * rng.normal(size=count) > 0, 1.0, -1.0)
    )


def split_lbfgs(x: Tensor, signs: Tensor, penalty: float) -> float:
    """The least value that L-BFGS-B finds where each weight is a difference of two, both >= 0."""
    plain, own = x.numpy(), signs.numpy()
    width = plain.shape[1]

    def value(both: Floats) -> tuple[float, Floats]:
        margins = own * (plain @ (both[:width] - both[width:]))
        slope = -penalty * (plain.T @ (own / (1 + np.exp(margins))))
        total = both.sum() + penalty * np.logaddexp(0, -margins).sum()
        return float(total), np.concatenate([slope + 1, 1 - slope])

    found = minimize(
        value,
        np.zeros(2 * width),
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * (2 * width),
        options={"maxiter": 20_000, "maxfun": 50_000, "ftol": 1e-15, "gtol": 1e-7, "maxcor": 50},
    )
    return float(found.fun)


def tight(x: Tensor, signs: Tensor, penalty: float) -> Tensor:
    """scikit-learn's liblinear, at a tolerance of its own rather than `liblinear`'s."""
    model = LogisticRegression(
        l1_ratio=1.0, C=penalty, solver="liblinear", tol=1e-8, max_iter=100_000, random_state=1
    ).fit(x[:, :-1].numpy(), signs.numpy() > 0)
    return torch.from_numpy(np.append(model.coef_[0], model.intercept_[0]))


class TestOptimum:
    @pytest.mark.parametrize("penalty", [10.0, 1.0, 0.1, 0.01])
    def test_stored_features_against_a_second_solver(self, penalty: float) -> None:
        """Both solvers of this file, and L-BFGS-B on the smooth form, to 1e-6 of the objective."""
        features, y = stored()
        x, signs = with_intercept(features), torch.from_numpy(np.where(y == 2, 1.0, -1.0))
        newton = objective(x, signs, penalty, proximal_newton(x, signs, penalty))
        assert newton == pytest.approx(split_lbfgs(x, signs, penalty), rel=1e-6)
        other = objective(x, signs, penalty, liblinear(x, signs, penalty, seed=0))
        assert newton == pytest.approx(other, rel=1e-6)
        assert newton <= other * (1 + 1e-12)

    def test_what_version_1_stopped_at_was_further_off(self) -> None:
        features, y = stored()
        x, signs = with_intercept(features), torch.from_numpy(np.where(y == 2, 1.0, -1.0))
        model = LogisticRegression(l1_ratio=1.0, C=10.0, solver="liblinear", tol=1e-2)
        model.fit(features, y == 2)
        loose = torch.from_numpy(np.append(model.coef_[0], model.intercept_[0]))
        best = objective(x, signs, 10.0, proximal_newton(x, signs, 10.0))
        assert objective(x, signs, 10.0, loose) > best * 1.001

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_weights_are_liblinears(self, penalty: float) -> None:
        x, signs = drawn(300, 12)
        w = proximal_newton(x, signs, penalty)
        torch.testing.assert_close(w, tight(x, signs, penalty), atol=1e-5, rtol=1e-5)
        assert violation(w, gradient(x, signs, penalty, w)) < 1e-7

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_separable(self, penalty: float) -> None:
        x, _ = drawn(60, 8)
        signs = x[:, 0].sign()
        w = proximal_newton(x, signs, penalty)
        assert w.isfinite().all() and violation(w, gradient(x, signs, penalty, w)) < 1e-7
        assert objective(x, signs, penalty, w) == pytest.approx(
            objective(x, signs, penalty, tight(x, signs, penalty)), rel=1e-6
        )

    @pytest.mark.parametrize("penalty", PENALTIES)
    def test_collinear(self, penalty: float) -> None:
        """Copies, opposites, sums and constants: one least value, many ways to reach it."""
        x, signs = drawn(120, 6)
        first = x[:, :6]
        more = [first, first[:, :3], -first[:, 3:], first[:, :1] + first[:, 1:2], 0 * first[:, :1]]
        wide = torch.cat([*more, x[:, 6:]], dim=1)
        w = proximal_newton(wide, signs, penalty)
        assert violation(w, gradient(wide, signs, penalty, w)) < 1e-7
        assert objective(wide, signs, penalty, w) == pytest.approx(
            objective(wide, signs, penalty, tight(wide, signs, penalty)), rel=1e-6
        )

    def test_more_features_than_samples(self) -> None:
        x, signs = drawn(20, 100)
        w = proximal_newton(x, signs, 10.0)
        assert violation(w, gradient(x, signs, 10.0, w)) < 1e-7
        assert int((w != 0).sum()) <= 20

    def test_tiny_c_leaves_nothing(self) -> None:
        """All weights are 0 exactly up to the C at which the first one pays for itself."""
        x, signs = drawn(200, 10)
        first = 1 / float((x.T @ signs).abs().max() / 2)
        assert not proximal_newton(x, signs, first * 0.999).any()
        assert proximal_newton(x, signs, first * 1.001).count_nonzero() == 1
        assert not proximal_newton(x, signs, 1e-12).any()

    def test_one_sample_a_class(self) -> None:
        x = with_intercept(np.array([[1.0, 2.0, -1.0], [0.5, -2.0, 3.0]]))
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
        for penalty in PENALTIES:
            w = proximal_newton(x, signs, penalty)
            assert violation(w, gradient(x, signs, penalty, w)) < 1e-7
            assert objective(x, signs, penalty, w) == pytest.approx(
                objective(x, signs, penalty, tight(x, signs, penalty)), rel=1e-6
            )

    def test_one_class_alone(self) -> None:
        """Only with several classes of which one has no samples in a subset."""
        x = drawn(50, 4)[0]
        signs = torch.ones(50, dtype=torch.float64)
        w = proximal_newton(x, signs, 1.0)
        assert w.isfinite().all() and violation(w, gradient(x, signs, 1.0, w)) < 1e-7
        assert w[-1] > 0

    def test_intercept_is_penalised_and_the_loss_a_sum(self) -> None:
        """Twice the samples are half the penalty; and the intercept stays short of the log odds."""
        x, signs = drawn(100, 5)
        double = torch.cat([x, x]), torch.cat([signs, signs])
        torch.testing.assert_close(
            proximal_newton(*double, 0.15), proximal_newton(x, signs, 0.3), atol=1e-7, rtol=0
        )
        alone = torch.ones(100, 1, dtype=torch.float64)
        odds = torch.where(torch.arange(100) < 80, 1.0, -1.0).double()
        intercept = float(proximal_newton(alone, odds, 0.1)[0])
        share = 1 / (1 + np.exp(-intercept))
        assert 0.1 * (80 - 100 * share) == pytest.approx(1.0)  # the slope of the penalty

    def test_same_bits_again(self) -> None:
        x, signs = drawn(300, 20)
        assert torch.equal(proximal_newton(x, signs, 1.0), proximal_newton(x, signs, 1.0))


class TestLasso:
    def test_every_combination_of_signs(self) -> None:
        """Against the best of all 3^4 sets of signs, each solved by itself."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
            curvature = root @ root.T + 0.01 * torch.eye(4)
            slope = 3 * torch.randn(4, generator=generator, dtype=torch.float64)
            start = torch.randn(4, generator=generator, dtype=torch.float64)

            def value(z: Tensor, a: Tensor = curvature, b: Tensor = slope) -> float:
                return float(z @ a @ z / 2 + b @ z + z.abs().sum())

            least = 0.0
            for signs in torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 4).double():
                own = signs.nonzero()[:, 0]
                z = torch.zeros(4, dtype=torch.float64)
                z[own] = torch.linalg.solve(curvature[own][:, own], -(slope + signs)[own])
                least = min(least, value(z))
            for begin in (start, torch.zeros_like(start)):
                assert value(lasso(curvature, slope, begin)) == pytest.approx(least, abs=1e-9)


class TestWide:
    def test_which_solver(self) -> None:
        assert [solver_for(width) for width in (84, 120)] == ["proximal_newton"] * 2
        assert [solver_for(width) for width in (512, 1280, 2048)] == ["liblinear"] * 3

    @pytest.mark.parametrize("penalty", [1.0, 0.1, 0.01])
    def test_liblinear_reaches_what_newton_does(self, penalty: float) -> None:
        x, signs = drawn(150, WIDE + 50)
        w, other = liblinear(x, signs, penalty, 0), proximal_newton(x, signs, penalty)
        assert violation(w, gradient(x, signs, penalty, w)) <= LIBLINEAR_VIOLATION
        assert objective(x, signs, penalty, w) == pytest.approx(
            objective(x, signs, penalty, other), rel=1e-6
        )

    def test_nothing_to_gain(self) -> None:
        x, signs = drawn(150, WIDE)
        assert not liblinear(x, signs, 1e-9, 0).any()

    def test_layer_of_wide_features_is_liblinears(self) -> None:
        x, signs = drawn(100, WIDE)
        y = (signs > 0).long().numpy()
        layer = fit_layer(x[:, :-1].numpy(), y, 2, 0.3, seed=4)
        expected = liblinear(x, signs, 0.3, 4).numpy()
        np.testing.assert_array_equal(layer.weights[1], expected[:-1])
        assert layer.intercepts[1] == expected[-1]


class TestLayer:
    def test_two_classes_are_one_fit(self) -> None:
        x, signs = drawn(80, 7)
        features, y = x[:, :-1].numpy(), (signs > 0).long().numpy()
        layer = fit_layer(features, y, 2, 0.3, seed=4)
        direct = tight(x, signs, 0.3).numpy()
        scores = layer.scores(features)
        np.testing.assert_allclose(
            scores[:, 1] - scores[:, 0], features @ direct[:-1] + direct[-1], atol=1e-5
        )
        assert not layer.weights[0].any() and layer.intercepts[0] == 0

    def test_five_classes_are_five_fits(self) -> None:
        features, y = stored()
        layer = fit_layer(features, y, 5, 0.3, seed=4)
        assert layer.weights.shape == (5, 84)
        model: Any = LogisticRegression(
            l1_ratio=1.0, C=0.3, solver="liblinear", tol=1e-7, max_iter=10_000, random_state=0
        )
        wrapped = OneVsRestClassifier(model).fit(features, y)
        for label, alone in enumerate(wrapped.estimators_):
            np.testing.assert_allclose(layer.weights[label], alone.coef_[0], atol=1e-3)
        predicted = layer.scores(features).argmax(axis=1)
        np.testing.assert_array_equal(predicted, wrapped.predict(features))
        assert (predicted == y).mean() > 0.4

    def test_violation_is_the_worst_of_its_fits(self) -> None:
        features, y = stored()
        layer = fit_layer(features, y, 5, 0.03, seed=4)
        x = with_intercept(features)
        found = []
        for label in range(5):
            w = torch.from_numpy(np.append(layer.weights[label], layer.intercepts[label]))
            signs = torch.from_numpy(np.where(y == label, 1.0, -1.0))
            found.append(violation(w, gradient(x, signs, 0.03, w)))
        assert layer.violation == pytest.approx(max(found)) and layer.violation < 1e-8
        off = torch.full((85,), 0.5, dtype=torch.float64)
        assert violation(off, gradient(x, signs, 0.03, off)) > 0.1
