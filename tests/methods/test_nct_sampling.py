"""Rebalancing the nodes: what each strategy draws, and how it weighs what it draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import Task
from methods.backbones import Backbone
from methods.nct.builder import NodeLoss, TreeBuilder, node_sampler, node_size, node_weights
from methods.nct.config import NctConfig, Strategy
from methods.nct.tree import Tree
from methods.training import Training

MakeContext = Callable[..., RunContext]
COUNTS = torch.tensor([40, 10, 0, 5, 25])
MIXED = torch.randperm(80, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(5).repeat_interleave(COUNTS)[MIXED]
GEOMEAN = 15  # (40 * 10 * 5 * 25) ** (1 / 4) = 14.95


def drawn(strategy: Strategy, seed: int = 0, epoch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return node_sampler(LABELS, COUNTS, strategy)(epoch, generator)


def of_node(index: Tensor, node: int) -> list[int]:
    return sorted(index[LABELS[index] == node].tolist())


class TestWeights:
    def test_by_hand(self) -> None:
        """80 samples in four filled nodes: 80 / (4 n)."""
        assert node_weights(COUNTS, cap=40).tolist() == pytest.approx([0.5, 2.0, 0.0, 4.0, 0.8])

    def test_are_capped(self) -> None:
        assert node_weights(COUNTS, cap=1.5).tolist() == pytest.approx([0.5, 1.5, 0.0, 1.5, 0.8])

    def test_every_node_weighs_the_same_in_total(self) -> None:
        total = node_weights(COUNTS, cap=1e9) * COUNTS
        assert total.tolist() == pytest.approx([20, 20, 0, 20, 20])


class TestSizes:
    @pytest.mark.parametrize(
        ("strategy", "size"), [("class_weights", None), ("downsample", 5), ("geomean", GEOMEAN)]
    )
    def test_by_hand(self, strategy: Strategy, size: int | None) -> None:
        assert node_size(COUNTS, strategy) == size

    @pytest.mark.parametrize("counts", [[9, 4, 0], [36, 1, 0, 0, 0]])
    def test_geometric_mean_is_over_filled_nodes(self, counts: list[int]) -> None:
        assert node_size(torch.tensor(counts), "geomean") == 6

    def test_geometric_mean_of_large_nodes_does_not_overflow(self) -> None:
        counts = torch.tensor([10**7] * 40)
        assert node_size(counts, "geomean") == pytest.approx(10**7, rel=1e-6)


class TestDraws:
    @pytest.mark.parametrize(("strategy", "size"), [("downsample", 5), ("geomean", GEOMEAN)])
    def test_every_filled_node_gives_the_same(self, strategy: Strategy, size: int) -> None:
        index = drawn(strategy)
        assert len(index) == 4 * size  # the empty node counts in neither K nor the mean
        per_node = torch.bincount(LABELS[index], minlength=5).tolist()
        assert per_node == [size, size, 0, size, size]

    def test_class_weights_visit_everything_once(self) -> None:
        assert sorted(drawn("class_weights").tolist()) == list(range(80))

    @pytest.mark.parametrize("strategy", ["downsample", "geomean"])
    @pytest.mark.parametrize("node", [0, 1, 3, 4])
    def test_replacement_only_where_a_node_grows(self, strategy: Strategy, node: int) -> None:
        for seed in range(5):
            mine = of_node(drawn(strategy, seed), node)
            grows = len(mine) > COUNTS[node]
            assert (len(set(mine)) < len(mine)) == grows

    def test_node_of_just_the_size_is_taken_whole(self) -> None:
        smallest = (LABELS == 3).nonzero()[:, 0].tolist()
        assert all(of_node(drawn("downsample", seed), 3) == smallest for seed in range(5))

    @pytest.mark.parametrize("strategy", ["downsample", "geomean"])
    def test_each_epoch_is_a_fresh_draw(self, strategy: Strategy) -> None:
        draws = [of_node(drawn(strategy, seed), 0) for seed in range(4)]
        assert len(set(map(tuple, draws))) == 4
        assert torch.equal(drawn(strategy, seed=2), drawn(strategy, seed=2))

    def test_downsampling_reaches_every_sample_in_time(self) -> None:
        """A subsample drawn once and shuffled again would leave most of node 0 unseen."""
        seen = {i for seed in range(80) for i in of_node(drawn("downsample", seed), 0)}
        assert len(seen) == 40

    @pytest.mark.parametrize("strategy", ["class_weights", "downsample", "geomean"])
    def test_nodes_are_mixed(self, strategy: Strategy) -> None:
        nodes = LABELS[drawn(strategy)]
        blocks = int((nodes[1:] != nodes[:-1]).sum()) + 1
        assert blocks > 8


def toy_builder(task: Task, ctx: RunContext, strategy: Strategy) -> TreeBuilder:
    config = NctConfig(
        hidden=4, epochs=(1, 2), phase1_ratio=(0.0, 0.5), sampling=strategy, weight_cap=2.5
    )
    return TreeBuilder(task, config, ctx)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[NodeLoss]:
    """Every objective that a growing tree makes."""
    made: list[NodeLoss] = []

    class Noted(NodeLoss):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("methods.nct.builder.NodeLoss", Noted)
    return made


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The training positions of every epoch."""
    indices: list[Tensor] = []
    original = Training._batches

    def noted(self: Training, parts: list[Tensor]) -> Any:
        indices.append(torch.cat(parts))
        return original(self, parts)

    monkeypatch.setattr(Training, "_batches", noted)
    return indices


class TestInTraining:
    FIRST = torch.arange(60) // 50  # 50 and 10 samples
    SECOND = 2 * FIRST + (torch.arange(60) % 10 < 4)  # 30, 20, 6 and 4

    def train(self, builder: TreeBuilder) -> None:
        torch.manual_seed(0)
        tree = Tree(Backbone(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), 8), 2)
        builder.first_val = torch.zeros_like(builder.task.val.y)
        for labels in (self.FIRST, self.SECOND):
            counts = torch.bincount(labels)
            builder._grow(tree, counts)
            builder._train(tree, labels, counts)

    def test_weights_are_uniform_at_first_and_by_node_later(
        self, toy_task: Task, make_context: MakeContext, losses: list[NodeLoss]
    ) -> None:
        self.train(toy_builder(toy_task, make_context(), "class_weights"))
        first, *later = (loss.weights.tolist() for loss in losses)
        assert first == [1.0, 1.0]
        assert len(later) == 2
        for weights in later:
            assert weights == pytest.approx([0.5, 0.75, 2.5, 2.5])

    @pytest.mark.parametrize("strategy", ["downsample", "geomean"])
    def test_resampled_nodes_are_not_weighted_too(
        self, toy_task: Task, make_context: MakeContext, losses: list[NodeLoss], strategy: Strategy
    ) -> None:
        self.train(toy_builder(toy_task, make_context(), strategy))
        assert len(losses) == 3
        assert all((loss.weights == 1).all() for loss in losses)

    @pytest.mark.parametrize(
        ("strategy", "lengths"),
        [
            ("class_weights", [60, 60, 60]),
            ("downsample", [2 * 10, 4 * 4, 4 * 4]),
            ("geomean", [2 * 22, 4 * 11, 4 * 11]),
        ],
    )
    def test_epoch_lengths(
        self,
        toy_task: Task,
        make_context: MakeContext,
        epochs: list[Tensor],
        strategy: Strategy,
        lengths: list[int],
    ) -> None:
        """Geometric means: sqrt(50 * 10) = 22.4 and (30 * 20 * 6 * 4) ** (1 / 4) = 11.0."""
        self.train(toy_builder(toy_task, make_context(), strategy))
        assert [len(index) for index in epochs] == lengths
        assert epochs[1].tolist() != epochs[2].tolist()
