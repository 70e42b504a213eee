"""Networks: sizes, features, and weights that fit or are refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import BackboneSpec, Task
from datasets.errors import DataCorrupt, DataMissing, UsageError
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
    load_weights,
)


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


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_round_trip(resnet18: Backbone, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    # Released files carry the ImageNet classifier, which has no place here.
    state = {**resnet18.body.state_dict(), "fc.weight": torch.zeros(1000, 512)}
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    loaded = build_backbone(BackboneSpec("resnet18", pretrained=True, weights=str(path)), 3)
    expected = resnet18.body.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in loaded.body.state_dict().items())


def test_weights_of_another_network_are_refused(resnet18: Backbone, tmp_path: Path) -> None:
    state = dict(resnet18.body.state_dict())
    path = tmp_path / "weights.pth"
    torch.save({k: v for k, v in state.items() if not k.startswith("layer4.1")}, path)
    with pytest.raises(DataCorrupt, match=r"does not fit the backbone: layer4\.1\S+ and \d+ more"):
        build_backbone(BackboneSpec("resnet18", True, str(path)), 3)
    torch.save({**state, "conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
    with pytest.raises(DataCorrupt, match=r"does not fit.*conv1\.weight"):
        build_backbone(BackboneSpec("resnet18", True, str(path)), 3)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("<html>quota exceeded</html>")
    with pytest.raises(DataCorrupt, match="not a readable weights file"):
        load_weights(nn.Linear(1, 1), str(tmp_path / name))


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    torch.save({"weight": Bomb()}, tmp_path / "weights.pth")
    with pytest.raises(DataCorrupt):
        load_weights(nn.Linear(1, 1), str(tmp_path / "weights.pth"))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("weights", [None, "/nowhere/weights.pth"])
def test_missing_weights_say_how_to_get_them(weights: str | None) -> None:
    with pytest.raises(DataMissing, match="not on disk") as raised:
        build_backbone(BackboneSpec("resnet18", True, weights), 3)
    assert "python -m bench data get weights" in raised.value.remedy


def test_timm_imports_in_a_spawned_worker() -> None:
    worker = multiprocessing.get_context("spawn").Process(target=check_backbone, args=("resnet18",))
    worker.start()
    worker.join(timeout=120)
    assert worker.exitcode == 0
