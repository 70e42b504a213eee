"""Optimisers and schedules, described by a frozen config and built from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.optim import lr_scheduler

from datasets.config import require
from methods.selection import RuleName

Schedule = lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau | None


@dataclass(frozen=True)
class TrainConfig:
    """How one network is trained.

    Attributes:
        scheduler: `none`, `step` (times `decay` at each of `milestones`), `plateau` (times `decay`
            after `plateau_patience` epochs without improvement) or `cosine` (to zero).
        patience: stop after this many epochs without improvement; 0 never stops early.
        selection: which epoch is kept; see `methods.selection`.
    """

    epochs: int = 100
    batch_size: int = 128
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    scheduler: Literal["none", "step", "plateau", "cosine"] = "none"
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    plateau_patience: int = 5
    patience: int = 0
    selection: RuleName = "val_avg"

    def __post_init__(self) -> None:
        require(self.epochs >= 1, f"epochs must be at least 1 but got {self.epochs}")
        require(self.batch_size >= 1, f"batch_size must be at least 1 but got {self.batch_size}")
        require(0 < self.lr < float("inf"), f"lr must be positive but got {self.lr}")
        require(
            0 <= self.weight_decay < float("inf"),
            f"weight_decay cannot be negative but got {self.weight_decay}",
        )
        require(0 <= self.momentum < 1, f"momentum must be in [0, 1) but got {self.momentum}")
        require(0 < self.decay <= 1, f"decay must be in (0, 1] but got {self.decay}")
        require(
            self.plateau_patience >= 0,
            f"plateau_patience cannot be negative but got {self.plateau_patience}",
        )
        require(self.patience >= 0, f"patience cannot be negative but got {self.patience}")
        require(
            self.scheduler != "step" or bool(self.milestones),
            "scheduler = step needs milestones",
        )

    def quick(self) -> Self:
        """Cut to a smoke run."""
        return replace(self, epochs=min(self.epochs, 2))


def build_optimizer(
    config: TrainConfig, groups: Iterable[dict[str, Any]] | nn.Module
) -> torch.optim.Optimizer:
    """Build the optimiser; parameter groups may bring rates of their own."""
    parameters: Any = groups.parameters() if isinstance(groups, nn.Module) else list(groups)
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    options["fused"] = True  # one kernel for all parameters, on a CPU as well as on a GPU
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **options)


def build_schedule(
    config: TrainConfig, optimizer: torch.optim.Optimizer, higher_is_better: bool
) -> Schedule:
    """Build the schedule, stepped once an epoch."""
    if config.scheduler == "step":
        return lr_scheduler.MultiStepLR(optimizer, list(config.milestones), gamma=config.decay)
    if config.scheduler == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.epochs)
    if config.scheduler == "plateau":
        # A factor of 1 means no decay, which torch refuses to be told.
        if config.decay == 1:
            return None
        mode: Literal["max", "min"] = "max" if higher_is_better else "min"
        return lr_scheduler.ReduceLROnPlateau(
            optimizer, mode=mode, factor=config.decay, patience=config.plateau_patience
        )
    return None


def step_schedule(schedule: Schedule, value: float) -> None:
    """Advance the schedule by one epoch."""
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(value)
    elif schedule is not None:
        schedule.step()
