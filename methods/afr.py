"""AFR: automatic feature reweighting, the last layer fitted again on training samples held back.

Paper: Qiu et al. 2023, Simple and Fast Group Robustness by Automatic Feature Reweighting; authors'
    code AndPotap/afr. A base model is trained on 80% of training. On the other 20% the last layer
    is fitted again, samples weighed by exp(-gamma p) / (size of the class), where p is the base
    model's probability of the true class, and drawn to the base layer by a penalty. Supervision:
    groups of validation, to choose gamma, the penalty and the step (T no, V yes; V no where
    `selection` reads none).
Deviations: descent begins at the base layer and is penalised towards it, as in the paper and the
    authors' script; their notebook adds a second layer with random values instead. The base model's
    rate is constant: their cosine is stepped twice in CelebA's 20 epochs. All pairs of gamma and
    penalty are fitted within one run. The split is drawn by torch from `split_seed`, the same for
    every seed of a run, as theirs is; which samples it holds differs from theirs. Features are
    taken once, in evaluation mode. Of fits that the rule finds equal the more accurate one is kept,
    then the first. Their early stopping looks at validation groups after each of
    500 to 1,000 steps; `stopping = "last"` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.backbones import Classifier, FittedClassifier, SingleNetworkMethod, build_classifier
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
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName, Score, Selection, selection
from methods.training import Training

STAGE_VERSION = 1
QUICK_STEPS = 10
CLIP = 1.0  # norm of a gradient
CLIP_SLACK = 1e-6  # added to it, as torch does
REPORT_EVERY = 100  # steps


@dataclass(frozen=True)
class AfrConfig:
    """How the base model is trained, and how its last layer is fitted again.

    Attributes:
        base: the base model's training.
        share: of the training samples, held back for the last layer.
        split_seed: of that split; not the run's seed.
        gammas, penalties: of which all pairs are fitted.
        head_lr, head_steps: of the descent, on all samples at once.
        stopping: whether the `best` step of a fit counts or the `last`.
        selection: the rule that scores steps and pairs on validation.
    """

    base: TrainConfig = field(default_factory=lambda: TrainConfig(selection="last"))
    share: float = 0.2
    split_seed: int = 21
    gammas: tuple[float, ...] = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0)
    penalties: tuple[float, ...] = (0.0, 0.1, 0.3)
    head_lr: float = 1e-2
    head_steps: int = 500
    stopping: Literal["best", "last"] = "best"
    selection: RuleName = "val_wga"

    def __post_init__(self) -> None:
        require(0 < self.share < 1, f"share must be between 0 and 1 but got {self.share}")
        require(self.split_seed >= 0, f"split_seed cannot be negative: {self.split_seed}")
        for name, values in (("gammas", self.gammas), ("penalties", self.penalties)):
            require(bool(values) and min(values) >= 0, f"{name} cannot be negative: {values}")
        require(self.head_lr > 0, f"head_lr must be positive but got {self.head_lr}")
        require(self.head_steps >= 1, f"head_steps must be at least 1 but got {self.head_steps}")
        require(self.selection != "last", "selection = last; it is `stopping` that may be last")

    def quick(self) -> AfrConfig:
        """Cut to a smoke run."""
        return replace(
            self,
            base=self.base.quick(),
            gammas=self.gammas[:2],
            head_steps=min(self.head_steps, QUICK_STEPS),
        )


@dataclass(frozen=True)
class BaseConfig:
    """What the base model depends on."""

    base: TrainConfig
    share: float
    split_seed: int


@dataclass(frozen=True)
class Head:
    """A last layer, or several of them along a first dimension."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class HeadFit:
    """The last layer that was kept, for which gamma and penalty, and after which step."""

    head: Head
    gamma: float
    penalty: float
    step: int
    score: Score


def split_training(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split positions at random into those of the base model and those held back, both sorted."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = min(max(round(share * count), 1), count - 1)
    return order[held:].sort().values, order[:held].sort().values


def sample_weights(probability: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Weigh samples by exp(-gamma p) over the size of their class; the weights sum to one."""
    sizes = torch.bincount(y)[y]
    weights = torch.exp(-gamma * probability) / sizes
    return weights / weights.sum()


def descend(
    features: Tensor,
    y: Tensor,
    weights: Tensor,
    penalties: Tensor,
    start: Head,
    lr: float,
    steps: int,
) -> Iterator[Head]:
    """Take steps of gradient descent for several weightings at once; yield the heads after each.

    For each row of `weights` and its penalty the loss is the weighted cross-entropy plus the
    penalty times the squared distance from `start`. Each gradient is clipped to norm 1.
    """
    fits, classes = len(weights), len(start.bias)
    pull = 2 * penalties[:, None]
    weight = start.weight.repeat(fits, 1, 1)
    bias = start.bias.repeat(fits, 1)
    target = functional.one_hot(y, classes).to(features.dtype)[:, None]
    share = weights.T[:, :, None]
    for _ in range(steps):
        logits = apply_heads(features, Head(weight, bias))
        error = (logits.softmax(dim=2) - target) * share
        along = (error.flatten(1).T @ features).view_as(weight)
        along = along + pull[:, :, None] * (weight - start.weight)
        across = error.sum(dim=0) + pull * (bias - start.bias)
        norm = (along.square().sum(dim=(1, 2)) + across.square().sum(dim=1)).sqrt()
        rate = lr * (CLIP / (norm + CLIP_SLACK)).clamp(max=1.0)
        weight = weight - rate[:, None, None] * along
        bias = bias - rate[:, None] * across
        yield Head(weight, bias)


def apply_heads(features: Tensor, heads: Head) -> Tensor:
    """Compute the logits of several last layers, as (samples, layers, classes)."""
    logits = features @ heads.weight.flatten(0, 1).T
    return logits.view(len(features), *heads.bias.shape) + heads.bias


def choose_head(
    config: AfrConfig,
    held_out: tuple[Tensor, Tensor],
    probability: Tensor,
    validation: tuple[Tensor, Tensor],
    start: Head,
    rule: Selection,
    ctx: Context,
) -> HeadFit:
    """Fit the last layer for every gamma and penalty, and keep the best."""
    pairs = list(product(config.gammas, config.penalties))
    features, y = held_out
    val_features, val_y = validation
    weights = torch.stack([sample_weights(probability, y, gamma) for gamma, _ in pairs])
    penalties = torch.tensor([penalty for _, penalty in pairs], device=features.device)
    best: list[HeadFit | None] = [None] * len(pairs)
    heads = descend(features, y, weights, penalties, start, config.head_lr, config.head_steps)
    for step, now in enumerate(heads, start=1):
        if config.stopping == "last" and step < config.head_steps:
            continue
        outputs = apply_heads(val_features, now).cpu()
        for number, (gamma, penalty) in enumerate(pairs):
            score, so_far = Score.of(rule, outputs[:, number], val_y), best[number]
            if score.beats(so_far.score if so_far else None, rule):
                own = Head(now.weight[number], now.bias[number])
                best[number] = HeadFit(own, gamma, penalty, step, score)
        if step % REPORT_EVERY == 0:
            ctx.report(stage=f"afr: step {step}/{config.head_steps}")
    fits = [fit for fit in best if fit is not None]
    chosen = fits[0]
    for fit in fits[1:]:
        chosen = fit if fit.score.beats(chosen.score, rule) else chosen
    return chosen


def base_stage(config: AfrConfig) -> Stage:
    """Return the stage that trains the base model."""
    own = BaseConfig(config.base, config.share, config.split_seed)
    needs = Supervision(val_groups=config.base.selection in WORST_GROUP_RULES)
    return Stage("afr-base", own, STAGE_VERSION, needs)


def train_base(task: Task, config: AfrConfig, ctx: Context) -> Classifier:
    """Train the base model on the training samples that are not held back."""
    kept, _ = split_training(len(task.train), config.share, config.split_seed)
    own = replace(task, train=task.train.subset(kept))

    def compute(narrowed: Task, ctx: Context) -> StageResult:
        part = replace(narrowed, train=narrowed.train.subset(kept))
        model = build_classifier(part, ctx, "afr-base")
        Training(model, part, config.base, ctx, name="afr-base").run()
        return StageResult(dict(model.state_dict()))

    result = ctx.stage(base_stage(config), task, compute)
    model = build_classifier(own, ctx, "afr-base")
    model.load_state_dict(result.tensors)
    return model


@register("afr", version=1, config=AfrConfig, title="AFR", order=120, reference="Qiu et al. 2023")
class Afr(SingleNetworkMethod, Method):
    """Fit the last layer again, with weight on what the base model is not sure of."""

    extended = True
    further_rows = MappingProxyType({"no validation groups": {"selection": "val_worst_class"}})

    def supervision(self, config: AfrConfig) -> Supervision:
        """Return access to the validation groups, where something is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def stages(self, config: AfrConfig) -> tuple[Stage, ...]:
        """Return the base model."""
        return (base_stage(config),)

    def selection_rules(self, config: AfrConfig) -> tuple[str, ...]:
        """Return none: the rule scores steps of the last layer, not epochs of a training."""
        return ()

    def fit(self, task: Task, config: AfrConfig, ctx: Context) -> Fitted:
        """Train the base model, weigh what was held back, and fit the last layer on it."""
        network = train_base(task, config, ctx)
        _, positions = split_training(len(task.train), config.share, config.split_seed)
        held_out = task.train.subset(positions)
        features, val_features = (
            predict_with(network.backbone, EvalImages(split.images, task.eval_transform))
            for split in (held_out, task.val)
        )
        ctx.count_passes(len(held_out) + len(task.val))
        features, val_features = features.to(ctx.device), val_features.to(ctx.device)
        start = Head(network.head.weight.detach(), network.head.bias.detach())
        y = held_out.y.to(ctx.device)
        base = functional.linear(features, start.weight, start.bias).softmax(dim=1)
        probability = base.gather(1, y[:, None])[:, 0]
        rule = selection(config.selection, task)
        fit = choose_head(
            config, (features, y), probability, (val_features, task.val.y), start, rule, ctx
        )
        with torch.no_grad():
            network.head.weight.copy_(fit.head.weight)
            network.head.bias.copy_(fit.head.bias)
        weights = sample_weights(probability, y, fit.gamma)
        facts = {
            "gamma": fit.gamma,
            "penalty": fit.penalty,
            "step": fit.step,
            "held_out": len(held_out),
            "base_errors": int((base.argmax(dim=1) != y).sum()),
            "effective_size": float(1 / weights.square().sum()),
        }
        chosen = Selected(rule.rule, fit.score.value)
        return FittedClassifier(network, selection=chosen, details={"afr": facts})

    def search_space(self, trial: Any, task: Task) -> AfrConfig:
        """Search gamma and the penalty, instead of choosing them within the fit."""
        preset: AfrConfig = preset_config(self, task.name)
        return replace(
            preset,
            gammas=(trial.suggest_float("gamma", 0.0, 20.0),),
            penalties=(trial.suggest_float("penalty", 1e-3, 0.3, log=True),),
        )
