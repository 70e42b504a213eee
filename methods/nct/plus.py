"""NCT+: NCT with its leaves calibrated, and a steadier choice of its checkpoint.

Paper: none; a variant, made here, of NCT (Garg et al., Discovering Latent Groups for Robust
    Classification). Supervision: none (T no, V no), and the partition is visible at inference (I
    yes). The calibration is fitted on the class labels of the validation split, by which ERM,
    GEORGE and NCT only choose (ExMap fits its last layer there too).
Deviations: from NCT, each a switch: leaf calibration; checkpoint and depth by cell-pWGA; a moving
    average of the weights; mixing of sibling nodes; no early stop and a constant rate (NCT's own
    knobs). Tree, loss, sampling and routing are NCT's, and so is iteration 1: with every switch off
    it is NCT to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from datasets.base import Task
from methods.base import Context, Fitted, Shape, register
from methods.nct.calibration import CalibratedTree, Calibration, fit_calibration
from methods.nct.config import NctConfig
from methods.nct.depth import Proxy, cell_wga, pseudo_auroc, pseudo_wga
from methods.nct.fitted import FittedTree
from methods.nct.loss import NodeLoss
from methods.nct.method import Growth, Nct
from methods.nct.mixing import MixedNodeLoss
from methods.nct.tree import Tree
from methods.optimisation import demand
from methods.prediction import EvalImages, predict_with
from methods.training import Trained

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
    penalty: float = 1e-4
    proxy: Literal["pwga2", "cell"] = "cell"
    cell_smallest: int = 5
    cell_prior: float = 10.0
    ema: float = 0.998
    mixup: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        demand(self.penalty > 0, f"penalty must be positive but got {self.penalty}")
        demand(self.cell_smallest >= 1, f"cell_smallest must be at least 1: {self.cell_smallest}")
        demand(self.cell_prior >= 0, f"cell_prior cannot be negative but got {self.cell_prior}")
        demand(0 <= self.ema < 1, f"ema must be in [0, 1) but got {self.ema}")
        demand(0 <= self.mixup <= 1, f"mixup must be between 0 and 1 but got {self.mixup}")


@dataclass
class PlusGrowth(Growth):
    """The growing of one tree whose leaves are calibrated at the end of every iteration."""

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
        """Judge the calibrated outputs, on those validation samples that may judge."""
        calibration = self._fit(leaf_logits)
        outputs = leaf_logits if calibration is None else calibration(leaf_logits)
        judges = self.halves[1]
        return self._judge(outputs[judges], judges, t)

    def _judge(self, outputs: Tensor, judges: Tensor, t: int) -> Proxy:
        config, y = self.config, self.task.val.y[judges]
        if self.task.metric == "auroc":
            return pseudo_auroc(outputs, y, t)
        if config.proxy == "pwga2":
            own = self._routed_val()[judges] if config.pwga == "routed" else None
            return pseudo_wga(outputs, y, t, own, config.min_group)
        assert self.first_val is not None
        first, classes = self.first_val[judges], len(self.task.classes)
        return cell_wga(outputs, y, first, classes, config.cell_smallest, config.cell_prior)

    @cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Give the validation samples that calibrate and those that judge: all, or a half each."""
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
        mine = self.halves[0]
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

    def _finish(
        self, tree: Tree, labels: Tensor, counts: Tensor, merged: tuple[int, ...], trained: Trained
    ) -> None:
        """Keep the iteration's tree calibrated; the one that is routed by and grown on is not."""
        t, y = tree.depth, self.task.val.y
        if t > 1 and self.config.calibration == "train":
            self.fixed = self._fit_on_training_images(tree)
        super()._finish(tree, labels, counts, merged, trained)
        if t > 1:
            done = self.done[-1]
            logits = predict_with(tree, EvalImages(self.task.val.images, self.task.eval_transform))
            self.ctx.count_passes(len(y))
            calibration = self._fit(logits)
            outputs = logits
            if calibration is not None:
                outputs = calibration(logits)
                done.tree = CalibratedTree(done.tree, calibration).to(self.ctx.device)
                done.facts["calibration"] = {
                    "bias": calibration.bias.tolist(),
                    "scale": float(calibration.scale),
                }
            if self._rule() == "cell_pwga":
                done.facts["cell_pwga"] = done.facts["pwga2"]
                done.facts["pwga2"] = pseudo_wga(outputs, y, t).value
        self.fixed = None


@register("nct_plus", version=1, config=PlusConfig)
class NctPlus(Nct):
    """Grow NCT's tree, and calibrate its leaves."""

    training_name = "nct"  # its random streams as well, so that the two differ by the switches only

    def scored_by(self, config: NctConfig) -> tuple[str, ...]:
        """Name the proxies; iteration 1 has none yet."""
        return (*super().scored_by(config), "cell_pwga") if config.iterations > 1 else ()

    def fit(self, task: Task, config: NctConfig, ctx: Context) -> Fitted:
        """Train iteration by iteration."""
        assert isinstance(config, PlusConfig)
        return PlusGrowth(task, config, ctx).run()

    def revive(self, shape: Shape, config: NctConfig, weights: dict[str, Tensor]) -> Fitted:
        """Fill a tree of the kept depth, and put its calibration back."""
        plain = {
            name: value for name, value in weights.items() if not name.startswith("calibration.")
        }
        tree = self._revived(shape, config, plain)
        if "calibration.bias" in weights:
            bias, scale = weights["calibration.bias"], weights["calibration.scale"]
            tree = CalibratedTree(tree, Calibration(bias, scale, tree.classes)).eval()
        return FittedTree(tree, shape.codes)
