"""What a method is: its supervision, its configuration, `fit`, and what `fit` returns.

A method file holds a frozen config dataclass and a class under `@register`. It sees a `Task` and a
`Context`; it knows nothing of files, devices, tables or schedulers. Methods outside this repository
register through the entry-point group `bench.methods`.
"""

from __future__ import annotations

import importlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from datasets.base import BackboneSpec, Task
from datasets.dataset import outside
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
    "methods.nct.builder",
    "methods.nct.plus",
    "methods.balanced",
    "methods.afr",
    "methods.xrm",
    "methods.self",
    "methods.lff",
    "methods.evals",
    "methods.dpe",
)
NAME = re.compile("[a-z][a-z0-9_]{,39}")  # run ids, file names and `--set` keys are made of it
RESERVED = ("all", "backbone")  # what else stands there
STAGE_NAME = re.compile("[a-z0-9][a-z0-9_.-]{,59}")  # a folder is called so


@dataclass(frozen=True)
class Supervision:
    """What a method may know of groups (T and V in the paper), and whether it exposes them (I)."""

    train_groups: bool = False
    val_groups: bool = False
    interpretable: bool = False

    def covers(self, other: Supervision) -> bool:
        """Return whether every group label that `other` grants is granted here as well."""
        return self.train_groups >= other.train_groups and self.val_groups >= other.val_groups


@dataclass(frozen=True)
class Stage:
    """A piece of a fit that is computed once for all runs that ask for the same one.

    Attributes:
        name: of its kind.
        config: all settings that its result depends on, as a dataclass.
        version: raised when what is computed changes.
        needs: the group labels it reads; its task is narrowed to them.
    """

    name: str
    config: Any
    version: int
    needs: Supervision = field(default_factory=Supervision)

    def __post_init__(self) -> None:
        if STAGE_NAME.fullmatch(self.name) is None:
            raise UsageError(
                f"'{self.name}' cannot be the name of a stage",
                "use up to 60 lower-case letters, digits, hyphens, dots and underscores",
            )


@dataclass(frozen=True)
class StageResult:
    """What a stage leaves behind: tensors, and small facts about how they came about."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """Which model a fit kept, and by what.

    Attributes:
        rule: what candidates were scored by.
        value: the score of the one that was kept.
        epoch: the epoch it is from, counted from 0; None where no epochs were compared.
        epochs_run: how many epochs there were; None where no epochs were compared.
    """

    rule: str
    value: float
    epoch: int | None = None
    epochs_run: int | None = None


class Context(Protocol):
    """What the harness lends to a fit."""

    device: torch.device

    def seed(self, *names: str | int) -> int:
        """Derive the seed that belongs to a name; equal names give equal seeds."""
        ...

    def generator(self, *names: str | int) -> torch.Generator:
        """Make a generator on the run's device, seeded by name."""
        ...

    def stage(
        self, stage: Stage, task: Task, compute: Callable[[Task, Context], StageResult]
    ) -> StageResult:
        """Compute a piece of work once for every run that asks for the same one.

        `compute` receives the task narrowed to what the stage needs, and a context of its own.
        """
        ...

    def history(self, where: dict[str, object], **row: float) -> None:
        """Keep one line of the training history; `where` names it (stage, epoch, ...)."""
        ...

    def count_passes(self, images: int) -> None:
        """Count images that went through the network."""
        ...

    def report(self, **progress: object) -> None:
        """Report how far the work has come."""
        ...

    def audit(
        self,
        where: dict[str, object],
        val_outputs: Tensor,
        module: nn.Module,
        *,
        last: bool = False,
    ) -> None:
        """Show the model to the harness; nothing comes back. `last`: no epoch will follow.

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
        selection: which model was kept, and by what.
        details: what else belongs in the record, under one key of the method's own.
        partition: the group each sample of a split was inferred to belong to, if any.
        partition_split: which split that is.
        val_partition: the same for validation, where a method trains on parts of the training split
            and puts validation samples into them as well.
        snapshots: the model at earlier iterations, for methods that go through several.
        last_epoch: the same model with the weights of its training's last epoch, where those that
            were selected may be of an earlier one; for diagnostics.
        tree_key: for trees, the key in `details` under which there is a list `iterations`, one
            entry a snapshot.
    """

    tree_key: ClassVar[str] = ""
    val_partition: Tensor | None = None

    def __init__(
        self,
        module: nn.Module,
        *,
        selection: Selected | None = None,
        details: dict[str, object] | None = None,
        partition: Tensor | None = None,
        partition_split: Literal["train", "val"] = "train",
        snapshots: tuple[Fitted, ...] = (),
        last_epoch: Fitted | None = None,
    ) -> None:
        self.module = module
        self.selection = selection
        self.details = details or {}
        self.partition = partition
        self.partition_split = partition_split
        self.snapshots = snapshots
        self.last_epoch = last_epoch

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Score the classes of a batch of transformed images."""

    def leaf(self, images: Tensor) -> Tensor | None:
        """Return the latent group of each image, where the method has one at inference."""
        return None

    def leaf_logits(self, images: Tensor) -> Tensor | None:
        """Score every latent group of a batch, in the order of `leaf_names`, where there are any.

        A group that no image can be assigned to scores minus infinity.
        """
        return None

    def level_logits(self, images: Tensor) -> Tensor | None:
        """Score the nodes of every level of a tree, level after level, for descent from its root.

        Each node has two children; one that no image can be assigned to scores minus infinity.
        """
        return None

    def leaf_names(self) -> tuple[str, ...]:
        """Return the names of the latent groups that `leaf` numbers."""
        return ()


@dataclass(frozen=True)
class NetworkSpec:
    """What has to be known to build a network again: its backbone, its input, its classes."""

    backbone: BackboneSpec
    channels: int
    codes: tuple[str, ...]


class Method(ABC):
    """One method; instances hold no state.

    Attributes:
        title: how tables and figures spell it.
        order: its place in tables, lowest first.
        reference: the paper it is from, in short.
        tree: whether what it fits is a tree with leaves and iterations.
        slices: where it partitions samples, what a part is, and how samples that it was not
            trained on get into one, in sentences for people who read of slices.
        takes_rows: whether it runs on rows of features as well as on images.
        extended: whether it stands in tables of the whole field alone, and not in the main table
            and what belongs to that.
        further_rows: settings under which tables of the whole field have another row of it, by what
            that row is called.
        distribution: the installed package that brought it, or else the module that registered it;
            None for those of this repository.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    config_type: ClassVar[type[Any]]
    title: ClassVar[str]
    order: ClassVar[int]
    reference: ClassVar[str]
    tree: ClassVar[bool] = False
    slices: ClassVar[str] = ""
    takes_rows: ClassVar[bool] = True
    extended: ClassVar[bool] = False
    further_rows: ClassVar[Mapping[str, Mapping[str, str]]] = MappingProxyType({})
    distribution: str | None = None

    @property
    def training_name(self) -> str:
        """Name of the last training, or what the names of its parts begin with."""
        return self.name

    def version_of(self, config: Any) -> int:
        """Return the version of the method under these settings.

        A change that concerns some settings only raises the version under those alone.
        """
        return self.version

    def supervision(self, config: Any) -> Supervision:
        """Return what the method, so configured, may see."""
        return Supervision()

    def fits_on_validation(self, config: Any) -> bool:
        """Return whether it fits something to validation samples, beyond choosing by them."""
        return False

    def stages(self, config: Any) -> tuple[Stage, ...]:
        """Return the stages that a fit asks for, in the order in which they are finished.

        A launcher can then have a stage that several runs share made once, before the others start.
        """
        return ()

    def selection_rules(self, config: Any) -> tuple[str, ...]:
        """Return the rules that may score the epochs of the last training, if a fit ends with one.

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

    def load_fitted(self, spec: NetworkSpec, config: Any, weights: dict[str, Tensor]) -> Fitted:
        """Build the fitted model again from kept weights."""
        raise UsageError(f"models of {self.name} cannot be loaded again")


METHODS: dict[str, Method] = {}
MethodType = TypeVar("MethodType", bound=type[Method])


def register(
    name: str,
    *,
    version: int,
    config: type[Any],
    title: str = "",
    order: int = 100,
    reference: str = "",
) -> Callable[[MethodType], MethodType]:
    """Add a method under a name; raise `version` when its behaviour changes.

    Args:
        name: lower-case letters, digits and underscores, a letter first.
        version: part of what makes two runs the same run.
        config: the class of its settings.
        title: how tables and figures spell it; the name by default.
        order: its place in tables, lowest first; the paper's methods have 10 to 95.
        reference: the paper it is from, in short.
    """
    if NAME.fullmatch(name) is None or name in RESERVED:
        raise UsageError(
            f"'{name}' cannot be the name of a method",
            "use up to 40 lower-case letters, digits and underscores, beginning with a letter, and "
            f"none of {', '.join(RESERVED)}",
        )

    def add(method: MethodType) -> MethodType:
        known = METHODS.get(name)
        if known is not None and type(known).__qualname__ != method.__qualname__:
            raise UsageError(
                f"'{name}' is the name of two methods: in {type(known).__module__} and in "
                f"{method.__module__}",
                "rename one of them",
            )
        method.name, method.version, method.config_type = name, version, config
        method.title, method.order, method.reference = title or name, order, reference
        METHODS[name] = method()
        METHODS[name].distribution = outside(method, "methods")
        return method

    return add


def load_methods() -> dict[str, Method]:
    """Import the methods of this package and of every plug-in, and return all by name."""
    for module in BUILT_IN:
        importlib.import_module(module)
    for entry in _plug_ins(tuple(sys.path)):
        before = dict(METHODS)
        distribution = entry.dist.name if entry.dist is not None else None
        try:
            entry.load()
        except Exception as error:
            cause = error.message if isinstance(error, UsageError) else repr(error)
            raise UsageError(
                f"the plug-in '{entry.name}' ({entry.value}) of "
                f"{distribution or 'an unknown distribution'} cannot be loaded: {cause}",
                f"repair it, or remove it (pip uninstall {distribution or entry.module})",
            ) from error
        for name, method in METHODS.items():
            # Its module may have been imported before, by the user or in unpickling.
            inside = f"{type(method).__module__}.".startswith(f"{entry.module}.")
            if inside or before.get(name) is not method:
                method.distribution = distribution or outside(type(method), "methods")
    return METHODS


@cache
def _plug_ins(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Look for plug-ins once for every search path, since every installed package is read."""
    return tuple(entry_points(group="bench.methods"))


def get_method(name: str) -> Method:
    """Find a method, or suggest the nearest name."""
    known = load_methods()
    if name in known:
        return known[name]
    raise UsageError(
        f"unknown method '{name}'{did_you_mean(name, known)}",
        f"choose from {', '.join(known)}, or all",
    )
