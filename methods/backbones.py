"""Networks from images to features, and classifiers on them: two LeNets and all that timm has.

Rows of features instead of images have `linear`, which only scales them, and `mlp`, one hidden
layer on top of that.

LeNet-4 is GEORGE's for UMNIST, LeNet-5 is CnC's for CMNIST; `lenet5_tall` is LeNet-5 for images of
64 x 32, whose first dense layer has 1,040 inputs instead of 400. ResNet-50 is torchvision's,
through timm (`resnet50`, weights `resnet50.tv_in1k`). The LeNets pool before the ReLU rather than
after it: both orders give the same values and gradients, and this one does less work.
"""

from __future__ import annotations

import difflib
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import BackboneSpec, Task
from datasets.errors import UsageError
from datasets.features import FeatureRows
from methods.base import Context, Fitted, NetworkSpec
from methods.torchvision_shim import declare_missing_operators, import_timm
from methods.training import isolated_randomness
from methods.weights_file import fitting_state, load_weights

LENET_SHAPES = {"lenet4": (32, 32), "lenet5": (32, 32), "lenet5_tall": (64, 32)}
"""Rows and columns of the images that the LeNets' last layers are made for."""

LENETS = tuple(LENET_SHAPES)
ROW_NETWORKS = ("linear", "mlp")
SMALL_NETWORKS = (*LENETS, *ROW_NETWORKS)  # without ImageNet weights, and fastest on one thread
NO_SPREAD = 1e-12  # relative variance below which differences are rounding
HIDDEN = 128  # units of `mlp`
MEASURED = 2**27  # numbers whose mean and variance are computed at once, in double precision
CONVOLUTIONS = 6  # layers of a LeNet before what is different in the two
WIDENED = 3  # of them, up to the second convolution
REGISTER = 8  # numbers that a vector register holds

# Now, since a fitted network that comes from another process imports timm by being unpickled.
declare_missing_operators()


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


class WholeImageConv(nn.Conv2d):
    """A convolution whose kernel covers the image, computed as the matrix product it is."""

    def forward(self, images: Tensor) -> Tensor:
        """Reduce each image to one pixel."""
        flat = functional.linear(images.flatten(1), self.weight.flatten(1), self.bias)
        return flat[:, :, None, None]


class LeNet(nn.Sequential):
    """Layers in order; the first convolution's six channels alone fill no vector register.

    In training, grey images go through the convolutions in pairs. Two images laid side by side, as
    the two groups of a grouped convolution with the same weights twice, fill it: the same sums, a
    third more images a second. Colour images get two more channels of zero weights, which are
    dropped after the pooling: a twentieth more, and every bit as it was. With gradients outside of
    training, as heatmaps take them, all layers are called one by one.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features of a batch."""
        layers = list(self.children())
        grey, even = images.shape[1] == 1, len(images) % 2 == 0
        training = self.training and torch.is_grad_enabled()
        if training and grey and even:
            images = _in_pairs(layers[:CONVOLUTIONS], images)
            layers = layers[CONVOLUTIONS:]
        elif not grey and (training or not torch.is_grad_enabled()) and _can_widen(images):
            images = _widened(layers[:WIDENED], images)
            layers = layers[WIDENED:]
        for layer in layers:
            images = layer(images)
        return images


def _can_widen(images: Tensor) -> bool:
    """Return whether images are laid out as the loop does on a processor; elsewhere bits differ."""
    by_pixel = images.is_contiguous(memory_format=torch.channels_last)
    return images.device.type == "cpu" and by_pixel


def _widened(layers: list[nn.Module], images: Tensor) -> Tensor:
    """Apply a convolution and what pools it, with channels of zeros added in between."""
    first, *rest = layers
    assert isinstance(first, nn.Conv2d) and first.bias is not None
    more = -first.out_channels % REGISTER
    weight = functional.pad(first.weight, (0, 0, 0, 0, 0, 0, 0, more))
    images = functional.conv2d(images, weight, functional.pad(first.bias, (0, more)))
    for layer in rest:
        images = layer(images)
    return images[:, : first.out_channels].contiguous(memory_format=torch.channels_last)


def _in_pairs(layers: list[nn.Module], images: Tensor) -> Tensor:
    """Apply layers to two images at a time, side by side in the channels."""
    pairs = images.unflatten(0, (-1, 2)).flatten(1, 2)
    pairs = pairs.contiguous(memory_format=torch.channels_last)
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            assert layer.bias is not None
            weight, bias = layer.weight.repeat(2, 1, 1, 1), layer.bias.repeat(2)
            pairs = functional.conv2d(pairs, weight, bias, groups=2)
        else:
            pairs = layer(pairs)
    singles: Tensor = pairs.unflatten(1, (2, -1)).flatten(0, 1)
    return singles


class Standardise(nn.Module):
    """Brings each number of a row to mean 0 and variance 1 over the rows it was shown.

    What it was shown is kept with the weights. A number that is always the same becomes 0.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(length))
        self.register_buffer("scale", torch.ones(length))

    def measure(self, rows: Tensor) -> None:
        """Take mean and variance of each number from rows, a few numbers at a time of many rows."""
        together = max(1, MEASURED // max(1, len(rows)))
        parts = [torch.var_mean(p.double(), dim=0, correction=0) for p in rows.split(together, 1)]
        spread, mean = (torch.cat(found) for found in zip(*parts, strict=True))
        varies = spread > NO_SPREAD * mean.square().clamp(min=NO_SPREAD)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(varies, spread, 1.0).rsqrt() * varies)

    def forward(self, rows: Tensor) -> Tensor:
        """Scale a batch."""
        return (rows - self.mean) * self.scale


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
        backbone = backbone_for(task)
        classifier = Classifier(backbone, len(task.classes))
    # Channels-last is twice as fast for the LeNets on a CPU, and what tensor cores want on a GPU.
    classifier.to(ctx.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return classifier


def train_head_only(model: Classifier) -> dict[str, Any]:
    """Return what a `Training` is given to leave a network's backbone as it is."""

    def set_mode(trained: nn.Module) -> None:
        assert isinstance(trained, Classifier)
        trained.train()
        trained.backbone.eval()

    return {"parameters": [{"params": list(model.head.parameters())}], "set_mode": set_mode}


class FittedClassifier(Fitted):
    """An ordinary network that maps images to class logits."""

    def logits(self, images: Tensor) -> Tensor:
        """Score the classes."""
        scores: Tensor = self.module(images)
        return scores


class SingleNetworkMethod:
    """Mixed into methods that end with a `FittedClassifier`: how to load one again."""

    def load_fitted(self, spec: NetworkSpec, config: Any, weights: dict[str, Tensor]) -> Fitted:
        """Fill a network of the same kind."""
        model = Classifier(build_backbone(spec.backbone, spec.channels), len(spec.codes))
        model.load_state_dict(weights)
        return FittedClassifier(model.eval())


def backbone_for(task: Task) -> Backbone:
    """Build a task's backbone; one for rows scales them by what the training rows have."""
    backbone = build_backbone(task.backbone, task.channels)
    images = task.train.images
    for part in backbone.modules():
        if isinstance(part, Standardise) and isinstance(images, FeatureRows) and len(images):
            part.measure(images.rows)
    return backbone


def build_backbone(spec: BackboneSpec, channels: int) -> Backbone:
    """Build a backbone, with its ImageNet weights where the spec asks for them."""
    if spec.name in ROW_NETWORKS:
        scaled = nn.Flatten(), Standardise(channels)
        if spec.name == "linear":
            return Backbone(nn.Sequential(*scaled), channels)
        hidden = nn.Linear(channels, HIDDEN), nn.ReLU()
        return Backbone(nn.Sequential(*scaled, *hidden), HIDDEN)
    if spec.name == "lenet4":
        last = WholeImageConv(16, 120, 5), nn.ReLU(), nn.Flatten()
        return Backbone(LeNet(*_convolutions(channels), *last), 120)
    if spec.name in LENETS:
        seen = 16 * math.prod(((side - 4) // 2 - 4) // 2 for side in LENET_SHAPES[spec.name])
        dense = nn.Linear(seen, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        return Backbone(LeNet(*_convolutions(channels), nn.Flatten(), *dense), 84)
    return _timm_backbone(spec, channels)


def check_backbone(name: str) -> None:
    """Refuse a name that neither this file nor timm knows."""
    if name in SMALL_NETWORKS:
        return
    timm = import_timm()
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise UsageError(
            f"unknown backbone '{name}'" + (f"; did you mean {', '.join(near)}?" if near else ""),
            "use lenet4, lenet5 or a timm model name such as resnet50 or resnet18; on rows of "
            "features linear or mlp",
        )


def check_input(name: str, *, rows: bool, data: str, shape: tuple[int, int] = (0, 0)) -> None:
    """Refuse a network for rows on images, one for images on rows, and a LeNet on other sizes.

    `shape` are the rows and columns of images; (0, 0) is what the network is made for.
    """
    made_for = LENET_SHAPES.get(name)
    if made_for is not None and not rows and shape not in (made_for, (0, 0)):
        sizes = [" x ".join(map(str, own)) for own in (made_for, shape)]
        squares = made_for[0] == made_for[1]
        raise UsageError(
            f"{name} takes images of {sizes[0]}, and those of {data} have {sizes[1]}",
            (f"--resolution {made_for[0]}, or " if squares else "") + "another --backbone",
        )
    if rows == (name in ROW_NETWORKS):
        return
    kind = ("images", "rows of features")[rows]
    raise UsageError(
        f"the backbone '{name}' does not take {kind}, and {data} has them",
        "--set backbone.name=mlp or linear"
        if rows
        else "use lenet4, lenet5 or a timm model name such as resnet18",
    )


def check_frozen(name: str, *, rows: bool, data: str) -> None:
    """Refuse to freeze a network that has no weights, and to make features of features."""
    if rows:
        raise UsageError(
            f"{data} has rows of features, which need no network to be made",
            "leave --features (backbone.frozen) out; --backbone linear or mlp is the head on them",
        )
    if name in SMALL_NETWORKS:
        raise UsageError(
            f"{name} has no pretrained weights, so that there are no features of it to freeze",
            "name a network of timm's and its weights, e.g. --backbone resnet18 "
            "--set backbone.weights=FILE, or leave --features (backbone.frozen) out",
        )


def _convolutions(channels: int) -> tuple[nn.Module, ...]:
    return (
        *(nn.Conv2d(channels, 6, 5), Pool(), nn.ReLU()),
        *(nn.Conv2d(6, 16, 5), Pool(), nn.ReLU()),
    )


def _timm_backbone(spec: BackboneSpec, channels: int) -> Backbone:
    check_backbone(spec.name)
    network = _timm_network(spec.name, channels)
    if spec.pretrained:
        load_weights(network, spec.weights, spec.name)
    return Backbone(network, _features_of(network))


def _timm_network(name: str, channels: int) -> Any:
    """Build a network of timm's without its classifier: images in, pooled features out.

    A transformer takes images of any size that its patches divide; its position embeddings are
    resized where that is not the size it is named for.
    """
    known = {"dynamic_img_size": True} if _can_resize_embeddings(name) else {}
    return import_timm().create_model(
        name, pretrained=False, num_classes=0, in_chans=channels, **known
    )


@cache
def _can_resize_embeddings(name: str) -> bool:
    """Ask a network of timm's; it is built without data, so that nothing random is drawn."""
    with torch.device("meta"):
        return hasattr(import_timm().create_model(name, pretrained=False), "dynamic_img_size")


def _features_of(network: Any) -> int:
    """Return the length of the features; some networks widen them after the pooling."""
    return int(getattr(network, "head_hidden_size", None) or network.num_features)


def check_network(spec: BackboneSpec, channels: int, resolution: int) -> None:
    """Refuse a network that cannot take images of this size, or a weights file that is another's.

    Nothing is computed: the network is built without data. Networks for rows and LeNets have
    nothing to check here.
    """
    if spec.name in SMALL_NETWORKS:
        return
    check_backbone(spec.name)
    changed = Path(spec.weights).stat().st_mtime_ns if spec.pretrained and spec.weights else 0
    _check_network(spec, channels, resolution, changed)


@cache  # jobs share networks, and files are large
def _check_network(spec: BackboneSpec, channels: int, resolution: int, changed: int) -> None:
    with torch.device("meta"), isolated_randomness(0, torch.device("cpu")):
        network = _timm_network(spec.name, channels)
        image = torch.zeros(2, channels, resolution, resolution)
    try:
        with torch.no_grad():
            found = tuple(network.eval()(image).shape)
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{spec.name} does not take images of side {resolution}: {reason}",
            "give another --resolution (a multiple of the patches of a transformer), or another "
            "--backbone",
        ) from error
    if found != (2, _features_of(network)):
        raise UsageError(
            f"{spec.name} gives {found[1:]} for an image instead of {_features_of(network)} "
            "features, so that no classifier can be put on it",
            "choose a network for classification with --backbone",
        )
    if spec.pretrained and spec.weights:
        fitting_state(network, Path(spec.weights), spec.name)
