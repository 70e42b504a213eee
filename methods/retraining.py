"""Retraining the last layer on frozen features: what DFR does with groups and ExMap with clusters.

Group-balanced subsets of validation, sparse logistic regression, the penalty chosen on held-out
halves, and the average of many fits, as one linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from datasets.base import Split, Task
from datasets.config import require
from methods.backbones import Classifier
from methods.base import Context, Selected
from methods.logistic import Floats, Ints, Layer, fit_layer, solver_for
from methods.metrics import worst_group_metric
from methods.prediction import EvalImages, predict_with

Score = Callable[[Floats, Ints], float]
"""How good class scores are on the samples at some positions; higher is better."""
Report = Callable[[str], None]
"""Told of every fit that is done."""

MOST_WIDER = 4  # values beyond the end of a grid
ROUNDING = 1e-12  # spread of a constant's own copies, relative to it, once their mean is rounded


@dataclass(frozen=True)
class RetrainConfig:
    """How the last layer is fitted again.

    Attributes:
        penalties: values of C to choose from; larger is a weaker penalty, and wins a tie. Beyond
            an end that is chosen the grid goes on; a single value is taken as it is.
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
        weights = layer.weights / self.std
        shift = (weights * self.mean).sum(axis=1)  # unlike a product, alike on every processor
        return replace(layer, weights=weights, intercepts=layer.intercepts - shift)


@dataclass(frozen=True)
class Samples:
    """What fits choose their samples from."""

    features: Floats
    y: Ints
    classes: int


@dataclass(frozen=True)
class Choice:
    """Which C was chosen, and among which.

    Attributes:
        penalty: it.
        scores: the mean held-out score of every C that was tried, those beyond the grid included.
        edge: the end of the given grid at or beyond which it lies, if any.
        violation: the largest of all fits.
    """

    penalty: float
    scores: dict[float, float]
    edge: Literal["largest", "smallest"] | None
    violation: float


def choose_penalty(
    samples: Samples,
    groups: Ints,
    config: RetrainConfig,
    score: Score,
    rng: np.random.Generator,
    report: Report = lambda done: None,
) -> Choice:
    """Score every C on held-out halves of validation, and choose the best.

    Where the best is an end of the grid, the grid goes on there by its last factor, while that is
    better and at most `MOST_WIDER` times: its ends are a habit, and say nothing of these features.
    """
    halves = []
    for _ in range(config.splits):
        order = rng.permutation(len(samples.y))
        fit_half, held_out = order[: len(order) // 2], order[len(order) // 2 :]
        chosen = fit_half[balanced_subset(groups[fit_half], config.min_group, rng)]
        scale = Standardiser.of(samples.features[chosen])
        halves.append((chosen, held_out, scale, int(rng.integers(2**31))))
    violations = []

    def mean_score(penalty: float) -> float:
        total = 0.0
        for number, (chosen, held_out, scale, seed) in enumerate(halves, start=1):
            features = scale(samples.features[chosen])
            layer = fit_layer(features, samples.y[chosen], samples.classes, penalty, seed)
            total += score(layer.scores(scale(samples.features[held_out])), held_out)
            violations.append(layer.violation)
            report(f"C = {penalty:.3g}, halving {number}/{len(halves)}")
        return total / len(halves)

    scores = {penalty: mean_score(penalty) for penalty in config.penalties}
    best = max(scores, key=lambda penalty: (scores[penalty], penalty))
    for _ in range(MOST_WIDER):
        wider = next_penalty(sorted(scores), best)
        if wider is None:
            break
        scores[wider] = mean_score(wider)
        if scores[wider] <= scores[best]:
            break
        best = wider
    edge: Literal["largest", "smallest"] | None = None
    if len(set(config.penalties)) > 1 and best >= max(config.penalties):
        edge = "largest"
    elif len(set(config.penalties)) > 1 and best <= min(config.penalties):
        edge = "smallest"
    return Choice(best, scores, edge, max(violations))


def next_penalty(grid: Sequence[float], chosen: float) -> float | None:
    """Continue an ascending grid beyond its end if that was chosen, by its last factor."""
    if len(grid) > 1 and chosen == grid[-1]:
        return chosen * (chosen / grid[-2])
    if len(grid) > 1 and chosen == grid[0]:
        return chosen * (chosen / grid[1])
    return None


def average_layer(
    samples: Samples,
    groups: Ints,
    config: RetrainConfig,
    penalty: float,
    scale: Standardiser,
    rng: np.random.Generator,
    report: Report = lambda done: None,
) -> Layer:
    """Average fits on fresh balanced subsets of the whole of validation."""
    layers = []
    for number in range(1, config.retrains + 1):
        chosen = balanced_subset(groups, config.min_group, rng)
        seed = int(rng.integers(2**31))
        features = scale(samples.features[chosen])
        layers.append(fit_layer(features, samples.y[chosen], samples.classes, penalty, seed))
        report(f"C = {penalty:.3g}, fit {number}/{config.retrains}")
    average = Layer(
        np.mean([layer.weights for layer in layers], axis=0),
        np.mean([layer.intercepts for layer in layers], axis=0),
        max(layer.violation for layer in layers),
    )
    return scale.folded(average)


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

    def report(done: str) -> None:
        ctx.report(stage=f"retraining: {done}")

    over = samples, groups.numpy(), config
    choice = choose_penalty(*over, held_out, rng, report)
    layer = average_layer(*over, choice.penalty, scale, rng, report)
    with torch.no_grad():
        network.head.weight.copy_(torch.from_numpy(layer.weights))
        network.head.bias.copy_(torch.from_numpy(layer.intercepts))
    sizes = torch.bincount(groups)
    tried = sorted(choice.scores)
    details = {
        "penalty": choice.penalty,
        "penalty_scores": [[penalty, choice.scores[penalty]] for penalty in tried],
        "penalty_edge": choice.edge,
        "penalty_widened": [penalty for penalty in tried if penalty not in config.penalties],
        "penalty_open": choice.edge is not None and choice.penalty in (tried[0], tried[-1]),
        "solver": solver_for(features.shape[1]),
        "violation": max(choice.violation, layer.violation),
        "group_sizes": sizes[sizes > 0].tolist(),
    }
    value = choice.scores[choice.penalty]
    return Selected("held_out_worst_group", value), {"retraining": details}
