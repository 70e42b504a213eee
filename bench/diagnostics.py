"""What a record keeps of a tree: each iteration's metrics, logits, margins, captures and make-up.

Computed by the harness after the fit, from the model at the end of every iteration; the method
itself never sees the test set or a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.evaluate import evaluate
from datasets.base import Labels, LoadedData
from methods.metrics import class_scores
from methods.nct.fitted import FittedTree
from methods.prediction import EvalImages, predict


def describe_tree(
    fitted: FittedTree, data: LoadedData, history: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Complete what the method noted with what only the harness can know."""
    facts = dict(fitted.facts["nct"])
    test = EvalImages(data.splits["test"].images, data.facts.eval_transform)
    described = []
    for noted, snapshot in zip(facts["iterations"], fitted.snapshots, strict=True):
        assert isinstance(snapshot, FittedTree)
        snapshot.module.eval()
        described.append({**noted, **_iteration(snapshot, data, predict(snapshot.module, test))})
    facts["iterations"] = described
    facts["spearman_val"] = proxy_correlation(history, "val", data.facts.metric)
    facts["spearman_test"] = proxy_correlation(history, "test", data.facts.metric)
    return facts


def _iteration(snapshot: FittedTree, data: LoadedData, leaf_logits: Tensor) -> dict[str, Any]:
    facts, labels = data.facts, data.splits["test"].labels
    names, count = snapshot.paths(), leaf_logits.shape[1]
    leaf = leaf_logits.argmax(dim=1)
    top = leaf_logits.topk(2, dim=1).values
    return {
        "leaves": names,
        "test": evaluate(data, "test", class_scores(leaf_logits, len(facts.classes))),
        **_moments("logit", [leaf_logits[:, j] for j in range(count)]),
        **_moments("margin", [(top[:, 0] - top[:, 1])[leaf == j] for j in range(count)]),
        "capture": capture(leaf, labels, facts.groups, names),
        "makeup": makeup(snapshot.partition, data, names),
    }


def _moments(name: str, samples: Sequence[Tensor]) -> dict[str, list[float | None]]:
    """Give mean and standard deviation by leaf; none for a leaf that is merged or never chosen."""
    finite = [sample.double()[sample.isfinite()] for sample in samples]
    return {
        f"{name}_mean": [float(s.mean()) if len(s) else None for s in finite],
        f"{name}_std": [float(s.std()) if len(s) > 1 else None for s in finite],
    }


def capture(
    leaf: Tensor, labels: Labels, groups: Sequence[str], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Give the share (percent) of each group that lands in each leaf; shares of 0 are left out."""
    table = torch.zeros(len(groups), len(names), dtype=torch.float64)
    table.index_put_((labels.groups, leaf), torch.ones(len(leaf), dtype=torch.float64), True)
    shares = 100 * table / table.sum(dim=1, keepdim=True)
    return {
        group: {names[j]: float(shares[g, j]) for j in range(len(names)) if shares[g, j] > 0}
        for g, group in enumerate(groups)
    }


def makeup(
    partition: Tensor | None, data: LoadedData, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Count the training samples of each group that routing put into each leaf."""
    if partition is None:
        return {}
    groups = data.splits["train"].labels.groups
    table = torch.bincount(
        partition * len(data.facts.groups) + groups, minlength=len(names) * len(data.facts.groups)
    ).view(len(names), -1)
    return {
        name: {
            group: int(table[j, g]) for g, group in enumerate(data.facts.groups) if table[j, g] > 0
        }
        for j, name in enumerate(names)
    }


def proxy_correlation(history: Sequence[dict[str, Any]], split: str, metric: str) -> float | None:
    """Rank correlation, over the epochs from iteration 2 on, of the proxy and the true metric."""
    truth = f"audit_{split}_{'auroc_nonpatch' if metric == 'auroc' else 'wga'}"
    rows = [
        row for row in history if (row.get("iteration") or 0) >= 2 and row.get(truth) is not None
    ]
    proxy = [row["selection"] for row in rows]
    if len(set(proxy)) < 2 or len({row[truth] for row in rows}) < 2:
        return None
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(proxy, [row[truth] for row in rows]).statistic)
