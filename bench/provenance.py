"""Where a number comes from: the code, the machine, the libraries."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench import numerics
from datasets.config import Values

LIBRARIES = (
    *("nct-bench", "torch", "torchvision", "timm", "numpy", "scipy", "scikit-learn", "pandas"),
    *("pyarrow", "pillow", "umap-learn", "numba", "pynndescent", "zennit", "captum"),
    *("safetensors", "optuna", "submitit"),
)
"""What may have computed something of a run; the versions are recorded."""

PACKAGES = ("bench", "methods", "datasets", "pyproject.toml")
COMPUTING = (
    *("runner.py", "fitting.py", "context.py", "evaluation.py"),
    *("job.py", "process.py", "numerics.py", "audit.py", "record.py", "store.py"),
)
"""The files of `bench` that can influence a run's numbers; all of methods and datasets can."""
SOURCES = (".py", ".toml")
SUBMITTED = "submitted.json"  # in a copy of the tree that was made for queued jobs: its commit


@dataclass(frozen=True)
class GitState:
    """The commit of a source tree, and whether the code differs from it."""

    commit: str | None = None
    dirty: bool | None = None


@dataclass(frozen=True)
class Environment:
    """A machine and the libraries on it; what records of schema 1 lack is none there.

    Attributes:
        cpu: the processor's family, model, a digest of its flags, and its caches.
        cpu_capability: the instruction set that torch uses.
        numerics: the choice in effect, and the settings of the libraries (`bench.numerics`).
    """

    python: str = ""
    platform: str = ""
    processor: str = ""
    cpu: Mapping[str, str] | None = None
    cpu_capability: str | None = None
    numerics: Mapping[str, str] | None = None
    gpu: str | None = None
    cuda: str | None = None
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    extra: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Plugin:
    """The distribution that a method or dataset from outside this repository came with.

    One that no installed package brought has the name of its module, and no version. The digest is
    of the files of the package that holds it; a notebook has none.
    """

    distribution: str
    version: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Provenance:
    """How a run came about.

    Attributes:
        seed_tree: the root seed, and how every stream derives from it.
        label_digest: of the labels of all splits, as they were loaded.
        pixel_digest: of a sample of the loaded images; none in records made before there was one.
        code: digest of the sources that computed it; none in records of schema 1.
    """

    command: str = ""
    seed_tree: Values = field(default_factory=dict)
    device: str | None = None
    threads: int | None = None
    label_digest: str | None = None
    pixel_digest: str | None = None
    environment: Environment = field(default_factory=Environment)
    git: GitState = field(default_factory=GitState)
    code: str | None = None
    plugin: Plugin | None = None

    def hardware(self) -> str:
        """Return the kind of machine; times of two kinds do not compare."""
        name = self.environment.processor if self.device == "cpu" else self.device
        return f"{name}, {self.threads} thread{'s' if (self.threads or 1) > 1 else ''}"


def source_root() -> Path:
    """Return the folder that holds the packages."""
    return Path(__file__).parents[1]


@cache
def git_state() -> GitState:
    """Return the commit of the source tree, and whether the code differs from it."""
    root = source_root()
    if (root / SUBMITTED).exists():
        submitted = json.loads((root / SUBMITTED).read_text())
        return GitState(submitted.get("commit"), submitted.get("dirty"))
    if not (root / ".git").exists():
        return GitState()
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *PACKAGES)
    return GitState(commit, None if changes is None else bool(changes))


@cache
def code_digest() -> str:
    """Return a digest of the sources that can influence a run's numbers."""
    root = source_root()
    files = [root / "bench" / name for name in COMPUTING]
    files += [path for name in ("methods", "datasets") for path in (root / name).rglob("*")]
    return _digest_of(files, root)


def plugin_info(name: str, module: str) -> Plugin:
    """Describe the distribution `name` by its version and the files of a module's package."""
    source = getattr(import_module(module.partition(".")[0]), "__file__", None)
    if source is None:
        return Plugin(name, _version(name))
    file = Path(source)
    files = file.parent.rglob("*") if file.name == "__init__.py" else [file]
    return Plugin(name, _version(name), _digest_of(files, file.parent))


def _digest_of(files: Iterable[Path], root: Path) -> str:
    """Return a digest of the sources among the files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix in SOURCES and path.is_file()):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def environment() -> Environment:
    """Describe the machine and the libraries."""
    import torch

    processor, cpu = _processor()
    return Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        processor=processor,
        cpu=cpu,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        numerics=numerics.in_effect(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cuda=torch.version.cuda,
        libraries={name: _version(name) for name in LIBRARIES},
    )


def _processor() -> tuple[str, dict[str, str]]:
    """Return the processor's name, and what tells it from others of the same name."""
    lines: list[list[str]] = []
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        lines = [line.split(":", 1) for line in first.splitlines() if ":" in line]
    known = {name.strip(): value.strip() for name, value in lines}
    named = ("vendor_id", "cpu family", "model", "stepping")
    cpu = {name.replace(" ", "_"): known[name] for name in named if name in known}
    if "flags" in known:
        cpu["flags"] = hashlib.sha256(known["flags"].encode()).hexdigest()[:16]
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
            cpu[f"L{level}_{kind.lower()}"] = size
    return known.get("model name", platform.processor()), cpu


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
