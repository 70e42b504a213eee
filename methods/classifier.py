"""The fitted form of methods whose result is one ordinary network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from methods.backbones import Classifier, build_backbone
from methods.base import Fitted, Shape


class FittedClassifier(Fitted):
    """An ordinary network that maps images to class logits."""

    def __init__(
        self, module: nn.Module, facts: dict[str, Any], partition: Tensor | None = None
    ) -> None:
        self.module = module
        self.facts = facts
        self.partition = partition

    def logits(self, images: Tensor) -> Tensor:
        """Score the classes."""
        scores: Tensor = self.module(images)
        return scores


class PlainNetwork:
    """Mixed into methods that end with a `FittedClassifier`: how to load one again."""

    def revive(self, shape: Shape, config: Any, weights: dict[str, Tensor]) -> Fitted:
        """Fill a network of the same shape."""
        model = Classifier(build_backbone(shape.backbone, shape.channels), len(shape.codes))
        model.load_state_dict(weights)
        return FittedClassifier(model.eval(), {})
