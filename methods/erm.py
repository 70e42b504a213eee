"""ERM: empirical risk minimisation, the baseline every other method is measured against.

Paper: Vapnik 1998; recipes from the authors' code of GEORGE (waterbirds, celeba, isic, umnist) and
    of Correct-n-Contrast (cmnist). Supervision: none (T no, V no).
Deviations: GEORGE chooses the epoch by validation accuracy re-weighted to the training shares of
    the true subclasses; that reads group labels, so here it is the plain validation accuracy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from datasets.base import Task
from methods.backbones import FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import (
    Context,
    Fitted,
    Method,
    Selected,
    Stage,
    StageResult,
    Supervision,
    register,
)
from methods.optimisation import TrainConfig
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES
from methods.training import Training

STAGE_VERSION = 1  # of what `train_erm` computes, for every method that builds on it


@dataclass(frozen=True)
class ErmConfig(TrainConfig):
    """ERM has no knobs of its own."""


def erm_stage(config: TrainConfig) -> Stage:
    """Return the stage that `train_erm` asks for."""
    needs = Supervision(val_groups=config.selection in WORST_GROUP_RULES)
    return Stage("erm", config, STAGE_VERSION, needs)


def train_erm(task: Task, config: TrainConfig, ctx: Context) -> FittedClassifier:
    """Train by ERM, as a stage that every method asking for the same one shares."""

    def compute(task: Task, ctx: Context) -> StageResult:
        model = build_classifier(task, ctx, "erm")
        selected = Training(model, task, config, ctx, name="erm").run()
        return StageResult(dict(model.state_dict()), {"selection": asdict(selected)})

    result = ctx.stage(erm_stage(config), task, compute)
    model = build_classifier(task, ctx, "erm")
    model.load_state_dict(result.tensors)
    return FittedClassifier(model, selection=Selected(**result.facts["selection"]))


@register("erm", version=1, config=ErmConfig, title="ERM", order=60, reference="Vapnik 1998")
class Erm(SingleNetworkMethod, Method):
    """Minimise the mean cross-entropy."""

    def stages(self, config: ErmConfig) -> tuple[Stage, ...]:
        """Return the training itself: other methods begin with it."""
        return (erm_stage(config),)

    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        """Train one network on all samples alike."""
        return train_erm(task, config, ctx)

    def search_space(self, trial: Any, task: Task) -> ErmConfig:
        """Search the rates; the rest is the preset's."""
        preset: ErmConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [32, 64, 128]),
        )
