"""The audit: the harness's one-way look at the model after each epoch.

It needs the test split and every group label while `fit` runs, so it lives where the fit does not:
in the process that holds the data. The model comes to it, and nothing but "go on" goes back. The
fit waits while the audit looks, so that the model is not changed under it, and that time is not
counted as the method's.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

from torch import Tensor, nn

from bench.context import AUDIT_CODE
from bench.evaluation import evaluate, robust_metric
from bench.process import CpuClock
from datasets.base import LoadedData
from datasets.config import Values
from datasets.errors import UsageError
from datasets.files import append_line
from datasets.images import MappedImages
from methods.metrics import class_scores
from methods.prediction import EvalImages, predict_with

AUDITED = ("wga", "avg", "worst_class", "auroc")
"""What is kept of every epoch, with the dataset's own robust metric beside it."""

EVERY_FOR_PHOTOS = 5
"""Epochs from one look to the next where the images are photos, whose test pass costs the most."""


def parse_interval(schedule: str) -> float:
    """Read `--audit`: how many epochs lie from one look to the next.

    Infinitely many is the last epoch alone, and 0 is no look at all.
    """
    named = {"all": 1.0, "last": math.inf, "off": 0.0}
    if schedule in named:
        return named[schedule]
    if not (schedule.isascii() and schedule.isdigit()) or int(schedule) < 1:
        raise UsageError(
            f"--audit must be all, last, off or a number of epochs but got '{schedule}'",
            "e.g. --audit 5",
        )
    return float(schedule)


def default_interval(data: LoadedData) -> float:
    """Return how often a model is looked at by default: every epoch, but not for photos."""
    photos = isinstance(data.splits["train"].images, MappedImages)
    return EVERY_FOR_PHOTOS if photos else 1.0


class Auditor:
    """Scores models on validation and test with all group labels."""

    def __init__(self, data: LoadedData, folder: Path, code: str = "") -> None:
        """Prepare to write rows to `<folder>/<run or stage>.jsonl`, by models of that code."""
        self.data = data
        self.folder = folder
        self.code = code
        self.test = EvalImages(data.splits["test"].images, data.facts.eval_transform)
        self.names = dict.fromkeys((*AUDITED, robust_metric(data.facts)))

    def look(self, key: str, where: Values, val_outputs: Tensor, module: nn.Module) -> None:
        """Write down how the model does as it is now."""
        row, began = {**where, **({AUDIT_CODE: self.code} if self.code else {})}, CpuClock.now()
        outputs = {"val": val_outputs, "test": predict_with(module, self.test)}
        for split, found in outputs.items():
            scores = class_scores(found, len(self.data.facts.classes))
            metrics = evaluate(self.data, split, scores)
            row |= {
                f"audit_{split}_{name}": metrics.get(name)
                for name in self.names
                if name in metrics.values
            }
        row["audit_seconds"] = (CpuClock.now() - began).cpu
        append_line(self.folder / f"{key}.jsonl", row)


def without_hooks(module: nn.Module) -> nn.Module:
    """Copy a module without its hooks: what is shown to the audit is the network alone."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return twin
