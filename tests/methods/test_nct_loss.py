"""The objective of an iteration: node BCE, its weights, and the parents' auxiliary term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from methods.backbones import Backbone
from methods.nct.builder import NodeLoss, node_bce
from methods.nct.tree import Tree
from methods.training import Batch

LABELS = torch.tensor([5, 0, 2, 7, 2, 4])
UNIFORM = torch.ones(8)


def tree_of(depth: int) -> Tree:
    torch.manual_seed(depth)
    tree = Tree(Backbone(nn.Linear(5, 6), 6), 2)
    for _ in range(depth):
        tree.grow(4, 0.0, "asymmetric", False)
    return tree.eval()


def batch_of(index: Tensor) -> Batch:
    pixels = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    return Batch(pixels[index], LABELS[index] // 4, index)


def looped_bce(logits: Tensor, labels: Tensor, active: Tensor) -> list[float]:
    """Each sample's mean over the active heads, by torch's own loss of one head at a time."""
    values = []
    for scores, label in zip(logits, labels, strict=True):
        heads = [
            functional.binary_cross_entropy(
                torch.sigmoid(scores[j]), torch.tensor(float(j == label), dtype=scores.dtype)
            )
            for j in range(len(scores))
            if active[j]
        ]
        values.append(float(sum(heads)) / len(heads))
    return values


class TestNodeBce:
    @pytest.mark.parametrize("inactive", [[], [1], [1, 6]])
    def test_equals_the_loop(self, inactive: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        logits = 3 * torch.randn(6, 8, generator=generator, dtype=torch.float64)
        active = torch.ones(8, dtype=torch.bool)
        active[inactive] = False
        mine = node_bce(logits, LABELS, active)
        assert mine.shape == (6,)
        assert mine.tolist() == pytest.approx(looped_bce(logits, LABELS, active))

    def test_inactive_nodes_have_no_say(self) -> None:
        logits = torch.zeros(6, 8, requires_grad=True)
        active = UNIFORM.bool()
        active[3] = False
        shouting = logits + 50.0 * functional.one_hot(torch.tensor(3), 8)
        value = node_bce(shouting, LABELS, active)
        assert value.tolist() == pytest.approx([0.6931] * 6, abs=1e-4)
        value.sum().backward()
        assert logits.grad is not None
        assert (logits.grad.abs().sum(dim=0) > 0).tolist() == active.tolist()

    def test_confident_logits_stay_finite(self) -> None:
        wrong = node_bce(torch.full((6, 8), 1e4), LABELS, UNIFORM.bool())
        assert wrong.isfinite().all()


class TestNodeLoss:
    def test_auxiliary_term_is_the_parents_loss(self) -> None:
        tree, batch = tree_of(3), batch_of(torch.arange(6))
        _, parents, leaves = tree.logits(batch.images)
        children = node_bce(leaves, LABELS, UNIFORM).mean()
        above = node_bce(parents, LABELS // 2, torch.ones(4)).mean()
        for aux in (0.0, 0.5, 2.0):
            loss = NodeLoss(LABELS, UNIFORM, aux, frozen=False)(tree, batch)
            torch.testing.assert_close(loss, children + aux * above)

    def test_parents_have_their_own_mask(self) -> None:
        tree, batch = tree_of(3), batch_of(torch.arange(6))
        tree.levels[1].active[3] = False
        tree.leaves.active[1] = False
        _, parents, leaves = tree.logits(batch.images)
        expected = (
            node_bce(leaves, LABELS, tree.leaves.active).mean()
            + node_bce(parents, LABELS // 2, tree.levels[1].active).mean()
        )
        torch.testing.assert_close(NodeLoss(LABELS, UNIFORM, 1.0, False)(tree, batch), expected)

    def test_first_level_has_no_parents(self) -> None:
        tree, batch = tree_of(1), batch_of(torch.arange(6))
        labels = LABELS // 4
        expected = node_bce(tree.logits(batch.images)[0], labels, torch.ones(2)).mean()
        loss = NodeLoss(labels, torch.ones(2), 5.0, frozen=False)(tree, batch)
        torch.testing.assert_close(loss, expected)

    def test_phase_one_is_the_new_heads_alone(self) -> None:
        tree, batch = tree_of(3), batch_of(torch.arange(6))
        expected = node_bce(tree.logits(batch.images)[-1], LABELS, UNIFORM).mean()
        loss = NodeLoss(LABELS, UNIFORM, 5.0, frozen=True)(tree, batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for name, parameter in tree.named_parameters():
            assert (parameter.grad is not None) == name.startswith("levels.2."), name

    def test_phase_two_reaches_backbone_and_parents(self) -> None:
        tree = tree_of(3)
        NodeLoss(LABELS, UNIFORM, 1.0, frozen=False)(tree, batch_of(torch.arange(6))).backward()
        unreached = {name for name, value in tree.named_parameters() if value.grad is None}
        # The grandparents' logits appear in neither term; their representations do.
        assert unreached == {"levels.0.out_weight", "levels.0.out_bias"}

    def test_weights_multiply_the_whole_loss_of_a_sample(self) -> None:
        tree, batch = tree_of(3), batch_of(torch.arange(6))
        weights = torch.tensor([2.0, 9.0, 0.5, 9.0, 1.0, 3.0, 9.0, 0.0])
        _, parents, leaves = tree.logits(batch.images)
        both = node_bce(leaves, LABELS, UNIFORM) + node_bce(parents, LABELS // 2, torch.ones(4))
        expected = (both * torch.tensor([3.0, 2.0, 0.5, 0.0, 0.5, 1.0])).mean()
        torch.testing.assert_close(NodeLoss(LABELS, weights, 1.0, False)(tree, batch), expected)

    def test_labels_are_found_by_position_in_the_training_set(self) -> None:
        tree, index = tree_of(3), torch.tensor([3, 1, 3])
        batch = batch_of(index)
        expected = node_bce(tree(batch.images), LABELS[index], UNIFORM).mean()
        torch.testing.assert_close(NodeLoss(LABELS, UNIFORM, 0.0, False)(tree, batch), expected)

    def test_labels_are_no_part_of_a_checkpoint(self) -> None:
        assert NodeLoss(LABELS, UNIFORM, 1.0, frozen=False).state_dict() == {}
