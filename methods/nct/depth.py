"""How deep the tree should be: the pseudo worst-group accuracy and the rule with a tolerance.

Neither reads a group label: the groups are those that the tree itself makes, at the granularity of
iteration 2. The paper calls the tolerance Wilson's; the formula it prints is Wald's standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.metrics import auroc, class_scores, group_accuracy
from methods.nct.tree import class_of


@dataclass(frozen=True)
class Proxy:
    """A pseudo-metric: its value (between 0 and 1) and the size of the group that attains it."""

    value: float
    n_worst: int


NO_PROXY = Proxy(0.0, 0)


def pseudo_wga(
    leaf_logits: Tensor, y: Tensor, depth: int, groups: Tensor | None = None, smallest: int = 1
) -> Proxy:
    """Lowest validation accuracy over iteration-2 groups (pWGA_2).

    Groups are the iteration-2 ancestors of the predicted leaves, or those given (each sample's own
    routed label, say). Groups with fewer than `smallest` samples are left out.
    """
    leaf = leaf_logits.argmax(dim=1)
    own = leaf // 2 ** (depth - 2) if groups is None else groups
    accuracy, sizes = group_accuracy(class_of(leaf, depth), y, own, int(own.max()) + 1)
    accuracy = torch.where(sizes >= smallest, accuracy, torch.nan)
    if accuracy.isnan().all():
        return NO_PROXY
    worst = int(accuracy.nan_to_num(nan=math.inf).argmin())
    return Proxy(float(accuracy[worst]) / 100, int(sizes[worst]))


def cell_wga(
    leaf_logits: Tensor, y: Tensor, first: Tensor, classes: int, smallest: int, prior: float
) -> Proxy:
    """Lowest validation accuracy over the cells (class, what iteration 1 predicts).

    Iteration 1 follows the shortcut, so a cell is a class with one value of it, whatever the
    present tree makes of its samples; groups by predicted leaf change with every epoch. Cells with
    fewer than `smallest` samples are left out, and each is drawn to the average as if `prior`
    samples of average accuracy were added to it: small cells are noisy.
    """
    pred = class_scores(leaf_logits, classes).argmax(dim=1)
    accuracy, sizes = group_accuracy(pred, y, classes * y + first, classes**2)
    average = 100 * float((pred == y).double().mean())
    drawn = (accuracy.nan_to_num() * sizes + prior * average) / (sizes + prior)
    drawn = torch.where(sizes >= smallest, drawn, math.inf)
    worst = int(drawn.argmin())
    return (
        Proxy(float(drawn[worst]) / 100, int(sizes[worst])) if drawn.isfinite().any() else NO_PROXY
    )


def pseudo_auroc(leaf_logits: Tensor, y: Tensor, depth: int) -> Proxy:
    """Lowest AUROC of one iteration-2 benign group against all positives.

    The paper names a pseudo-AUROC without defining it. Here, as in the true metric, the positives
    are all positives; negatives are grouped by the better of their two benign iteration-2 nodes,
    so that every negative is in exactly one group, misclassified or not.
    """
    scores = class_scores(leaf_logits, 2)
    score = scores[:, 1] - scores[:, 0]
    benign = leaf_logits.view(len(y), 2, 2, 2 ** (depth - 2)).amax(dim=3)[:, 0].argmax(dim=1)
    pairs = []
    for node in range(2):
        keep = (y == 1) | ((y == 0) & (benign == node))
        value = auroc(score[keep], y[keep])
        if not math.isnan(value):
            pairs.append(Proxy(value, int(keep.sum())))
    return min(pairs, key=lambda proxy: proxy.value, default=NO_PROXY)


def tolerance(best: float, n_worst: int, z: float) -> float:
    """How far below the running best an iteration may fall: z sqrt(p (1 - p) / n)."""
    return z * math.sqrt(best * (1 - best) / n_worst) if n_worst else 0.0


@dataclass(frozen=True)
class DepthChoice:
    """Which iteration is the model, which one has the highest proxy, and why."""

    iteration: int
    argmax_iteration: int
    reason: str
    stopped: bool


def choose_depth(proxies: dict[int, Proxy], z: float) -> DepthChoice:
    """Apply the rule to the iterations trained so far (those from 2 on).

    An iteration is kept as the operating depth while its proxy stays within the tolerance of the
    best before it; at the first failure deepening stops and the best iteration is returned.
    """
    if not proxies:
        return DepthChoice(1, 1, "only iteration 1 was trained", stopped=False)
    iterations = sorted(proxies)
    highest = max(iterations, key=lambda t: proxies[t].value)
    best = iterations[0]
    operating = best
    for t in iterations[1:]:
        allowed = tolerance(proxies[best].value, proxies[t].n_worst, z)
        if proxies[t].value < proxies[best].value - allowed:
            reason = (
                f"iteration {t} fell to {proxies[t].value:.3f}, more than {allowed:.3f} below the "
                f"best, {proxies[best].value:.3f} at iteration {best}"
            )
            return DepthChoice(best, highest, reason, stopped=True)
        operating = t
        if proxies[t].value > proxies[best].value:
            best = t
    reason = f"iteration {operating} stayed within the tolerance of the best"
    return DepthChoice(operating, highest, reason, stopped=False)
