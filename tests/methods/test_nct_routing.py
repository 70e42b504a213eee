"""Routing by correctness, merging of sparse nodes, and what prediction for it leaves untouched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import Task
from methods.backbones import Backbone
from methods.nct.builder import TreeBuilder, _new_heads_only
from methods.nct.config import NctConfig
from methods.nct.routing import RoutingImages, predicted_leaves, route
from methods.nct.tree import Tree
from methods.prediction import EvalImages, predict_with

MakeContext = Callable[..., RunContext]
Y = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
FIRST = torch.tensor([0, 0, 1, 0, 1, 1, 1, 1, 0, 1])
"""Samples 2, 4 and 8 are predicted wrongly."""


class TestByHand:
    def test_wrong_samples_go_to_the_hard_child(self) -> None:
        routed = route(Y, FIRST, nodes=2, smallest=0)
        assert routed.labels.tolist() == [0, 0, 1, 0, 1, 2, 2, 2, 3, 2]
        assert routed.counts.tolist() == [3, 2, 4, 1]
        assert routed.merged == ()

    def test_second_split_compares_leaves_rather_than_classes(self) -> None:
        labels = route(Y, FIRST, nodes=2, smallest=0).labels
        predicted = torch.tensor([0, 1, 1, 0, 0, 2, 2, 3, 3, 0])
        # Sample 1 is given its own class but the wrong leaf of it, and so it is hard; 2 is easy.
        routed = route(labels, predicted, nodes=4, smallest=0)
        assert routed.labels.tolist() == [0, 1, 2, 0, 3, 4, 4, 5, 6, 5]
        assert routed.counts.tolist() == [2, 1, 1, 1, 2, 2, 1, 0]

    def test_easy_sibling_absorbs_a_small_hard_child(self) -> None:
        routed = route(Y, FIRST, nodes=2, smallest=2)
        assert routed.labels.tolist() == [0, 0, 1, 0, 1, 2, 2, 2, 2, 2]
        assert routed.counts.tolist() == [3, 2, 5, 0]
        assert routed.merged == (3,)

    @pytest.mark.parametrize(
        ("smallest", "merged"), [(0, ()), (1, ()), (2, (3,)), (3, (1, 3)), (100, (1, 3))]
    )
    def test_threshold_is_exact(self, smallest: int, merged: tuple[int, ...]) -> None:
        """The hard children have 2 and 1 samples; exactly as many as demanded is enough."""
        assert route(Y, FIRST, nodes=2, smallest=smallest).merged == merged

    def test_small_easy_child_stays(self) -> None:
        routed = route(Y, 1 - FIRST, nodes=2, smallest=4)
        assert routed.counts.tolist() == [5, 0, 1, 4]
        assert routed.merged == (1,)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """Labels and predictions over some nodes, of which a few may be empty, and a threshold."""
    nodes = draw(st.integers(2, 12))
    size = draw(st.integers(1, 60))
    node = st.integers(0, nodes - 1)
    labels, predicted = (draw(st.lists(node, min_size=size, max_size=size)) for _ in range(2))
    return torch.tensor(labels), torch.tensor(predicted), nodes, draw(st.integers(0, 12))


@given(assignments())
def test_parents_are_recovered_before_and_after_merging(
    case: tuple[Tensor, Tensor, int, int],
) -> None:
    labels, predicted, nodes, smallest = case
    split, final = (route(labels, predicted, nodes, limit) for limit in (0, smallest))
    assert torch.equal(split.labels // 2, labels)
    assert torch.equal(final.labels // 2, labels)
    assert torch.equal(split.labels % 2 == 1, predicted != labels)
    assert len(final.counts) == 2 * nodes
    assert torch.equal(final.counts, torch.bincount(final.labels, minlength=2 * nodes))
    assert split.merged == ()
    for parent in range(nodes):
        easy, hard = 2 * parent, 2 * parent + 1
        filled = bool((labels == parent).any())
        merges = filled and bool(split.counts[hard] < smallest)  # nobody wrong is few, too
        assert (hard in final.merged) == merges
        assert final.counts[hard] == (0 if merges else split.counts[hard])
        assert final.counts[easy] + final.counts[hard] == (labels == parent).sum()
    assert all(node % 2 == 1 for node in final.merged)


def toy_tree(depth: int) -> Tree:
    """A tree over 8 x 8 images whose backbone has a batch-norm to spoil."""
    torch.manual_seed(3)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
    tree = Tree(Backbone(body, 8), 2)
    for _ in range(depth):
        tree.grow(4, 0.5, "asymmetric", False)
    return tree


class TestEmptyNodes:
    def test_are_inactive_and_so_is_all_below_them(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        builder = TreeBuilder(toy_task, NctConfig(hidden=4), make_context())
        tree = toy_tree(1)
        labels = toy_task.train.y
        wrong = torch.arange(60) % 10 == 1  # six samples, all of class 1
        routed = route(labels, torch.where(wrong, 1 - labels, labels), 2, smallest=20)
        assert routed.counts.tolist() == [30, 0, 30, 0]
        builder._grow(tree, routed.counts)
        assert tree.leaves.active.tolist() == [True, False, True, False]
        guesses = torch.arange(60) // 2 % 4
        routed = route(routed.labels, guesses, 4, smallest=0)
        assert (routed.counts > 0).tolist() == [True, True, False, False, True, True, False, False]
        builder._grow(tree, routed.counts)
        assert torch.equal(tree.leaves.active, routed.counts > 0)
        leaves = predict_with(tree, EvalImages(toy_task.val.images, toy_task.eval_transform))
        assert not torch.isin(leaves.argmax(dim=1), torch.tensor([2, 3, 6, 7])).any()


class TestPrediction:
    @pytest.mark.parametrize("images", ["augmented", "clean"])
    def test_leaves_modes_and_statistics_alone(
        self, toy_task: Task, make_context: MakeContext, images: RoutingImages
    ) -> None:
        tree = toy_tree(2)
        _new_heads_only(tree)  # some parts in training mode, others not
        modes = [part.training for part in tree.modules()]
        assert len(set(modes)) == 2
        state = {name: value.clone() for name, value in tree.state_dict().items()}
        ctx = make_context()
        predicted = predicted_leaves(tree, toy_task, ctx, images)
        assert [part.training for part in tree.modules()] == modes
        after = tree.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in state.items())
        tree.eval()
        assert torch.equal(predicted, predicted_leaves(tree, toy_task, ctx, images))
        assert ctx.account.image_passes == 2 * len(toy_task.train)

    def test_clean_images_are_those_of_the_evaluation(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        tree = toy_tree(2).eval()
        batch = toy_task.train.images.batch(torch.arange(len(toy_task.train)))
        expected = tree(toy_task.eval_transform(batch)).argmax(dim=1)
        assert torch.equal(predicted_leaves(tree, toy_task, make_context(), "clean"), expected)

    def test_augmented_images_are_those_of_the_training(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        tree, ctx = toy_tree(2).eval(), make_context()
        batch = toy_task.train.images.batch(torch.arange(len(toy_task.train)))
        drawn = toy_task.train_transform(batch, ctx.generator("nct", "route", 2))
        augmented = predicted_leaves(tree, toy_task, ctx, "augmented")
        assert torch.equal(augmented, tree(drawn).argmax(dim=1))
        assert not torch.equal(augmented, predicted_leaves(tree, toy_task, ctx, "clean"))

    def test_same_seed_routes_the_same(self, toy_task: Task, make_context: MakeContext) -> None:
        tree = toy_tree(2)
        first, again, other = (
            predicted_leaves(tree, toy_task, make_context(name, seed), "augmented")
            for name, seed in (("one", 0), ("two", 0), ("three", 1))
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_masked_leaves_are_not_predicted(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        tree = toy_tree(2)
        popular = int(predicted_leaves(tree, toy_task, make_context(), "clean").mode().values)
        tree.leaves.active[popular] = False
        assert popular not in predicted_leaves(tree, toy_task, make_context(), "augmented")
