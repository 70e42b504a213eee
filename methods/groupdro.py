"""GroupDRO: distributionally robust optimisation over known groups.

Paper: Sagawa et al. 2020, Distributionally Robust Neural Networks for Group Shifts; authors' code
    kohpangwei/group_DRO. Recipes of GEORGE's authors (HazyResearch/hidden-stratification), whose
    subclass GroupDRO is the row of the NCT paper; they also define the variant over pairs of
    subclasses that ISIC uses. Supervision: groups of training and of validation (T yes, V yes).
Deviations: group weights are kept as logarithms (the same arithmetic, without overflow); the size
    adjustment C / sqrt(n) never enters the reported loss. UMNIST's groups are the NCT paper's
    three, where GEORGE's are the ten digits. GEORGE selects by accuracies re-weighted to training
    shares; a worst group is the same with and without. GEORGE's code can adjust pairs to sizes only
    where one subclass is malignant; more of them are adjusted alike.
Version 2, only where pairs are adjusted: by the size of the benign group, as GEORGE's authors do;
    version 1 took the size of the whole pair (docs/protocol.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.backbones import (
    FittedClassifier,
    SingleNetworkMethod,
    build_classifier,
    train_head_only,
)
from methods.base import Context, Fitted, Method, Supervision, register
from methods.optimisation import TrainConfig
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName, Selection
from methods.training import Batch, Sampler, Training


@dataclass(frozen=True)
class GroupDroConfig(TrainConfig):
    """GroupDRO's own knobs beside the optimiser's.

    Attributes:
        eta: step of the group weights.
        adjustment: C of the size adjustment C / sqrt(n_g); of a pair, n_g is the negative group's.
        balanced: draw samples so that every group is met equally often.
        pairs: weigh pairs of a negative and a positive group, as GEORGE does where AUROC counts.
    """

    selection: RuleName = "val_wga"
    eta: float = 0.01
    adjustment: float = 0.0
    balanced: bool = False
    pairs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eta > 0, f"eta must be positive but got {self.eta}")
        require(self.adjustment >= 0, f"adjustment cannot be negative but got {self.adjustment}")


class RobustLoss(nn.Module):
    """Weighted sum of group losses, the weights growing exponentially with each group's loss.

    `members[u, g]` is 1 where unit u contains group g; a unit is a group, or a pair of them. The
    size adjustment of a unit goes by the size of those of its groups that `adjusted_by` marks, by
    default of all.
    """

    log_weights: Tensor
    members: Tensor
    groups: Tensor
    offset: Tensor

    def __init__(
        self,
        groups: Tensor,
        members: Tensor,
        eta: float,
        adjustment: float,
        adjusted_by: Tensor | None = None,
    ) -> None:
        super().__init__()
        counted = members if adjusted_by is None else adjusted_by
        sizes = counted @ torch.bincount(groups, minlength=members.shape[1]).float()
        self.eta = eta
        self.register_buffer("log_weights", torch.zeros(len(members)))
        self.register_buffer("groups", groups, persistent=False)
        self.register_buffer("members", members, persistent=False)
        self.register_buffer("offset", adjustment / sizes.sqrt(), persistent=False)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Update the weights with this batch's losses, then weigh the losses with them."""
        losses = functional.cross_entropy(model(batch.images), batch.y, reduction="none")
        # A matrix product, because scattered additions on a GPU come out in no fixed order.
        belongs = self.members[:, self.groups[batch.index]].to(losses.dtype)
        means = belongs @ losses / belongs.sum(dim=1).clamp(min=1)  # 0 for one not in the batch
        with torch.no_grad():
            self.log_weights += self.eta * (means.float() + self.offset)
            self.log_weights -= self.log_weights.logsumexp(dim=0)
        return (self.log_weights.exp() * means).sum()


def group_balanced_sampler(groups: Tensor) -> Sampler:
    """Draw as many samples as there are, with replacement, every group equally likely."""
    chances = (1.0 / torch.bincount(groups).clamp(min=1).double())[groups]

    def draw(epoch: int, generator: torch.Generator) -> Tensor:
        return torch.multinomial(
            chances.to(generator.device), len(groups), replacement=True, generator=generator
        )

    return draw


def train_groupdro(
    task: Task,
    groups: Tensor,
    config: GroupDroConfig,
    ctx: Context,
    name: str,
    select: Selection | None = None,
    *,
    head_only: bool = False,
) -> FittedClassifier:
    """Train a fresh network against the worst of the given training groups.

    Groups without samples are left out: they would take weight without ever having a loss. With
    `head_only` the backbone stays as it was built, its batch-norm statistics included.
    """
    present, groups = torch.unique(groups, return_inverse=True)
    model = build_classifier(task, ctx, name)
    units, negatives = _units(task, groups, config.pairs)
    selected = Training(
        model,
        task,
        config,
        ctx,
        name=name,
        sampler=group_balanced_sampler(groups) if config.balanced else None,
        objective=RobustLoss(groups, units, config.eta, config.adjustment, negatives),
        select=select,
        **(train_head_only(model) if head_only else {}),
    ).run()
    details: dict[str, object] = {"robust_groups": present.tolist()}
    return FittedClassifier(model, selection=selected, details=details)


class RobustMethod(SingleNetworkMethod, Method):
    """A method that minimises this loss, which has changed where pairs are adjusted."""

    def version_of(self, config: Any) -> int:
        """Return one version more where pairs are adjusted to their sizes."""
        adjusted: bool = config.pairs and config.adjustment > 0
        return self.version + adjusted


def _units(task: Task, groups: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Return which groups belong to which unit of the robust loss, and by which it is adjusted.

    A row a unit. A pair goes by its negative group's size: that is what tells pairs apart whose
    positive group is the same, and what GEORGE's authors do.
    """
    count = int(groups.max()) + 1
    if not pairs:
        return torch.eye(count), torch.eye(count)
    sizes = torch.bincount(groups, minlength=count)
    positive = torch.bincount(groups, weights=task.train.y.double(), minlength=count) / sizes
    require(
        len(task.classes) == 2 and bool(((positive == 0) | (positive == 1)).all()),
        f"pairs = true needs two classes and groups within a class, which {task.name} has not",
    )
    negatives, positives = (positive == 0).nonzero()[:, 0], (positive == 1).nonzero()[:, 0]
    units = [torch.zeros(count) for _ in range(len(negatives) * len(positives))]
    for unit, pair in zip(units, torch.cartesian_prod(negatives, positives), strict=True):
        unit[pair] = 1.0
    found = torch.stack(units)
    return found, found * (positive == 0)


@register(
    "groupdro",
    version=1,
    config=GroupDroConfig,
    title="Group DRO",
    order=10,
    reference="Sagawa et al. 2020",
)
class GroupDro(RobustMethod):
    """Minimise the loss of the worst group."""

    def supervision(self, config: GroupDroConfig) -> Supervision:
        """Return access to groups; to validation's where the model is chosen by them."""
        return Supervision(train_groups=True, val_groups=config.selection in WORST_GROUP_RULES)

    def fit(self, task: Task, config: GroupDroConfig, ctx: Context) -> Fitted:
        """Train one network against the worst of the true groups."""
        return train_groupdro(task, task.train.groups, config, ctx, "groupdro")

    def search_space(self, trial: Any, task: Task) -> GroupDroConfig:
        """Search the rates and the adjustment; the rest is the preset's."""
        preset: GroupDroConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            eta=trial.suggest_float("eta", 1e-3, 1e-1, log=True),
            adjustment=trial.suggest_float("adjustment", 0.0, 5.0),
        )
