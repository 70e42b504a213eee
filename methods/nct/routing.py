"""Routing: samples the tree gets right go to the easy child of their node, the others to the hard.

The update is l <- 2 l + [predicted leaf != assigned leaf]. A hard child with too few samples is
merged into its easy sibling; merging stays below one parent, so l // 2 is the parent's label before
and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from datasets.base import Task
from datasets.resident import batches
from methods.base import Context
from methods.nct.tree import Tree
from methods.prediction import (
    EvalImages,
    batch_size_for,
    evaluation_mode,
    mixed_precision,
    predict_with,
)

RoutingImages = Literal["augmented", "clean"]


@dataclass(frozen=True)
class Routed:
    """Where routing put every training sample.

    Attributes:
        labels: node of each sample at the next level.
        counts: samples of each node, after merging.
        merged: hard children folded into their siblings.
    """

    labels: Tensor
    counts: Tensor
    merged: tuple[int, ...]


def route(labels: Tensor, predicted: Tensor, nodes: int, smallest: int) -> Routed:
    """Split every one of `nodes` nodes by correctness and merge what is too small."""
    split = 2 * labels + (predicted != labels).long()
    counts = torch.bincount(split, minlength=2 * nodes)
    hard = torch.arange(2 * nodes) % 2 == 1
    filled_parent = (torch.bincount(labels, minlength=nodes) > 0).repeat_interleave(2)
    small = hard & filled_parent & (counts < smallest)
    split = torch.where(small[split], split - 1, split)
    counts = torch.bincount(split, minlength=2 * nodes)
    return Routed(split, counts, tuple(small.nonzero()[:, 0].tolist()))


def predicted_leaves(tree: Tree, task: Task, ctx: Context, images: RoutingImages) -> Tensor:
    """Predict the leaf of every training image, in evaluation mode, in one pass.

    Augmented images by default: the paper does not say, and its capture rates are only reached so.
    """
    ctx.count_passes(len(task.train))
    if images == "clean":
        return predict_with(tree, EvalImages(task.train.images, task.eval_transform)).argmax(1)
    generator = ctx.generator("nct", "route", tree.depth)
    leaves = []
    size = batch_size_for(task.train_transform, task.train.images)
    parts = torch.arange(len(task.train)).split(size)
    with torch.no_grad(), evaluation_mode(tree), mixed_precision(ctx.device):
        for raw in batches(task.train.images, parts):
            batch = task.train_transform(raw, generator)
            batch = batch.contiguous(memory_format=torch.channels_last)
            leaves.append(tree(batch).argmax(dim=1).cpu())
    return torch.cat(leaves)
