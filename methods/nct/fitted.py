"""A fitted tree: what `fit` returns and what a kept model becomes again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from methods.base import Fitted
from methods.metrics import class_scores
from methods.nct.tree import Tree, path_name


class FittedTree(Fitted):
    """A trained tree: the classifier and the partition at once."""

    def __init__(
        self,
        tree: Tree,
        codes: tuple[str, ...],
        partition: Tensor | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.module = self.tree = tree
        self.codes = codes
        self.partition = partition
        self.facts = facts or {}

    def logits(self, images: Tensor) -> Tensor:
        """Score each class by its best leaf."""
        return class_scores(self.tree(images), self.tree.classes)

    def leaf(self, images: Tensor) -> Tensor:
        """Name the leaf of each image."""
        return self.leaf_logits(images).argmax(dim=1)

    def leaf_logits(self, images: Tensor) -> Tensor:
        """Score every leaf; merged ones are minus infinity."""
        logits: Tensor = self.tree(images)
        return logits

    def path(self, leaf: int) -> str:
        """Name a leaf by its class and its easy/hard route."""
        return path_name(leaf, self.tree.depth, self.codes)

    def paths(self) -> list[str]:
        """Name every leaf, in order."""
        return [self.path(leaf) for leaf in range(len(self.tree.leaves.active))]
