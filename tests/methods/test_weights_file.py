"""Weights files: what is read, under whose names, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from datasets.base import BackboneSpec
from datasets.errors import DataCorrupt, DataMissing
from methods.backbones import Backbone, build_backbone, check_network
from methods.torchvision_shim import import_timm
from methods.weights_file import (
    load_weights,
    mobilenet_v2_from_torchvision,
    read_state,
    vit_from_torchvision,
)

NAME = "resnet10t"  # the smallest ResNet of timm's


@pytest.fixture(scope="module")
def network() -> Backbone:
    torch.manual_seed(0)
    return build_backbone(BackboneSpec(NAME), 3)


@pytest.fixture(scope="module")
def state(network: Backbone) -> dict[str, Tensor]:
    """What a released file holds: the ImageNet classifier, too, which has no place here."""
    return {**network.body.state_dict(), "fc.weight": torch.zeros(1000, 512)}


def loaded(path: Path, name: str = NAME, channels: int = 3) -> dict[str, Tensor]:
    """Check the file as a launcher does, then load it as a worker does."""
    spec = BackboneSpec(name, pretrained=True, weights=str(path))
    check_network(spec, channels, 64)
    return build_backbone(spec, channels).body.state_dict()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_round_trip(
    network: Backbone, state: dict[str, Tensor], tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    expected = network.body.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in loaded(path).items())


WRAPPED = {
    "nested": lambda own: {"state_dict": own, "epoch": 3},
    "model": lambda own: {"model": own, "optimizer": {"lr": 0.1}},
    "model_state_dict": lambda own: {"model_state_dict": own},
    "parallel": lambda own: {f"module.{key}": value for key, value in own.items()},
    "both": lambda own: {"state_dict": {f"module.{key}": value for key, value in own.items()}},
    "lightning": lambda own: {"state_dict": {f"model.{key}": value for key, value in own.items()}},
    "compiled": lambda own: {f"_orig_mod.{key}": value for key, value in own.items()},
}


@pytest.mark.parametrize("how", sorted(WRAPPED))
def test_what_weights_are_wrapped_in_is_taken_off(
    how: str, state: dict[str, Tensor], tmp_path: Path
) -> None:
    torch.save(WRAPPED[how](state), tmp_path / "weights.pth")
    found = read_state(tmp_path / "weights.pth")
    assert found.keys() == state.keys()
    assert torch.equal(found["fc.weight"], state["fc.weight"])


def torchvision_model(name: str, **known: Any) -> nn.Module:
    import_timm()  # torchvision alone fails to import where it was built for CUDA
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **known)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):  # as trained ones are: not all alike
            assert part.running_mean is not None and part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize(
    ("theirs", "ours", "classifier"),
    [("resnet18", "resnet18", "fc"), ("mobilenet_v2", "mobilenetv2_100", "classifier")],
)
def test_files_of_torchvision_compute_the_same(
    theirs: str, ours: str, classifier: str, tmp_path: Path
) -> None:
    model, path = torchvision_model(theirs), tmp_path / "weights.pth"
    torch.save(model.state_dict(), path)
    network = build_backbone(BackboneSpec(ours, pretrained=True, weights=str(path)), 3).eval()
    setattr(model, classifier, nn.Identity())
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(network(image), model(image), atol=1e-5)


def test_transformer_of_torchvision_computes_the_same(tmp_path: Path) -> None:
    """A small one: ViT-Tiny's sizes, which torchvision's class can have as well."""
    import_timm()
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    sizes = {"hidden_dim": 192, "mlp_dim": 768, "num_heads": 3, "num_layers": 12}
    model = VisionTransformer(image_size=224, patch_size=16, **sizes).eval()
    for value in model.parameters():
        nn.init.normal_(value, std=0.05)
    path = tmp_path / "weights.pth"
    torch.save(model.state_dict(), path)
    spec = BackboneSpec("vit_tiny_patch16_224", pretrained=True, weights=str(path))
    network = build_backbone(spec, 3).eval()
    model.heads = nn.Identity()
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(network(image), model(image), atol=1e-3)


def test_names_of_torchvision_become_those_of_timm() -> None:
    assert vit_from_torchvision("encoder.layers.encoder_layer_11.mlp.linear_1.bias") == (
        "blocks.11.mlp.fc1.bias"
    )
    assert mobilenet_v2_from_torchvision("features.1.conv.1.weight") == "blocks.0.0.conv_pw.weight"
    assert mobilenet_v2_from_torchvision("features.17.conv.3.bias") == "blocks.6.0.bn3.bias"
    assert mobilenet_v2_from_torchvision("features.18.1.weight") == "bn2.weight"
    assert mobilenet_v2_from_torchvision("conv1.weight") == "conv1.weight"


def test_first_layer_of_colour_images_is_adapted_to_grey_ones(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(state, tmp_path / "weights.safetensors")
    grey = loaded(tmp_path / "weights.safetensors", channels=1)["conv1.0.weight"]
    assert torch.allclose(grey, state["conv1.0.weight"].sum(dim=1, keepdim=True), atol=1e-6)


def test_a_file_that_lacks_tensors_is_refused_by_their_names(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({k: v for k, v in state.items() if not k.startswith("layer4")}, path)
    with pytest.raises(DataCorrupt, match=r"does not fit resnet10t: it lacks layer4\.0") as raised:
        loaded(path)
    assert "(512, 256, 3, 3)" in raised.value.message
    assert "and 13 more" in raised.value.message


def test_tensors_of_other_sizes_are_named_with_both(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    torch.save({**state, "layer1.0.conv1.weight": torch.zeros(64, 64, 1, 1)}, path)
    said = r"layer1\.0\.conv1\.weight is \(64, 64, 1, 1\) in it and \(64, 64, 3, 3\) in the"
    with pytest.raises(DataCorrupt, match=said):
        loaded(path)


def test_a_larger_network_of_the_same_parts_is_refused(
    state: dict[str, Tensor], tmp_path: Path
) -> None:
    """Every tensor that is needed is there, with the right size: the rest gives it away."""
    path = tmp_path / "weights.pth"
    torch.save({**state, "layer1.1.conv1.weight": torch.zeros(64, 64, 3, 3)}, path)
    with pytest.raises(DataCorrupt, match=r"it has layer1\.1\.conv1\.weight \(64, 64, 3, 3\), w"):
        loaded(path)


def test_names_that_are_not_converted_are_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"features.0.0.weight": torch.zeros(96, 3, 4, 4)}, path)
    with pytest.raises(DataCorrupt, match=r"it begins with features\.0\.0\.weight") as raised:
        loaded(path, "convnext_atto")
    assert "look like torchvision's" in raised.value.remedy
    torch.save({"w": torch.zeros(1)}, path)
    with pytest.raises(DataCorrupt) as raised:
        loaded(path)
    assert "this very architecture" in raised.value.remedy


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("<html>quota exceeded</html>")
    with pytest.raises(DataCorrupt, match="not a readable weights file"):
        load_weights(nn.Linear(1, 1), str(tmp_path / name))


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {}])
def test_files_without_tensors_are_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(DataCorrupt, match=r"no tensors|instead of tensors"):
        read_state(tmp_path / "weights.pth")


def test_pickled_code_is_not_run_and_the_remedy_says_what_to_save(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "exploded",))  # type: ignore[return-value]

    torch.save({"weight": Bomb()}, tmp_path / "weights.pth")
    with pytest.raises(DataCorrupt, match="it holds more than tensors") as raised:
        load_weights(nn.Linear(1, 1), str(tmp_path / "weights.pth"))
    assert "torch.save(checkpoint['state_dict'], FILE)" in raised.value.remedy
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("weights", [None, "/nowhere/weights.pth"])
def test_missing_weights_say_how_to_get_them(weights: str | None) -> None:
    with pytest.raises(DataMissing, match="not on disk") as raised:
        build_backbone(BackboneSpec("resnet18", True, weights), 3)
    assert "python -m bench data get weights" in raised.value.remedy
