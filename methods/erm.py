"""ERM: empirical risk minimisation, the baseline every other method is measured against.

Paper: Vapnik 1998; recipes from the authors' code of GEORGE (waterbirds, celeba, isic, umnist) and
    of Correct-n-Contrast (cmnist). Supervision: none (T no, V no).
Deviations: GEORGE chooses the epoch by validation accuracy re-weighted to the training shares of
    the true subclasses; that reads group labels, so here it is the plain validation accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from datasets.base import Task
from methods.backbones import build_classifier
from methods.base import Context, Fitted, Method, SharedStage, StageResult, register
from methods.classifier import FittedClassifier, PlainNetwork
from methods.optimisation import TrainConfig
from methods.presets import preset_config
from methods.stacking import Stackable
from methods.training import Training

STAGE_VERSION = 1  # of what `train_erm` computes, for every method that builds on it


@dataclass(frozen=True)
class ErmConfig(TrainConfig):
    """ERM has no knobs of its own."""

    def as_stage(self) -> SharedStage:
        """Name the stage that `train_erm` asks for."""
        return SharedStage("erm", self, STAGE_VERSION)


def erm_training(task: Task, config: TrainConfig, ctx: Context) -> Training:
    """Describe the training, with a fresh network."""
    return Training(build_classifier(task, ctx, "erm"), task, config, ctx, name="erm")


def train_erm(task: Task, config: TrainConfig, ctx: Context) -> FittedClassifier:
    """Train by ERM, as a stage that every method asking for the same one shares."""

    def compute(ctx: Context) -> StageResult:
        training = erm_training(task, config, ctx)
        trained = training.run()
        return StageResult(dict(training.model.state_dict()), {"selection": trained.as_facts()})

    result = ctx.stage("erm", config, compute, version=STAGE_VERSION)
    model = build_classifier(task, ctx, "erm")
    model.load_state_dict(result.tensors)
    return FittedClassifier(model, dict(result.facts))


@register("erm", version=1, config=ErmConfig)
class Erm(PlainNetwork, Stackable, Method):
    """Minimise the mean cross-entropy."""

    def shared_stage(self, config: ErmConfig) -> SharedStage:
        """Name the training itself: other methods begin with it."""
        return config.as_stage()

    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        """Train one network on all samples alike."""
        return train_erm(task, config, ctx)

    def training(self, task: Task, config: ErmConfig, ctx: Context) -> Training:
        """Describe the same training, to be stacked."""
        return erm_training(task, config, ctx)

    def search_space(self, trial: Any, task: Task) -> ErmConfig:
        """Search the rates; the rest is the preset's."""
        preset: ErmConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [32, 64, 128]),
        )
