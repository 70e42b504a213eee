"""The tree: a shared backbone and one level of heads for each iteration; and a fitted one.

Level t has K(t) = C * 2^(t-1) heads; head j reads the representation of head j // 2 of the level
above (the backbone's features at level 1). All heads of a level are one batched product: their
weights are stacked, so the cost of a level hardly grows with its width.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor, nn

from methods.backbones import Backbone
from methods.base import Fitted, Selected
from methods.metrics import class_scores

HeadKinds = Literal["linear", "mlp", "asymmetric", "reversed"]


class Heads(nn.Module):
    """The heads of one level, side by side.

    A head is phi (a linear layer, followed by ReLU and dropout where it is an MLP) and a linear
    logit on phi. From level 2 on, batch-norm precedes and follows phi. The norm before phi has no
    gain and shift, for phi's linear layer has them; siblings read the same parent and share it.
    Weights are stored by parent, the children of one side by side: (parents, inputs, children x
    hidden). At level 1 the backbone is the one parent of all heads.
    """

    active: Tensor

    def __init__(
        self, count: int, parents: int, inputs: int, hidden: int, kinds: HeadKinds, dropout: float
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.hidden = hidden
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(parents, inputs, count // parents * hidden))
        self.bias = nn.Parameter(torch.empty(parents, 1, count // parents * hidden))
        self.out_weight = nn.Parameter(torch.empty(count, hidden))
        self.out_bias = nn.Parameter(torch.empty(count))
        for parameter, fan_in in (
            *((self.weight, inputs), (self.bias, inputs)),
            *((self.out_weight, hidden), (self.out_bias, hidden)),
        ):
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        norm = parents > 1
        self.norm_in = nn.BatchNorm1d(parents * inputs, affine=False) if norm else None
        self.norm_out = nn.BatchNorm1d(count * hidden) if norm else None
        self.register_buffer("active", torch.ones(count, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (B, K, hidden) representations and (B, K) logits from (B, parents, inputs)."""
        if self.norm_in is not None:
            inputs = self.norm_in(inputs.flatten(1)).view_as(inputs)
        phi = torch.baddbmm(self.bias, inputs.transpose(0, 1), self.weight)
        phi = self._nonlinear(phi.unflatten(2, (-1, self.hidden)))
        if self.norm_out is not None:
            phi = self.norm_out(phi.flatten(1)).view_as(phi)
        return phi, (phi * self.out_weight).sum(dim=-1) + self.out_bias

    def _nonlinear(self, phi: Tensor) -> Tensor:
        """Apply ReLU and dropout to the heads that are MLPs, and put the heads in order.

        From (parents, B, children, hidden) to (B, K, hidden).
        """
        if self.kinds == "linear":
            return phi.transpose(0, 1).flatten(1, 2)
        if self.kinds == "mlp":
            return self._drop(phi.relu()).transpose(0, 1).flatten(1, 2)
        easy, hard = phi.transpose(0, 1).unbind(dim=2)
        if self.kinds == "asymmetric":
            hard = self._drop(hard.relu())
        else:
            easy = self._drop(easy.relu())
        return torch.stack([easy, hard], dim=2).flatten(1, 2)

    def _drop(self, values: Tensor) -> Tensor:
        """Drop values; a uniform draw is several times cheaper on a CPU than torch's Bernoulli."""
        if self.dropout == 0 or not self.training:
            return values
        kept = (torch.rand_like(values) >= self.dropout).to(values.dtype)
        return values * kept.mul_(1 / (1 - self.dropout))

    def masked(self, logits: Tensor) -> Tensor:
        """Rule out merged and empty nodes."""
        return logits.masked_fill(~self.active, -torch.inf)


class Tree(nn.Module):
    """A backbone and its levels of heads; calling it gives the masked leaf logits."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = classes
        self.levels = nn.ModuleList()

    @property
    def depth(self) -> int:
        """Number of levels, which is the iteration the tree has reached."""
        return len(self.levels)

    @property
    def leaves(self) -> Heads:
        """The heads of the last level."""
        heads = self.levels[-1]
        assert isinstance(heads, Heads)
        return heads

    def grow(self, hidden: int, dropout: float, kinds: HeadKinds, first_mlp: bool) -> Heads:
        """Add a level: one head for each class, then two for each head."""
        count = self.classes * 2**self.depth
        if self.depth == 0:
            first: HeadKinds = "mlp" if first_mlp else "linear"
            heads = Heads(count, 1, self.backbone.dim, hidden, first, dropout)
        else:
            heads = Heads(count, count // 2, hidden, hidden, kinds, dropout)
        self.levels.append(heads)
        return heads

    def parent_features(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute what the last level reads, and the raw logits of the levels before it."""
        state = self.backbone(images)[:, None]
        outputs = []
        for level in self.levels[:-1]:
            state, scores = level(state)
            outputs.append(scores)
        return state, outputs

    def logits(self, images: Tensor, *, frozen: bool = False) -> list[Tensor]:
        """Compute the raw logits of every level; `frozen` keeps gradients to the last one."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            state, outputs = self.parent_features(images)
        return [*outputs, self.leaves(state)[1]]

    def forward(self, images: Tensor) -> Tensor:
        """Compute leaf logits, merged nodes ruled out."""
        masked: Tensor = self.leaves.masked(self.logits(images)[-1])
        return masked


def class_of(leaf: Tensor, depth: int) -> Tensor:
    """Read the class off a leaf: floor(leaf / 2^(T-1))."""
    return leaf.div(2 ** (depth - 1), rounding_mode="floor")


def path_name(leaf: int, depth: int, codes: tuple[str, ...]) -> str:
    """Return the name of a leaf, its class and its easy/hard route: `LB:HE`."""
    steps = [leaf >> shift & 1 for shift in reversed(range(depth - 1))]
    route = "".join("EH"[step] for step in steps)
    code = codes[leaf >> (depth - 1)]
    return f"{code}:{route}" if route else code


class FittedTree(Fitted):
    """A trained tree: the classifier and the partition at once."""

    tree_key = "nct"

    def __init__(
        self,
        tree: Tree,
        codes: tuple[str, ...],
        *,
        selection: Selected | None = None,
        details: dict[str, object] | None = None,
        partition: Tensor | None = None,
        snapshots: tuple[FittedTree, ...] = (),
        last_epoch: FittedTree | None = None,
    ) -> None:
        super().__init__(
            tree,
            selection=selection,
            details=details,
            partition=partition,
            snapshots=snapshots,
            last_epoch=last_epoch,
        )
        self.tree = tree
        self.codes = codes

    def logits(self, images: Tensor) -> Tensor:
        """Score each class by its best leaf."""
        return class_scores(self.tree(images), self.tree.classes)

    def leaf(self, images: Tensor) -> Tensor:
        """Return the leaf of each image."""
        return self.leaf_logits(images).argmax(dim=1)

    def leaf_logits(self, images: Tensor) -> Tensor:
        """Score every leaf; merged ones are minus infinity."""
        logits: Tensor = self.tree(images)
        return logits

    def level_logits(self, images: Tensor) -> Tensor:
        """Score the nodes of every level, uncalibrated; merged ones are minus infinity."""
        scored = zip(self.tree.levels, self.tree.logits(images), strict=True)
        return torch.cat([cast(Heads, heads).masked(scores) for heads, scores in scored], dim=1)

    def leaf_names(self) -> tuple[str, ...]:
        """Return the class and the easy/hard route of every leaf, in order."""
        leaves = range(len(self.tree.leaves.active))
        return tuple(path_name(leaf, self.tree.depth, self.codes) for leaf in leaves)
