"""DPE: diverse prototypical ensembles, many last layers that are kept unlike one another.

Paper: To et al. 2025, Diverse Prototypical Ensembles Improve Robustness to Subpopulation Shift;
    authors' code minhto2802/DPE. On frozen features of an ERM model, one prototype a class is
    fitted to an evenly drawn subset of validation, by the distances of normalised vectors; then
    another to another subset, with a penalty on its similarity to the earlier ones, and so on. The
    probabilities of all are averaged. Supervision: none (T no, V no): class labels of validation
    are fitted on, and the worst class chooses each one's epoch. With `balance = groups` and
    `selection = val_wga` groups of validation are fitted on and chosen by (V yes).
Deviations: the ERM model is the preset's; part of the authors' published gain is a stronger one,
    trained for longer and on more augmentation. A last batch that is smaller than the others is
    used. Features are taken once, in evaluation mode, as theirs are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.backbones import Backbone, Classifier, FittedClassifier, build_backbone
from methods.balanced import smallest_subset
from methods.base import (
    Context,
    Fitted,
    Method,
    NetworkSpec,
    Selected,
    Stage,
    Supervision,
    register,
)
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName, Selection, selection

START_SPREAD = 1e-2  # of a prototype's first numbers
MOMENTUM = 0.9
FLAT = 1e-6  # standard deviation below which a sample's features are not divided by it
QUICK_HEADS = 2


@dataclass(frozen=True)
class DpeConfig:
    """How the first model and the prototypes are trained.

    Attributes:
        erm: the first model's training.
        heads: prototypes of each class.
        epochs, batch_size, lr: of each, by SGD.
        scale: multiplies distances in training.
        diversity: penalty on a prototype's similarity to earlier ones.
        diversity_decay: from the third on it is divided by 1 + this, by 1 + twice this, and so on.
        size_penalty: on the squared lengths of prototypes.
        balance: whether subsets have equally many of each class or of each group.
        selection: the rule that chooses the epoch of each prototype, on validation.
    """

    erm: ErmConfig = field(default_factory=ErmConfig)
    heads: int = 15
    epochs: int = 20
    batch_size: int = 256
    lr: float = 1e-3
    scale: float = 30.0
    diversity: float = 5e4
    diversity_decay: float = 0.05
    size_penalty: float = 10.0
    balance: Literal["classes", "groups"] = "classes"
    selection: RuleName = "val_worst_class"

    def __post_init__(self) -> None:
        for name in ("heads", "epochs", "batch_size"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("lr", "scale"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        for name in ("diversity", "diversity_decay", "size_penalty"):
            require(getattr(self, name) >= 0, f"{name} cannot be negative")

    def quick(self) -> DpeConfig:
        """Cut to a smoke run."""
        return replace(
            self,
            erm=self.erm.quick(),
            heads=min(self.heads, QUICK_HEADS),
            epochs=min(self.epochs, 2),
        )

    def penalty_of(self, head: int) -> float:
        """Return the weight of the similarity penalty of a head, counted from 0."""
        return self.diversity / (1 + self.diversity_decay * max(0, head - 1))


def standardised(features: Tensor) -> Tensor:
    """Bring each sample's features to mean 0 and variance 1."""
    spread, mean = torch.var_mean(features, dim=1, correction=0, keepdim=True)
    return (features - mean) / spread.sqrt().clamp(min=FLAT)


def distance_logits(features: Tensor, prototypes: Tensor, scale: Tensor) -> Tensor:
    """Return minus the scaled distances of unit vectors, as (samples, classes)."""
    points, centres = functional.normalize(features), functional.normalize(prototypes)
    exact = "donot_use_mm_for_euclid_dist"  # the other way has no gradient near zero
    return -scale.abs() * torch.cdist(points, centres, compute_mode=exact)


def similarity(prototypes: Tensor, earlier: Tensor) -> Tensor:
    """Measure how alike a class's prototype (K, D) is to its earlier ones (H, K, D)."""
    heads, _, length = earlier.shape
    products = torch.einsum("kd,hkd->k", prototypes, earlier) / (length - 1)
    return (products / (heads + 1)).mean().abs()


class PrototypeNetwork(nn.Module):
    """A backbone and an ensemble of prototypes; returns logarithms of mean probabilities."""

    prototypes: Tensor
    scales: Tensor

    def __init__(self, backbone: Backbone, prototypes: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("scales", scales)

    def forward(self, images: Tensor) -> Tensor:
        """Score the classes of a batch."""
        return self.scores(standardised(self.backbone(images).float()))

    def scores(self, features: Tensor) -> Tensor:
        """Score the classes by standardised features."""
        each = [
            distance_logits(features, own, scale).softmax(dim=1)
            for own, scale in zip(self.prototypes, self.scales, strict=True)
        ]
        return torch.stack(each).mean(dim=0).log()


@dataclass(frozen=True)
class ValidationFeatures:
    """What prototypes are fitted to: standardised features, classes, and what is balanced."""

    features: Tensor
    y: Tensor
    cells: Tensor
    classes: int


def fit_prototypes(
    data: ValidationFeatures, earlier: Tensor, config: DpeConfig, rule: Selection, ctx: Context
) -> tuple[Tensor, Tensor]:
    """Fit one prototype a class to an even draw; return the best epoch's, and their scale.

    Validation as a whole scores the epochs; of equals the last is kept.
    """
    head, length = len(earlier), data.features.shape[1]
    generator = torch.Generator().manual_seed(ctx.seed("dpe", "head", head))
    subset = smallest_subset(data.cells, generator)
    start = START_SPREAD * torch.randn(data.classes, length, generator=generator)
    prototypes = start.to(data.features.device).requires_grad_()
    scale = torch.ones(1, device=data.features.device, requires_grad=True)
    solver = torch.optim.SGD([prototypes, scale], lr=config.lr, momentum=MOMENTUM)
    best, kept = float("nan"), (prototypes, scale)
    for _ in range(config.epochs):
        order = subset[torch.randperm(len(subset), generator=generator)]
        for index in order.to(data.features.device).split(config.batch_size):
            logits = distance_logits(data.features[index], prototypes, scale)
            loss = functional.cross_entropy(config.scale * logits, data.y[index])
            loss = loss + config.size_penalty * prototypes.square().sum(dim=1).mean()
            if head > 0:
                loss = loss + config.penalty_of(head) * similarity(prototypes, earlier)
            solver.zero_grad()
            loss.backward()
            solver.step()
        with torch.no_grad():
            value = rule.score(distance_logits(data.features, prototypes, scale).cpu())
        if kept[0] is prototypes or rule.better(value, best):
            best, kept = value, (prototypes.detach().clone(), scale.detach().clone())
    return kept


@register("dpe", version=1, config=DpeConfig, title="DPE", order=170, reference="To et al. 2025")
class Dpe(Method):
    """Average prototypes that are fitted to other even draws and kept unlike one another."""

    extended = True
    further_rows = MappingProxyType(
        {"validation groups": {"selection": "val_wga", "balance": "groups"}}
    )

    def supervision(self, config: DpeConfig) -> Supervision:
        """Return access to the validation groups, where they are balanced or choose."""
        reads = config.balance == "groups" or config.selection in WORST_GROUP_RULES
        return Supervision(val_groups=reads)

    def fits_on_validation(self, config: DpeConfig) -> bool:
        """Return that prototypes are fitted there."""
        return True

    def stages(self, config: DpeConfig) -> tuple[Stage, ...]:
        """Return the first model."""
        return (erm_stage(config.erm),)

    def selection_rules(self, config: DpeConfig) -> tuple[str, ...]:
        """Return none: the rule scores prototypes, not epochs of a network's training."""
        return ()

    def fit(self, task: Task, config: DpeConfig, ctx: Context) -> Fitted:
        """Train by ERM, then fit prototype after prototype on validation."""
        network = train_erm(task, config.erm, ctx).module
        assert isinstance(network, Classifier)
        images = EvalImages(task.val.images, task.eval_transform)
        features = standardised(predict_with(network.backbone, images)).to(ctx.device)
        ctx.count_passes(len(task.val))
        cells = task.val.groups if config.balance == "groups" else task.val.y
        data = ValidationFeatures(features, task.val.y.to(ctx.device), cells, len(task.classes))
        rule = replace(selection(config.selection, task), latest_of_equals=True)
        prototypes = features.new_empty(0, data.classes, features.shape[1])
        scales = features.new_empty(0)
        for head in range(config.heads):
            fitted, scale = fit_prototypes(data, prototypes, config, rule, ctx)
            prototypes, scales = torch.cat([prototypes, fitted[None]]), torch.cat([scales, scale])
            ctx.report(stage=f"dpe: prototype {head + 1}/{config.heads}")
        ensemble = PrototypeNetwork(network.backbone, prototypes, scales).to(ctx.device)
        with torch.no_grad():
            value = rule.score(ensemble.scores(features).cpu())
        facts = {"subset": len(torch.unique(cells)) * int(torch.bincount(cells)[cells].min())}
        chosen = Selected(rule.rule, value)
        return FittedClassifier(ensemble, selection=chosen, details={"dpe": facts})

    def search_space(self, trial: Any, task: Task) -> DpeConfig:
        """Search the authors' ranges of the penalty and of the scale."""
        preset: DpeConfig = preset_config(self, task.name)
        return replace(
            preset,
            diversity=trial.suggest_float("diversity", 1e4, 1e6, log=True),
            scale=trial.suggest_float("scale", 10.0, 40.0),
            lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        )

    def load_fitted(self, spec: NetworkSpec, config: Any, weights: dict[str, Tensor]) -> Fitted:
        """Fill a network with as many prototypes as there are."""
        backbone = build_backbone(spec.backbone, spec.channels)
        shapes = (torch.empty_like(weights[name]) for name in ("prototypes", "scales"))
        model = PrototypeNetwork(backbone, *shapes)
        model.load_state_dict(weights)
        return FittedClassifier(model.eval())
