"""Example Method: ERM with softened targets. Say here what yours does, in a line.

Paper: who, when and what, and where the authors' code is; here Szegedy et al. 2016.
Supervision: none (T no, V no). Name the group labels it reads, if any, and return them below.
Deviations: none. List what differs from the paper or its code, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from methods.backbones import FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import Context, Fitted, Method, Supervision, register
from methods.optimisation import TrainConfig
from methods.training import Batch, Training


@dataclass(frozen=True)
class ExampleMethodConfig(TrainConfig):
    """The settings; `TrainConfig` brings the optimiser's, and what cuts them to a smoke run.

    Each can be given as `--set example_method.smoothing=0.2`. Runs are told apart by them: a
    setting that comes later is declared with `datasets.config.added`, so that no stored run is
    lost.

    Attributes:
        smoothing: share of the target that is spread over all classes.
    """

    smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.smoothing < 1, f"smoothing must be in [0, 1) but got {self.smoothing}")


class ExampleMethodLoss(nn.Module):
    """The objective, a module so that what it remembers is kept with the checkpoints.

    `batch.index` are the positions of the samples in the training split, for what is known of each.
    """

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch."""
        return functional.cross_entropy(
            model(batch.images), batch.y, label_smoothing=self.smoothing
        )


# Raise `version` when what it computes changes: its runs are then others than those before.
@register("example_method", version=1, config=ExampleMethodConfig, title="Example Method")
class ExampleMethod(SingleNetworkMethod, Method):
    """Train one network on softened targets.

    `SingleNetworkMethod` loads kept models again; a method that ends with another model than a
    `FittedClassifier` has a `load_fitted` of its own.
    """

    def supervision(self, config: ExampleMethodConfig) -> Supervision:
        """Return what it may see of groups; what is not granted here is hidden from `fit`."""
        return Supervision(train_groups=False, val_groups=False)

    def fit(self, task: Task, config: ExampleMethodConfig, ctx: Context) -> Fitted:
        """Train on the task: `task.train`, `task.val`, their `y`, and `groups` where granted.

        All randomness comes from `ctx.generator(name)` or `ctx.seed(name)`, and all training goes
        through `Training`, so that a run that is killed goes on to the very same end. A first stage
        that other runs can share goes through `ctx.stage` (see `methods/jtt.py`).
        """
        model = build_classifier(task, ctx, "example_method")
        loss = ExampleMethodLoss(config.smoothing)
        # Named like the method, since the last training is looked for by that name.
        selected = Training(model, task, config, ctx, name="example_method", objective=loss).run()
        return FittedClassifier(model, selection=selected)

    def search_space(self, trial: Any, task: Task) -> ExampleMethodConfig:
        """Draw settings for `bench tune`."""
        return replace(
            ExampleMethodConfig(),
            lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            smoothing=trial.suggest_float("smoothing", 0.0, 0.3),
        )
