"""Choosing the epoch to keep: named rules over the validation outputs of the model in training.

A rule that needs group labels asks the task for them, and so fails at once for a method whose tier
does not grant them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.nn import functional

from datasets.base import Task
from datasets.errors import UsageError
from methods.metrics import accuracy, auroc, margin_score, worst_group_metric


@dataclass(frozen=True)
class Selection:
    """A rule: how to score the validation outputs, and which of two scores is better."""

    rule: str
    score: Callable[[Tensor], float]
    higher_is_better: bool = True
    always_last: bool = False
    latest_of_equals: bool = False

    def better(self, new: float, best: float) -> bool:
        """Return whether `new` replaces `best`; any number replaces an undefined (NaN) one."""
        if self.always_last or (math.isnan(best) and not math.isnan(new)):
            return True
        if self.latest_of_equals and new == best:
            return True
        return new > best if self.higher_is_better else new < best


@dataclass(frozen=True)
class Score:
    """How good one of many fits is: a rule's value, and accuracy where values are equal.

    With many groups the worst of them is often 0 for fits that differ by far.
    """

    value: float
    average: float

    @classmethod
    def of(cls, rule: Selection, logits: Tensor, y: Tensor) -> Score:
        """Score the outputs on samples of classes `y`."""
        return cls(rule.score(logits), accuracy(logits.argmax(1), y))

    def beats(self, best: Score | None, rule: Selection) -> bool:
        """Return whether this replaces the best so far, if there is one."""
        if best is None or rule.better(self.value, best.value):
            return True
        return self.value == best.value and self.average > best.average


RuleName = Literal[
    "val_avg", "val_loss", "val_auroc", "val_wga", "val_worst_auroc", "val_worst_class", "last"
]
RULES: tuple[str, ...] = get_args(RuleName)
WORST_GROUP_RULES = ("val_wga", "val_worst_auroc")  # these read validation groups


def selection(rule: str, task: Task) -> Selection:
    """Build the rule of that name for a task."""
    if rule.endswith("auroc") and len(task.classes) != 2:
        raise UsageError(f"{rule} needs two classes but {task.name} has {len(task.classes)}")
    y = task.val.y
    if rule == "val_avg":
        return Selection(rule, lambda logits: accuracy(logits.argmax(1), y))
    if rule == "last":
        return Selection(rule, lambda logits: accuracy(logits.argmax(1), y), always_last=True)
    if rule == "val_loss":
        return Selection(
            rule, lambda logits: float(functional.cross_entropy(logits, y)), higher_is_better=False
        )
    if rule == "val_auroc":
        return Selection(rule, lambda logits: auroc(margin_score(logits), y))
    if rule == "val_worst_class":  # as worst groups go where no group is known
        return Selection(rule, lambda logits: worst_group_metric(logits, y, y, "wga"))
    if rule in WORST_GROUP_RULES:
        groups, metric = task.val.groups, "auroc" if rule == "val_worst_auroc" else "wga"
        return Selection(rule, lambda logits: worst_group_metric(logits, y, groups, metric))
    raise UsageError(f"unknown selection rule '{rule}'", f"choose from {', '.join(RULES)}")
