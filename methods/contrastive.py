"""Contrastive sets over slices of the training data, and the loss of Correct-n-Contrast on them.

A slice holds the samples for which a first model gave the same answer. A set has four roles of
equal size, in this order: anchors (a slice's correct samples), positives (the anchors' class, found
in other slices), negatives (the slice's other classes) and easy negatives (the correct samples of
the slice that the first positive is in).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.errors import BenchError
from methods.backbones import Classifier
from methods.training import Batch

ROLES = 4


class NoAnchors(BenchError):
    """No slice holds a sample of its own class."""

    kind = "no_anchors"


@dataclass(frozen=True)
class Pools:
    """Where the sets of one slice come from, as positions in the training split.

    Attributes:
        others: every sample of another class, wherever it is.
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor
    others: Tensor


def role_pools(y: Tensor, slices: Tensor, classes: int) -> dict[int, Pools]:
    """Collect the pools of every slice that has anchors.

    A slice without errors takes its negatives from all samples of other classes. A class that is
    never misclassified is its own positives; the rule for easy negatives then gives the same class
    once more, as in the authors' code.
    """
    pools = {}
    for own in range(classes):
        inside, mine = slices == own, y == own
        anchors, others = _positions(inside & mine), _positions(~mine)
        if len(anchors):
            positives, negatives = _positions(mine & ~inside), _positions(inside & ~mine)
            pools[own] = Pools(
                anchors,
                positives if len(positives) else _positions(mine),
                negatives if len(negatives) else others,
                others,
            )
    if not pools:
        raise NoAnchors(
            f"the first stage put none of the {len(y)} training samples into the slice of its own "
            "class, so there are no anchors",
            "train a better first stage, with --set cnc.erm.epochs=... or --set cnc.erm.lr=...",
        )
    return pools


def _positions(where: Tensor) -> Tensor:
    return where.nonzero()[:, 0]


class ContrastiveSets:
    """Draws the sets of an epoch; calling it makes it the `Sampler` of a training.

    Attributes:
        per_role: samples of each role, at most as many as the smallest pool of positives or of
            negatives has.
        per_slice: sets of each slice; the slice with the fewest anchors decides.
    """

    def __init__(
        self, y: Tensor, slices: Tensor, classes: int, per_role: int, anchor_ratio: float
    ) -> None:
        self.slices = slices
        self.pools = role_pools(y, slices, classes)
        every = self.pools.values()
        self.per_role = min(per_role, *(min(len(p.positives), len(p.negatives)) for p in every))
        self.per_slice = max(1, round(anchor_ratio * min(len(p.anchors) for p in every)))

    @property
    def per_epoch(self) -> int:
        """Count the sets of an epoch."""
        return self.per_slice * len(self.pools)

    def __call__(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Draw one set of each slice in turn; a set's samples follow one another, role by role."""
        sets = [self._of_slice(own, generator) for own in self.pools]
        return torch.stack(sets, dim=1).flatten()

    def _of_slice(self, own: int, generator: torch.Generator) -> Tensor:
        """Draw the sets of one slice, as (sets, roles, samples)."""
        device, pools = generator.device, self.pools[own]

        def draw(pool: Tensor, rows: int) -> Tensor:
            return pool.to(device)[subsets(len(pool), self.per_role, rows, generator)]

        size, rows = len(pools.anchors), self.per_slice
        first = torch.randperm(size, generator=generator, device=device)[:rows, None]
        # Subsets of offsets, turned until their first member is the anchor that has its turn.
        offsets = subsets(size, self.per_role, rows, generator)
        anchors = pools.anchors.to(device)[(first + offsets - offsets[:, :1]) % size]
        positives = draw(pools.positives, rows)
        negatives = draw(pools.negatives, rows)
        easy = torch.empty_like(positives)
        sources = self.slices.to(device)[positives[:, 0]]
        for source in sources.unique().tolist():
            there = _positions(sources == source)
            # A slice in which nothing is correct has no easy negatives to give.
            pool = self.pools[source].anchors if source in self.pools else pools.others
            easy[there] = draw(pool, len(there))
        return torch.stack([anchors, positives, negatives, easy], dim=1)


def subsets(size: int, count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw `count` of `size` things for each row, in random order, all outcomes equally likely.

    Without replacement unless there are too few things. Floyd's algorithm, on all rows at once:
    its cost does not grow with `size`, where shuffling would touch every thing for every row.
    """
    device = generator.device
    if size < count:
        return torch.randint(size, (rows, count), generator=generator, device=device)
    limits = torch.arange(size - count + 1, size + 1, device=device)
    shape = rows, count
    # Single precision has too few values between 0 and 1 to be fair to a large pool.
    share = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    drawn = (share * limits).long()
    for column in range(1, count):
        taken = (drawn[:, :column] == drawn[:, column : column + 1]).any(dim=1)
        drawn[:, column].masked_fill_(taken, size - count + column)
    # So far, which column a member is in depends on the member.
    return drawn.gather(1, torch.rand(shape, generator=generator, device=device).argsort(dim=1))


def supervised_contrast(first: Tensor, positives: Tensor, negatives: Tensor, tau: float) -> Tensor:
    """Contrast one sample of each set (S, D) with its positives and negatives (S, N, D)."""
    others = torch.cat([positives, negatives], dim=1)
    similarity = functional.cosine_similarity(first[:, None], others, dim=2) / tau
    return similarity.logsumexp(dim=1) - similarity[:, : positives.shape[1]].mean(dim=1)


class TwoSidedLoss(nn.Module):
    """Contrast from the first anchor and from the first positive, and cross-entropy on all roles.

    One forward pass serves all three, for the encoder is in evaluation mode: what a sample becomes
    does not depend on those beside it.
    """

    def __init__(self, per_role: int, sets_per_forward: int, temperature: float, weight: float):
        super().__init__()
        self.per_role = per_role
        self.sets_per_forward = sets_per_forward
        self.temperature = temperature
        self.weight = weight

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Average over the sets of a batch.

        The divisor is that of a full batch, so that the last step of an epoch, too, does not depend
        on how many sets share a forward pass.
        """
        assert isinstance(model, Classifier)
        features = model.backbone(batch.images)
        entropy = functional.cross_entropy(model.head(features), batch.y, reduction="none")
        entropy = entropy.view(-1, ROLES * self.per_role).mean(dim=1)
        roles = features.float().view(-1, ROLES, self.per_role, features.shape[1])
        anchors, positives, negatives, easy = roles.unbind(dim=1)
        contrast = supervised_contrast(
            anchors[:, 0], positives, negatives, self.temperature
        ) + supervised_contrast(positives[:, 0], anchors, easy, self.temperature)
        losses = self.weight * contrast + (1 - self.weight) * entropy
        return losses.sum() / self.sets_per_forward
