"""Cluster profiles: what a job asks of SLURM, read from a TOML file.

A profile has keys for every job and, under `[[override]]`, keys for some methods or datasets; of
several that fit a job, later ones win. `slurm/h100.toml` explains every key.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.job import Job
from bench.resources import profiles_folder
from datasets.catalogue import get_dataset
from datasets.config import Values, build_config, coerce, require
from datasets.errors import UsageError
from methods.base import get_method


@dataclass(frozen=True)
class Resources:
    """What one array task asks for; jobs that ask for the same share an array.

    The first six are as sbatch has them. Those and `memory_gb` can be left to the cluster: "" or 0.
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
    minutes: int = 60  # a run that needs longer is requeued and goes on
    signal_seconds: int = 60  # how long before the limit a task is told to stop
    parallel: int = 64  # tasks of an array that may run at once
    pack: int = 1  # runs that share a task and its GPU, each in a process of its own
    requeues: int = 10  # how often a task may run into its time limit before it is given up
    setup: tuple[str, ...] = ()  # shell commands before the job, such as loading modules
    python: str = ""  # the interpreter of tasks, where it is not that of the launcher
    container: str = ""  # an image that tasks run in
    container_command: str = "apptainer exec"  # what runs a command in an image

    def __post_init__(self) -> None:
        for name in ("cpus", "minutes", "signal_seconds", "parallel", "pack"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("gpus", "memory_gb", "requeues"):
            require(getattr(self, name) >= 0, f"{name} cannot be negative")
        require(bool(self.container_command.strip()), "container_command cannot be empty")
        both = self.gpus and self.gres
        require(not both, "gpus and gres are two ways to say one thing: give one")

    @property
    def device(self) -> str:
        """The device that jobs find."""
        return "cuda" if self.gpus or self.gres.startswith("gpu") else "cpu"

    def python_command(self, folders: Iterable[Path]) -> str | None:
        """Return the shell command that starts Python in a task; none for the launcher's own.

        Args:
            folders: what tasks read and write; a container sees them under the same paths.
        """
        given = os.path.expanduser(os.path.expandvars(self.python))
        if not self.container:
            return shlex.quote(given) if given else None
        seen = ",".join(dict.fromkeys(map(str, folders)))
        gpu = ["--nv"] if self.device == "cuda" else []
        image = os.path.expanduser(os.path.expandvars(self.container))
        words = [*shlex.split(self.container_command), *gpu, "--bind", seen, image]
        return shlex.join([*words, given or "python3"])


@dataclass(frozen=True)
class Override:
    """Changes for the jobs of some methods on some datasets; an empty list means all."""

    methods: tuple[str, ...]
    datasets: tuple[str, ...]
    changes: Values


@dataclass(frozen=True)
class Profile:
    """A cluster as a user may use it."""

    name: str
    base: Values
    overrides: tuple[Override, ...] = ()

    def resources(self, job: Job) -> Resources:
        """Return what a job asks for."""
        values = dict(self.base)
        for each in self.overrides:
            meant = not each.methods or job.method in each.methods
            if meant and (not each.datasets or job.dataset in each.datasets):
                values |= each.changes
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
    build_config(Resources, content, name)
    overrides = []
    for entry in entries:
        methods, datasets = (
            coerce(entry.pop(key, []), tuple[str, ...], f"{name}: override.{key}")
            for key in ("methods", "datasets")
        )
        for method in methods:
            get_method(method)
        for dataset in datasets:
            get_dataset(dataset)
        build_config(Resources, {**content, **entry}, f"{name}: override")
        overrides.append(Override(methods, datasets, entry))
    return Profile(name, content, tuple(overrides))
