"""Networks from images to features: two LeNets and whatever timm has.

LeNet-4 is GEORGE's for UMNIST, LeNet-5 is CnC's for CMNIST; ResNet-50 is torchvision's, through
timm (`resnet50`, weights `resnet50.tv_in1k`). The LeNets pool before the ReLU rather than after
it: both orders give the same values and gradients, and this one does less work.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import BackboneSpec, Task
from datasets.errors import DataCorrupt, DataMissing, UsageError
from methods.base import Context
from methods.torchvision_shim import import_timm
from methods.training import isolated_randomness

LENETS = ("lenet4", "lenet5")


class Backbone(nn.Module):
    """A network without its classifier; `dim` is the length of its features."""

    def __init__(self, body: nn.Module, dim: int) -> None:
        super().__init__()
        self.body = body
        self.dim = dim

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features of a batch."""
        features: Tensor = self.body(images)
        return features


class Pool(nn.MaxPool2d):
    """Maximum over 2 x 2 windows; without gradients by comparing slices, which is far faster.

    Both ways give the same values to the last bit, and the slower one is needed only to know which
    pixel of a window a gradient goes to.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, images: Tensor) -> Tensor:
        """Halve height and width, leaving out an odd last row or column."""
        if torch.is_grad_enabled():
            return functional.max_pool2d(images, 2)
        even = images[:, :, : images.shape[2] // 2 * 2, : images.shape[3] // 2 * 2]
        wide = torch.maximum(even[:, :, :, 0::2], even[:, :, :, 1::2])
        return torch.maximum(wide[:, :, 0::2], wide[:, :, 1::2])


class Classifier(nn.Module):
    """A backbone and one linear layer."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Compute class logits."""
        logits: Tensor = self.head(self.backbone(images))
        return logits


def build_classifier(task: Task, ctx: Context, name: str) -> Classifier:
    """Build a classifier for a task, initialised from the random stream of that name."""
    with isolated_randomness(ctx.seed(name, "init"), ctx.device):
        backbone = build_backbone(task.backbone, task.channels)
        classifier = Classifier(backbone, len(task.classes))
    # Channels-last is twice as fast for the LeNets on a CPU, and what tensor cores want on a GPU.
    classifier.to(ctx.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return classifier


def build_backbone(spec: BackboneSpec, channels: int) -> Backbone:
    """Build a backbone, with its ImageNet weights where the spec asks for them."""
    if spec.name == "lenet4":
        return Backbone(
            nn.Sequential(*_convolutions(channels), nn.Conv2d(16, 120, 5), *_flat()), 120
        )
    if spec.name == "lenet5":
        dense = nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        return Backbone(nn.Sequential(*_convolutions(channels), nn.Flatten(), *dense), 84)
    return _timm_backbone(spec, channels)


def check_backbone(name: str) -> None:
    """Refuse a name that neither this file nor timm knows."""
    if name in LENETS:
        return
    timm = import_timm()
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UsageError(
            f"unknown backbone '{name}'" + (f"; did you mean {', '.join(near)}?" if near else ""),
            "use lenet4, lenet5 or a timm model name such as resnet50 or resnet18",
        )


def _convolutions(channels: int) -> tuple[nn.Module, ...]:
    return (
        *(nn.Conv2d(channels, 6, 5), Pool(), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), Pool(), nn.ReLU()),
    )


def _flat() -> tuple[nn.Module, ...]:
    return nn.ReLU(), nn.Flatten()


def _timm_backbone(spec: BackboneSpec, channels: int) -> Backbone:
    check_backbone(spec.name)
    network = import_timm().create_model(
        spec.name, pretrained=False, num_classes=0, in_chans=channels
    )
    if spec.pretrained:
        load_weights(network, spec.weights)
    return Backbone(network, int(network.num_features))


def load_weights(network: nn.Module, weights: str | None) -> None:
    """Fill a network from a weights file, refusing one that does not fit it."""
    if weights is None or not Path(weights).is_file():
        raise DataMissing(
            f"ImageNet weights are not on disk ({weights or 'no file given'})",
            "python -m bench data get weights, or --set backbone.weights=FILE, or train from "
            "scratch with --set backbone.pretrained=false",
        )
    state = _read_state(Path(weights))
    wanted = set(network.state_dict())
    state = {name: value for name, value in state.items() if name in wanted}
    lacking = sorted(
        name for name in wanted - set(state) if not name.endswith("num_batches_tracked")
    )
    try:
        network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lacking = [str(error).splitlines()[-1].strip()]
    if lacking:
        raise DataCorrupt(
            f"{weights} does not fit the backbone: {lacking[0]}"
            + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            "give the weights of this very architecture",
        )


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:
        raise DataCorrupt(
            f"{path} is not a readable weights file: {error}", "fetch it again"
        ) from error
