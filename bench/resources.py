"""Files that travel with the package: the paper's numbers and the cluster profiles.

In a source tree they lie at its root (`results/paper`, `slurm`); a wheel carries copies.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def paper_folder() -> Path:
    """Find the folder with the paper's numbers."""
    return _found(PACKAGE / "resources" / "paper", PACKAGE.parent / "results" / "paper")


def profiles_folder() -> Path:
    """Find the folder with the cluster profiles."""
    return _found(PACKAGE / "resources" / "slurm", PACKAGE.parent / "slurm")


def _found(installed: Path, source: Path) -> Path:
    return installed if installed.is_dir() else source
