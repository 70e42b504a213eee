"""Retraining the last layer on frozen features: what DFR does with groups and ExMap with clusters.

Group-balanced subsets of validation, sparse logistic regression, the penalty chosen on held-out
halves, and the average of many fits, as one linear layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from datasets.base import Split, Task
from methods.backbones import Classifier
from methods.base import Context
from methods.metrics import worst_case
from methods.optimisation import demand
from methods.prediction import EvalImages, predict_with

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Score = Callable[[Floats, Ints], float]
"""How good class scores are on the samples at some positions; higher is better."""
Layer = tuple[Floats, Floats]
"""Weights, one row a class, and intercepts."""
TOLERANCE = 1e-2  # of liblinear; its own 1e-4 takes five times as long for 0.05% less loss
ROUNDING = 1e-12  # spread of a constant's own copies, relative to it, once their mean is rounded


@dataclass(frozen=True)
class RetrainConfig:
    """How the last layer is fitted again.

    Attributes:
        penalties: values of C to choose from; larger is a weaker penalty, and wins a tie.
        splits: random halvings of validation over which a penalty is judged.
        retrains: fits on fresh balanced subsets that are averaged.
        min_group: groups with fewer samples do not set the size of the others; all of their
            samples are used.
    """

    penalties: tuple[float, ...] = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)
    splits: int = 5
    retrains: int = 20
    min_group: int = 6

    def __post_init__(self) -> None:
        demand(
            bool(self.penalties) and min(self.penalties) > 0,
            f"penalties must be positive but got {self.penalties}",
        )
        demand(self.splits >= 1, f"splits must be at least 1 but got {self.splits}")
        demand(self.retrains >= 1, f"retrains must be at least 1 but got {self.retrains}")
        demand(self.min_group >= 1, f"min_group must be at least 1 but got {self.min_group}")


@dataclass(frozen=True)
class Standardiser:
    """Shifts and scales features; one that never varies is only shifted."""

    mean: Floats
    std: Floats

    @classmethod
    def of(cls, features: Floats) -> Standardiser:
        """Measure mean and spread of some features."""
        std = features.std(axis=0)
        varies = std > ROUNDING * np.abs(features).max(axis=0)
        return cls(features.mean(axis=0), np.where(varies, std, 1.0))

    def __call__(self, features: Floats) -> Floats:
        """Standardise."""
        scaled: Floats = (features - self.mean) / self.std
        return scaled

    def folded(self, layer: Layer) -> Layer:
        """Rewrite a layer on standardised features as one on the features themselves."""
        weights = layer[0] / self.std
        return weights, layer[1] - weights @ self.mean


def balanced_subset(groups: Ints, min_group: int, rng: np.random.Generator) -> Ints:
    """Draw as many samples of each group as the smallest one has, without replacement."""
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    sizes = [len(own) for own in members]
    quota = min((size for size in sizes if size >= min_group), default=min(sizes))
    drawn = [rng.permutation(own)[:quota] for own in members]
    return np.concatenate(drawn)


def fit_layer(features: Floats, y: Ints, classes: int, penalty: float, seed: int) -> Layer:
    """Fit L1 logistic regression with liblinear: one fit for two classes, else one a class.

    liblinear penalises the intercept too and sums the loss over samples, so that the right C
    depends on how many there are.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rows = []
    for positive in range(1 if classes == 2 else 0, classes):
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", tol=TOLERANCE, random_state=seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the authors' iterations, too
            model.fit(features, y == positive)
        rows.append((model.coef_[0], model.intercept_[0]))
    if classes == 2:  # the first class scores 0, so that the margin is the fit's own
        rows.insert(0, (np.zeros_like(rows[0][0]), 0.0))
    return np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])


def apply_layer(layer: Layer, features: Floats) -> Floats:
    """Score the classes."""
    scores: Floats = features @ layer[0].T + layer[1]
    return scores


def choose_penalty(
    features: Floats,
    y: Ints,
    groups: Ints,
    classes: int,
    config: RetrainConfig,
    score: Score,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Judge every C on held-out halves of validation; give the best and its mean score."""
    totals = np.zeros(len(config.penalties))
    for _ in range(config.splits):
        order = rng.permutation(len(y))
        fit_half, held_out = order[: len(y) // 2], order[len(y) // 2 :]
        chosen = fit_half[balanced_subset(groups[fit_half], config.min_group, rng)]
        scale = Standardiser.of(features[chosen])
        seed = int(rng.integers(2**31))
        for number, penalty in enumerate(config.penalties):
            layer = fit_layer(scale(features[chosen]), y[chosen], classes, penalty, seed)
            totals[number] += score(apply_layer(layer, scale(features[held_out])), held_out)
    best = max(range(len(totals)), key=lambda i: (totals[i], config.penalties[i]))
    return config.penalties[best], float(totals[best] / config.splits)


def average_layer(
    features: Floats,
    y: Ints,
    groups: Ints,
    classes: int,
    config: RetrainConfig,
    penalty: float,
    scale: Standardiser,
    rng: np.random.Generator,
) -> Layer:
    """Average fits on fresh balanced subsets of the whole of validation."""
    scaled = scale(features)
    layers = []
    for _ in range(config.retrains):
        chosen = balanced_subset(groups, config.min_group, rng)
        seed = int(rng.integers(2**31))
        layers.append(fit_layer(scaled[chosen], y[chosen], classes, penalty, seed))
    weights, intercepts = (np.mean(parts, axis=0) for parts in zip(*layers, strict=True))
    return scale.folded((weights, intercepts))


def extract_features(network: Classifier, split: Split, task: Task, ctx: Context) -> Floats:
    """Run the backbone over the clean images of a split."""
    features = predict_with(network.backbone, EvalImages(split.images, task.eval_transform))
    ctx.count_passes(len(split))
    found: Floats = features.double().numpy()
    return found


def retrain_head(
    network: Classifier,
    task: Task,
    groups: Tensor,
    scale: Standardiser | None,
    config: RetrainConfig,
    ctx: Context,
) -> dict[str, Any]:
    """Fit a network's head again on validation data balanced over groups; give the facts of it.

    Features are standardised as `scale` says, or by validation's own mean and spread.
    """
    features = extract_features(network, task.val, task, ctx)
    y, classes = task.val.y, len(task.classes)
    scale = scale or Standardiser.of(features)
    rng = np.random.default_rng(ctx.seed("retrain"))

    def held_out(scores: Floats, positions: Ints) -> float:
        index = torch.from_numpy(positions)
        return worst_case(torch.from_numpy(scores), y[index], groups[index], task.metric)

    arrays = features, y.numpy(), groups.numpy(), classes, config
    penalty, value = choose_penalty(*arrays, held_out, rng)
    layer = average_layer(*arrays, penalty, scale, rng)
    with torch.no_grad():
        network.head.weight.copy_(torch.from_numpy(layer[0]))
        network.head.bias.copy_(torch.from_numpy(layer[1]))
    sizes = torch.bincount(groups)
    return {
        "selection": {"rule": "held_out_worst_group", "value": value, "epoch": None},
        "retraining": {"penalty": penalty, "group_sizes": sizes[sizes > 0].tolist()},
    }
