"""XRM: cross-risk minimisation, environments from the mistakes of two networks that swap data.

Paper: Pezeshki et al. 2024, Discovering Environments with XRM; authors' code facebookresearch/XRM.
    Each training sample belongs to one of two twin networks. Both are trained together, each on its
    own samples; a sample's label turns into what the other twin takes it for, with a probability
    that grows with that twin's confidence. A sample that either twin finally gets wrong, by its
    original label, is in environment 1, in training and in validation; GroupDRO over class x
    environment follows. Supervision: none (T no, V no): the epoch is chosen by the worst inferred
    group of validation.
Deviations: hyperparameters are the preset's, where the authors draw ten for each phase and take
    those that flip the most labels, then those with the best worst inferred group. Lengths are
    epochs instead of steps, and validation is scored once an epoch instead of every 50 steps. Twins
    of small networks are trained from scratch, on augmented images as everything here is; on photos
    they are linear layers on frozen features, as the authors' are. `head_only` trains the second
    phase's last layer alone, as the authors do on Waterbirds, but on augmented images. With
    `balanced`, where a preset has it, the second phase draws groups evenly; theirs never does.
    Where a class has a single environment the authors discard the trial; here the run goes on and
    its record says `degenerate`. At the authors' last commit images cannot be trained on, because a
    setting is missing; what is reproduced is the code before it (7957455).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from methods.backbones import build_classifier
from methods.base import Context, Fitted, Stage, StageResult, register
from methods.groupdro import GroupDroConfig, RobustMethod, train_groupdro
from methods.metrics import worst_group_metric
from methods.optimisation import TrainConfig, build_optimizer
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import Selection
from methods.training import Batch, Training, in_batches, isolated_randomness

STAGE_VERSION = 1
TWINS = 2
FLIPPED = "flipped_labels"
RULE = "worst_environment"


@dataclass(frozen=True)
class TwinConfig(TrainConfig):
    """How the twins are trained.

    Attributes:
        selection: the last epoch is kept, and scored by the share of labels that were flipped.
        frozen: train linear layers, from zero, on the features of the network as it is built.
    """

    selection: Literal["flipped_labels"] = "flipped_labels"  # type: ignore[assignment]
    frozen: bool = False


@dataclass(frozen=True)
class XrmConfig(GroupDroConfig):
    """GroupDRO's knobs, which are those of the second phase, and the twins'.

    Attributes:
        selection: the one rule there is: the worst inferred group of validation.
        head_only: train the last layer alone in the second phase.
        twins: the first phase.
    """

    selection: Literal["worst_environment"] = "worst_environment"  # type: ignore[assignment]
    head_only: bool = False
    twins: TwinConfig = field(default_factory=TwinConfig)

    def quick(self) -> XrmConfig:
        """Cut to a smoke run."""
        return replace(super().quick(), twins=self.twins.quick())


class Twins(nn.Module):
    """Two networks side by side; for each class its logit in the first, then in the second."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, images: Tensor) -> Tensor:
        """Compute both twins' logits."""
        return torch.stack([self.first(images), self.second(images)], dim=2).flatten(1)


class CrossRisk(nn.Module):
    """The loss of the twins on labels that each flips for the other.

    Attributes:
        labels: of all training samples, as they are now.
        owner: the twin, 0 or 1, that each sample trains.
    """

    labels: Tensor
    owner: Tensor

    def __init__(self, y: Tensor, owner: Tensor, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.register_buffer("labels", y.clone())
        self.register_buffer("owner", owner)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Sum the classes' mean losses of the own twin; then let the other twin flip labels."""
        both = model(batch.images).unflatten(1, (-1, TWINS))
        own, labels = self.owner[batch.index, None] == 0, self.labels[batch.index]
        inside = torch.where(own, both[:, :, 0], both[:, :, 1])
        outside = torch.where(own, both[:, :, 1], both[:, :, 0]).detach()
        loss = class_balanced_sum(inside, labels, self.classes)
        # By what the other twin says before this batch's step.
        confidence, answer = outside.float().softmax(dim=1).max(dim=1)
        flips = torch.rand_like(confidence) < flip_probability(confidence, self.classes)
        self.labels[batch.index] = torch.where(flips, answer, labels)
        return loss


def class_balanced_sum(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Add up the mean cross-entropies of the classes that occur among the labels."""
    losses = functional.cross_entropy(logits, labels, reduction="none")
    members = functional.one_hot(labels, classes).to(losses.dtype)
    return ((losses @ members) / members.sum(dim=0).clamp(min=1)).sum()


def flip_probability(confidence: Tensor, classes: int) -> Tensor:
    """Map confidence to the chance of a flip: from 1/K, a guess, to 1, it goes from 0 to 1."""
    return (confidence - 1 / classes) * classes / (classes - 1)


def mistaken(outputs: Tensor, y: Tensor) -> Tensor:
    """Return environment 1 where either twin is wrong, else 0."""
    answers = outputs.unflatten(1, (-1, TWINS)).argmax(dim=1)
    found: Tensor = (answers != y[:, None]).any(dim=1).long()
    return found


def is_degenerate(environments: Sequence[tuple[Tensor, Tensor]], classes: int) -> bool:
    """Return whether some class has a single environment in a split, given with its classes."""
    return any(
        len(torch.unique(found[y == label])) < TWINS
        for found, y in environments
        for label in range(classes)
    )


def environment_stage(config: XrmConfig) -> Stage:
    """Return the stage that trains the twins and finds the environments."""
    return Stage("xrm-environments", config.twins, STAGE_VERSION)


def find_environments(task: Task, config: XrmConfig, ctx: Context) -> StageResult:
    """Train the twins; return the environments of both splits, and how many labels were flipped."""

    def compute(task: Task, ctx: Context) -> StageResult:
        y = task.train.y
        coins = ctx.generator("xrm", "owners")
        owner = torch.randint(TWINS, (len(y),), generator=coins, device=ctx.device)
        loss = CrossRisk(y, owner, len(task.classes))
        outputs = (_frozen_twins if config.twins.frozen else _twins)(task, config.twins, loss, ctx)
        train, val = outputs
        found = {"train": mistaken(train, y), "val": mistaken(val, task.val.y)}
        return StageResult(found, {"flipped": int((loss.labels.cpu() != y).sum())})

    return ctx.stage(environment_stage(config), task, compute)


def _twins(task: Task, config: TwinConfig, loss: CrossRisk, ctx: Context) -> list[Tensor]:
    """Train networks from scratch and return their outputs on both splits."""
    networks = (build_classifier(task, ctx, f"xrm-twin-{number}") for number in range(TWINS))
    twins, y = Twins(*networks), task.train.y

    def flipped(outputs: Tensor) -> float:
        return 100.0 * float((loss.labels.cpu() != y).double().mean())

    rule = Selection(FLIPPED, flipped, always_last=True)
    Training(twins, task, config, ctx, name="xrm-twins", objective=loss, select=rule).run()
    ctx.count_passes(len(task.train) + len(task.val))
    splits = task.train, task.val
    return [predict_with(twins, EvalImages(part.images, task.eval_transform)) for part in splits]


def _frozen_twins(task: Task, config: TwinConfig, loss: CrossRisk, ctx: Context) -> list[Tensor]:
    """Train linear layers on fixed features and return their outputs on both splits."""
    backbone = build_classifier(task, ctx, "xrm-twin-0").backbone
    features = [
        predict_with(backbone, EvalImages(part.images, task.eval_transform)).to(ctx.device)
        for part in (task.train, task.val)
    ]
    ctx.count_passes(len(task.train) + len(task.val))
    layers = [nn.Linear(backbone.dim, len(task.classes)) for _ in range(TWINS)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    twins, loss = Twins(*layers).to(ctx.device), loss.to(ctx.device)
    optimizer = build_optimizer(config, twins)
    y = task.train.y.to(ctx.device)
    for epoch in range(config.epochs):
        generator = ctx.generator("xrm-twins", "sample", epoch)
        order = torch.randperm(len(y), generator=generator, device=ctx.device)
        with isolated_randomness(ctx.seed("xrm-twins", "dropout", epoch), ctx.device):
            for index in in_batches(order, config.batch_size):
                optimizer.zero_grad(set_to_none=True)
                loss(twins, Batch(features[0][index], y[index], index)).backward()
                optimizer.step()
        ctx.report(stage=f"xrm-twins: epoch {epoch + 1}/{config.epochs}")
    with torch.no_grad():
        return [twins(rows).cpu() for rows in features]


@register(
    "xrm", version=1, config=XrmConfig, title="XRM", order=130, reference="Pezeshki et al. 2024"
)
class Xrm(RobustMethod):
    """Infer environments from what twins get wrong, then be robust to them."""

    extended = True
    slices = (
        "Slice 1 has the samples that one of two twin networks got wrong, slice 0 the rest, in "
        "training and in validation; test samples are in none. That slice 1 is hard is how it was "
        "made."
    )

    def stages(self, config: XrmConfig) -> tuple[Stage, ...]:
        """Return the twins with the environments they lead to."""
        return (environment_stage(config),)

    def fit(self, task: Task, config: XrmConfig, ctx: Context) -> Fitted:
        """Find the environments and run GroupDRO over class x environment."""
        found = find_environments(task, config, ctx)
        train, val = found.tensors["train"], found.tensors["val"]
        classes, y = len(task.classes), task.val.y
        groups, val_groups = train * classes + task.train.y, val * classes + y
        rule = Selection(
            RULE,
            lambda logits: worst_group_metric(logits, y, val_groups, task.metric),
            latest_of_equals=True,
        )
        fitted = train_groupdro(
            task, groups, config, ctx, "xrm", select=rule, head_only=config.head_only
        )
        fitted.partition, fitted.val_partition = train, val
        fitted.details["xrm"] = {
            "flipped_labels": found.facts["flipped"],
            "environment_sizes": torch.bincount(train, minlength=TWINS).tolist(),
            "val_environment_sizes": torch.bincount(val, minlength=TWINS).tolist(),
            "group_sizes": torch.bincount(groups, minlength=TWINS * classes).tolist(),
            "degenerate": is_degenerate([(train, task.train.y), (val, y)], classes),
        }
        return fitted

    def search_space(self, trial: Any, task: Task) -> XrmConfig:
        """Search the authors' ranges of both phases; rates beyond them, for small networks."""
        preset: XrmConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-6, 1e-3, log=True),
            eta=trial.suggest_float("eta", 1e-3, 1e-1, log=True),
            twins=replace(preset.twins, lr=trial.suggest_float("twin_lr", 1e-5, 1e-2, log=True)),
        )
