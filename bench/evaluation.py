"""From a fitted model to the numbers a record keeps: predictions, metrics, partition, leaves.

All of it is computed by the harness after the fit, from every label; the method itself never sees
the test set, or a group that its tier does not grant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from bench.context import HistoryRow
from bench.record import WITHOUT_GROUPS, Metrics, PartitionQuality
from datasets.base import Facts, Labels, LoadedData
from datasets.config import Values
from datasets.errors import BenchError
from methods.base import Fitted, Supervision
from methods.metrics import (
    accuracy,
    auroc,
    calibration_error,
    class_scores,
    group_accuracy,
    margin_score,
    pairwise_auroc,
    worst_group,
)
from methods.prediction import EvalImages, predict

Scores = Callable[[Tensor], Tensor]
"""What a fitted model that has leaves answers to images; without leaves it answers none."""


def evaluate(data: LoadedData, split: str, logits: Tensor) -> Metrics:
    """Compute every metric of a split; accuracies in percent, AUROCs between 0 and 1."""
    facts, labels = data.facts, data.splits[split].labels
    names, groups = data.grouping(split)
    pred = logits.argmax(dim=1)
    by_group, sizes = group_accuracy(pred, labels.y, groups, len(names))
    by_class, _ = group_accuracy(pred, labels.y, labels.y, len(facts.classes))
    values = {
        "wga": worst_group(by_group),
        "avg": accuracy(pred, labels.y),
        "worst_class": worst_group(by_class),
    }
    if split not in facts.group_splits:
        del values["wga"]
    elif "train" in facts.group_splits:
        train = data.splits["train"].labels.groups
        values["avg_train_weighted"] = weighted_average(by_group, train)
    if data.data_kind == "own" or split not in facts.group_splits:
        values |= groupless(logits, labels.y, by_class)
    for name, members in facts.extra_groupings.items():
        own, _ = group_accuracy(pred, labels.y, labels.extra_groupings[name], len(members))
        values[f"wga_{name}"] = worst_group(own)
    if facts.metric == "auroc":
        values |= aurocs(facts, labels, margin_score(logits))
    accuracies = {n: _defined(v) for n, v in zip(names, by_group.tolist(), strict=True)}
    counts = dict(zip(names, (int(size) for size in sizes.tolist()), strict=True))
    return Metrics({n: _defined(v) for n, v in values.items()}, accuracies, counts)


def groupless(logits: Tensor, y: Tensor, by_class: Tensor) -> dict[str, float]:
    """Compute what can be said of a model without groups: balance, calibration, ranking."""
    values = {
        "balanced": float(by_class.nanmean()),
        "ece": calibration_error(logits.softmax(dim=1), y),
    }
    return values | ({"auroc": auroc(margin_score(logits), y)} if logits.shape[1] == 2 else {})


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def weighted_average(by_group: Tensor, train_groups: Tensor) -> float:
    """Average group accuracies by training shares, leaving out groups without samples.

    This is the average most of the field's papers report on Waterbirds.
    """
    shares = torch.bincount(train_groups, minlength=len(by_group)).double()
    shares = torch.where(by_group.isnan(), 0.0, shares)
    return float((by_group.nan_to_num() * shares).sum() / shares.sum())


def aurocs(facts: Facts, labels: Labels, score: Tensor) -> dict[str, float]:
    """AUROC over all samples, and of the negative subgroups that the dataset names.

    A named figure is that of one negative subgroup against all positives; one without a subgroup is
    the minimum over those of its grouping, as GEORGE's code takes it.
    """
    found = {"auroc": auroc(score, labels.y)}
    for name, pair in facts.pair_aurocs.items():
        groups = labels.extra_groupings[pair.grouping] if pair.grouping else labels.groups
        names = facts.extra_groupings[pair.grouping] if pair.grouping else facts.groups
        by_group = pairwise_auroc(score, labels.y, groups, len(names))
        worst = min(by_group.values(), default=math.nan)
        found[name] = worst if pair.group is None else by_group.get(pair.group, math.nan)
    return found


def robust_metric(facts: Facts) -> str:
    """Return the metric that trajectories follow: WGA, or the AUROC of the dataset's named pair."""
    named = [n for n, p in facts.pair_aurocs.items() if p.group is not None and not p.grouping]
    return facts.metric if facts.metric == "wga" or not named else named[0]


def granted_metrics(metrics: Metrics, supervision: Supervision) -> Metrics:
    """Keep of validation metrics what a tier may know."""
    if not supervision.val_groups:
        return Metrics({n: v for n, v in metrics.values.items() if n in WITHOUT_GROUPS})
    values = dict(metrics.values)
    if not supervision.train_groups:
        values.pop("avg_train_weighted", None)
    return replace(metrics, values=values)


def predict_splits(fitted: Fitted, data: LoadedData) -> tuple[pd.DataFrame, dict[str, Metrics]]:
    """Predict the loaded splits but train, keep every sample's scores, and compute the metrics."""
    fitted.module.eval()
    frames, metrics = [], {}
    for split in ("val", "test"):
        if split not in data.splits:
            continue
        part = data.splits[split]
        images = EvalImages(part.images, data.facts.eval_transform)
        logits = predict(fitted.logits, images)
        leaf = torch.full((len(logits),), -1)
        if fitted.leaf(next(iter(images))[:1]) is not None:
            leaf = predict(cast(Scores, fitted.leaf), images).long()
        metrics[split] = evaluate(data, split, logits)
        extra = part.labels.extra_groupings
        columns: dict[str, object] = {
            "id": part.labels.ids,
            "split": split,
            "y": part.labels.y.to(torch.int16),
            "group": part.labels.groups.to(torch.int16),
            **{f"group_{name}": v.to(torch.int16) for name, v in extra.items()},
            "pred": logits.argmax(1).to(torch.int16),
            **{f"score_{c}": logits[:, c].half() for c in range(logits.shape[1])},
            "leaf": leaf,
        }
        if fitted.val_partition is not None:  # where there is a partition of train besides
            known = fitted.val_partition.cpu() if split == "val" else torch.full((len(leaf),), -1)
            columns["part"] = known.to(torch.int16)
        if fitted.val_first is not None:
            known = fitted.val_first.cpu() if split == "val" else torch.full((len(leaf),), -1)
            columns["first"] = known.to(torch.int16)
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True), metrics


def describe_partition(
    fitted: Fitted, data: LoadedData
) -> tuple[PartitionQuality | None, pd.DataFrame]:
    """Compare an inferred partition of a split with the groups there, if known; tabulate it."""
    assert fitted.partition is not None
    partition, split = fitted.partition.cpu(), fitted.partition_split
    labels, facts = data.splits[split].labels, data.facts
    # Where a dataset has many small groups, the unions it names are what one looks for.
    named = facts.group_sets or {name: (number,) for number, name in enumerate(facts.groups)}
    columns = {
        "id": labels.ids,
        "group": labels.groups.to(torch.int16),
        "part": partition.to(torch.int16),
    }
    table = pd.DataFrame(columns).sort_values("id", ignore_index=True)
    if split not in facts.group_splits:
        return None, table
    return partition_quality(partition, labels.groups, named, split), table


def partition_quality(
    partition: Tensor, groups: Tensor, named: Mapping[str, Sequence[int]], split: str = "train"
) -> PartitionQuality:
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
    return PartitionQuality(
        split=split,
        precision=precision,
        recall=float(overlap[best] / rare.sum()),
        enrichment=precision / float(rare.double().mean()),
        ami=float(adjusted_mutual_info_score(groups.numpy(), parts.numpy())),
        sizes=tuple(int(size) for size in sizes),
        matched_group=rarest,
    )


def describe_snapshots(
    fitted: Fitted, data: LoadedData, history: Sequence[HistoryRow]
) -> dict[str, object]:
    """Complete what a tree noted of its iterations with what only the harness can know.

    Each iteration's model gets its test metrics, and by leaf the mean and spread of logits and
    margins, the share of each group that lands there, and the training samples routed there. Under
    `end` stands the same of the model as it was after the iteration's last epoch, where the method
    hands that over as well.
    """
    noted = fitted.details[fitted.tree_key]
    if not isinstance(noted, Mapping) or not isinstance(noted.get("iterations"), list):
        raise BenchError(
            f"details['{fitted.tree_key}'] has no list of iterations to complete",
            "note one entry for each of the fitted model's snapshots",
        )
    test = EvalImages(data.splits["test"].images, data.facts.eval_transform)
    described = []
    for entry, snapshot in zip(noted["iterations"], fitted.snapshots, strict=True):
        leaf_logits = _leaf_logits(snapshot, test)
        found = {**entry, **_describe_leaves(snapshot, data, leaf_logits)}
        found["makeup"] = makeup(snapshot.partition, data, snapshot.leaf_names())
        found |= describe_claims(snapshot, data, test, leaf_logits)
        if snapshot.last_epoch is not None:
            scores = _leaf_logits(snapshot.last_epoch, test)
            last = _describe_leaves(snapshot.last_epoch, data, scores)
            found["end"] = {**(entry.get("end") or {}), **last}
        described.append(found)
    return {
        **noted,
        "iterations": described,
        "spearman_val": proxy_correlation(history, f"audit_val_{robust_metric(data.facts)}"),
        "spearman_test": proxy_correlation(history, f"audit_test_{robust_metric(data.facts)}"),
    }


def _leaf_logits(snapshot: Fitted, test: EvalImages) -> Tensor:
    snapshot.module.eval()
    return predict(cast(Scores, snapshot.leaf_logits), test)


def _describe_leaves(snapshot: Fitted, data: LoadedData, leaf_logits: Tensor) -> dict[str, object]:
    facts = data.facts
    names, count = list(snapshot.leaf_names()), leaf_logits.shape[1]
    leaf = leaf_logits.argmax(dim=1)
    top = leaf_logits.topk(2, dim=1).values
    scores = class_scores(leaf_logits, len(facts.classes))
    return {
        "leaves": names,
        "test": evaluate(data, "test", scores).to_json(),
        **_moments("logit", [leaf_logits[:, j] for j in range(count)]),
        **_moments("margin", [(top[:, 0] - top[:, 1])[leaf == j] for j in range(count)]),
        "capture": capture(leaf, *data.grouping("test"), names),
    }


def describe_claims(
    snapshot: Fitted, data: LoadedData, test: EvalImages, leaf_logits: Tensor
) -> dict[str, object]:
    """Return what claims about leaves are judged by: logits by group, and descent from the root.

    `group_logits` are each leaf's mean logit over a group's test samples. `greedy` is what a tree
    of several levels would predict by going from its root to the better child of each node: metrics
    of the class alone, and the percentage of samples that end in the leaf which is best of all.
    """
    facts = data.facts
    names, groups = data.grouping("test")
    means = [leaf_logits[groups == g].double().mean(dim=0) for g in range(len(names))]
    by_group = {n: list(map(_finite, m.tolist())) for n, m in zip(names, means, strict=True)}
    found: dict[str, object] = {"group_logits": by_group}
    if snapshot.level_logits(next(iter(test))[:1]) is not None:
        nodes = predict(cast(Scores, snapshot.level_logits), test)
        if nodes.shape[1] > leaf_logits.shape[1]:
            leaf = descend(nodes, len(facts.classes))
            pred = leaf * len(facts.classes) // leaf_logits.shape[1]
            one_hot = functional.one_hot(pred, len(facts.classes)).float()
            metrics = evaluate(data, "test", one_hot)
            known = {n: v for n, v in metrics.values.items() if "auroc" not in n}  # no scores
            same = accuracy(leaf, leaf_logits.argmax(dim=1))
            found["greedy"] = {"test": replace(metrics, values=known).to_json(), "same_leaf": same}
    return found


def descend(nodes: Tensor, classes: int) -> Tensor:
    """Go from the best class to the better child of each node, and return the leaf reached.

    `nodes` are the logits of all levels side by side: of the classes, of their children, and so on.
    """
    node, start, width = nodes[:, :classes].argmax(dim=1), classes, 2 * classes
    while start < nodes.shape[1]:
        children = torch.stack([2 * node, 2 * node + 1], dim=1)
        scores = nodes[:, start : start + width].gather(1, children)
        node, start, width = 2 * node + scores.argmax(dim=1), start + width, 2 * width
    return node


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _moments(name: str, samples: Sequence[Tensor]) -> dict[str, list[float | None]]:
    """Return mean and standard deviation by leaf; none for one that is merged or never chosen."""
    finite = [sample.double()[sample.isfinite()] for sample in samples]
    return {
        f"{name}_mean": [float(s.mean()) if len(s) else None for s in finite],
        f"{name}_std": [float(s.std()) if len(s) > 1 else None for s in finite],
    }


def capture(
    leaf: Tensor, groups: Sequence[str], labels: Tensor, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the percentage of each group that lands in each leaf; zeros are left out."""
    table = torch.zeros(len(groups), len(names), dtype=torch.float64)
    table.index_put_((labels, leaf), torch.ones(len(leaf), dtype=torch.float64), True)
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
    groups, labels = data.grouping("train")
    count = len(groups)
    cells = partition * count + labels
    table = torch.bincount(cells, minlength=len(names) * count).view(len(names), -1)
    return {
        name: {group: int(table[j, g]) for g, group in enumerate(groups) if table[j, g] > 0}
        for j, name in enumerate(names)
    }


def proxy_correlation(history: Sequence[Values], truth: str) -> float | None:
    """Rank correlation, over the epochs from iteration 2 on, of the proxy and an audited figure."""
    rows = [r for r in history if _number(r.get("iteration")) >= 2 and r.get(truth) is not None]
    proxy, true = ([_number(row[name]) for row in rows] for name in ("selection", truth))
    if len(set(proxy)) < 2 or len(set(true)) < 2:
        return None
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(proxy, true).statistic)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def history_table(rows: Sequence[HistoryRow]) -> pd.DataFrame:
    """Put history rows into a table whose first columns every run has."""
    table = pd.DataFrame(list(rows)).drop(columns="record", errors="ignore")
    first = ["stage", "iteration", "phase", "epoch", "loss", "selection"]
    first += ["audit_val_wga", "audit_test_wga"]
    for name in first:
        if name not in table:
            table[name] = None
    rest = [name for name in table if name not in first]
    return table[first + rest].astype(dict.fromkeys(("iteration", "phase", "epoch"), "Int64"))
