"""NCT's knobs: the paper's hyperparameters, and a switch for each reading and ablation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

from datasets.config import require
from methods.nct.routing import RoutingImages
from methods.nct.tree import HeadKinds
from methods.optimisation import TrainConfig

Strategy = Literal["class_weights", "downsample", "geomean"]
PwgaGroups = Literal["predicted", "routed"]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class NctConfig:
    """How a tree is grown; values given per iteration repeat their last one.

    Attributes:
        iterations: the deepest tree to train.
        first_head: phi of iteration 1, `linear` or `mlp`; neither has batch-norm.
        heads: which children are MLPs from iteration 2 on.
        lr_decay_factor: divides both rates once per iteration.
        phase1_ratio: share of an iteration's epochs that trains the new heads alone.
        scope: `standard` (both phases), `head_only` or `full` (phase 2 only).
        checkpoint: which epochs compete to be the iteration's result, those of its last `phase`
            (phase 2, where there is one) or of the whole `iteration`.
        patience, phase2_patience: epochs without improvement before a phase stops; 0 never stops.
        min_samples: hard children with fewer training samples are merged; 0 merges none.
        weight_cap: largest node weight under class-weight sampling.
        z: of the depth rule's tolerance; `depth_rule = false` takes the deepest tree.
        pwga: groups of pWGA_2, by `predicted` leaf (the printed equation) or by `routed` label (the
            paper's numbers; docs/protocol.md), 2 y + [iteration 1 was wrong] at every depth.
        min_group: smallest group that counts in pWGA_2.
    """

    iterations: int = 3
    hidden: int = 32
    dropout: float = 0.0
    first_head: Literal["linear", "mlp"] = "linear"
    heads: HeadKinds = "asymmetric"
    optimizer: Literal["sgd", "adam", "adamw"] = "adamw"
    backbone_lr: float = 1e-3
    head_lr: float = 1e-3
    lr_decay_factor: float = 1.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: tuple[int, ...] = (1, 50, 50)
    phase1_ratio: tuple[float, ...] = (0.0, 0.3, 0.3)
    scope: Literal["standard", "head_only", "full"] = "standard"
    scheduler: Literal["none", "step", "plateau"] = "plateau"
    decay: float = 0.5
    plateau_patience: int = 5
    milestones: tuple[int, ...] = ()
    checkpoint: Literal["phase", "iteration"] = "phase"
    patience: int = 15
    phase2_patience: int = 15
    sampling: Strategy = "geomean"
    aux_weight: float = 1.0
    weight_cap: float = 40.0
    min_samples: int = 20
    z: float = 1.96
    depth_rule: bool = True
    routing_images: RoutingImages = "augmented"
    pwga: PwgaGroups = "routed"
    min_group: int = 1

    def __post_init__(self) -> None:
        require(self.iterations >= 1, f"iterations must be at least 1 but got {self.iterations}")
        require(self.hidden >= 1, f"hidden must be at least 1 but got {self.hidden}")
        require(0 <= self.dropout < 1, f"dropout must be in [0, 1) but got {self.dropout}")
        require(
            0 < self.backbone_lr < float("inf"),
            f"backbone_lr must be positive but got {self.backbone_lr}",
        )
        require(self.lr_decay_factor >= 1, "lr_decay_factor must be at least 1")
        require(self.aux_weight >= 0, f"aux_weight cannot be negative but got {self.aux_weight}")
        require(self.weight_cap > 0, f"weight_cap must be positive but got {self.weight_cap}")
        require(self.min_samples >= 0, f"min_samples cannot be negative: {self.min_samples}")
        require(
            bool(self.epochs) and min(self.epochs) >= 1, f"epochs must be positive: {self.epochs}"
        )
        require(
            bool(self.phase1_ratio) and all(0 <= ratio <= 1 for ratio in self.phase1_ratio),
            f"phase1_ratio must be between 0 and 1 but got {self.phase1_ratio}",
        )
        require(self.z >= 0, f"z cannot be negative but got {self.z}")
        require(self.min_group >= 1, f"min_group must be at least 1 but got {self.min_group}")
        for phase in (1, 2):
            self.phase(1, phase)  # checks what training in general demands

    def quick(self) -> Self:
        """Cut to a smoke run."""
        return replace(self, epochs=tuple(min(epochs, 2) for epochs in self.epochs))

    def phase_epochs(self, iteration: int) -> tuple[int, int]:
        """Return the epochs of phase 1 and of phase 2."""
        total = _at(self.epochs, iteration)
        ratio = {"head_only": 1.0, "full": 0.0}.get(self.scope, _at(self.phase1_ratio, iteration))
        first = round(ratio * total)
        return first, total - first

    def rates(self, iteration: int) -> tuple[float, float]:
        """Return the learning rates of the backbone and of the heads."""
        shrink = self.lr_decay_factor ** (iteration - 1)
        return self.backbone_lr / shrink, self.head_lr / shrink

    def phase(self, iteration: int, phase: int) -> TrainConfig:
        """Describe one phase's training."""
        return TrainConfig(
            epochs=max(1, self.phase_epochs(iteration)[phase - 1]),
            batch_size=self.batch_size,
            optimizer=self.optimizer,
            lr=self.rates(iteration)[1],
            weight_decay=self.weight_decay,
            scheduler=self.scheduler,
            decay=self.decay,
            plateau_patience=self.plateau_patience,
            milestones=self.milestones,
            patience=self.patience if phase == 1 else self.phase2_patience,
        )


def _at(values: tuple[Number, ...], iteration: int) -> Number:
    return values[min(iteration, len(values)) - 1]
