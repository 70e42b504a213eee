"""The tree's batched heads are the heads of the paper, one by one, and so are its leaves' names."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from methods.backbones import Backbone
from methods.metrics import class_scores
from methods.nct.builder import _new_heads_only
from methods.nct.tree import FittedTree, HeadKinds, Heads, Tree, class_of, path_name

PIXELS, FEATURES, HIDDEN, BATCH = 5, 6, 4, 9
KINDS = get_args(HeadKinds)


def grown(
    classes: int,
    depth: int,
    kinds: HeadKinds = "asymmetric",
    *,
    dropout: float = 0.0,
    first_mlp: bool = False,
) -> Tree:
    """A tree in double precision whose batch-norms are as if long trained."""
    torch.manual_seed(classes + 10 * depth)
    body = nn.Sequential(nn.Linear(PIXELS, FEATURES), nn.BatchNorm1d(FEATURES))
    tree = Tree(Backbone(body, FEATURES), classes)
    for _ in range(depth):
        tree.grow(HIDDEN, dropout, kinds, first_mlp)
    for part in tree.modules():
        if isinstance(part, nn.BatchNorm1d):
            nn.init.uniform_(part.running_var, 0.5, 2.0)
            nn.init.normal_(part.running_mean)
            if part.affine:
                nn.init.uniform_(part.weight, 0.5, 2.0)
                nn.init.normal_(part.bias)
    return tree.double()


def images(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, PIXELS, generator=generator, dtype=torch.float64)


def by_head(values: Tensor, hidden: int) -> Tensor:
    """View a level's weights, stored by parent, as one matrix for each head."""
    parents, inputs, _ = values.shape
    return values.detach().view(parents, inputs, -1, hidden).transpose(1, 2).flatten(0, 1)


def is_mlp(kinds: HeadKinds, j: int) -> bool:
    return {"linear": False, "mlp": True, "asymmetric": j % 2 == 1, "reversed": j % 2 == 0}[kinds]


class PlainHead(nn.Module):
    """One head out of torch's own layers, filled from its place in a batched level."""

    def __init__(self, heads: Heads, j: int) -> None:
        super().__init__()
        (_, inputs, _), hidden = heads.weight.shape, heads.hidden
        self.norm_in = _own_norm(heads.norm_in, j // 2, inputs)
        self.linear = nn.Linear(inputs, hidden)
        rich = nn.Sequential(nn.ReLU(), nn.Dropout(heads.dropout))
        self.block = rich if is_mlp(heads.kinds, j) else nn.Identity()
        self.norm_out = _own_norm(heads.norm_out, j, hidden)
        self.out = nn.Linear(hidden, 1)
        self.double()
        with torch.no_grad():
            self.linear.weight.copy_(by_head(heads.weight, hidden)[j].T)
            self.linear.bias.copy_(by_head(heads.bias, hidden)[j, 0])
            self.out.weight.copy_(heads.out_weight[j][None])
            self.out.bias.copy_(heads.out_bias[j])

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        phi = self.norm_out(self.block(self.linear(self.norm_in(inputs))))
        return phi, self.out(phi)[:, 0]


def _own_norm(norm: nn.BatchNorm1d | None, j: int, width: int) -> nn.Module:
    if norm is None:
        return nn.Identity()
    own = nn.BatchNorm1d(width, affine=norm.affine)
    state = {
        name: value if value.ndim == 0 else value[j * width : (j + 1) * width]
        for name, value in norm.state_dict().items()
    }
    own.load_state_dict(state)
    return own


def plain_levels(tree: Tree) -> nn.ModuleList:
    return nn.ModuleList(
        nn.ModuleList(PlainHead(level, j) for j in range(len(level.active)))
        for level in tree.levels
    )


def plain_logits(levels: nn.ModuleList, features: Tensor) -> list[Tensor]:
    """Every head by itself: head j reads the representation of head j // 2 above it."""
    outputs, above = [], None
    for level in levels:
        pairs = [head(features if above is None else above[j // 2]) for j, head in enumerate(level)]
        above = [phi for phi, _ in pairs]
        outputs.append(torch.stack([logit for _, logit in pairs], dim=1))
    return outputs


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
class TestBatchedHeadsEqualTheLoop:
    def test_forward_gradients_and_statistics(
        self, depth: int, classes: int, kinds: HeadKinds, training: bool
    ) -> None:
        tree = grown(classes, depth, kinds, first_mlp=kinds == "mlp")
        plain = plain_levels(tree)
        tree.levels.train(training)
        plain.train(training)
        features = images()[:, [0, 1, 2, 3, 4, 0]].requires_grad_()
        tree.backbone = Backbone(nn.Identity(), FEATURES)
        batched = tree.logits(features)
        looped_features = features.detach().clone().requires_grad_()
        looped = plain_logits(plain, looped_features)
        assert len(batched) == len(looped) == depth
        for left, right in zip(batched, looped, strict=True):
            close(left, right)

        torch.manual_seed(1)
        pull = [torch.randn_like(scores) for scores in batched]
        sum((p * scores).sum() for p, scores in zip(pull, batched, strict=True)).backward()
        sum((p * scores).sum() for p, scores in zip(pull, looped, strict=True)).backward()
        mine = features.grad
        assert mine is not None and looped_features.grad is not None
        assert mine.abs().max() > 0
        close(mine, looped_features.grad)
        for level, heads in zip(tree.levels, plain, strict=True):
            linears, outs = [head.linear for head in heads], [head.out for head in heads]
            weights = torch.stack([part.weight.grad.T for part in linears])
            close(by_head(level.weight.grad, level.hidden), weights)
            biases = torch.stack([part.bias.grad for part in linears])
            close(by_head(level.bias.grad, level.hidden)[:, 0], biases)
            close(level.out_weight.grad, torch.cat([part.weight.grad for part in outs]))
            close(level.out_bias.grad, torch.cat([part.bias.grad for part in outs]))
            for name in ("norm_in", "norm_out"):
                # Siblings share the norm before phi: one of each pair stands for both.
                own = [getattr(head, name) for head in heads][:: 2 if name == "norm_in" else 1]
                self.check_norm(getattr(level, name), own)

    @staticmethod
    def check_norm(norm: nn.BatchNorm1d | None, own: list[nn.BatchNorm1d]) -> None:
        if norm is None:
            assert all(isinstance(part, nn.Identity) for part in own)
            return
        if norm.affine:
            close(norm.weight.grad, torch.cat([part.weight.grad for part in own]))
            close(norm.bias.grad, torch.cat([part.bias.grad for part in own]))
        close(norm.running_mean, torch.cat([part.running_mean for part in own]))
        close(norm.running_var, torch.cat([part.running_var for part in own]))


def test_loop_comparison_notices_a_swapped_head() -> None:
    tree = grown(2, 2).eval()
    plain = plain_levels(tree).eval()
    with torch.no_grad():
        tree.leaves.weight.copy_(tree.leaves.weight.flip(0))
    features = tree.backbone(images())
    looped = plain_logits(plain, features)
    assert not torch.allclose(tree.logits(images())[1], looped[1])


class TestShape:
    @pytest.mark.parametrize("classes", [2, 5, 10])
    def test_each_level_doubles(self, classes: int) -> None:
        tree = grown(classes, 4).eval()
        widths = [scores.shape for scores in tree.logits(images())]
        assert widths == [(BATCH, classes * 2 ** (t - 1)) for t in (1, 2, 3, 4)]
        assert tree.depth == 4
        assert tree(images()).shape == (BATCH, 8 * classes)

    def test_only_later_levels_have_batch_norm(self) -> None:
        norms = [(level.norm_in, level.norm_out) for level in grown(2, 3).levels]
        assert norms[0] == (None, None)
        for level_norms in norms[1:]:
            assert all(isinstance(norm, nn.BatchNorm1d) for norm in level_norms)

    @pytest.mark.parametrize("kinds", KINDS)
    @pytest.mark.parametrize("first_mlp", [True, False])
    def test_which_heads_are_mlps(self, kinds: HeadKinds, first_mlp: bool) -> None:
        tree = grown(3, 3, kinds, first_mlp=first_mlp)
        first: HeadKinds = "mlp" if first_mlp else "linear"
        for level, expected in zip(tree.levels, (first, kinds, kinds), strict=True):
            parents = level.weight.shape[0]
            shape = (parents, BATCH, len(level.active) // parents, HIDDEN)
            values = torch.randn(shape, dtype=torch.float64)
            plain = values.transpose(0, 1).flatten(1, 2)
            changed = (level.eval()._nonlinear(values) != plain).any(dim=2).any(dim=0)
            assert changed.tolist() == [is_mlp(expected, j) for j in range(len(level.active))]

    def test_dropout_is_for_mlps_in_training(self) -> None:
        tree = grown(2, 2, dropout=0.5)
        tree.levels[1].norm_out = None  # batch statistics would spread nothing, but hide the cause
        tree.eval()
        assert torch.equal(tree.logits(images())[1], tree.logits(images())[1])
        tree.levels[1].train()
        tree.levels[1].norm_in.eval()
        first, second = (tree.logits(images())[1] for _ in range(2))
        changed = (first != second).any(dim=0)
        assert changed.tolist() == [False, True, False, True]


class TestParents:
    @pytest.mark.parametrize("parent", range(5))
    def test_parent_feeds_its_two_children_only(self, parent: int) -> None:
        # Linear heads: with so few hidden units a ReLU may be dead and hide the change.
        tree = grown(5, 3, "linear").eval()
        before = tree.logits(images())
        with torch.no_grad():
            tree.levels[0].weight[0, :, parent * HIDDEN : (parent + 1) * HIDDEN] += 1.0
        changed = [
            (old != new).any(dim=0).nonzero()[:, 0].tolist()
            for old, new in zip(before, tree.logits(images()), strict=True)
        ]
        assert changed[0] == [parent]
        assert changed[1] == [2 * parent, 2 * parent + 1]
        assert changed[2] == [4 * parent + k for k in range(4)]

    def test_earlier_heads_are_kept_when_growing(self) -> None:
        tree = grown(3, 2).eval()
        levels = list(tree.levels)
        before = {name: value.clone() for name, value in tree.state_dict().items()}
        outputs = tree.logits(images())
        tree.grow(HIDDEN, 0.0, "asymmetric", False).double()
        tree.eval()
        assert list(tree.levels)[:2] == levels
        after = tree.state_dict()
        assert set(before) < set(after)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        for old, new in zip(outputs, tree.logits(images()), strict=False):
            assert torch.equal(old, new)


class TestFrozen:
    def test_gradient_reaches_the_last_level_only(self) -> None:
        tree = grown(2, 3)
        tree.logits(images(), frozen=True)[-1].sum().backward()
        for name, parameter in tree.named_parameters():
            assert (parameter.grad is not None) == name.startswith("levels.2."), name

    def test_gradient_reaches_everything_otherwise(self) -> None:
        tree = grown(2, 3)
        sum(scores.sum() for scores in tree.logits(images())).backward()
        assert all(parameter.grad is not None for parameter in tree.parameters())

    def test_only_the_new_level_updates_its_statistics(self) -> None:
        tree = grown(2, 3)
        _new_heads_only(tree)
        before = {name: value.clone() for name, value in tree.named_buffers()}
        tree.logits(images(), frozen=True)
        for name, value in tree.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                assert torch.equal(value, before[name]) != name.startswith("levels.2."), name

    def test_same_logits_as_unfrozen(self) -> None:
        tree = grown(2, 3).eval()
        pairs = zip(tree.logits(images(), frozen=True), tree.logits(images()), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


class TestMasking:
    def test_masked_heads_are_never_predicted(self) -> None:
        tree = grown(2, 3).eval()
        merged = torch.tensor([1, 4, 7])
        with torch.no_grad():
            tree.leaves.out_bias[merged] = 1e6
        assert torch.isin(tree(images()).argmax(dim=1), merged).all()  # they would win by far
        tree.leaves.active[merged] = False
        masked = tree(images())
        assert not torch.isin(masked.argmax(dim=1), merged).any()
        assert (masked[:, merged] == -torch.inf).all()
        assert masked[:, tree.leaves.active].isfinite().all()

    def test_the_nodes_of_all_levels_are_masked_and_the_last_are_the_leaves(self) -> None:
        tree = grown(classes=3, depth=3).eval()
        for level, node in ((1, 5), (2, 10), (2, 11)):
            heads = tree.levels[level]
            assert isinstance(heads, Heads)
            heads.active[node] = False
        fitted = FittedTree(tree, ("a", "b", "c"))
        nodes = fitted.level_logits(images())
        first, second, third = nodes.split([3, 6, 12], dim=1)
        assert torch.equal(first, tree.logits(images())[0])
        assert second.isneginf().nonzero()[:, 1].unique().tolist() == [5]
        assert torch.equal(third, fitted.leaf_logits(images()))

    def test_the_mask_is_kept_with_the_weights(self) -> None:
        tree, other = grown(2, 2), grown(2, 2)
        tree.leaves.active[3] = False
        other.load_state_dict(tree.state_dict())
        assert other.leaves.active.tolist() == [True, True, True, False]


@st.composite
def leaf_paths(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """A number of classes, a depth, a class, and the turns taken below it."""
    classes = draw(st.integers(2, 12))
    depth = draw(st.integers(1, 7))
    turns = draw(st.lists(st.integers(0, 1), min_size=depth - 1, max_size=depth - 1))
    return classes, depth, draw(st.integers(0, classes - 1)), turns


class TestNames:
    @given(leaf_paths())
    def test_name_tells_class_and_turns(self, path: tuple[int, int, int, list[int]]) -> None:
        classes, depth, y, turns = path
        leaf = y
        for turn in turns:
            leaf = 2 * leaf + turn
        assert int(class_of(torch.tensor([leaf]), depth)) == y
        name = path_name(leaf, depth, tuple(f"c{c}" for c in range(classes)))
        code, _, route = name.partition(":")
        assert code == f"c{y}"
        assert [{"E": 0, "H": 1}[letter] for letter in route] == turns

    @given(st.integers(2, 9), st.integers(1, 6))
    def test_names_are_distinct(self, classes: int, depth: int) -> None:
        codes = tuple(f"c{c}" for c in range(classes))
        count = classes * 2 ** (depth - 1)
        assert len({path_name(leaf, depth, codes) for leaf in range(count)}) == count

    @pytest.mark.parametrize(
        ("leaf", "depth", "name"),
        [(0, 1, "LB"), (1, 1, "WB"), (1, 2, "LB:H"), (2, 3, "LB:HE"), (7, 3, "WB:HH")],
    )
    def test_names_of_the_paper(self, leaf: int, depth: int, name: str) -> None:
        assert path_name(leaf, depth, ("LB", "WB")) == name


@given(st.integers(2, 7), st.integers(1, 5), st.integers(0, 2**20))
def test_best_class_is_the_class_of_the_best_leaf(classes: int, depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    leaves = classes * 2 ** (depth - 1)
    logits = torch.stack([torch.randperm(leaves, generator=generator) for _ in range(8)]).float()
    mask = torch.rand(leaves, generator=generator) < 0.4
    mask[int(torch.randint(leaves, (), generator=generator))] = False  # one leaf is always there
    logits = logits.masked_fill(mask, -torch.inf)
    scores = class_scores(logits, classes)
    assert scores.shape == (8, classes)
    assert torch.equal(scores.argmax(dim=1), class_of(logits.argmax(dim=1), depth))
    assert torch.equal(scores.amax(dim=1), logits.amax(dim=1))
