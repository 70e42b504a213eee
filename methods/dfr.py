"""DFR: deep feature reweighting, the last layer retrained on group-balanced validation data.

Paper: Kirichenko et al. 2023, Last Layer Re-Training is Sufficient for Robustness to Spurious
    Correlations; authors' code PolinaKirichenko/deep_feature_reweighting, the variant that fits on
    validation. Supervision: groups of validation, to fit and to choose the penalty (T no, V yes).
Deviations: the penalty is judged over several random halvings of validation instead of one; a group
    with fewer than `min_group` samples does not shrink the others to its size; the draws are
    seeded. A penalty at the end of its grid is compared with weaker or stronger ones beyond it.
    More than two classes are fitted one against the rest with a shared penalty, which is what
    liblinear used to do by itself. Its objective is kept, the penalised intercept included, and
    fitted to the optimum (`methods.logistic`), where the authors' liblinear stops at 1e-4. On ISIC
    the penalty is chosen by the worst pair's AUROC.
Version 2: version 1 had liblinear stop at 1e-2, 0.2 to 1% above the optimum (docs/protocol.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from datasets.base import Task
from methods.backbones import Classifier, FittedClassifier, SingleNetworkMethod
from methods.base import Context, Fitted, Method, Stage, Supervision, register
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.presets import preset_config
from methods.retraining import RetrainConfig, Standardiser, extract_features, retrain_head


@dataclass(frozen=True)
class DfrConfig(RetrainConfig):
    """DFR's knobs: the base model's training, and the retraining of its last layer."""

    erm: ErmConfig = field(default_factory=ErmConfig)

    def quick(self) -> DfrConfig:
        """Cut to a smoke run."""
        return replace(
            self, erm=self.erm.quick(), splits=min(self.splits, 1), retrains=min(self.retrains, 3)
        )


@register(
    "dfr", version=2, config=DfrConfig, title="DFR", order=50, reference="Kirichenko et al. 2023"
)
class Dfr(SingleNetworkMethod, Method):
    """Keep ERM's features and fit the last layer again."""

    def supervision(self, config: DfrConfig) -> Supervision:
        """Return access to the validation groups."""
        return Supervision(val_groups=True)

    def fits_on_validation(self, config: DfrConfig) -> bool:
        """Return that the last layer is fitted there."""
        return True

    def stages(self, config: DfrConfig) -> tuple[Stage, ...]:
        """Return the base model."""
        return (erm_stage(config.erm),)

    def fit(self, task: Task, config: DfrConfig, ctx: Context) -> Fitted:
        """Train by ERM, then replace its last layer by the average of balanced fits."""
        network = train_erm(task, config.erm, ctx).module
        assert isinstance(network, Classifier)
        scale = Standardiser.of(extract_features(network, task.train, task, ctx))
        selected, details = retrain_head(network, task, task.val.groups, scale, config, ctx)
        return FittedClassifier(network, selection=selected, details=details)

    def search_space(self, trial: Any, task: Task) -> DfrConfig:
        """Search C, as the NCT paper does, instead of choosing it within the fit."""
        preset: DfrConfig = preset_config(self, task.name)
        return replace(preset, penalties=(trial.suggest_float("penalty", 1e-3, 10.0, log=True),))
