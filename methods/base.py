"""What a method is: its supervision, its configuration, `fit`, and what `fit` returns.

A method file holds a frozen config dataclass and a class under `@register`. It sees a `Task` and a
`Context`; it knows nothing of files, devices, tables or schedulers. Methods outside this repository
register through the entry-point group `bench.methods`.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from datasets.base import BackboneSpec, Task
from datasets.errors import UsageError, did_you_mean

BUILT_IN = (
    "methods.erm",
    "methods.groupdro",
    "methods.jtt",
    "methods.eiil",
    "methods.dfr",
    "methods.cnc",
    "methods.george",
    "methods.exmap",
    "methods.nct.method",
    "methods.nct.plus",
)


@dataclass(frozen=True)
class Supervision:
    """What a method may know of groups (T and V in the paper), and whether it exposes them (I)."""

    train_groups: bool = False
    val_groups: bool = False
    interpretable: bool = False


@dataclass(frozen=True)
class StageResult:
    """What a stage leaves behind: tensors, and small facts about how they came about."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedStage:
    """A stage that a fit is going to ask for, named before the fit runs."""

    name: str
    config: Any
    version: int


class Context(Protocol):
    """What the harness lends to a fit.

    Attributes:
        cores: how many this run may keep busy, by processes of its own as well; results must not
            depend on it.
    """

    device: torch.device
    cores: int

    def seed(self, *names: str | int) -> int:
        """Derive the seed that belongs to a name; equal names give equal seeds."""
        ...

    def generator(self, *names: str | int) -> torch.Generator:
        """Make a generator on the run's device, seeded by name."""
        ...

    def stage(
        self, name: str, config: Any, compute: Callable[[Context], StageResult], version: int
    ) -> StageResult:
        """Compute a piece of work once for every job that asks for the same one.

        Raise `version` when what is computed changes.
        """
        ...

    def history(self, where: dict[str, Any], **row: float) -> None:
        """Keep one line of the training history; `where` names it (stage, epoch, ...)."""
        ...

    def count_passes(self, images: int) -> None:
        """Count images that went through the network."""
        ...

    def report(self, **progress: Any) -> None:
        """Tell whoever watches how far the work has come."""
        ...

    def audit(self, where: dict[str, Any], val_outputs: Tensor, module: nn.Module) -> None:
        """Let the harness look at the model; nothing comes back.

        Outputs are one column a class, or as many for each class as it has leaves, in order.
        """
        ...

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a checkpoint of the current stage, atomically."""
        ...

    def restore(self, name: str) -> dict[str, Any] | None:
        """Read back a checkpoint of the current stage, if there is one."""
        ...


class Fitted(ABC):
    """A trained classifier, and the partition it discovered where it has one.

    Attributes:
        module: the network, for keeping its weights.
        partition: the group each sample of a split was inferred to belong to, if any.
        partition_split: which split that is.
        facts: what else belongs in the record, by name.
        snapshots: the model at earlier iterations, for methods that go through several.
    """

    module: nn.Module
    partition: Tensor | None = None
    partition_split: Literal["train", "val"] = "train"
    facts: dict[str, Any]
    snapshots: tuple[Fitted, ...] = ()

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Score the classes of a batch of transformed images."""

    def leaf(self, images: Tensor) -> Tensor | None:
        """Name the latent group of each image, where the method has one at inference."""
        return None


@dataclass(frozen=True)
class Shape:
    """What has to be known to build a network again: its backbone, its input, its classes."""

    backbone: BackboneSpec
    channels: int
    codes: tuple[str, ...]


class Method(ABC):
    """One method; instances hold no state."""

    name: ClassVar[str]
    version: ClassVar[int]
    config_type: ClassVar[type[Any]]

    @property
    def training_name(self) -> str:
        """Name of the last training, or what the names of its parts begin with."""
        return self.name

    def supervision(self, config: Any) -> Supervision:
        """State what the method, so configured, may see."""
        return Supervision()

    def shared_stage(self, config: Any) -> SharedStage | None:
        """Name the stage that other runs may share, so that a cluster can have it made once.

        By default it is the ERM that the config carries under `erm`.
        """
        as_stage = getattr(getattr(config, "erm", None), "as_stage", None)
        stage: SharedStage | None = as_stage() if as_stage is not None else None
        return stage

    def scored_by(self, config: Any) -> tuple[str, ...]:
        """Name the rules that may score the epochs of the last training, if a fit ends with one.

        By default it is the config's own `selection`. That training is called `training_name`.
        """
        rule = getattr(config, "selection", None)
        return () if rule is None else (str(rule),)

    @abstractmethod
    def fit(self, task: Task, config: Any, ctx: Context) -> Fitted:
        """Train on the task."""

    @abstractmethod
    def search_space(self, trial: Any, task: Task) -> Any:
        """Draw a configuration from an Optuna trial."""

    def revive(self, shape: Shape, config: Any, weights: dict[str, Tensor]) -> Fitted:
        """Build the fitted model again from kept weights; methods with a plain network do."""
        raise UsageError(f"models of {self.name} cannot be loaded again")


METHODS: dict[str, Method] = {}
MethodType = TypeVar("MethodType", bound=type[Method])


def register(name: str, *, version: int, config: type[Any]) -> Callable[[MethodType], MethodType]:
    """Add a method under a name; raise `version` when its behaviour changes."""

    def add(method: MethodType) -> MethodType:
        known = METHODS.get(name)
        if known is not None and type(known).__qualname__ != method.__qualname__:
            raise UsageError(
                f"'{name}' is the name of two methods: in {type(known).__module__} and in "
                f"{method.__module__}",
                "rename one of them",
            )
        method.name, method.version, method.config_type = name, version, config
        METHODS[name] = method()
        return method

    return add


def load_methods() -> dict[str, Method]:
    """Import the methods of this package and of every plug-in, and return all by name."""
    for module in BUILT_IN:
        importlib.import_module(module)
    for entry in _plug_ins(tuple(sys.path)):
        entry.load()
    return METHODS


@cache
def _plug_ins(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Look for plug-ins once for every search path: it takes a look at each installed package."""
    return tuple(entry_points(group="bench.methods"))


def get_method(name: str) -> Method:
    """Find a method, or suggest the nearest name."""
    if name in METHODS:  # looking for plug-ins takes a while, and a grid asks thousands of times
        return METHODS[name]
    known = load_methods()
    if name in known:
        return known[name]
    raise UsageError(
        f"unknown method '{name}'{did_you_mean(name, known)}",
        f"choose from {', '.join(known)}, or all",
    )
