"""EVaLS: the last layer fitted on samples of high and of low loss, chosen by inferred environments.

Paper: Ghaznavi et al. 2024, Trained Models Tell Us How to Make Them Robust to Spurious Correlation
    without Group Annotation; authors' code sharif-ml-lab/EVaLS. On one half of validation, the k
    samples of each class with the highest loss under ERM and the k with the lowest are what a fresh
    last layer is fitted on. How many, how strong a penalty and which epoch is chosen by the worst
    class x environment of the other half, where EIIL infers environments from ERM's outputs.
    Supervision: none (T no, V no): class labels of validation are fitted on. With `selection =
    val_wga`, the authors' EVaLS-GL, groups of the other half choose (V yes).
Deviations: all counts and penalties are fitted within one run, on features taken once in evaluation
    mode. Of fits that are equally good the more accurate one is kept, then the first. Where all
    samples fall into one environment the classes are the groups, and the record says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.afr import Head, apply_heads
from methods.backbones import Classifier, FittedClassifier, SingleNetworkMethod
from methods.base import Context, Fitted, Method, Selected, Stage, Supervision, register
from methods.eiil import InferenceConfig, infer_environments, scale_gradients
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.metrics import worst_group_metric
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, Score, Selection, selection
from methods.self import halve
from methods.training import isolated_randomness

RULE = "worst_environment"
RATE_DROPS = 0.85  # of the epochs, after which the rate is halved
QUICK_STEPS = 100


@dataclass(frozen=True)
class EvalsConfig:
    """How the first model is trained, and how its last layer is fitted again.

    Attributes:
        erm: the first model's training.
        counts: samples of high loss and of low loss that are taken of each class.
        l1: penalties on the last layer's absolute values; one of each is fitted.
        epochs, batch_size, lr, weight_decay: of the last layer's training by Adam.
        inference_steps, inference_lr, inference_eps: of EIIL's inference.
        selection: what chooses: the worst inferred environment, or a rule of `methods.selection`.
    """

    erm: ErmConfig = field(default_factory=ErmConfig)
    counts: tuple[int, ...] = (50, 100, 150, 200, 250)
    l1: tuple[float, ...] = (0.0, 0.01, 0.02, 0.1, 0.2, 1.0, 2.0)
    epochs: int = 100
    batch_size: int = 32
    lr: float = 5e-4
    weight_decay: float = 1e-4
    inference_steps: int = 20_000
    inference_lr: float = 1e-2
    inference_eps: float = 1e-8
    selection: Literal[
        "worst_environment", "val_wga", "val_worst_auroc", "val_worst_class", "val_avg"
    ] = "worst_environment"

    def __post_init__(self) -> None:
        require(
            bool(self.counts) and min(self.counts) >= 1,
            f"counts must be at least 1 but got {self.counts}",
        )
        require(bool(self.l1) and min(self.l1) >= 0, f"l1 cannot be negative but got {self.l1}")
        require(self.epochs >= 1, f"epochs must be at least 1 but got {self.epochs}")
        require(self.batch_size >= 1, f"batch_size must be at least 1 but got {self.batch_size}")
        require(self.lr > 0, f"lr must be positive but got {self.lr}")
        require(self.weight_decay >= 0, f"weight_decay cannot be negative: {self.weight_decay}")
        require(self.inference_steps >= 1, "inference_steps must be at least 1")
        require(self.inference_lr > 0, "inference_lr must be positive")
        require(self.inference_eps > 0, "inference_eps must be positive")

    def quick(self) -> EvalsConfig:
        """Cut to a smoke run."""
        return replace(
            self,
            erm=self.erm.quick(),
            counts=self.counts[:1],
            epochs=min(self.epochs, 2),
            inference_steps=min(self.inference_steps, QUICK_STEPS),
        )


def extremes(losses: Tensor, y: Tensor, count: int) -> Tensor:
    """Return the positions of each class's highest and lowest losses, `count` of both.

    A class that has fewer gives what it has; of one with less than twice as many some count twice.
    """
    chosen = []
    for label in torch.unique(y):
        own = (y == label).nonzero()[:, 0]
        order = own[losses[own].argsort(descending=True, stable=True)]
        chosen += [order[:count], order.flip(0)[:count]]
    return torch.cat(chosen)


def fit_heads(
    features: Tensor, y: Tensor, start: Head, config: EvalsConfig, generator: torch.Generator
) -> Iterator[Head]:
    """Train a last layer for each penalty, all on the same batches; yield them after each epoch."""
    fits = len(config.l1)
    weight = start.weight.repeat(fits, 1, 1).requires_grad_()
    bias = start.bias.repeat(fits, 1).requires_grad_()
    solver = torch.optim.Adam([weight, bias], lr=config.lr, weight_decay=config.weight_decay)
    drop = max(1, round(RATE_DROPS * config.epochs))
    schedule = torch.optim.lr_scheduler.StepLR(solver, drop, gamma=0.5)
    penalties = torch.tensor(config.l1)
    for _ in range(config.epochs):
        for index in torch.randperm(len(y), generator=generator).split(config.batch_size):
            logits = apply_heads(features[index], Head(weight, bias))
            target = y[index, None].expand(-1, fits)
            losses = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            size = weight.abs().sum(dim=(1, 2)) + bias.abs().sum(dim=1)
            solver.zero_grad()
            # Each fit's loss has only its own layer in it, so that the sum has all gradients.
            (losses.mean(dim=0) + penalties * size).sum().backward()
            solver.step()
        schedule.step()
        yield Head(weight.detach().clone(), bias.detach().clone())


def environment_rule(
    logits: Tensor, y: Tensor, metric: str, config: EvalsConfig, start: Tensor
) -> tuple[Selection, list[int]]:
    """Infer environments from a model's outputs; return the rule of the worst, and their sizes."""
    inference = InferenceConfig(
        config.erm, "adam", config.inference_steps, config.inference_lr, config.inference_eps
    )
    found = infer_environments(scale_gradients(logits, y), start, inference)
    groups = found * logits.shape[1] + y
    rule = Selection(RULE, lambda scores: worst_group_metric(scores, y, groups, metric))
    return rule, torch.bincount(found, minlength=2).tolist()


@register(
    "evals",
    version=1,
    config=EvalsConfig,
    title="EVaLS",
    order=160,
    reference="Ghaznavi et al. 2024",
)
class Evals(SingleNetworkMethod, Method):
    """Fit the last layer on extremes of loss, and choose by environments that EIIL infers."""

    extended = True
    further_rows = MappingProxyType({"validation groups": {"selection": "val_wga"}})

    def supervision(self, config: EvalsConfig) -> Supervision:
        """Return access to the validation groups, where something is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def fits_on_validation(self, config: EvalsConfig) -> bool:
        """Return that the last layer is fitted there."""
        return True

    def stages(self, config: EvalsConfig) -> tuple[Stage, ...]:
        """Return the first model."""
        return (erm_stage(config.erm),)

    def selection_rules(self, config: EvalsConfig) -> tuple[str, ...]:
        """Return none: the rule scores last layers, not epochs of a network's training."""
        return ()

    def fit(self, task: Task, config: EvalsConfig, ctx: Context) -> Fitted:
        """Train by ERM, fit last layers on one half of validation, choose by the other."""
        network = train_erm(task, config.erm, ctx).module
        assert isinstance(network, Classifier)
        generator = torch.Generator().manual_seed(ctx.seed("evals", "halves"))
        fitted, other = (task.val.subset(part) for part in halve(len(task.val), generator))
        features, held_out = (
            predict_with(network.backbone, EvalImages(half.images, task.eval_transform))
            for half in (fitted, other)
        )
        ctx.count_passes(len(task.val))
        weight, bias = (part.detach().cpu() for part in network.head.parameters())
        losses = functional.cross_entropy(
            functional.linear(features, weight, bias), fitted.y, reduction="none"
        )
        facts: dict[str, object] = {"fitted_on": len(fitted), "chosen_on": len(other)}
        if config.selection == RULE:
            draws = torch.Generator().manual_seed(ctx.seed("evals", "assignment"))
            start = torch.randn(len(other), generator=draws)
            logits = functional.linear(held_out, weight, bias)
            rule, sizes = environment_rule(logits, other.y, task.metric, config, start)
            facts |= {"environment_sizes": sizes, "one_environment": min(sizes) == 0}
        else:
            rule = selection(config.selection, replace(task, val=other))
        best: tuple[Score, Head, dict[str, object]] | None = None
        given = features, fitted.y, losses, held_out, config, ctx, len(task.classes)
        for outputs, head, made in self._fits(*given):
            score = Score.of(rule, outputs, other.y)
            if score.beats(best[0] if best else None, rule):
                best = score, head, made
        assert best is not None
        score, head, made = best
        with torch.no_grad():
            network.head.weight.copy_(head.weight)
            network.head.bias.copy_(head.bias)
        details: dict[str, object] = {"evals": {**facts, **made}}
        return FittedClassifier(
            network, selection=Selected(rule.rule, score.value), details=details
        )

    def _fits(
        self,
        features: Tensor,
        y: Tensor,
        losses: Tensor,
        held_out: Tensor,
        config: EvalsConfig,
        ctx: Context,
        classes: int,
    ) -> Iterator[tuple[Tensor, Head, dict[str, object]]]:
        """Yield the last layer of every count, epoch and penalty, with its held-out logits."""
        for count in config.counts:
            chosen = extremes(losses, y, count)
            with isolated_randomness(ctx.seed("evals", "init", count), torch.device("cpu")):
                fresh = nn.Linear(features.shape[1], classes)
            start = Head(fresh.weight.detach(), fresh.bias.detach())
            draws = torch.Generator().manual_seed(ctx.seed("evals", "draws", count))
            heads = fit_heads(features[chosen], y[chosen], start, config, draws)
            for epoch, now in enumerate(heads):
                outputs = apply_heads(held_out, now)
                for number, l1 in enumerate(config.l1):
                    made: dict[str, object] = {"count": count, "l1": l1, "epoch": epoch}
                    yield outputs[:, number], Head(now.weight[number], now.bias[number]), made
            ctx.report(stage=f"evals: {count} of each class")

    def search_space(self, trial: Any, task: Task) -> EvalsConfig:
        """Search the count, the penalty and the rate, instead of choosing them within the fit."""
        preset: EvalsConfig = preset_config(self, task.name)
        return replace(
            preset,
            counts=(trial.suggest_int("count", 10, 500, log=True),),
            l1=(trial.suggest_float("l1", 1e-3, 2.0, log=True),),
            lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        )
