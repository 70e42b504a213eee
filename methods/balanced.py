"""RWY, SUBY, RWG, SUBG: ERM on samples drawn evenly over classes (Y) or over groups (G).

Paper: Idrissi et al. 2022, Simple Data Balancing Achieves Competitive Worst-Group-Accuracy;
    authors' code facebookresearch/BalancingGroups. RW* draw as many samples an epoch as there are,
    with replacement; SUB* draw one subset at the start, in which every class or group is as large
    as the smallest. The loss is the plain mean. Supervision: groups of validation, to choose the
    epoch (V yes; no where `selection` reads none); those of training for RWG and SUBG (T yes) and
    not for RWY and SUBY (T no).
Deviations: classes and groups without a training sample are left out; in the authors' code the
    subset is empty then. Images are augmented as for every method here; the authors augment none.
    The subset is drawn from a random stream of its own, so that it is another one for each seed. Of
    equally good epochs the last is kept, as theirs. Values that the authors selected were never
    published: presets start from the grid they searched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from datasets.base import Task
from methods.backbones import FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import Context, Fitted, Method, Supervision, register
from methods.groupdro import group_balanced_sampler
from methods.optimisation import TrainConfig
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName, selection
from methods.training import Sampler, Training


@dataclass(frozen=True)
class BalancedConfig(TrainConfig):
    """How the network is trained; balancing has no knobs of its own."""

    selection: RuleName = "val_wga"


def smallest_subset(cells: Tensor, generator: torch.Generator) -> Tensor:
    """Draw positions, as many of every cell as the smallest one has; empty cells do not count."""
    sizes = torch.bincount(cells)
    quota = int(sizes[sizes > 0].min())
    order = torch.randperm(len(cells), generator=generator)
    chosen = [order[cells[order] == cell][:quota] for cell in range(len(sizes))]
    return torch.cat(chosen)


def shuffled_subset(positions: Tensor) -> Sampler:
    """Visit the same samples in every epoch, once each, in random order."""

    def draw(epoch: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(len(positions), generator=generator, device=generator.device)
        return positions.to(generator.device)[order]

    return draw


class BalancedMethod(SingleNetworkMethod, Method):
    """ERM on balanced draws.

    Attributes:
        by_groups: whether groups are balanced; else classes.
        in_subset: whether one subset is kept; else samples are drawn again every epoch.
    """

    extended = True
    further_rows = MappingProxyType({"no validation groups": {"selection": "val_worst_class"}})
    by_groups: ClassVar[bool]
    in_subset: ClassVar[bool]

    def supervision(self, config: BalancedConfig) -> Supervision:
        """Return access to the groups that are balanced, and to those the epoch is chosen by."""
        return Supervision(
            train_groups=self.by_groups, val_groups=config.selection in WORST_GROUP_RULES
        )

    def fit(self, task: Task, config: BalancedConfig, ctx: Context) -> Fitted:
        """Train one network on balanced draws."""
        cells = task.train.groups if self.by_groups else task.train.y
        sizes = torch.bincount(cells)
        drawn = len(cells)
        if self.in_subset:
            generator = torch.Generator().manual_seed(ctx.seed(self.name, "subset"))
            positions = smallest_subset(cells, generator)
            sampler, drawn = shuffled_subset(positions), len(positions)
        else:
            sampler = group_balanced_sampler(cells)
        model = build_classifier(task, ctx, self.name)
        rule = replace(selection(config.selection, task), latest_of_equals=True)
        selected = Training(
            model, task, config, ctx, name=self.name, sampler=sampler, select=rule
        ).run()
        facts = {"sizes": sizes.tolist(), "samples_per_epoch": drawn}
        return FittedClassifier(model, selection=selected, details={"balanced": facts})

    def search_space(self, trial: Any, task: Task) -> BalancedConfig:
        """Search the authors' ranges, and rates beyond them for small networks."""
        preset: BalancedConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            batch_size=trial.suggest_categorical("batch_size", [16, 32, 64, 128]),
        )


@register(
    "rwy", version=1, config=BalancedConfig, title="RWY", order=110, reference="Idrissi et al. 2022"
)
class Rwy(BalancedMethod):
    """Draw classes evenly."""

    by_groups, in_subset = False, False


@register(
    "suby",
    version=1,
    config=BalancedConfig,
    title="SUBY",
    order=112,
    reference="Idrissi et al. 2022",
)
class Suby(BalancedMethod):
    """Cut every class to the size of the smallest."""

    by_groups, in_subset = False, True


@register(
    "rwg", version=1, config=BalancedConfig, title="RWG", order=114, reference="Idrissi et al. 2022"
)
class Rwg(BalancedMethod):
    """Draw groups evenly."""

    by_groups, in_subset = True, False


@register(
    "subg",
    version=1,
    config=BalancedConfig,
    title="SUBG",
    order=116,
    reference="Idrissi et al. 2022",
)
class Subg(BalancedMethod):
    """Cut every group to the size of the smallest."""

    by_groups, in_subset = True, True
