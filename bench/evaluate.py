"""From predictions to the numbers a record keeps: pure functions, no model, no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def partition_quality(
    partition: Tensor, groups: Tensor, named: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Compare an inferred partition of some samples with their true groups.

    Precision and recall are of the best-matching part for the rarest of the `named` sets of groups;
    the enrichment is how many times more of that set the part holds than all samples do. Adjusted
    mutual information compares the partition as a whole.
    """
    from sklearn.metrics import adjusted_mutual_info_score  # slow to import, and seldom needed

    parts = torch.unique(partition, return_inverse=True)[1]
    members = {name: torch.isin(groups, torch.tensor(union)) for name, union in named.items()}
    rarest = min((name for name in members if members[name].any()), key=lambda n: members[n].sum())
    rare = members[rarest]
    sizes = torch.bincount(parts).double()
    overlap = torch.bincount(parts[rare], minlength=len(sizes)).double()
    best = int((2 * overlap / (sizes + rare.sum())).argmax())  # by F1
    precision = float(overlap[best] / sizes[best])
    return {
        "precision": precision,
        "recall": float(overlap[best] / rare.sum()),
        "enrichment": precision / float(rare.double().mean()),
        "ami": float(adjusted_mutual_info_score(groups.numpy(), parts.numpy())),
        "sizes": [int(size) for size in sizes],
        "matched_group": rarest,
    }


def _named(names: tuple[str, ...], values: Tensor) -> dict[str, Any]:
    return dict(zip(names, values.tolist(), strict=True))
