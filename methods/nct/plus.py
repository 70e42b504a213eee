"""NCT+: NCT with its leaves calibrated, and a steadier choice of its checkpoint.

Paper: none; a variant, made here, of NCT (Garg et al., Discovering Latent Groups for Robust
    Classification). Supervision: none (T no, V no), and the partition is visible at inference (I
    yes). The calibration is fitted on the class labels of the validation split, by which ERM,
    GEORGE and NCT only choose (ExMap fits its last layer there too).
Deviations: from NCT, each a switch: leaf calibration; checkpoint and depth by cell-pWGA; a moving
    average of the weights; mixing of sibling nodes; no early stop and a constant rate (NCT's own
    knobs). Tree, loss, sampling and routing are NCT's, and so is iteration 1: with every switch off
    it is NCT to the last bit.

The heads of a tree are trained one against all, on nodes made equally large, so that nothing makes
their logits comparable: those of easy leaves are far larger, and take images that belong to a hard
leaf of another class. A bias for each leaf and one common scale, fitted by the cross-entropy of the
classes, put that right. They move images between classes only: within a class the leaf with the
highest raw logit is the leaf, as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.base import Context, Fitted, NetworkSpec, register
from methods.nct.builder import Nct, NodeLoss, TreeBuilder
from methods.nct.config import NctConfig
from methods.nct.depth import Proxy, cell_wga, pseudo_auroc, pseudo_wga
from methods.nct.tree import FittedTree, Tree
from methods.prediction import EvalImages, predict_with
from methods.training import Batch

CalibrationData = Literal["none", "validation", "half", "train"]


@dataclass(frozen=True)
class PlusConfig(NctConfig):
    """NCT's knobs, and a switch for each part of the variant.

    Attributes:
        calibration: where leaves are calibrated: on all of `validation`; on one `half` of it, the
            other half choosing checkpoint and depth; on as many `train` images (once an iteration
            has ended, so that its epochs are compared without); or not at all.
        penalty: of the calibration, on the squares of its biases.
        proxy: what chooses checkpoint and depth, pWGA_2 or cell-pWGA (not where AUROC counts).
        cell_smallest, cell_prior: smallest cell that counts, samples it is drawn to the average by.
        ema: decay of the weights' moving average from iteration 2 on; 0 is none.
        mixup: share of training images mixed with one of the sibling node.
    """

    calibration: CalibrationData = "validation"
    penalty: float = 1e-5
    proxy: Literal["pwga2", "cell"] = "cell"
    cell_smallest: int = 5
    cell_prior: float = 10.0
    ema: float = 0.998
    mixup: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.penalty > 0, f"penalty must be positive but got {self.penalty}")
        require(self.cell_smallest >= 1, f"cell_smallest must be at least 1: {self.cell_smallest}")
        require(self.cell_prior >= 0, f"cell_prior cannot be negative but got {self.cell_prior}")
        require(0 <= self.ema < 1, f"ema must be in [0, 1) but got {self.ema}")
        require(0 <= self.mixup <= 1, f"mixup must be between 0 and 1 but got {self.mixup}")


class Calibration(nn.Module):
    """Leaf biases and a scale; from raw leaf logits to outputs that choose the class first.

    A class scores the logsumexp of its leaves' calibrated logits. An output is the score of the
    leaf's class, less how far the leaf's raw logit lies below the best of that class. So the best
    output of a class is its score, and the best of all is the leaf that class-first choice takes.
    """

    bias: Tensor
    scale: Tensor

    def __init__(self, bias: Tensor, scale: Tensor, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("bias", bias)
        self.register_buffer("scale", scale)

    def forward(self, leaf_logits: Tensor) -> Tensor:
        """Compute the outputs; leaves that are minus infinity stay so."""
        scores = class_logsumexp(leaf_logits, self.bias, self.scale, self.classes)
        raw = leaf_logits.view(len(leaf_logits), self.classes, -1)
        return (scores[:, :, None] + raw - raw.amax(dim=2, keepdim=True)).flatten(1)


class CalibratedTree(Tree):
    """A finished tree with its calibration; calling it gives the calibrated outputs."""

    def __init__(self, tree: Tree, calibration: Calibration) -> None:
        super().__init__(tree.backbone, tree.classes)
        self.levels = tree.levels
        self.calibration = calibration

    def forward(self, images: Tensor) -> Tensor:
        """Compute the outputs, merged nodes ruled out."""
        outputs: Tensor = self.calibration(super().forward(images))
        return outputs


def class_logsumexp(leaf_logits: Tensor, bias: Tensor, scale: Tensor, classes: int) -> Tensor:
    """Score each class by all its leaves, scaled and shifted."""
    absent = leaf_logits.isneginf()
    moved = scale * leaf_logits.masked_fill(absent, 0.0) + bias  # infinity has no gradient
    moved = moved.masked_fill(absent, -torch.inf)
    if moved.shape[1] == classes:  # one leaf a class is its own logsumexp, which is slow
        return moved
    return moved.view(len(moved), classes, -1).logsumexp(dim=2)


def fit_calibration(leaf_logits: Tensor, y: Tensor, classes: int, penalty: float) -> Calibration:
    """Minimise the mean cross-entropy of the classes plus `penalty` times the squared sizes.

    The penalty is on the biases and on the logarithm of the scale: without one, neither has an end
    where the classes can be told apart without an error.
    """
    logits = leaf_logits.double()
    bias = torch.zeros(logits.shape[1], dtype=torch.float64, requires_grad=True)
    log_scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([bias, log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        scores = class_logsumexp(logits, bias, log_scale.exp(), classes)
        size = bias.square().sum() + log_scale.square()
        loss = functional.cross_entropy(scores, y) + penalty * size
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
    return Calibration(bias.detach().float(), log_scale.detach().exp().float(), classes)


class MixedNodeLoss(NodeLoss):
    """Node loss on a batch in which a share of the images is mixed with siblings of the batch.

    A hard node has a few dozen images, and its heads learn them by heart. A mixture of one of them
    with an image of its easy sibling has the same class, and a node label in between.
    """

    def __init__(
        self, labels: Tensor, weights: Tensor, aux_weight: float, frozen: bool, share: float
    ) -> None:
        super().__init__(labels, weights, aux_weight, frozen)
        self.share = share

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch; its terms are mixed as the images are."""
        assert isinstance(model, Tree)
        labels = self.labels[batch.index]
        partner, own = sibling_mixture(labels, self.share)
        weight = own[:, None, None, None]
        images = weight * batch.images + (1 - weight) * batch.images[partner]
        outputs = model.logits(images, frozen=self.frozen)
        mine = self.per_sample(model, outputs, labels)
        theirs = self.per_sample(model, outputs, labels[partner])
        return torch.mean(own * mine + (1 - own) * theirs)


def sibling_mixture(labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Draw a partner for each sample and the sample's own weight in the mixture.

    The partner is a random sample of the sibling node, l xor 1. A `share` of those that have one is
    mixed, with a weight drawn evenly from 0 to 1; the others keep the weight 1.
    """
    siblings = (labels[:, None] ^ 1) == labels
    draws = torch.rand(siblings.shape, device=labels.device).masked_fill(~siblings, -1.0)
    best, partner = draws.max(dim=1)
    chance, weight = torch.rand((2, len(labels)), device=labels.device)
    mixed = (best >= 0) & (chance < share)
    return partner, torch.where(mixed, weight, 1.0)


@dataclass
class PlusTreeBuilder(TreeBuilder):
    """Grows one tree whose leaves are calibrated at the end of every iteration."""

    config: PlusConfig
    fixed: Calibration | None = field(default=None, init=False)  # on training images

    def _objective(self, t: int, labels: Tensor, weights: Tensor, frozen: bool) -> NodeLoss:
        if self.config.mixup == 0 or t == 1:
            return super()._objective(t, labels, weights, frozen)
        return MixedNodeLoss(labels, weights, self.config.aux_weight, frozen, self.config.mixup)

    def _average(self, t: int) -> float:
        return self.config.ema if t > 1 else 0.0

    def _rule(self) -> str:
        cells = self.config.proxy == "cell" and self.task.metric != "auroc"
        return "cell_pwga" if cells else super()._rule()

    def _proxy(self, leaf_logits: Tensor, t: int) -> Proxy:
        """Score the calibrated outputs, on those validation samples that choose."""
        calibration = self._fit(leaf_logits)
        outputs = leaf_logits if calibration is None else calibration(leaf_logits)
        return self._selection_proxy(outputs[self.selection_indices], t)

    def _selection_proxy(self, outputs: Tensor, t: int) -> Proxy:
        chosen = self.selection_indices
        config, y = self.config, self.task.val.y[chosen]
        if self.task.metric == "auroc":
            return pseudo_auroc(outputs, y, t)
        if config.proxy == "pwga2":
            own = self._routed_val()[chosen] if config.pwga == "routed" else None
            return pseudo_wga(outputs, y, t, own, config.min_group)
        assert self.first_val is not None
        first, classes = self.first_val[chosen], len(self.task.classes)
        return cell_wga(outputs, y, first, classes, config.cell_smallest, config.cell_prior)

    @property
    def calibration_indices(self) -> Tensor:
        """Validation samples that calibrate: all, or a half."""
        return self._halves[0]

    @property
    def selection_indices(self) -> Tensor:
        """Validation samples that choose checkpoint and depth: all, or the other half."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        count = len(self.task.val)
        if self.config.calibration != "half":
            return torch.arange(count), torch.arange(count)
        drawn = torch.randperm(
            count, generator=torch.Generator().manual_seed(self.ctx.seed("nct", "halves"))
        )
        first, second = drawn[: count // 2], drawn[count // 2 :]
        return first.sort().values, second.sort().values

    def _fit(self, leaf_logits: Tensor) -> Calibration | None:
        """Calibrate on validation class labels, given the leaf logits of all validation samples."""
        if self.config.calibration in ("none", "train"):
            return self.fixed
        mine = self.calibration_indices
        return self._calibration(leaf_logits[mine], self.task.val.y[mine])

    def _calibration(self, leaf_logits: Tensor, y: Tensor) -> Calibration:
        return fit_calibration(leaf_logits, y, len(self.task.classes), self.config.penalty)

    def _fit_on_training_images(self, tree: Tree) -> Calibration:
        """Calibrate on a sample of training images as large as the validation split."""
        count = min(len(self.task.val), len(self.task.train))
        generator = torch.Generator().manual_seed(self.ctx.seed("nct", "calibration"))
        index = torch.randperm(len(self.task.train), generator=generator)[:count]
        images = EvalImages(self.task.train.images.subset(index), self.task.eval_transform)
        self.ctx.count_passes(count)
        return self._calibration(predict_with(tree, images), self.task.train.y[index])

    def _judged(self, tree: Tree) -> tuple[Tree, Proxy, dict[str, Any]]:
        """Return a tree calibrated; the one that is routed by and grown on is not."""
        t = tree.depth
        if self.config.calibration == "train":
            self.fixed = self._fit_on_training_images(tree)
        outputs = self._val_logits(tree)
        calibration, self.fixed = self._fit(outputs), None
        facts: dict[str, Any] = {}
        if calibration is not None:
            outputs = calibration(outputs)
            tree = CalibratedTree(tree, calibration).to(self.ctx.device)
            facts["calibration"] = {
                "bias": calibration.bias.tolist(),
                "scale": float(calibration.scale),
            }
        proxy = self._selection_proxy(outputs[self.selection_indices], t)
        facts["pwga2"] = proxy.value
        if self._rule() == "cell_pwga":
            facts["cell_pwga"] = proxy.value
            facts["pwga2"] = self._pwga(outputs, t, self.config.pwga).value
        return tree, proxy, facts | self._readings(outputs, t)


@register("nct_plus", version=2, config=PlusConfig, title="NCT+", order=95)
class NctPlus(Nct):
    """Grow NCT's tree, and calibrate its leaves."""

    slices = (
        "A slice is a leaf of the tree. A training sample is in the leaf of its class that it was "
        "trained in; every other sample is in the best leaf of the class that it is taken for."
    )

    training_name = "nct"  # its random streams as well, so that the two differ by the switches only

    def fits_on_validation(self, config: PlusConfig) -> bool:
        """Return whether leaves are calibrated there."""
        return config.calibration in ("validation", "half")

    def selection_rules(self, config: NctConfig) -> tuple[str, ...]:
        """Return the proxies; iteration 1 has none yet."""
        return (*super().selection_rules(config), "cell_pwga") if config.iterations > 1 else ()

    def fit(self, task: Task, config: NctConfig, ctx: Context) -> Fitted:
        """Train iteration by iteration."""
        assert isinstance(config, PlusConfig)
        return PlusTreeBuilder(task, config, ctx).run()

    def load_fitted(
        self, spec: NetworkSpec, config: NctConfig, weights: dict[str, Tensor]
    ) -> Fitted:
        """Fill a tree of the kept depth, and put its calibration back."""
        plain = {
            name: value for name, value in weights.items() if not name.startswith("calibration.")
        }
        tree = self._load_tree(spec, config, plain)
        if "calibration.bias" in weights:
            bias, scale = weights["calibration.bias"], weights["calibration.scale"]
            tree = CalibratedTree(tree, Calibration(bias, scale, tree.classes)).eval()
        return FittedTree(tree, spec.codes)
