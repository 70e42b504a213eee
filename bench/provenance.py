"""Where a number comes from: the code, the machine, the libraries."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import bench

LIBRARIES = (
    "nct-bench",
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "scikit-learn",
    "scipy",
    "pandas",
)
SOURCE = ("bench", "methods", "datasets", "pyproject.toml")
CODE = (".py", ".toml")
SUBMITTED = "submitted.json"  # in a copy of the tree that was made for queued jobs: its commit


@cache
def git_state() -> dict[str, Any]:
    """Name the commit of the source tree, and whether the code differs from it."""
    root = Path(bench.__file__).parents[1]
    if (root / SUBMITTED).exists():
        submitted: dict[str, Any] = json.loads((root / SUBMITTED).read_text())
        return submitted
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *SOURCE)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def source_stamp() -> frozenset[tuple[str, int]]:
    """Stamp the code and presets on disk, to tell whether somebody has changed them since."""
    root = Path(bench.__file__).parents[1]
    files = (path for name in SOURCE for path in (root / name).rglob("*"))
    try:
        return frozenset((str(f), f.stat().st_mtime_ns) for f in files if f.suffix in CODE)
    except OSError:  # a file went away while we looked: they are being changed
        return frozenset()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def environment() -> dict[str, Any]:
    """Describe the machine and the libraries."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class PeakMemory:
    """Peak memory of one run, in a process that may have done others before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark on Linux

    def read(self) -> int:
        """Give the peak in bytes: of the GPU where there is one, else of the process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        try:
            status = Path("/proc/self/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        except (OSError, StopIteration):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
