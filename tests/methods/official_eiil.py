"""EIIL's inference as its authors compute it, written anew: autograd in every step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def official_assignment(
    logits: Tensor, y: Tensor, start: Tensor, steps: int, lr: float, eps: float = 1e-8
) -> Tensor:
    """Maximise both environments' penalty by Adam; give the weights behind the soft assignment."""
    scale = torch.ones((), requires_grad=True)
    each = functional.cross_entropy(scale * logits, y, reduction="none")
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=lr, eps=eps)
    for _ in range(steps):
        q = weights.sigmoid()
        penalties = []
        for share in (q, 1 - q):
            (slope,) = torch.autograd.grad((share * each).mean(), scale, create_graph=True)
            penalties.append(slope**2)
        optimizer.zero_grad()
        (-torch.stack(penalties).mean()).backward(retain_graph=True)
        optimizer.step()
    return weights.detach()
