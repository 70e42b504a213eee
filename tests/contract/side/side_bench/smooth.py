"""Label smoothing: ERM with softened targets.

Paper: Szegedy et al. 2016. Supervision: none (T no, V no). Deviations: none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from methods.backbones import FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import Context, Fitted, Method, register
from methods.optimisation import TrainConfig
from methods.training import Batch, Training


@dataclass(frozen=True)
class SmoothConfig(TrainConfig):
    """How much to soften."""

    smoothing: float = 0.1


class SmoothedLoss(nn.Module):
    """Cross-entropy with softened targets."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch."""
        return functional.cross_entropy(
            model(batch.images), batch.y, label_smoothing=self.smoothing
        )


@register("smooth", version=1, config=SmoothConfig, title="Smooth")
class Smooth(SingleNetworkMethod, Method):
    """Train with softened targets."""

    def fit(self, task: Task, config: SmoothConfig, ctx: Context) -> Fitted:
        """Train one network."""
        model = build_classifier(task, ctx, "smooth")
        loss = SmoothedLoss(config.smoothing)
        selected = Training(model, task, config, ctx, name="smooth", objective=loss).run()
        return FittedClassifier(model, selection=selected)

    def search_space(self, trial: Any, task: Task) -> SmoothConfig:
        """Search how much to soften."""
        return replace(SmoothConfig(), smoothing=trial.suggest_float("smoothing", 0.0, 0.3))
