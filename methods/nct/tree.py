"""The tree: a shared backbone and one level of heads for each iteration.

Level t has K(t) = C * 2^(t-1) heads; head j reads the representation of head j // 2 of the level
above (the backbone's features at level 1). All heads of a level are one batched product: their
weights are stacked, so the cost of a level hardly grows with its width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from methods.backbones import Backbone

HeadKinds = Literal["linear", "mlp", "asymmetric", "reversed"]


class Heads(nn.Module):
    """The heads of one level, side by side.

    A head is phi (a linear layer, followed by ReLU and dropout where it is an MLP) and a linear
    logit on phi. From level 2 on, batch-norm precedes and follows phi. The norm before phi has no
    gain and shift, for phi's linear layer has them; siblings read the same parent and share it.
    """

    active: Tensor

    def __init__(
        self, count: int, inputs: int, hidden: int, kinds: HeadKinds, dropout: float, norm: bool
    ) -> None:
        super().__init__()
        self.kinds = kinds
        self.hidden = hidden
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(count, inputs, hidden))
        self.bias = nn.Parameter(torch.empty(count, hidden))
        self.out_weight = nn.Parameter(torch.empty(count, hidden))
        self.out_bias = nn.Parameter(torch.empty(count))
        for parameter, fan_in in (
            *((self.weight, inputs), (self.bias, inputs)),
            *((self.out_weight, hidden), (self.out_bias, hidden)),
        ):
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        self.norm_in = nn.BatchNorm1d(count // 2 * inputs, affine=False) if norm else None
        self.norm_out = nn.BatchNorm1d(count * hidden) if norm else None
        self.register_buffer("active", torch.ones(count, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (B, K, hidden) representations and (B, K) logits.

        Inputs are (B, features) at level 1 and (B, K / 2, hidden) below it.
        """
        phi = self._nonlinear(self._linear(inputs))
        if self.norm_out is not None:
            phi = self.norm_out(phi.flatten(1)).view_as(phi)
        return phi, (phi * self.out_weight).sum(dim=-1) + self.out_bias

    def _linear(self, inputs: Tensor) -> Tensor:
        count, features, hidden = self.weight.shape
        if self.norm_in is None:
            flat = self.weight.permute(1, 0, 2).reshape(features, -1)
            return (inputs @ flat).view(len(inputs), count, hidden) + self.bias
        seen = self.norm_in(inputs.flatten(1)).view_as(inputs).transpose(0, 1)
        # Both children of a parent in one product: (K/2, B, in) times (K/2, in, 2 hidden).
        pairs = self.weight.view(-1, 2, features, hidden).transpose(1, 2).flatten(2)
        phi = torch.baddbmm(self.bias.view(-1, 1, 2 * hidden), seen, pairs)
        return phi.transpose(0, 1).reshape(len(inputs), count, hidden)

    def _nonlinear(self, phi: Tensor) -> Tensor:
        """Apply ReLU and dropout to the heads that are MLPs, and to no others."""
        if self.kinds == "linear":
            return phi
        if self.kinds == "mlp":
            return self._drop(phi.relu())
        easy, hard = phi.unflatten(1, (-1, 2)).unbind(dim=2)
        if self.kinds == "asymmetric":
            hard = self._drop(hard.relu())
        else:
            easy = self._drop(easy.relu())
        return torch.stack([easy, hard], dim=2).flatten(1, 2)

    def _drop(self, values: Tensor) -> Tensor:
        """Drop values; a uniform draw is several times cheaper on a CPU than torch's Bernoulli."""
        if self.dropout == 0 or not self.training:
            return values
        kept = torch.rand_like(values) >= self.dropout
        return values * kept / (1 - self.dropout)

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
            heads = Heads(count, self.backbone.dim, hidden, first, dropout, norm=False)
        else:
            heads = Heads(count, hidden, hidden, kinds, dropout, norm=True)
        self.levels.append(heads)
        return heads

    def logits(self, images: Tensor, *, frozen: bool = False) -> list[Tensor]:
        """Compute the raw logits of every level; `frozen` keeps gradients to the last one."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            state = self.backbone(images)
            outputs = []
            for level in self.levels[:-1]:
                state, scores = level(state)
                outputs.append(scores)
        outputs.append(self.leaves(state)[1])
        return outputs

    def forward(self, images: Tensor) -> Tensor:
        """Compute leaf logits, merged nodes ruled out."""
        masked: Tensor = self.leaves.masked(self.logits(images)[-1])
        return masked


def class_of(leaf: Tensor, depth: int) -> Tensor:
    """Read the class off a leaf: floor(leaf / 2^(T-1))."""
    return leaf.div(2 ** (depth - 1), rounding_mode="floor")


def path_name(leaf: int, depth: int, codes: tuple[str, ...]) -> str:
    """Name a leaf by its class and its easy/hard route: `LB:HE`."""
    steps = [leaf >> shift & 1 for shift in reversed(range(depth - 1))]
    route = "".join("EH"[step] for step in steps)
    code = codes[leaf >> (depth - 1)]
    return f"{code}:{route}" if route else code
