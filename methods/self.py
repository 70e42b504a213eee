"""SELF and CB-LLR: the last layer fitted on a half of validation, with class labels alone.

Paper: LaBonte et al. 2023, Towards Last-Layer Retraining for Group Robustness with Fewer
    Annotations; authors' code tmlabonte/last-layer-retraining. Both begin with a model trained on
    evenly drawn classes. SELF fine-tunes its last layer on the few samples of one half of
    validation on which an early checkpoint, or the model under dropout, disagrees with it most, or
    which it gets most wrong. CB-LLR, its control, sets the last layer back and fits it on all of
    that half. Supervision: classes of one half of validation, to fit; groups of the other half, to
    choose among the fits (T no, V yes; V no where `selection` reads none).
Deviations: features are taken once, in evaluation mode and without augmentation, where the authors
    augment images whose features are frozen. Descent has no momentum: theirs is set where the
    optimiser never reads it. Dropout is on features alone; theirs puts the whole network into
    training mode, which changes its batch-norm statistics while it scores. All combinations of
    count, rate and checkpoint are fitted within one run; of fits that the rule finds equal the more
    accurate one is kept, then the first, where theirs is the last. CB-LLR's rate is chosen as well;
    theirs is the base model's. Ties go to the sample that comes first, and a count beyond the half
    is all of it. Their first release compared the early model with itself; this is the corrected
    one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Split, Task
from datasets.config import require
from methods.afr import Head
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
from methods.groupdro import group_balanced_sampler
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName, Score, Selection, selection
from methods.training import Training, isolated_randomness

Variant = Literal[
    "es_disagreement",
    "dropout_disagreement",
    "misclassification",
    "es_misclassification",
    "random",
]

STAGE_VERSION = 1
CHECKPOINTS = (10, 20, 50)  # percent of the base model's epochs after which it is kept
QUICK_STEPS = 10


@dataclass(frozen=True)
class HeadConfig:
    """What both have in common.

    Attributes:
        base: the base model's training, on evenly drawn classes.
        lrs: rates of the last layer's descent, of which one is chosen.
        batch_size, weight_decay: of that descent.
        selection: the rule that chooses, on the half of validation that nothing is fitted on.
    """

    base: TrainConfig = field(default_factory=lambda: TrainConfig(selection="last"))
    lrs: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    batch_size: int = 32
    weight_decay: float = 1e-4
    selection: RuleName = "val_wga"

    def __post_init__(self) -> None:
        require(bool(self.lrs) and min(self.lrs) > 0, f"lrs must be positive but got {self.lrs}")
        require(self.batch_size >= 1, f"batch_size must be at least 1 but got {self.batch_size}")
        require(self.weight_decay >= 0, f"weight_decay cannot be negative: {self.weight_decay}")
        require(self.selection != "last", "selection = last says nothing of single fits")


@dataclass(frozen=True)
class SelfConfig(HeadConfig):
    """SELF's own knobs.

    Attributes:
        variant: what samples are chosen by; `es` compares with an early checkpoint.
        counts: how many samples are chosen.
        checkpoints: percent of the epochs after which the early model is taken; 10, 20 or 50.
        dropouts: shares of the features that are dropped.
        steps: of the descent.
    """

    variant: Variant = "es_disagreement"
    counts: tuple[int, ...] = (20, 100, 500)
    checkpoints: tuple[int, ...] = CHECKPOINTS
    dropouts: tuple[float, ...] = (0.5, 0.7, 0.9)
    steps: int = 250

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.counts) and min(self.counts) >= 1,
            f"counts must be at least 1 but got {self.counts}",
        )
        require(
            bool(self.checkpoints) and set(self.checkpoints) <= set(CHECKPOINTS),
            f"checkpoints must be among {CHECKPOINTS} but got {self.checkpoints}",
        )
        require(
            bool(self.dropouts) and 0 < min(self.dropouts) <= max(self.dropouts) < 1,
            f"dropouts must be between 0 and 1 but got {self.dropouts}",
        )
        require(self.steps >= 1, f"steps must be at least 1 but got {self.steps}")

    def quick(self) -> SelfConfig:
        """Cut to a smoke run."""
        return replace(self, base=self.base.quick(), steps=min(self.steps, QUICK_STEPS))


@dataclass(frozen=True)
class CbLlrConfig(HeadConfig):
    """CB-LLR's own knob: how many epochs over its half of validation its last layer is fitted."""

    epochs: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epochs >= 1, f"epochs must be at least 1 but got {self.epochs}")

    def quick(self) -> CbLlrConfig:
        """Cut to a smoke run."""
        return replace(self, base=self.base.quick(), epochs=min(self.epochs, 2))


@dataclass(frozen=True)
class Fits:
    """What fits of a last layer are made from and compared by.

    Attributes:
        network: the base model.
        early: the same network as it was at each checkpoint.
        half: the samples that are fitted on.
        features: theirs.
        held_out, held_out_y: features and classes of the other half.
        rule: scores the logits of the other half.
    """

    network: Classifier
    early: dict[int, Classifier]
    half: Split
    features: Tensor
    held_out: Tensor
    held_out_y: Tensor
    rule: Selection

    @property
    def head(self) -> Head:
        """The base model's last layer."""
        weight, bias = (part.detach().cpu() for part in self.network.head.parameters())
        return Head(weight, bias)


def halve(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split positions into two random halves, each sorted; the second may have one more."""
    order = torch.randperm(count, generator=generator)
    return order[: count // 2].sort().values, order[count // 2 :].sort().values


def disagreement(target: Tensor, final: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of the final model from a target, over K."""
    inputs, wanted = final.log_softmax(dim=1), target.log_softmax(dim=1)
    divergence = functional.kl_div(inputs, wanted, reduction="none", log_target=True)
    return divergence.mean(dim=1)


def highest(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the highest scores; of equals those that come first."""
    return scores.argsort(descending=True, stable=True)[:count]


def even_draws(y: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw batches of positions with replacement, every class that occurs equally likely."""
    chances = (1.0 / torch.bincount(y).clamp(min=1).double())[y]
    steps, batch = shape
    drawn = torch.multinomial(chances, steps * batch, replacement=True, generator=generator)
    return drawn.view(steps, batch)


def fit_head(
    features: Tensor, y: Tensor, draws: Tensor, start: Head, lr: float, weight_decay: float
) -> Head:
    """Take a step of gradient descent for each row of draws, by the mean loss of its samples."""
    weight, bias = start.weight.clone(), start.bias.clone()
    target = functional.one_hot(y, len(bias)).to(features.dtype)
    for index in draws.to(features.device):
        own = features[index]
        error = (functional.linear(own, weight, bias).softmax(dim=1) - target[index]) / len(index)
        weight_step = error.T @ own + weight_decay * weight
        bias -= lr * (error.sum(dim=0) + weight_decay * bias)
        weight -= lr * weight_step
    return Head(weight, bias)


def base_stage(config: HeadConfig) -> Stage:
    """Return the stage that trains the base model."""
    needs = Supervision(val_groups=config.base.selection in WORST_GROUP_RULES)
    return Stage("class-balanced-base", config.base, STAGE_VERSION, needs)


def train_base(task: Task, config: HeadConfig, ctx: Context) -> dict[int, Classifier]:
    """Train on evenly drawn classes; return the model after 10, 20, 50 and 100% of its epochs."""
    epochs = {mark: max(1, round(mark * config.base.epochs / 100)) for mark in CHECKPOINTS}

    def compute(task: Task, ctx: Context) -> StageResult:
        model = build_classifier(task, ctx, "class-balanced-base")
        training = Training(
            model,
            task,
            config.base,
            ctx,
            name="class-balanced-base",
            sampler=group_balanced_sampler(task.train.y),
            keep_after=tuple(epochs.values()),
        )
        training.run()
        final = dict(model.state_dict())
        states = {100: final} | {m: training.kept.get(e, final) for m, e in epochs.items()}
        tensors = {f"{m}.{name}": v.clone() for m, own in states.items() for name, v in own.items()}
        return StageResult(tensors)

    tensors = ctx.stage(base_stage(config), task, compute).tensors
    models = {}
    for mark in (*CHECKPOINTS, 100):
        models[mark] = build_classifier(task, ctx, "class-balanced-base")
        start = f"{mark}."
        own = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        models[mark].load_state_dict(own)
    return models


class HeadOnHalf(SingleNetworkMethod, Method):
    """What both do: halve validation, fit last layers on one half, choose by the other."""

    extended = True
    further_rows = MappingProxyType({"no validation groups": {"selection": "val_worst_class"}})

    def supervision(self, config: HeadConfig) -> Supervision:
        """Return access to the validation groups, where something is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def fits_on_validation(self, config: HeadConfig) -> bool:
        """Return that the last layer is fitted there."""
        return True

    def stages(self, config: HeadConfig) -> tuple[Stage, ...]:
        """Return the base model, which both share."""
        return (base_stage(config),)

    def selection_rules(self, config: HeadConfig) -> tuple[str, ...]:
        """Return none: the rule scores last layers, not epochs of a training."""
        return ()

    def prepare(self, task: Task, config: HeadConfig, ctx: Context) -> Fits:
        """Train the base model and take the features of both halves of validation."""
        early = train_base(task, config, ctx)
        network = early.pop(100)
        generator = torch.Generator().manual_seed(ctx.seed("self", "halves"))
        fitted, other = (task.val.subset(part) for part in halve(len(task.val), generator))
        features, held_out = (
            predict_with(network.backbone, EvalImages(half.images, task.eval_transform))
            for half in (fitted, other)
        )
        ctx.count_passes(len(task.val))
        rule = selection(config.selection, replace(task, val=other))
        return Fits(network, early, fitted, features, held_out, other.y, rule)

    def conclude(
        self, fits: Fits, made: Iterator[tuple[Head, dict[str, object]]]
    ) -> FittedClassifier:
        """Keep the best last layer; each comes with what it was made by."""
        best: tuple[Score, Head, dict[str, object]] | None = None
        for head, facts in made:
            logits = functional.linear(fits.held_out, head.weight, head.bias)
            score = Score.of(fits.rule, logits, fits.held_out_y)
            if score.beats(best[0] if best else None, fits.rule):
                best = score, head, facts
        assert best is not None
        score, head, facts = best
        with torch.no_grad():
            fits.network.head.weight.copy_(head.weight)
            fits.network.head.bias.copy_(head.bias)
        details = {**facts, "fitted_on": len(fits.half), "chosen_on": len(fits.held_out)}
        chosen = Selected(fits.rule.rule, score.value)
        return FittedClassifier(fits.network, selection=chosen, details={self.name: details})


@register(
    "self",
    version=1,
    config=SelfConfig,
    title="SELF",
    order=140,
    reference="LaBonte et al. 2023",
)
class SelfSelective(HeadOnHalf):
    """Fine-tune the last layer on what the model and an earlier one disagree about."""

    def fit(self, task: Task, config: SelfConfig, ctx: Context) -> Fitted:
        """Train the base model, choose samples, fine-tune on them in every way, keep the best."""
        fits = self.prepare(task, config, ctx)
        return self.conclude(fits, self._fits(fits, task, config, ctx))

    def _fits(
        self, fits: Fits, task: Task, config: SelfConfig, ctx: Context
    ) -> Iterator[tuple[Head, dict[str, object]]]:
        classes = set(range(len(task.classes)))
        for source, scores in self._scores(fits, task, config, ctx):
            for count, lr in product(config.counts, config.lrs):
                chosen = highest(scores, count)
                y = fits.half.y[chosen]
                seed = ctx.seed("self", "draws", source, count)
                generator = torch.Generator().manual_seed(seed)
                draws = even_draws(y, (config.steps, config.batch_size), generator)
                features = fits.features[chosen]
                head = fit_head(features, y, draws, fits.head, lr, config.weight_decay)
                facts: dict[str, object] = {
                    "variant": config.variant,
                    "scored_by": source,
                    "count": len(chosen),
                    "lr": lr,
                    "missing_classes": sorted(classes - set(y.tolist())),
                }
                yield head, facts

    def _scores(
        self, fits: Fits, task: Task, config: SelfConfig, ctx: Context
    ) -> Iterator[tuple[str, Tensor]]:
        """Score the half that is fitted on, in every way that the variant is to be tried."""
        features, y, head = fits.features, fits.half.y, fits.head
        final = functional.linear(features, head.weight, head.bias)
        if config.variant == "misclassification":
            yield "final", functional.cross_entropy(final, y, reduction="none")
        if config.variant == "random":
            generator = torch.Generator().manual_seed(ctx.seed("self", "random"))
            yield "random", torch.rand(len(y), generator=generator)
        for share in config.dropouts if config.variant == "dropout_disagreement" else ():
            name = f"dropout {share:g}"
            with isolated_randomness(ctx.seed("self", name), ctx.device):
                dropped = functional.dropout(features, share)
            yield name, disagreement(functional.linear(dropped, head.weight, head.bias), final)
        for mark in config.checkpoints if config.variant.startswith("es_") else ():
            images = EvalImages(fits.half.images, task.eval_transform)
            early = predict_with(fits.early[mark], images)
            ctx.count_passes(len(y))
            if config.variant == "es_disagreement":
                yield f"checkpoint {mark}%", disagreement(early, final)
            else:
                yield f"checkpoint {mark}%", functional.cross_entropy(early, y, reduction="none")

    def search_space(self, trial: Any, task: Task) -> SelfConfig:
        """Search the authors' knobs, instead of choosing them within the fit."""
        preset: SelfConfig = preset_config(self, task.name)
        return replace(
            preset,
            lrs=(trial.suggest_float("lr", 1e-4, 1e-1, log=True),),
            counts=(trial.suggest_int("count", 20, 1000, log=True),),
            checkpoints=(trial.suggest_categorical("checkpoint", list(CHECKPOINTS)),),
        )


@register(
    "cbllr",
    version=1,
    config=CbLlrConfig,
    title="CB-LLR",
    order=142,
    reference="LaBonte et al. 2023",
)
class CbLlr(HeadOnHalf):
    """Fit the last layer anew on evenly drawn classes of held-out data."""

    def fit(self, task: Task, config: CbLlrConfig, ctx: Context) -> Fitted:
        """Train the base model, fit its last layer from scratch at every rate, keep the best."""
        fits = self.prepare(task, config, ctx)
        return self.conclude(fits, self._fits(fits, task, config, ctx))

    def _fits(
        self, fits: Fits, task: Task, config: CbLlrConfig, ctx: Context
    ) -> Iterator[tuple[Head, dict[str, object]]]:
        with isolated_randomness(ctx.seed("cbllr", "init"), ctx.device):
            fresh = nn.Linear(fits.features.shape[1], len(task.classes))
        start = Head(fresh.weight.detach(), fresh.bias.detach())
        y, size = fits.half.y, config.batch_size
        steps = config.epochs * -(-len(y) // size)
        generator = torch.Generator().manual_seed(ctx.seed("cbllr", "draws"))
        draws = even_draws(y, (steps, size), generator)
        for lr in config.lrs:
            head = fit_head(fits.features, y, draws, start, lr, config.weight_decay)
            yield head, {"lr": lr, "steps": steps}

    def search_space(self, trial: Any, task: Task) -> CbLlrConfig:
        """Search the rate, instead of choosing it within the fit, and the weight decay."""
        preset: CbLlrConfig = preset_config(self, task.name)
        return replace(
            preset,
            lrs=(trial.suggest_float("lr", 1e-4, 1e-1, log=True),),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1e-2, log=True),
        )
