"""Calibrating the leaves of a tree against each other, with class labels alone.

The heads of a tree are trained one against all, on nodes made equally large, so that nothing makes
their logits comparable: those of easy leaves are far larger, and take images that belong to a hard
leaf of another class. A bias for each leaf and one common scale, fitted by the cross-entropy of the
classes, put that right. They move images between classes only: within a class the leaf with the
highest raw logit is the leaf, as before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from methods.nct.tree import Tree


class Calibration(nn.Module):
    """Leaf biases and a scale; from raw leaf logits to outputs that choose the class first.

    A class scores the logsumexp of its leaves' calibrated logits. An output is the score of the
    leaf's class, less how far the leaf's raw logit lies below the best of that class. So the best
    output of a class is its score, and the best of all is the leaf that class-first choice takes.
    """

    bias: Tensor
    scale: Tensor

    def __init__(self, bias: Tensor, scale: Tensor, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("bias", bias)
        self.register_buffer("scale", scale)

    def forward(self, leaf_logits: Tensor) -> Tensor:
        """Compute the outputs; leaves that are minus infinity stay so."""
        scores = class_logsumexp(leaf_logits, self.bias, self.scale, self.classes)
        raw = leaf_logits.view(len(leaf_logits), self.classes, -1)
        return (scores[:, :, None] + raw - raw.amax(dim=2, keepdim=True)).flatten(1)


class CalibratedTree(Tree):
    """A finished tree with its calibration; calling it gives the calibrated outputs."""

    def __init__(self, tree: Tree, calibration: Calibration) -> None:
        super().__init__(tree.backbone, tree.classes)
        self.levels = tree.levels
        self.calibration = calibration

    def forward(self, images: Tensor) -> Tensor:
        """Compute the outputs, merged nodes ruled out."""
        outputs: Tensor = self.calibration(super().forward(images))
        return outputs


def class_logsumexp(leaf_logits: Tensor, bias: Tensor, scale: Tensor, classes: int) -> Tensor:
    """Score each class by all its leaves, scaled and shifted."""
    absent = leaf_logits.isneginf()
    moved = scale * leaf_logits.masked_fill(absent, 0.0) + bias  # infinity has no gradient
    moved = moved.masked_fill(absent, -torch.inf)
    return moved.view(len(moved), classes, -1).logsumexp(dim=2)


def fit_calibration(leaf_logits: Tensor, y: Tensor, classes: int, penalty: float) -> Calibration:
    """Minimise the mean cross-entropy of the classes plus `penalty` times the squared sizes.

    The penalty is on the biases and on the logarithm of the scale: without one, neither has an end
    where the classes can be told apart without an error.
    """
    logits = leaf_logits.double()
    bias = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([bias, log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        scores = class_logsumexp(logits, bias, log_scale.exp(), classes)
        size = bias.square().sum() + log_scale.square()
        loss = functional.cross_entropy(scores, y) + penalty * size
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    return Calibration(bias.detach().float(), log_scale.detach().exp().float(), classes)
