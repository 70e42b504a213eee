"""JTT: just train twice.

Paper: Liu et al. 2021, Just Train Twice: Improving Group Robustness without Training Group
    Information; authors' code anniesch/jtt. Supervision: groups of validation, for model selection
    (T no, V yes).
Deviations: none in the algorithm. T counts from 0, as in the authors' code: T = 1 is the second
    pass. By default the error set is what that pass itself got wrong, sample by sample, while the
    weights were still changing, as their code records it; `errors = after_epoch` asks the model
    after the pass instead. Copies of error points are index entries, shuffled with the rest, so an
    epoch is as long as theirs. They evaluate on test each epoch; here nothing does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from datasets.errors import BenchError
from methods.backbones import FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import Context, Fitted, Method, Stage, StageResult, Supervision, register
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName
from methods.training import Batch, Sampler, Training

STAGE_VERSION = 1
QUICK_UPWEIGHT = 5  # of smoke runs: an epoch grows with the copies


class EmptyErrorSet(BenchError):
    """The first model made no mistake, so there is nothing to upweight."""

    kind = "empty_error_set"


@dataclass(frozen=True)
class JttConfig(TrainConfig):
    """JTT's own knobs; the optimiser's serve both stages.

    Attributes:
        identification_epoch: T, counted from 0; the first model trains T + 1 epochs.
        upweight: lambda, the further copies of each error point; it counts 1 + lambda times.
        errors: judge samples `during_training` (each as it is trained on) or `after_epoch`.
    """

    selection: RuleName = "val_wga"
    identification_epoch: int = 1
    upweight: int = 20
    errors: Literal["during_training", "after_epoch"] = "during_training"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.identification_epoch >= 0,
            f"identification_epoch cannot be negative but got {self.identification_epoch}",
        )
        require(self.upweight >= 0, f"upweight cannot be negative but got {self.upweight}")

    def quick(self) -> JttConfig:
        """Cut to a smoke run."""
        return replace(
            super().quick(),
            identification_epoch=min(self.identification_epoch, 1),
            upweight=min(self.upweight, QUICK_UPWEIGHT),
        )


@dataclass(frozen=True)
class IdentificationConfig(TrainConfig):
    """The first stage: its own training, and how its errors are told."""

    errors: Literal["during_training", "after_epoch"] = "during_training"


class ErrorTrackingCrossEntropy(nn.Module):
    """Cross-entropy that remembers which samples were wrong when they were last trained on."""

    wrong: Tensor

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.register_buffer("wrong", torch.zeros(samples, dtype=torch.bool))

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean loss and note the errors."""
        logits = model(batch.images)
        self.wrong[batch.index] = logits.detach().argmax(dim=1) != batch.y
        return functional.cross_entropy(logits, batch.y)


def first_config(config: JttConfig) -> IdentificationConfig:
    """Configure the first stage: T + 1 epochs, of which the last counts."""
    shared = {field.name: getattr(config, field.name) for field in fields(TrainConfig)}
    first = IdentificationConfig(**shared, errors=config.errors)
    return replace(first, epochs=config.identification_epoch + 1, selection="last", patience=0)


def first_stage(config: JttConfig) -> Stage:
    """Return the stage that finds the errors."""
    return Stage("jtt-identify", first_config(config), STAGE_VERSION)


def find_errors(task: Task, config: JttConfig, ctx: Context) -> Tensor:
    """Train the first model for T + 1 epochs and return which training samples it gets wrong."""
    first = first_config(config)

    def compute(task: Task, ctx: Context) -> StageResult:
        model = build_classifier(task, ctx, "jtt-identify")
        loss = ErrorTrackingCrossEntropy(len(task.train))
        Training(model, task, first, ctx, name="jtt-identify", objective=loss).run()
        wrong = loss.wrong.cpu()
        if first.errors == "after_epoch":
            images = EvalImages(task.train.images, task.eval_transform)
            wrong = predict_with(model, images).argmax(dim=1) != task.train.y
            ctx.count_passes(len(task.train))
        return StageResult({"wrong": wrong.to(torch.uint8)})

    return ctx.stage(first_stage(config), task, compute).tensors["wrong"].bool()


def upsample_errors(count: int, wrong: Tensor, upweight: int) -> Sampler:
    """Visit every sample once and the wrong ones `upweight` times more, in random order."""
    extra = wrong.nonzero()[:, 0].repeat(upweight)
    positions = torch.cat([torch.arange(count), extra])

    def draw(epoch: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(len(positions), generator=generator, device=generator.device)
        return positions.to(generator.device)[order]

    return draw


@register("jtt", version=1, config=JttConfig, title="JTT", order=20, reference="Liu et al. 2021")
class Jtt(SingleNetworkMethod, Method):
    """Train, then train again with the errors upweighted."""

    slices = (
        "Slice 1 is the error set: the training samples that a first model got wrong. Slice 0 is "
        "the rest; other samples are in none. That slice 1 is hard is how it was made."
    )

    def supervision(self, config: JttConfig) -> Supervision:
        """Return access to the validation groups, where the model is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def stages(self, config: JttConfig) -> tuple[Stage, ...]:
        """Return the first stage: runs that differ only in the second share it."""
        return (first_stage(config),)

    def fit(self, task: Task, config: JttConfig, ctx: Context) -> Fitted:
        """Find the error set, then train a fresh network on the samples and copies of it."""
        wrong = find_errors(task, config, ctx)
        errors = int(wrong.sum())
        if errors == 0:
            raise EmptyErrorSet(
                f"the first model got every training sample right in epoch "
                f"{config.identification_epoch}, so the error set is empty",
                "identify earlier (--set jtt.identification_epoch=...), or keep the first model "
                "from fitting with a lower jtt.lr or a higher jtt.weight_decay",
            )
        model = build_classifier(task, ctx, "jtt")
        sampler = upsample_errors(len(task.train), wrong, config.upweight)
        selected = Training(model, task, config, ctx, name="jtt", sampler=sampler).run()
        details: dict[str, object] = {"jtt": {"errors": errors}}
        return FittedClassifier(model, selection=selected, details=details, partition=wrong.long())

    def search_space(self, trial: Any, task: Task) -> JttConfig:
        """Search the authors' lambdas, T, and the rates."""
        preset: JttConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            identification_epoch=trial.suggest_int("identification_epoch", 0, 5),
            upweight=trial.suggest_categorical("upweight", [5, 20, 50, 100]),
        )
