"""From predictions to the numbers a record keeps: pure functions, no model, no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datasets.base import LoadedData
from methods.metrics import (
    accuracy,
    auroc,
    group_accuracy,
    margin_score,
    pairwise_auroc,
    worst_group,
)


def evaluate(data: LoadedData, split: str, logits: Tensor) -> dict[str, Any]:
    """Compute every metric of a split; accuracies in percent, AUROCs between 0 and 1."""
    facts, labels = data.facts, data.splits[split].labels
    pred = logits.argmax(dim=1)
    by_group, sizes = group_accuracy(pred, labels.y, labels.groups, len(facts.groups))
    train_groups = data.splits["train"].labels.groups
    metrics: dict[str, Any] = {
        "wga": worst_group(by_group),
        "avg": accuracy(pred, labels.y),
        "avg_train_weighted": weighted_average(by_group, train_groups),
        "group_accuracy": _named(facts.groups, by_group),
        "group_count": _named(facts.groups, sizes),
    }
    for name, groups in facts.alternates.items():
        values, _ = group_accuracy(pred, labels.y, labels.alternates[name], len(groups))
        metrics[f"wga_{name}"] = worst_group(values)
    if facts.metric == "auroc":
        metrics |= robust_aurocs(margin_score(logits), labels.y, labels.groups, labels.alternates)
    return metrics


def weighted_average(by_group: Tensor, train_groups: Tensor) -> float:
    """Average group accuracies by training shares, leaving out groups without samples.

    This is the average most of the field's papers report on Waterbirds.
    """
    shares = torch.bincount(train_groups, minlength=len(by_group)).double()
    shares = torch.where(by_group.isnan(), 0.0, shares)
    return float((by_group.nan_to_num() * shares).sum() / shares.sum())


def robust_aurocs(
    score: Tensor, y: Tensor, patch: Tensor, alternates: Mapping[str, Tensor]
) -> dict[str, float]:
    """AUROC over all samples, and of the named benign subgroup against all malignant ones.

    GEORGE's code takes the minimum over both benign subgroups of each grouping; the named one is
    the expected minimum and what its tables show. Both are kept.
    """
    by_patch = pairwise_auroc(score, y, patch, 2)
    by_hist = pairwise_auroc(score, y, alternates["histopath"], 2)
    nan = float("nan")
    return {
        "auroc": auroc(score, y),
        "auroc_nonpatch": by_patch.get(0, nan),
        "auroc_histopath": by_hist.get(1, nan),
        "auroc_worst_patch_pair": min(by_patch.values(), default=nan),
        "auroc_worst_histopath_pair": min(by_hist.values(), default=nan),
    }


def partition_quality(partition: Tensor, groups: Tensor) -> dict[str, Any]:
    """Compare an inferred partition of the training set with the true groups.

    Precision and recall are of the best-matching part for the smallest group; adjusted mutual
    information compares the partition as a whole.
    """
    from sklearn.metrics import adjusted_mutual_info_score  # slow to import, and seldom needed

    parts = torch.unique(partition, return_inverse=True)[1]
    rare = int(
        torch.bincount(groups).float().masked_fill(torch.bincount(groups) == 0, 1e18).argmin()
    )
    overlap = torch.bincount(parts[groups == rare], minlength=int(parts.max()) + 1).double()
    sizes = torch.bincount(parts).double()
    n_rare = float((groups == rare).sum())
    f_score = 2 * overlap / (sizes + n_rare)
    best = int(f_score.argmax())
    return {
        "precision": float(overlap[best] / sizes[best]),
        "recall": float(overlap[best] / n_rare),
        "ami": float(adjusted_mutual_info_score(groups.numpy(), parts.numpy())),
        "sizes": [int(size) for size in sizes],
        "matched_group": rare,
    }


def _named(names: tuple[str, ...], values: Tensor) -> dict[str, Any]:
    return dict(zip(names, values.tolist(), strict=True))
