"""Mixing images of sibling nodes: the easy and the hard half of a class, made to overlap.

A hard node has a few dozen images, and its heads learn them by heart. A mixture of one of them with
an image of its easy sibling has the same class, and a node label in between.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.nct.loss import NodeLoss
from methods.nct.tree import Tree
from methods.training import Batch


class MixedNodeLoss(NodeLoss):
    """Node loss on a batch in which a share of the images is mixed with siblings of the batch."""

    def __init__(
        self, labels: Tensor, weights: Tensor, aux_weight: float, frozen: bool, share: float
    ) -> None:
        super().__init__(labels, weights, aux_weight, frozen)
        self.share = share

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch; its terms are mixed as the images are."""
        assert isinstance(model, Tree)
        labels = self.labels[batch.index]
        partner, own = sibling_mixture(labels, self.share)
        weight = own[:, None, None, None]
        images = weight * batch.images + (1 - weight) * batch.images[partner]
        outputs = model.logits(images, frozen=self.frozen)
        mine = self.each(model, outputs, labels)
        theirs = self.each(model, outputs, labels[partner])
        return torch.mean(own * mine + (1 - own) * theirs)


def sibling_mixture(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Draw a partner for each sample and the sample's own weight in the mixture.

    The partner is a random sample of the sibling node, l xor 1. A `share` of those that have one is
    mixed, with a weight drawn evenly from 0 to 1; the others keep the weight 1.
    """
    siblings = (labels[:, None] ^ 1) == labels
    draws = torch.rand(siblings.shape, device=labels.device).masked_fill(~siblings, -1.0)
    best, partner = draws.max(dim=1)
    chance, weight = torch.rand((2, len(labels)), device=labels.device)
    mixed = (best >= 0) & (chance < share)
    return partner, torch.where(mixed, weight, 1.0)
