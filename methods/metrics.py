"""Metrics as pure functions of tensors; shared by model selection and by the final evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

CALIBRATION_BINS = 15


def accuracy(pred: Tensor, y: Tensor) -> float:
    """Share of correct predictions, in percent."""
    return 100.0 * float((pred == y).double().mean())


def group_accuracy(pred: Tensor, y: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Accuracy (percent, NaN where empty) and size of each of `count` groups."""
    size = torch.bincount(groups, minlength=count)
    right = torch.bincount(groups, weights=(pred == y).double(), minlength=count)
    return 100.0 * right / size, size  # 0/0 is NaN, which is what an empty group has


def worst_group(accuracies: Tensor) -> float:
    """Lowest accuracy over the groups that have samples."""
    present = accuracies[~accuracies.isnan()]
    return float(present.min()) if len(present) else float("nan")


def auroc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve, ties counted half; NaN when a class is absent."""
    positive = positive.bool()
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    if n_pos == 0 or n_neg == 0:
        return float("nan")
    _, inverse, counts = torch.unique(score, return_inverse=True, return_counts=True)
    # Samples with equal scores share the mean of the ranks they occupy.
    last = counts.cumsum(0).double()
    rank = (last - (counts.double() - 1) / 2)[inverse]
    return float((rank[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def pairwise_auroc(score: Tensor, y: Tensor, groups: Tensor, count: int) -> dict[int, float]:
    """AUROC of each negative group against all positives, by group (GEORGE's robust AUROC)."""
    pairs = {}
    for group in range(count):
        mine = groups == group
        if mine.any() and not y[mine].any():
            keep = mine | (y == 1)
            pairs[group] = auroc(score[keep], y[keep])
    return pairs


def calibration_error(probabilities: Tensor, y: Tensor, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error between 0 and 1: how far confidence lies from accuracy.

    Samples are put into bins of equal width by their confidence, the probability of the predicted
    class; the difference of mean confidence and accuracy is averaged over samples.
    """
    confidence, pred = probabilities.double().max(dim=1)
    which = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=y.device)
    gap.index_add_(0, which, confidence - (pred == y).double())
    return float(gap.abs().sum()) / max(1, len(y))


def class_scores(outputs: Tensor, classes: int) -> Tensor:
    """Score each class by the best of its leaves; plain class logits stay as they are."""
    return outputs.view(len(outputs), classes, -1).amax(dim=2)


def margin_score(logits: Tensor) -> Tensor:
    """Score of class 1 in a binary task: how far its logit lies above the other's."""
    return logits[:, 1] - logits[:, 0]


def worst_group_metric(logits: Tensor, y: Tensor, groups: Tensor, metric: str) -> float:
    """Lowest group accuracy, or the lowest AUROC of a negative group where that is the metric."""
    count = int(groups.max()) + 1
    if metric == "auroc":
        pairs = pairwise_auroc(margin_score(logits), y, groups, count)
        return min(pairs.values(), default=float("nan"))
    return worst_group(group_accuracy(logits.argmax(dim=1), y, groups, count)[0])
