"""The pass that leaves out what stands still gives what the whole pass gives."""

from __future__ import annotations

import pytest
import torch

from datasets.base import BackboneSpec
from datasets.images import MemoryImages
from datasets.transforms import ResizedCentreCrop, Transform
from methods.backbones import build_backbone
from methods.nct.builder import CachedParents
from methods.nct.tree import Tree
from methods.prediction import EvalImages, predict_with


@pytest.fixture
def tree() -> Tree:
    torch.manual_seed(0)
    tree = Tree(build_backbone(BackboneSpec("lenet5"), channels=3), 5)
    for _ in range(3):
        tree.grow(hidden=8, dropout=0.3, kinds="asymmetric", first_mlp=False)
    tree.leaves.active[3] = False
    return tree.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@pytest.fixture
def images() -> EvalImages:
    pixels = torch.randint(0, 256, (70, 3, 28, 28), dtype=torch.uint8)
    half = (0.5, 0.5, 0.5)
    return EvalImages(MemoryImages(pixels), Transform(ResizedCentreCrop(32), 32, half, half), 32)


def change(tree: Tree) -> None:
    """Move the last level as a step of phase 1 would, its batch-norm statistics as well."""
    with torch.no_grad():
        for parameter in tree.leaves.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for norm in (tree.leaves.norm_in, tree.leaves.norm_out):
            assert norm is not None and norm.running_mean is not None
            norm.running_mean.add_(0.1)


def test_the_same_to_the_last_bit_while_the_leaves_change(tree: Tree, images: EvalImages) -> None:
    frozen, before = CachedParents(), None
    for _ in range(3):
        ours, whole = frozen(tree, images), predict_with(tree, images)
        assert torch.equal(ours, whole)
        assert before is None or not torch.equal(ours, before)
        before = ours
        change(tree)
    assert ours[:, 3].isneginf().all()


def test_backbone_and_parents_run_once(tree: Tree, images: EvalImages) -> None:
    calls: list[int] = []
    tree.backbone.register_forward_hook(lambda *_: calls.append(1))
    frozen = CachedParents()
    for _ in range(4):
        frozen(tree, images)
    assert len(calls) == 3  # the batches of one pass


def test_the_model_keeps_its_mode(tree: Tree, images: EvalImages) -> None:
    tree.eval()
    tree.leaves.train()
    CachedParents()(tree, images)
    assert tree.leaves.training and not tree.backbone.training
