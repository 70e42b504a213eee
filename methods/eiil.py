"""EIIL: environment inference for invariant learning, with GroupDRO on what it infers.

Paper: Creager et al. 2021, Environment Inference for Invariant Learning; authors' code
    ecreager/eiil, which holds the inference and IRM on binary data only; GroupDRO as the second
    stage is the paper's for Waterbirds. Supervision: groups of validation, for model selection
    (T no, V yes).
Deviations: groups of the second stage are environment x class, which the authors' code does not
    settle; the loss is the softmax cross-entropy, for any number of classes; the gradient of each
    sample's loss in the dummy scale is computed once, which leaves each of the inference steps
    plain arithmetic on vectors. No sample is dropped (their pooling loses the last of each part).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from datasets.base import Task
from datasets.config import require
from datasets.errors import BenchError
from methods.base import Context, Fitted, Stage, StageResult, Supervision, register
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.groupdro import GroupDroConfig, RobustMethod, train_groupdro
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES

STAGE_VERSION = 1


class OneEnvironment(BenchError):
    """The inference put every sample into one environment."""

    kind = "one_environment"


@dataclass(frozen=True)
class EiilConfig(GroupDroConfig):
    """EIIL's own knobs beside GroupDRO's, which are those of the second stage.

    Attributes:
        erm: the reference model; it has to be trained so briefly that it still errs.
        inference: `adam` (the authors') or `closed_form` (where those steps lead to).
        inference_steps, inference_lr, inference_eps: of Adam. Gradients shrink with the number of
            samples, and where they fall below `inference_eps` samples stay where they began.
    """

    balanced: bool = True
    patience: int = 10
    erm: ErmConfig = field(default_factory=ErmConfig)
    inference: Literal["adam", "closed_form"] = "adam"
    inference_steps: int = 10_000
    inference_lr: float = 1e-3
    inference_eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.inference_steps >= 1, "inference_steps must be at least 1")
        require(self.inference_lr > 0, "inference_lr must be positive")
        require(self.inference_eps > 0, "inference_eps must be positive")

    def quick(self) -> EiilConfig:
        """Cut to a smoke run."""
        steps = min(self.inference_steps, 100)
        return replace(super().quick(), erm=self.erm.quick(), inference_steps=steps)


@dataclass(frozen=True)
class InferenceConfig:
    """What the inferred environments depend on."""

    erm: ErmConfig
    inference: str
    steps: int
    lr: float
    eps: float


def scale_gradients(logits: Tensor, y: Tensor) -> Tensor:
    """Differentiate each sample's cross-entropy in a scale on the logits, at scale 1."""
    logits = logits.double()
    expected = (logits.softmax(dim=1) * logits).sum(dim=1)
    return expected - logits.gather(1, y[:, None])[:, 0]


def infer_environments(gradients: Tensor, start: Tensor, config: InferenceConfig) -> Tensor:
    """Split the samples so that the scale's gradient is large in both parts.

    With q the soft assignment, this maximises the mean over both parts of the squared gradient of
    the part's loss, where losses are averaged over all samples, as the authors do.
    """
    if config.inference == "closed_form":
        return (gradients > 0).long()
    gradients = gradients.float()
    soft = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([soft], lr=config.lr, eps=config.eps, fused=True)
    total = gradients.mean()
    with torch.no_grad():
        for _ in range(config.steps):
            q = soft.sigmoid()
            first = (q * gradients).mean()
            push = (2 * first - total) / len(gradients)  # the two parts' difference, over N
            soft.grad = -push * gradients * q * (1 - q)
            optimizer.step()
    return (soft.detach() > 0).long()


def environment_stage(config: EiilConfig) -> Stage:
    """Return the stage that infers the environments, with the reference model inside."""
    inference = InferenceConfig(
        config.erm,
        config.inference,
        config.inference_steps,
        config.inference_lr,
        config.inference_eps,
    )
    return Stage("eiil-environments", inference, STAGE_VERSION, erm_stage(config.erm).needs)


def find_environments(task: Task, config: EiilConfig, ctx: Context) -> tuple[Tensor, float]:
    """Infer the environments; also return the share on which they agree with the closed form."""
    stage = environment_stage(config)

    def compute(task: Task, ctx: Context) -> StageResult:
        reference = train_erm(task, config.erm, ctx)
        images = EvalImages(task.train.images, task.eval_transform)
        logits = predict_with(reference.module, images)
        ctx.count_passes(len(task.train))
        gradients = scale_gradients(logits, task.train.y)
        generator = torch.Generator().manual_seed(ctx.seed("eiil", "assignment"))
        start = torch.randn(len(gradients), generator=generator)
        environments = infer_environments(gradients, start, stage.config)
        same = float((environments == (gradients > 0)).double().mean())
        # Which part is called 0 depends on the draw.
        return StageResult({"environments": environments}, {"agreement": max(same, 1 - same)})

    result = ctx.stage(stage, task, compute)
    return result.tensors["environments"], float(result.facts["agreement"])


@register(
    "eiil", version=1, config=EiilConfig, title="EIIL", order=40, reference="Creager et al. 2021"
)
class Eiil(RobustMethod):
    """Infer environments from a reference model's mistakes, then be robust to them."""

    slices = (
        "A slice is one of two environments, into which training samples are put by how a first "
        "model errs on them; other samples are in none."
    )

    def supervision(self, config: EiilConfig) -> Supervision:
        """Return access to the validation groups, where the model is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def stages(self, config: EiilConfig) -> tuple[Stage, ...]:
        """Return the reference model, and the environments it leads to."""
        return erm_stage(config.erm), environment_stage(config)

    def fit(self, task: Task, config: EiilConfig, ctx: Context) -> Fitted:
        """Infer two environments and run GroupDRO over environment x class."""
        environments, agreement = find_environments(task, config, ctx)
        sizes = torch.bincount(environments, minlength=2).tolist()
        if min(sizes) == 0:
            raise OneEnvironment(
                "every training sample was put into one environment: the reference model makes no "
                "mistake that would tell them apart",
                "train it less (--set eiil.erm.epochs=...) or with a lower eiil.erm.lr",
            )
        groups = environments * len(task.classes) + task.train.y
        fitted = train_groupdro(task, groups, config, ctx, "eiil")
        fitted.partition = environments
        fitted.details["eiil"] = {
            "inference": config.inference,
            "agreement_with_closed_form": agreement,
            "environment_sizes": sizes,
        }
        return fitted

    def search_space(self, trial: Any, task: Task) -> EiilConfig:
        """Search the second stage's rates and the reference model's length."""
        preset: EiilConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            adjustment=trial.suggest_float("adjustment", 0.0, 5.0),
            erm=replace(preset.erm, epochs=trial.suggest_int("reference_epochs", 1, 5)),
        )
