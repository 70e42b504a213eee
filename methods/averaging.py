"""A moving average of a network's weights, and the network that has them.

Averaged weights need batch-norm statistics of their own: those of the network in training belong to
other activations. They are taken again from a few training batches whenever the average is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class WeightAverage(nn.Module):
    """A copy of a model whose weights follow the model's: w <- d w + (1 - d) new.

    The decay d starts low, (1 + n) / (10 + n) after n steps, so that the first weights, which are
    often random, are soon forgotten.
    """

    steps: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.averaged_model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the model by one step."""
        steps = int(self.steps)
        decay = min(self.decay, (1 + steps) / (10 + steps))
        own: list[Tensor] = list(self.averaged_model.parameters())
        torch._foreach_lerp_(own, list(model.parameters()), 1 - decay)
        self.steps += 1

    @torch.no_grad()
    def update_batch_norm(
        self, model: nn.Module, set_mode: Callable[[nn.Module], Any], batches: Iterable[Tensor]
    ) -> nn.Module:
        """Take batch-norm statistics that fit the averaged weights; return the averaged model.

        Only batch-norms that `set_mode` trains are estimated again, from the batches; all other
        buffers are the model's.
        """
        for own, source in zip(self.averaged_model.buffers(), model.buffers(), strict=True):
            own.copy_(source)
        set_mode(self.averaged_model)
        modules = self.averaged_model.modules()
        norms = [m for m in modules if isinstance(m, _BatchNorm) and m.training]
        if not norms:
            return self.averaged_model
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over the batches
        for images in batches:
            self.averaged_model(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        return self.averaged_model
