"""LfF: learning from failure, a network made biased on purpose and one that learns where it fails.

Paper: Nam et al. 2020, Learning from Failure: Training Debiased Classifier from Biased Classifier;
    authors' code alinlab/LfF. Both networks are trained at once. The biased one has the generalised
    cross-entropy, which favours what it is sure of; the other, which is the classifier, weighs each
    sample by the biased one's share of both losses. Supervision: none (T no, V no) with
    `selection = last`, as the authors do; V yes where `selection` reads groups of validation.
Deviations: one optimiser holds both networks, which is the same as two with equal settings. Images
    are scaled as for every method; the authors' coloured digits are divided by 255 twice.
    `head_only` leaves both backbones as they were built, as the authors do on CelebA, there with a
    ResNet-18. A moving average mixes the losses of an image under different augmentations, as
    theirs does. Their code has q times the gradient of the generalised cross-entropy; kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.backbones import (
    Classifier,
    FittedClassifier,
    SingleNetworkMethod,
    build_classifier,
    train_head_only,
)
from methods.base import Context, Fitted, Method, Supervision, register
from methods.optimisation import TrainConfig
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName
from methods.training import Batch, Training

DECAY = 0.7  # of the moving averages
SMALL = 1e-8  # added to the sum of both losses


@dataclass(frozen=True)
class LffConfig(TrainConfig):
    """How both networks are trained.

    Attributes:
        q: of the generalised cross-entropy; the larger, the more the biased network keeps to what
            it is sure of.
        head_only: train the last layers alone.
    """

    selection: RuleName = "last"
    q: float = 0.7
    head_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.q <= 1, f"q must be above 0 and at most 1 but got {self.q}")


def generalised_cross_entropy(logits: Tensor, y: Tensor, q: float) -> Tensor:
    """Return each sample's loss q p^q CE, of which p^q has no gradient."""
    losses = functional.cross_entropy(logits, y, reduction="none")
    probability = logits.detach().float().softmax(dim=1).gather(1, y[:, None])[:, 0]
    return q * probability**q * losses


class LossAverages(nn.Module):
    """Moving averages of each sample's loss in one network, and the scale of each class."""

    averages: Tensor
    visited: Tensor
    y: Tensor

    def __init__(self, y: Tensor, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("averages", torch.zeros(len(y)))
        self.register_buffer("visited", torch.zeros(len(y), dtype=torch.bool))
        self.register_buffer("y", y, persistent=False)

    def update(self, index: Tensor, losses: Tensor) -> None:
        """Take up the losses of a batch; a sample's first is its average."""
        mixed = DECAY * self.averages[index] + (1 - DECAY) * losses
        self.averages[index] = torch.where(self.visited[index], mixed, losses)
        self.visited[index] = True

    def scaled(self, index: Tensor) -> Tensor:
        """Return averages over the largest one of the sample's class in all of training."""
        largest = torch.zeros(self.classes, device=self.averages.device)
        largest = largest.scatter_reduce(0, self.y, self.averages, "amax")
        return self.averages[index] / largest[self.y[index]].clamp(min=torch.finfo().tiny)


class FailureLoss(nn.Module):
    """The loss of both networks: the classifier is given, the biased one belongs to the loss."""

    def __init__(self, biased: Classifier, y: Tensor, classes: int, q: float) -> None:
        super().__init__()
        self.biased = biased
        self.biased_losses = LossAverages(y, classes)
        self.debiased_losses = LossAverages(y, classes)
        self.q = q

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Weigh the classifier's losses by where the biased network fails; add the latter's own."""
        biased = self.biased(batch.images)
        losses = functional.cross_entropy(model(batch.images), batch.y, reduction="none")
        with torch.no_grad():
            failures = functional.cross_entropy(biased.float(), batch.y, reduction="none")
            self.biased_losses.update(batch.index, failures)
            self.debiased_losses.update(batch.index, losses.float())
            weights = self.weights(batch.index)
        own = generalised_cross_entropy(biased, batch.y, self.q)
        return (weights * losses).mean() + own.mean()

    def weights(self, index: Tensor) -> Tensor:
        """Return the biased network's share of both losses, each scaled within its class."""
        biased, debiased = self.biased_losses.scaled(index), self.debiased_losses.scaled(index)
        return biased / (biased + debiased + SMALL)


@register("lff", version=1, config=LffConfig, title="LfF", order=150, reference="Nam et al. 2020")
class Lff(SingleNetworkMethod, Method):
    """Learn from what a network fails on that was made to keep to shortcuts."""

    extended = True
    further_rows = MappingProxyType({"validation groups": {"selection": "val_wga"}})

    def supervision(self, config: LffConfig) -> Supervision:
        """Return access to the validation groups, where the model is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def fit(self, task: Task, config: LffConfig, ctx: Context) -> Fitted:
        """Train both networks together, and keep the one that is not biased."""
        model = build_classifier(task, ctx, "lff")
        biased = build_classifier(task, ctx, "lff-biased")
        loss = FailureLoss(biased, task.train.y, len(task.classes), config.q)
        parameters = [{"params": [*model.parameters(), *biased.parameters()]}]
        how: dict[str, Any] = {"parameters": parameters}
        if config.head_only:
            own, other = train_head_only(model), train_head_only(biased)
            other["set_mode"](biased)
            how = {**own, "parameters": own["parameters"] + other["parameters"]}
        selected = Training(model, task, config, ctx, name="lff", objective=loss, **how).run()
        weights = loss.weights(torch.arange(len(task.train), device=ctx.device)).cpu()
        facts = {"mean_weight": float(weights.mean()), "above_half": int((weights > 0.5).sum())}
        return FittedClassifier(model, selection=selected, details={"lff": facts})

    def search_space(self, trial: Any, task: Task) -> LffConfig:
        """Search q and the rates."""
        preset: LffConfig = preset_config(self, task.name)
        return replace(
            preset,
            q=trial.suggest_float("q", 0.05, 0.95),
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True),
        )
