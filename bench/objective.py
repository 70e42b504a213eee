"""What tuning maximises, and what it is allowed to know of a trial.

Each supervision tier has its objective: a method with validation groups is tuned by its validation
worst group; an unsupervised method by the worst group of its own making where it has such a figure
(NCT's pWGA_2, the worst cluster of GEORGE and ExMap), and by its plain validation metric where it
has none. The objective gets a `TrialView`, from which nothing else can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from datasets.base import GroupLabelsHidden
from datasets.errors import BenchError, UsageError
from methods.selection import RULES

WITHOUT_GROUPS = ("avg", "auroc")  # metrics that no group label enters
WITH_TRAIN_GROUPS = ("avg_train_weighted",)
BY_TRUE_GROUPS = ("val_wga", "val_worst_auroc")
BY_NO_GROUPS = ("val_avg", "val_auroc", "last")


class TestDataHidden(BenchError):
    """Something in tuning asked for test data."""

    kind = "test_data_hidden"
    __test__ = False  # not a test, whatever pytest makes of its name


@dataclass(frozen=True)
class Target:
    """The figure a study maximises, and its value in one trial."""

    name: str
    value: float


def granted_metrics(metrics: Mapping[str, Any], supervision: Mapping[str, bool]) -> dict[str, Any]:
    """Keep the validation metrics that a tier may know."""
    return {
        name: value
        for name, value in metrics.items()
        if name in WITHOUT_GROUPS
        or (supervision["val_groups"] and name not in WITH_TRAIN_GROUPS)
        or (supervision["val_groups"] and supervision["train_groups"])
    }


class TrialView:
    """A finished trial as its objective may see it.

    What the tier hides is absent rather than private: the view is made from copies of what is
    granted, so that no attribute or reference leads to the rest. Asking for it raises.
    """

    __slots__ = ("_val", "metric", "rule", "val_groups", "value")

    def __init__(self, record: Mapping[str, Any], metric: str) -> None:
        tier = record["supervision"]
        selection = record.get("selection") or {}
        self.metric = metric
        self.val_groups = bool(tier["val_groups"])
        self.rule = str(selection.get("rule", ""))
        self.value = float("nan" if (v := selection.get("value")) is None else v)
        self._val = granted_metrics(record["metrics"]["val"], tier)

    def val(self, name: str) -> float:
        """Give a validation metric, or raise `GroupLabelsHidden` where the tier hides it."""
        if name not in self._val:
            raise GroupLabelsHidden(
                f"the validation metric '{name}' needs group labels that are hidden from this "
                "method, and so from its tuning",
                f"visible are {', '.join(sorted(self._val))}, and what the fit reports itself",
            )
        return float(self._val[name])

    @property
    def test(self) -> NoReturn:
        """Raise: no tuning looks at test data."""
        raise TestDataHidden(
            "tuning does not look at test data", "use validation metrics, or what the fit reports"
        )


def steers(rule: str, supervision: Mapping[str, bool]) -> bool:
    """Tell whether a rule's values are the figure that its tier is tuned by; higher is better."""
    if rule not in RULES:  # the method's own figure
        return True
    return rule in (BY_TRUE_GROUPS if supervision["val_groups"] else BY_NO_GROUPS)


def target(view: TrialView) -> Target:
    """Give the figure that the view's tier is tuned by; higher is better."""
    own = bool(view.rule) and view.rule not in RULES  # the method's own figure, under its tier
    if own or (view.val_groups and view.rule in BY_TRUE_GROUPS):
        found = Target(view.rule, view.value)
    elif view.val_groups:
        name = "auroc_worst_patch_pair" if view.metric == "auroc" else "wga"
        found = Target(f"val_{name}", view.val(name))
    elif view.metric == "auroc":
        found = Target("val_auroc", view.val("auroc"))
    else:
        found = Target("val_avg", view.val("avg"))
    if math.isnan(found.value):
        raise UsageError(
            f"the trial has no value of {found.name}", "the metric is undefined on so little data"
        )
    return found
