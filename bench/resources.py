"""Files that travel with the package: the paper's numbers, cluster profiles, published results.

In a source tree they lie at its root (`results/paper`, `slurm`, `results/published`); a wheel
carries copies, of the published results one table without the runs themselves.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
PUBLISHED_TABLE = "results.csv"


def paper_folder() -> Path:
    """Return the folder with the paper's numbers."""
    return _found(PACKAGE / "resources" / "paper", PACKAGE.parent / "results" / "paper")


def profiles_folder() -> Path:
    """Return the folder with the cluster profiles."""
    return _found(PACKAGE / "resources" / "slurm", PACKAGE.parent / "slurm")


def published_folder() -> Path:
    """Return the folder with what is published: `results.csv`, and in a source tree the runs."""
    return _found(PACKAGE / "resources" / "published", PACKAGE.parent / "results" / "published")


def _found(installed: Path, source: Path) -> Path:
    return installed if installed.is_dir() else source
