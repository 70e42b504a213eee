"""Relevance: the same network in canonical form, rules against plain arithmetic, conservation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import BackboneSpec
from datasets.images import MemoryImages
from datasets.transforms import ResizedCentreCrop, Transform
from methods.backbones import Classifier, build_backbone
from methods.exmap import (
    Sum,
    canonical_form,
    gradient_times_input,
    has_rules,
    heatmap_batch_size,
    heatmaps,
    relevance,
)
from methods.prediction import EvalImages

NETWORKS = (("lenet4", 1), ("lenet5", 3), ("test_resnet", 3), ("tf_efficientnet_lite0", 3))
"""The third one is timm's own for tests: tiny, with both kinds of residual blocks."""
MOBILE = ("mobilenetv2_100", "mnasnet_100", "efficientnet_es", "efficientnet_lite0")
UNRULED = ("efficientnet_b0", "convnext_atto", "test_vit")
"""With gates, with layer norms, and a transformer: their parts have no rules."""
SIDE = 32


def network(name: str, channels: int, biases: bool = True, seed: int = 0) -> Classifier:
    """A network as if trained: batch norms have moved away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Classifier(build_backbone(BackboneSpec(name), channels), 5)
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                for numbers in (part.running_mean, part.bias):
                    assert numbers is not None
                    numbers.normal_(generator=generator).mul_(0.5 if biases else 0.0)
                for numbers in (part.running_var, part.weight):
                    assert numbers is not None
                    numbers.uniform_(0.5, 1.5, generator=generator)
            elif not biases and isinstance(getattr(part, "bias", None), Tensor):
                part.bias.zero_()
    return model.eval()


def images(count: int, channels: int) -> Tensor:
    return torch.randn(count, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def totals(maps: Tensor) -> Tensor:
    return maps.flatten(start_dim=1).sum(dim=1)


class TestCanonicalForm:
    @pytest.mark.parametrize(
        ("name", "channels"),
        (*NETWORKS, *((name, 3) for name in ("resnet18", "resnet26", *MOBILE))),
    )
    def test_computes_the_same(self, name: str, channels: int) -> None:
        model, batch = network(name, channels), images(3, channels)
        with torch.no_grad():
            expected, found = model(batch), canonical_form(model)(batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    def test_leaves_the_network_as_it_was(self) -> None:
        model = network("test_resnet", 3).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        relevance(canonical_form(model), images(1, 3), 4.0)
        assert model.training and all(p.requires_grad for p in model.parameters())
        assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
        assert not any(isinstance(part, Sum) for part in model.modules())

    def test_batch_norms_do_nothing_any_more(self) -> None:
        model = canonical_form(network("resnet18", 3))
        norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
        assert len(norms) == 20
        for norm in norms:
            batch = torch.randn(2, norm.num_features, 3, 3)
            assert torch.equal(norm(batch), batch)

    @pytest.mark.parametrize(("name", "channels"), NETWORKS)
    def test_every_step_has_a_rule(self, name: str, channels: int) -> None:
        assert has_rules(network(name, channels))

    @pytest.mark.parametrize("name", UNRULED)
    def test_other_networks_do_not(self, name: str) -> None:
        assert not has_rules(network(name, 3))


class TestGradientTimesInput:
    @pytest.mark.parametrize("name", UNRULED)
    def test_any_network_is_explained(self, name: str) -> None:
        side = 160 if name == "test_vit" else SIDE
        pixels = torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)
        transform = Transform(ResizedCentreCrop(side), side, (0.5,) * 3, (0.25,) * 3)
        model = network(name, 3).train()
        rows = next(heatmaps(model, EvalImages(MemoryImages(pixels), transform), 4.0, 8))
        assert rows.shape == (3, 3 * 8**2) and rows.isfinite().all()
        torch.testing.assert_close(rows.abs().amax(dim=1), torch.ones(3))
        assert len(rows.unique(dim=0)) == 3
        assert model.training and all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize(("name", "channels"), NETWORKS[:3])
    def test_is_the_propagation_of_gamma_0_without_biases(self, name: str, channels: int) -> None:
        """But for its scale, which is the logit instead of 1."""
        model = network(name, channels, biases=False)
        batch = images(3, channels)
        with torch.no_grad():
            top = model(batch).amax(dim=1)
        found = gradient_times_input(model, batch)
        torch.testing.assert_close(totals(found), top, rtol=1e-3, atol=1e-5)
        rules = relevance(canonical_form(model), batch, 0.0) * top.view(-1, 1, 1, 1)
        error = (found - rules).abs().amax() / rules.abs().amax()
        assert error < 1e-3


def gamma_rule(layer: nn.Conv2d, batch: Tensor, above: Tensor, gamma: float) -> Tensor:
    """The rule by its definition: contributions of each input to each output, one by one."""
    patches = functional.unfold(batch, layer.kernel_size, stride=layer.stride)[0]
    weights = layer.weight.detach().flatten(start_dim=1)
    bias = layer.bias.detach() if layer.bias is not None else torch.zeros(len(weights))
    shared = torch.zeros_like(patches)
    for place in range(patches.shape[1]):
        for out in range(len(weights)):
            parts = torch.cat([weights[out] * patches[:, place], bias[out : out + 1]]).double()
            agreeing = parts > 0 if parts.sum() > 0 else parts < 0
            parts = torch.where(agreeing, (1 + gamma) * parts, parts)
            shared[:, place] += (parts / parts.sum())[:-1] * above.view(len(weights), -1)[
                out, place
            ]
    size = (batch.shape[-2], batch.shape[-1])
    return functional.fold(shared[None], size, layer.kernel_size, stride=layer.stride)


class TestRules:
    @pytest.mark.parametrize("gamma", [0.0, 0.25, 4.0])
    @pytest.mark.parametrize("biases", [False, True])
    def test_convolution_by_the_definition(self, gamma: float, biases: bool) -> None:
        """Two layers, so that the lower one is handed unequal relevance; inputs of both signs."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            first, second = nn.Conv2d(2, 3, 3, bias=biases), nn.Conv2d(3, 4, 4, bias=biases)
        batch = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(2))
        stack = nn.Sequential(first, nn.ReLU(), second, nn.Flatten())
        with torch.no_grad():
            hidden = first(batch).relu()
            logits = second(hidden).flatten()
        top = torch.zeros(1, 4, 1, 1)
        top[0, logits.argmax()] = 1.0
        middle = gamma_rule(second, hidden, top, gamma)
        expected = gamma_rule(first, batch, middle, gamma)
        found = relevance(stack, batch, gamma)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    def test_linear_layers_share_by_contribution(self) -> None:
        layer = nn.Linear(3, 2, bias=False)
        layer.weight.data = torch.tensor([[1.0, 2.0, -1.0], [0.0, 1.0, 0.0]])
        found = relevance(nn.Sequential(layer), torch.tensor([[1.0, 2.0, 1.0]]), 4.0)
        torch.testing.assert_close(found, torch.tensor([[0.25, 1.0, -0.25]]))

    def test_sums_share_by_contribution(self) -> None:
        pair = torch.tensor([[[3.0, 1.0], [2.0, 0.0]]])  # (image, output, summand)
        found = relevance(Sum(), pair, 4.0)  # the first output is predicted
        torch.testing.assert_close(found, torch.tensor([[[0.75, 0.25], [0.0, 0.0]]]))

    def test_relevance_is_that_of_the_predicted_class(self) -> None:
        layer = nn.Linear(2, 2, bias=False)
        layer.weight.data = torch.eye(2)
        found = relevance(nn.Sequential(layer), torch.tensor([[3.0, 1.0], [1.0, 3.0]]), 4.0)
        torch.testing.assert_close(found, torch.eye(2))


class TestConservation:
    @pytest.mark.parametrize(("name", "channels"), NETWORKS)
    def test_without_biases_all_of_it_arrives(self, name: str, channels: int) -> None:
        """But for what keeps denominators from being 0: 1e-6 a layer, here below 1e-3 in all."""
        model = canonical_form(network(name, channels, biases=False))
        found = totals(relevance(model, images(3, channels), 4.0))
        torch.testing.assert_close(found, torch.ones(3), rtol=0, atol=1e-3)

    @pytest.mark.parametrize(("name", "channels"), NETWORKS)
    def test_biases_take_their_share(self, name: str, channels: int) -> None:
        model = canonical_form(network(name, channels))
        found = totals(relevance(model, images(3, channels), 4.0))
        assert ((found - 1).abs() > 0.01).all()

    @pytest.mark.parametrize(("name", "channels"), NETWORKS)
    def test_an_image_does_not_depend_on_its_batch(self, name: str, channels: int) -> None:
        model, batch = canonical_form(network(name, channels)), images(4, channels)
        together = relevance(model, batch, 4.0)
        for size in (1, 3):
            apart = torch.cat([relevance(model, part, 4.0) for part in batch.split(size)])
            error = (apart - together).abs().amax() / together.abs().amax()
            assert error < 1e-4


class TestHeatmaps:
    transform = Transform(ResizedCentreCrop(SIDE), SIDE, (0.5,), (0.25,))
    pixels = torch.randint(
        0, 256, (7, 1, SIDE, SIDE), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)

    def rows(self, side: int = 0, batch_size: int = 3) -> Tensor:
        split = EvalImages(MemoryImages(self.pixels), self.transform, batch_size)
        found = list(heatmaps(network("lenet4", 1), split, 4.0, side))
        assert [len(batch) for batch in found] == [
            len(p) for p in torch.arange(7).split(batch_size)
        ]
        return torch.cat(found)

    def test_one_flat_row_an_image_of_largest_value_1(self) -> None:
        rows = self.rows()
        assert rows.shape == (7, SIDE**2)
        torch.testing.assert_close(rows.abs().amax(dim=1), torch.ones(7))
        split = EvalImages(MemoryImages(self.pixels), self.transform)
        maps = relevance(canonical_form(network("lenet4", 1)), next(iter(split)), 4.0)
        np.testing.assert_allclose(np.corrcoef(rows[3], maps[3].flatten())[0, 1], 1.0, rtol=1e-6)

    def test_batch_size_does_not_matter(self) -> None:
        torch.testing.assert_close(self.rows(), self.rows(batch_size=7), rtol=0, atol=1e-5)

    def test_made_smaller_but_never_larger(self) -> None:
        assert self.rows(side=8).shape == (7, 64)
        torch.testing.assert_close(self.rows(side=8).abs().amax(dim=1), torch.ones(7))
        assert self.rows(side=SIDE + 8).shape == (7, SIDE**2)

    def test_channels_are_kept(self) -> None:
        split = EvalImages(
            MemoryImages(self.pixels.expand(-1, 3, -1, -1).contiguous()),
            Transform(ResizedCentreCrop(SIDE), SIDE, (0.5,) * 3, (0.25,) * 3),
        )
        assert next(heatmaps(network("lenet5", 3), split, 4.0, 0)).shape == (7, 3 * SIDE**2)

    def test_nothing_relevant_is_all_zeros(self) -> None:
        model: Any = network("lenet4", 1, biases=False)
        split = EvalImages(
            MemoryImages(torch.zeros_like(self.pixels)),
            Transform(ResizedCentreCrop(SIDE), SIDE, (0.0,), (1.0,)),
        )
        found = next(heatmaps(model, split, 4.0, 0))
        assert not found.any() and not found.isnan().any()

    @pytest.mark.parametrize(("side", "expected"), [(28, 512), (32, 392), (224, 8), (1024, 1)])
    def test_batches_are_as_large_as_memory_lets_them(self, side: int, expected: int) -> None:
        transform = Transform(ResizedCentreCrop(side), side, (0.5,), (0.2,))
        for name in ("lenet4", "resnet18"):
            assert heatmap_batch_size(network(name, 1), transform) == expected
        for name in ("tf_efficientnet_lite0", "convnext_atto"):  # which take more of it
            assert heatmap_batch_size(network(name, 1), transform) == max(1, expected // 4)
