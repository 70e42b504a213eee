"""Relevance heatmaps: how much each input value speaks for what a network predicts.

Layer-wise relevance propagation with zennit. A prediction's relevance, 1, is handed down layer by
layer, at each in proportion to what the inputs contributed to the output; in convolutions the
contributions that agree with the output's sign count `1 + gamma` times.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.errors import UsageError
from datasets.transforms import Transform
from methods.backbones import Backbone, Classifier, LeNet, Pool, WholeImageConv
from methods.prediction import EvalImages
from methods.torchvision_shim import declare_missing_operators, import_timm

BATCH_PIXELS = 8 * 224**2  # 8 images of side 224 and 512 of side 28, as the authors of ExMap take
EPSILON = 1e-6
LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.ReLU, nn.Flatten, nn.Identity),
    *(WholeImageConv, Pool, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)
"""Layers with a rule, or whose gradient hands relevance down as it should be."""


def heatmaps(network: Classifier, images: EvalImages, gamma: float, side: int) -> Iterator[Tensor]:
    """Give the heatmaps of each batch, one flat row an image, largest absolute value 1.

    Channels are kept. Heatmaps larger than `side` are made smaller; 0 leaves all as they are.
    """
    model = canonical_form(network)
    for batch in images:
        maps = relevance(model, batch, gamma)
        if 0 < side < maps.shape[-1]:
            maps = functional.interpolate(maps, size=(side, side), mode="bilinear")
        rows = maps.flatten(start_dim=1).cpu()
        largest = rows.abs().amax(dim=1, keepdim=True)
        yield rows / torch.where(largest > 0, largest, 1.0)  # nothing was relevant: all zeros


def batch_size_for(transform: Transform) -> int:
    """Choose how many images to explain at once; each needs many times its own memory."""
    return max(1, BATCH_PIXELS // transform.resolution**2)


def relevance(model: nn.Module, images: Tensor, gamma: float) -> Tensor:
    """Trace the predicted class of each image back to its pixels, in a network's canonical form."""
    declare_missing_operators()  # zennit imports torchvision
    from zennit.attribution import Gradient
    from zennit.composites import LayerMapComposite, layer_map_base
    from zennit.rules import Epsilon, Gamma, Norm
    from zennit.types import Convolution

    rules = [
        *layer_map_base(EPSILON),
        (Convolution, Gamma(gamma, EPSILON)),
        (nn.Linear, Epsilon(EPSILON)),
        (Sum, Norm(EPSILON)),
    ]
    with torch.enable_grad(), Gradient(model, LayerMapComposite(rules)) as explain:
        found: Tensor = explain(images, _predicted)[1]
    return found.detach()


def _predicted(logits: Tensor) -> Tensor:
    return functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(logits)


class Sum(nn.Module):
    """Adds two tensors, as a layer of its own so that a rule can take hold of the addition."""

    def forward(self, pair: Tensor) -> Tensor:
        """Sum over the last dimension."""
        return pair.sum(dim=-1)


class Residual(nn.Module):
    """A residual block of timm's, which adds its two paths within its own forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        layers = dict(block.named_children())  # in the order they are applied, but for two
        self.shortcut = layers.pop("downsample", nn.Identity())
        self.act = layers.pop("act3" if "act3" in layers else "act2")
        self.branch = nn.Sequential(*layers.values())
        self.add = Sum()

    def forward(self, x: Tensor) -> Tensor:
        """Join the paths and apply the last activation."""
        pair = torch.stack([self.shortcut(x), self.branch(x)], dim=-1)
        joined: Tensor = self.act(self.add(pair))
        return joined


def canonical_form(network: nn.Module) -> nn.Module:
    """Copy a network into a form that computes the same and in which every step has a rule.

    Batch norms become part of the convolutions before them, and additions become layers.
    """
    timm = import_timm()
    from zennit.canonizers import SequentialMergeBatchNorm

    resnet = timm.models.resnet
    blocks = (resnet.BasicBlock, resnet.Bottleneck)
    ours = (nn.Sequential, Classifier, Backbone, LeNet)
    known = (*LAYERS, *ours, *blocks, resnet.ResNet, timm.layers.SelectAdaptivePool2d)
    for part in network.modules():
        if type(part) not in known:
            raise UsageError(
                f"no relevance rule is known for {type(part).__name__}, which the backbone has",
                "use lenet4, lenet5 or a plain ResNet such as resnet50 or resnet18",
            )
    model = copy.deepcopy(network).eval().requires_grad_(False)
    for merge in SequentialMergeBatchNorm().apply(model):
        merge.batch_norm.eps = 0.0  # so that what is left of it is the identity exactly
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, blocks):
                setattr(parent, name, Residual(child))
    return model
