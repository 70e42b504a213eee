"""Networks: sizes, features, and weights that fit or are refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import BackboneSpec, Task
from datasets.errors import UsageError
from methods import backbones
from methods.backbones import (
    LENET_SHAPES,
    Backbone,
    Classifier,
    LeNet,
    Pool,
    build_backbone,
    build_classifier,
    check_backbone,
    check_frozen,
    check_network,
)
from methods.torchvision_shim import import_timm


@pytest.mark.parametrize(
    ("name", "channels", "parameters", "features"),
    [
        ("lenet4", 1, 50_692, 120),
        ("lenet5", 3, 61_156, 84),
        ("lenet5_tall", 3, 61_156 + 120 * (1040 - 400), 84),
    ],
)
def test_lenets_are_the_published_ones(
    name: str, channels: int, parameters: int, features: int
) -> None:
    shape = LENET_SHAPES[name]
    backbone = build_backbone(BackboneSpec(name), channels)
    assert sum(p.numel() for p in backbone.parameters()) == parameters
    assert backbone.dim == features
    out = backbone(torch.randn(4, channels, *shape))
    assert out.shape == (4, features)
    assert (out >= 0).all() and (out == 0).any()  # features are taken after the ReLU
    assert Classifier(backbone, 5)(torch.randn(4, channels, *shape)).shape == (4, 5)


def relu_before_pool(backbone: Backbone) -> nn.Sequential:
    """The published order, with the same weights."""
    assert isinstance(backbone.body, nn.Sequential)
    layers = list(backbone.body)
    pools = [i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    assert len(pools) == 2
    for i in pools:
        assert isinstance(layers[i + 1], nn.ReLU)
        layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("name", "channels"), [("lenet4", 1), ("lenet5", 3)])
def test_pooling_before_the_relu_changes_nothing(name: str, channels: int) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(BackboneSpec(name), channels)
    published = relu_before_pool(backbone.eval())
    kinds = [type(layer) for layer in published[:3]]
    assert kinds == [nn.Conv2d, nn.ReLU, Pool]
    images, weights = torch.randn(8, channels, 32, 32), torch.randn(backbone.dim)

    def value_and_gradients(network: nn.Module) -> tuple[Tensor, list[Tensor]]:
        backbone.zero_grad()
        out = network(images)
        (out @ weights).sum().backward()
        return out.detach(), [p.grad.clone() for p in backbone.parameters() if p.grad is not None]

    ours, theirs = value_and_gradients(backbone), value_and_gradients(published)
    assert torch.equal(ours[0], theirs[0])
    assert len(ours[1]) == len(list(backbone.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize("count", [2, 7, 64])
def test_images_in_pairs_give_the_same_features_and_gradients(count: int) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(BackboneSpec("lenet4"), 1).to(memory_format=torch.channels_last)
    assert isinstance(backbone.body, LeNet)
    weights = torch.randn(120, dtype=torch.double)
    images = torch.randn(count, 1, 32, 32, dtype=torch.double)
    backbone.double()

    def value_and_gradients(network: nn.Module) -> tuple[Tensor, list[Tensor]]:
        backbone.zero_grad()
        out = network(images)
        (out @ weights).sum().backward()
        return out.detach(), [p.grad.clone() for p in backbone.parameters() if p.grad is not None]

    ours = value_and_gradients(backbone.train())
    plain = relu_before_pool(backbone)
    plain[6] = nn.Conv2d(16, 120, 5)
    plain[6].weight, plain[6].bias = backbone.body[6].weight, backbone.body[6].bias
    published = value_and_gradients(plain)
    torch.testing.assert_close(ours[0], published[0])
    torch.testing.assert_close(ours[1], published[1])
    torch.testing.assert_close(backbone.eval()(images), ours[0])


@pytest.mark.parametrize("count", [1, 2, 7, 32, 64, 500])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["lenet4", "lenet5"])
def test_added_channels_leave_every_bit_of_colour_images(
    name: str, training: bool, count: int
) -> None:
    torch.manual_seed(count)
    backbone = build_backbone(BackboneSpec(name), 3).to(memory_format=torch.channels_last)
    assert isinstance(backbone.body, LeNet)
    backbone.train(training)
    images = torch.randn(count, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    weights = torch.randn(backbone.dim)

    def one_by_one(batch: Tensor) -> Tensor:
        for layer in backbone.body.children():
            batch = layer(batch)
        return batch

    def value_and_gradients(network: Callable[[Tensor], Tensor]) -> list[Tensor]:
        backbone.zero_grad()
        out = network(images)
        if training:
            (out @ weights).pow(2).mean().backward()
        gradients = [p.grad.clone() for p in backbone.parameters() if p.grad is not None]
        return [out.detach(), *gradients]

    with (
        torch.set_grad_enabled(training),
        mock.patch.object(backbones, "_widened", wraps=backbones._widened) as widened,
    ):
        ours, theirs = value_and_gradients(backbone), value_and_gradients(one_by_one)
    assert widened.call_count == 1
    assert len(ours) == (1 + len(list(backbone.parameters())) if training else 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(3, 6, 28, 28), (2, 16, 10, 10), (1, 2, 7, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_without_gradients_gives_the_same_bits(
    shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    images = torch.randn(shape).contiguous(memory_format=layout)
    images[..., :3, :3] = 0.25  # ties, as in the background of a digit
    with torch.no_grad():
        fast = Pool()(images)
    assert torch.equal(fast, nn.MaxPool2d(2)(images))
    assert torch.equal(fast, Pool()(images.requires_grad_()))


def test_initialisation_depends_on_the_seed_alone(
    toy_task: Task, make_context: type[RunContext]
) -> None:
    def weights(seed: int, name: str) -> Tensor:
        torch.rand(3)  # somebody else draws from the global generator
        model = build_classifier(toy_task, make_context(seed=seed), name)
        return model.head.weight

    before = torch.get_rng_state()
    build_classifier(toy_task, make_context(), "erm")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(0, "erm"), weights(0, "erm"))
    assert not torch.equal(weights(0, "erm"), weights(1, "erm"))
    assert not torch.equal(weights(0, "erm"), weights(0, "second"))


def test_unknown_name_suggests_near_ones() -> None:
    check_backbone("resnet18")
    with pytest.raises(UsageError, match="unknown backbone 'resnt18'; did you mean resnet18,"):
        check_backbone("resnt18")


@pytest.fixture(scope="module")
def resnet18() -> Backbone:
    torch.manual_seed(0)
    return build_backbone(BackboneSpec("resnet18"), 3)


def test_timm_network_gives_features(resnet18: Backbone) -> None:
    assert resnet18.dim == 512
    assert resnet18.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 512)


FAMILIES = {"resnet10t": 48, "mobilenetv3_small_050": 48, "vit_tiny_patch16_224": 48}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_networks_of_three_families_give_pooled_features(name: str) -> None:
    side = FAMILIES[name]
    check_network(BackboneSpec(name), 3, side)
    network = build_backbone(BackboneSpec(name), 3).eval()
    with torch.no_grad():
        features = network(torch.randn(2, 3, side, side))
    assert features.shape == (2, network.dim)
    assert not torch.equal(features[0], features[1])
    assert not any(len(weights) == 1000 for weights in network.parameters())  # no classifier


def test_transformer_at_its_own_size_is_as_timm_builds_it() -> None:
    """Resizing its position embeddings for other sizes changes nothing at this one."""
    ours = build_backbone(BackboneSpec("vit_tiny_patch16_224"), 3).eval()
    plain = import_timm().create_model("vit_tiny_patch16_224", num_classes=0).eval()
    plain.load_state_dict(ours.body.state_dict())
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(image), plain(image))


def test_images_that_a_network_cannot_take_are_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match=r"vit_tiny\S+ does not take images of side 50") as raised:
        check_network(BackboneSpec("vit_tiny_patch16_224"), 3, 50)
    assert "--resolution" in raised.value.remedy
    check_network(BackboneSpec("vit_tiny_patch16_224"), 3, 64)
    check_network(BackboneSpec("lenet5"), 3, 50)  # it has a check of its own


def test_what_cannot_be_frozen_says_what_can() -> None:
    check_frozen("resnet18", rows=False, data="cats")
    with pytest.raises(UsageError, match="lenet4 has no pretrained weights") as raised:
        check_frozen("lenet4", rows=False, data="umnist")
    assert "--set backbone.weights=FILE" in raised.value.remedy
    with pytest.raises(UsageError, match="words has rows of features"):
        check_frozen("resnet18", rows=True, data="words")


def test_timm_imports_in_a_spawned_worker() -> None:
    worker = multiprocessing.get_context("spawn").Process(target=check_backbone, args=("resnet18",))
    worker.start()
    worker.join(timeout=120)
    assert worker.exitcode == 0
