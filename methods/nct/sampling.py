"""Rebalancing the nodes of a level: class weights, downsampling, or the geometric mean.

Nodes without samples (merged, or never filled) take no part: they count neither in K nor in the
mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from methods.training import Sampler, shuffled

Strategy = Literal["class_weights", "downsample", "geomean"]


def node_weights(counts: Tensor, cap: float) -> Tensor:
    """Weight each node by N / (K n_j), at most `cap`; empty nodes get 0."""
    filled = counts > 0
    total, nodes = counts.sum(), filled.sum()
    weights = total / (nodes * counts.clamp(min=1)).double()
    return torch.where(filled, weights.clamp(max=cap), 0.0).float()


def node_size(counts: Tensor, strategy: Strategy) -> int | None:
    """Give the samples each node contributes to an epoch; None where every sample is used."""
    filled = counts[counts > 0]
    if strategy == "downsample":
        return int(filled.min())
    if strategy == "geomean":
        return max(1, round(float(filled.double().log().mean().exp())))
    return None


def node_sampler(labels: Tensor, counts: Tensor, strategy: Strategy) -> Sampler:
    """Draw an epoch: the same number from each node, fresh every time, in random order."""
    size = node_size(counts, strategy)
    if size is None:
        return shuffled(len(labels))
    members = [(labels == node).nonzero()[:, 0] for node in (counts > 0).nonzero()[:, 0]]

    def draw(epoch: int, generator: torch.Generator) -> Tensor:
        device = generator.device
        parts = []
        for own in members:
            if len(own) >= size:
                pick = torch.randperm(len(own), generator=generator, device=device)[:size]
            else:
                pick = torch.randint(len(own), (size,), generator=generator, device=device)
            parts.append(own.to(device)[pick])
        everything = torch.cat(parts)
        return everything[torch.randperm(len(everything), generator=generator, device=device)]

    return draw
