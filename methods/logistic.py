"""L1 logistic regressions, fitted to the optimum: the last layers of DFR and ExMap.

Minimised is what liblinear minimises, with which the authors of both fit:

    sum_j |w_j| + |b| + C sum_i log(1 + exp(-s_i (w x_i + b))),   s_i = 1 or -1.

The loss is a sum, so that the right C depends on how many samples there are, and the intercept is
penalised as the weight of a constant feature 1 would be.

Features of LeNets, a hundred or so, are left to a proximal Newton: the loss is replaced by its
second-order expansion, and the lasso that this leaves is solved exactly, by an active set with
signs (Lee, Battle, Raina and Ng 2007, Efficient sparse coding algorithms). Correlated features, on
which coordinate descent creeps, do not slow it down. An exact lasso over the 2,048 features of a
ResNet-50 does: there scikit-learn's liblinear takes over, at a tight tolerance.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Solver = Literal["proximal_newton", "liblinear"]

WIDE = 256  # features from which on liblinear is faster
VIOLATION = 1e-9  # of the optimality conditions at which the Newton steps end
LIBLINEAR_VIOLATION = 1e-4  # summed over features; the objective is then within 1e-6 of the least
NEWTON_STEPS = 100  # about 7 are needed
LIBLINEAR_STEPS = 10_000
DAMPING = 1e-9  # of the curvature, so that copies of a feature leave the lasso with one solution
DECREASE = 0.01  # share of the decrease a step promises that it has to keep
ROUNDING = 1e-13  # of the objective, relative to it


@dataclass(frozen=True)
class Layer:
    """A linear layer: weights, one row a class, and intercepts.

    Attributes:
        violation: how far the fit is from an optimum: the largest absolute entry that the
            subgradient of least norm has in any of its regressions. The penalty's slope is 1.
    """

    weights: Floats
    intercepts: Floats
    violation: float = 0.0

    def scores(self, features: Floats) -> Floats:
        """Score the classes."""
        found: Floats = features @ self.weights.T + self.intercepts
        return found


def solver_for(width: int) -> Solver:
    """Return which solver fits layers on so many features."""
    return "liblinear" if width >= WIDE else "proximal_newton"


def fit_layer(features: Floats, y: Ints, classes: int, penalty: float, seed: int) -> Layer:
    """Fit a layer: one regression for two classes, else one a class against the rest.

    Of two classes the first scores 0, so that the margin is the regression's own. `seed` is that of
    liblinear's draws.
    """
    x = torch.from_numpy(np.column_stack([features, np.ones(len(features))]))
    rows, violations = [], []
    for positive in range(1 if classes == 2 else 0, classes):
        signs = torch.from_numpy(np.where(y == positive, 1.0, -1.0))
        if solver_for(features.shape[1]) == "liblinear":
            row = liblinear(x, signs, penalty, seed)
        else:
            row = proximal_newton(x, signs, penalty)
        rows.append(row.numpy())
        violations.append(violation(row, gradient(x, signs, penalty, row)))
    if classes == 2:
        rows.insert(0, np.zeros_like(rows[0]))
    stacked = np.stack(rows)
    return Layer(stacked[:, :-1], stacked[:, -1], max(violations))


def objective(x: Tensor, signs: Tensor, penalty: float, w: Tensor) -> float:
    """Return what is minimised; the last column of `x` is 1 and that of `w` the intercept."""
    margins = signs * (x @ w)
    losses = torch.logaddexp(torch.zeros_like(margins), -margins)
    return float(w.abs().sum() + penalty * losses.sum())


def gradient(x: Tensor, signs: Tensor, penalty: float, w: Tensor) -> Tensor:
    """Differentiate the loss, without the penalty on the weights."""
    return -penalty * (x.T @ (signs * torch.sigmoid(-signs * (x @ w))))


def violation(w: Tensor, slope: Tensor) -> float:
    """Return the largest entry of the objective's subgradient of least norm."""
    apart = torch.where(w != 0, (slope + w.sign()).abs(), (slope.abs() - 1).clamp(min=0))
    return float(apart.max())


def proximal_newton(x: Tensor, signs: Tensor, penalty: float) -> Tensor:
    """Minimise by Newton steps, until the optimality conditions hold or rounding stops them."""
    w = x.new_zeros(x.shape[1])
    value, last = objective(x, signs, penalty, w), float("inf")
    for _ in range(NEWTON_STEPS):
        slope = gradient(x, signs, penalty, w)
        apart = violation(w, slope)
        if apart <= VIOLATION:
            break
        chances = torch.sigmoid(signs * (x @ w))
        curvature = x.T @ ((penalty * chances * (1 - chances))[:, None] * x)
        curvature.diagonal().add_(DAMPING * curvature.diagonal().mean() + torch.finfo(x.dtype).tiny)
        step = lasso(curvature, slope - curvature @ w, w) - w
        promised = float(slope @ step + (w + step).abs().sum() - w.abs().sum())
        if promised > -ROUNDING * value and apart > last / 2:
            break
        size, last = 1.0, apart
        while (
            found := objective(x, signs, penalty, w + size * step)
        ) > value + DECREASE * size * promised + ROUNDING * value and size > ROUNDING:
            size /= 2
        w, value = w + size * step, found
    return w


def lasso(curvature: Tensor, slope: Tensor, start: Tensor) -> Tensor:
    """Minimise z' curvature z / 2 + slope' z + |z|_1 by an active set with signs.

    In turn: go towards the minimum over the coordinates at work under the signs they have, drop the
    first that reaches 0, and, once there, take in the one that most wants to leave 0. Each step
    lowers what is minimised, so that no set comes twice and the search ends.
    """
    z, sign = start.clone(), start.sign()
    tolerance = max(VIOLATION / 10, ROUNDING * float(slope.abs().max()) / 10)
    for _ in range(100 + 20 * len(z)):
        active = sign.nonzero()[:, 0]
        factor = torch.linalg.cholesky_ex(curvature[active][:, active])[0]
        aim = -torch.cholesky_solve((slope[active] + sign[active])[:, None], factor)[:, 0]
        here = z[active]
        reach = torch.where(aim * sign[active] > 0, 2.0, here / (here - aim))
        if len(active) and float(reach.min()) <= 1:
            first = int(reach.argmin())
            z[active] = here + reach[first] * (aim - here)
            z[active[first]] = sign[active[first]] = 0.0
            continue
        z[active] = aim
        pull = curvature @ z + slope
        pull[active] = 0.0
        most = int(pull.abs().argmax())
        if float(pull[most].abs()) <= 1 + tolerance:
            break
        sign[most] = -pull[most].sign()
    return z


def liblinear(x: Tensor, signs: Tensor, penalty: float, seed: int) -> Tensor:
    """Minimise by liblinear, at the tolerance that bounds the sum of all violations.

    liblinear stops where that sum is below its tolerance times the sum at w = 0, times the share of
    the rarer class.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    slope = gradient(x, signs, penalty, x.new_zeros(x.shape[1]))
    share = min(float((signs > 0).double().mean()), float((signs < 0).double().mean()))
    at_first = share * float((slope.abs() - 1).clamp(min=0).sum())
    model = LogisticRegression(
        l1_ratio=1.0,
        C=penalty,
        solver="liblinear",
        tol=LIBLINEAR_VIOLATION / max(at_first, LIBLINEAR_VIOLATION),
        max_iter=LIBLINEAR_STEPS,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the record has the violation
        model.fit(x[:, :-1].numpy(), signs.numpy() > 0)
    return torch.from_numpy(np.append(model.coef_[0], model.intercept_[0]))
