"""The validation pass of phase 1, in which everything above the new heads stands still.

Epochs of phase 1 are short and the split is always the same, so that most of a pass would compute
again what the one before it has computed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.nct.tree import Tree
from methods.prediction import EvalImages, evaluation_mode


class FrozenAbove:
    """Predicts as `predict_with` does, to the last bit, but runs backbone and parents only once.

    To be used for one tree and one split, as long as nothing above the last level is trained.
    """

    def __init__(self) -> None:
        self.read_by_leaves: list[Tensor] = []

    def __call__(self, model: nn.Module, images: EvalImages) -> Tensor:
        """Compute the leaf logits of a split."""
        assert isinstance(model, Tree)
        with torch.no_grad(), evaluation_mode(model):
            self.read_by_leaves = self.read_by_leaves or [model.above(batch)[0] for batch in images]
            leaves = model.leaves
            outputs = [leaves.masked(leaves(state)[1]).float() for state in self.read_by_leaves]
        return torch.cat(outputs).cpu()
