"""The objective of one iteration: one-vs-all BCE over the nodes, plus that of their parents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from methods.nct.tree import Heads, Tree
from methods.training import Batch


def node_bce(logits: Tensor, labels: Tensor, active: Tensor) -> Tensor:
    """Give each sample's mean BCE over the active nodes, against the one-hot of its node."""
    target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (each * active).sum(dim=1) / active.sum()


class NodeLoss(nn.Module):
    """Weighted node BCE of the last level, and of the level above as auxiliary loss.

    In phase 1 everything above the last level is frozen: it runs without gradients, and the
    auxiliary loss, a constant there, is left out.
    """

    labels: Tensor
    weights: Tensor

    def __init__(self, labels: Tensor, weights: Tensor, aux_weight: float, frozen: bool) -> None:
        super().__init__()
        self.aux_weight = aux_weight
        self.frozen = frozen
        self.register_buffer("labels", labels, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch."""
        assert isinstance(model, Tree)
        outputs = model.logits(batch.images, frozen=self.frozen)
        return torch.mean(self.each(model, outputs, self.labels[batch.index]))

    def each(self, model: Tree, outputs: list[Tensor], labels: Tensor) -> Tensor:
        """Compute the weighted loss of each sample from the logits of every level."""
        loss = node_bce(outputs[-1], labels, model.leaves.active)
        if len(outputs) > 1 and not self.frozen and self.aux_weight > 0:
            parents = model.levels[-2]
            assert isinstance(parents, Heads)
            loss = loss + self.aux_weight * node_bce(outputs[-2], labels // 2, parents.active)
        return loss * self.weights[labels]
