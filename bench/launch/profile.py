"""Cluster profiles: what a job asks of SLURM, read from a TOML file.

A profile has keys for every job and, under `[[override]]`, keys for some methods or datasets; of
several that fit a job, later ones win. `slurm/h100.toml` explains every key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan import Job
from bench.resources import profiles_folder
from datasets.catalogue import get_dataset
from datasets.config import build_config, coerce
from datasets.errors import UsageError
from methods.base import get_method
from methods.optimisation import demand


@dataclass(frozen=True)
class Resources:
    """What one array task asks for; jobs that ask for the same share an array.

    Attributes:
        partition, account, qos, constraint, exclude, gres: as sbatch has them; empty leaves them to
            the cluster.
        gpus: GPUs of a task.
        cpus: cores of a task.
        memory_gb: memory of a task; 0 leaves it to the cluster.
        minutes: time limit; a run that needs longer is requeued and goes on.
        signal_seconds: how long before the limit a task is told to stop.
        parallel: tasks of an array that may run at once.
        pack: runs that share a task and its GPU, each in a process of its own.
        requeues: how many times a task may run into its time limit before it is given up.
        setup: shell commands before the job, such as loading modules.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: str = ""
    gres: str = ""
    gpus: int = 0
    cpus: int = 1
    memory_gb: float = 0.0
    minutes: int = 60
    signal_seconds: int = 60
    parallel: int = 64
    pack: int = 1
    requeues: int = 10
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("cpus", "minutes", "signal_seconds", "parallel", "pack"):
            demand(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("gpus", "memory_gb", "requeues"):
            demand(getattr(self, name) >= 0, f"{name} cannot be negative")
        demand(
            not (self.gpus and self.gres), "gpus and gres are two ways to say one thing: give one"
        )

    @property
    def device(self) -> str:
        """Name the device that jobs find."""
        return "cuda" if self.gpus or self.gres.startswith("gpu") else "cpu"


@dataclass(frozen=True)
class Override:
    """Changes for the jobs of some methods on some datasets; an empty list means all."""

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    changes: Mapping[str, Any]

    def fits(self, job: Job) -> bool:
        """Tell whether a job is meant."""
        return (not self.methods or job.method in self.methods) and (
            not self.datasets or job.dataset in self.datasets
        )


@dataclass(frozen=True)
class Profile:
    """A cluster as a user may use it."""

    name: str
    base: Mapping[str, Any]
    overrides: tuple[Override, ...] = ()

    def resources(self, job: Job) -> Resources:
        """Work out what a job asks for."""
        values = dict(self.base)
        for override in self.overrides:
            if override.fits(job):
                values |= override.changes
        return build_config(Resources, values, self.name)


def read_profile(path: Path) -> Profile:
    """Read and check a profile: any wrong key, name or value is an error here."""
    if not path.exists() and path.parent in (Path(), Path("slurm")):
        path = profiles_folder() / path.name  # one that came with the package, from any folder
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"there is no cluster profile {path}", f"start from one in {profiles_folder()}"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not a readable profile: {error}", "correct it") from error
    name, entries = path.name, content.pop("override", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageError(f"{name}: override must be a list", "write [[override]] above its keys")
    overrides = []
    for entry in entries:
        who = {
            key: coerce(entry.pop(key, []), tuple[str, ...], f"{name}: override.{key}")
            for key in ("methods", "datasets")
        }
        for method in who["methods"]:
            get_method(method)
        for dataset in who["datasets"]:
            get_dataset(dataset)
        overrides.append(Override(who["methods"], who["datasets"], entry))
    profile = Profile(name, content, tuple(overrides))
    build_config(Resources, content, name)
    for override in overrides:
        build_config(Resources, {**content, **override.changes}, f"{name}: override")
    return profile
