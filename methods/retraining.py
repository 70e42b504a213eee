"""Retraining the last layer on frozen features: what DFR does with groups and ExMap with clusters.

Group-balanced subsets of validation, sparse logistic regression, the penalty chosen on held-out
halves, and the average of many fits, as one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from datasets.base import Split, Task
from datasets.config import require
from methods.backbones import Classifier
from methods.base import Context, Selected
from methods.logistic import Floats, Ints, Layer, LogisticFit, Samples, Standardiser, fit_layers
from methods.metrics import worst_group_metric
from methods.prediction import EvalImages, predict_with

Score = Callable[[Floats, Ints], float]
"""How good class scores are on the samples at some positions; higher is better."""


@dataclass(frozen=True)
class RetrainConfig:
    """How the last layer is fitted again.

    Attributes:
        penalties: values of C to choose from; larger is a weaker penalty, and wins a tie.
        splits: random halvings of validation over which a penalty is scored.
        retrains: fits on fresh balanced subsets that are averaged.
        min_group: groups with fewer samples do not set the size of the others; all of their
            samples are used.
    """

    penalties: tuple[float, ...] = (1.0, 0.7, 0.3, 0.1, 0.07, 0.03, 0.01)
    splits: int = 5
    retrains: int = 20
    min_group: int = 6

    def __post_init__(self) -> None:
        require(
            bool(self.penalties) and min(self.penalties) > 0,
            f"penalties must be positive but got {self.penalties}",
        )
        require(self.splits >= 1, f"splits must be at least 1 but got {self.splits}")
        require(self.retrains >= 1, f"retrains must be at least 1 but got {self.retrains}")
        require(self.min_group >= 1, f"min_group must be at least 1 but got {self.min_group}")


def balanced_subset(groups: Ints, min_group: int, rng: np.random.Generator) -> Ints:
    """Draw as many samples of each group as the smallest one has, without replacement."""
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    sizes = [len(own) for own in members]
    quota = min((size for size in sizes if size >= min_group), default=min(sizes))
    drawn = [rng.permutation(own)[:quota] for own in members]
    return np.concatenate(drawn)


def apply_layer(layer: Layer, features: Floats) -> Floats:
    """Score the classes."""
    scores: Floats = features @ layer[0].T + layer[1]
    return scores


def choose_penalty(
    samples: Samples,
    groups: Ints,
    config: RetrainConfig,
    score: Score,
    rng: np.random.Generator,
    cores: int = 1,
) -> tuple[float, float]:
    """Score every C on held-out halves of validation; return the best and its mean score."""
    fits, scored_on = [], []
    for _ in range(config.splits):
        order = rng.permutation(len(samples.y))
        fit_half, held_out = order[: len(order) // 2], order[len(order) // 2 :]
        chosen = fit_half[balanced_subset(groups[fit_half], config.min_group, rng)]
        scale = Standardiser.of(samples.features[chosen])
        seed = int(rng.integers(2**31))
        fits += [LogisticFit(chosen, scale, penalty, seed) for penalty in config.penalties]
        scored_on += [held_out] * len(config.penalties)
    totals = np.zeros(len(config.penalties))
    layers = fit_layers(samples, fits, cores)
    for number, (fit, layer, rows) in enumerate(zip(fits, layers, scored_on, strict=True)):
        scores = apply_layer(layer, fit.scale(samples.features[rows]))
        totals[number % len(totals)] += score(scores, rows)
    best = max(range(len(totals)), key=lambda i: (totals[i], config.penalties[i]))
    return config.penalties[best], float(totals[best] / config.splits)


def average_layer(
    samples: Samples,
    groups: Ints,
    config: RetrainConfig,
    penalty: float,
    scale: Standardiser,
    rng: np.random.Generator,
    cores: int = 1,
) -> Layer:
    """Average fits on fresh balanced subsets of the whole of validation."""
    fits = []
    for _ in range(config.retrains):
        chosen = balanced_subset(groups, config.min_group, rng)
        fits.append(LogisticFit(chosen, scale, penalty, int(rng.integers(2**31))))
    layers = fit_layers(samples, fits, cores)
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
) -> tuple[Selected, dict[str, object]]:
    """Fit a network's head again on validation data balanced over groups.

    Return by what the penalty was chosen, and the details of a record.

    Features are standardised as `scale` says, or by validation's own mean and spread.
    """
    features = extract_features(network, task.val, task, ctx)
    y = task.val.y
    samples = Samples(features, y.numpy(), len(task.classes))
    scale = scale or Standardiser.of(features)
    rng = np.random.default_rng(ctx.seed("retrain"))

    def held_out(scores: Floats, positions: Ints) -> float:
        index = torch.from_numpy(positions)
        return worst_group_metric(torch.from_numpy(scores), y[index], groups[index], task.metric)

    over = samples, groups.numpy(), config
    penalty, value = choose_penalty(*over, held_out, rng, ctx.cores)
    layer = average_layer(*over, penalty, scale, rng, ctx.cores)
    with torch.no_grad():
        network.head.weight.copy_(torch.from_numpy(layer[0]))
        network.head.bias.copy_(torch.from_numpy(layer[1]))
    sizes = torch.bincount(groups)
    details = {"penalty": penalty, "group_sizes": sizes[sizes > 0].tolist()}
    return Selected("held_out_worst_group", value), {"retraining": details}
