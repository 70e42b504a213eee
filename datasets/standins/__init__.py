"""Synthetic data in the real on-disk formats, for machines where the real data cannot be had.

The loaders, the caches and the whole training path deserve to be exercised without a download of
gigabytes. A stand-in is written exactly as the released files are, so the very same loader reads
it; a marker file beside the labels keeps its numbers from being taken for real ones.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets.cifar_source import FOLDER
from datasets.config import LIMIT
from datasets.errors import UsageError
from datasets.standins import birds, digits, faces, lesions, vehicles
from datasets.standins.marker import MARKER_NAME, Counts, Marker, read_marker, write_marker

__all__ = ["MARKER_NAME", "NAMES", "Marker", "read_marker", "write"]

LARGEST = 1_000_000
SMALLEST = 40
"""Fewer training images than this could not hold every group and still be skewed."""


@dataclass(frozen=True)
class _Recipe:
    """How one dataset is written, and where a loader will look for it."""

    dataset: str
    folder: str
    labels: str
    write_into: Callable[[Path, int, int], Counts]


_MNIST = _Recipe("mnist", "mnist", digits.LABELS, digits.write_into)
_RECIPES = {
    "mnist": _MNIST,
    "umnist": _MNIST,
    "cmnist": _MNIST,
    "cmnist_irm": _MNIST,
    "waterbirds": _Recipe(
        "waterbirds",
        "waterbirds/waterbird_complete95_forest2water2",
        birds.LABELS,
        birds.write_into,
    ),
    "celeba": _Recipe("celeba", "celeba", faces.LABELS, faces.write_into),
    "isic": _Recipe("isic", "isic", lesions.LABELS, lesions.write_into),
    "dominoes": _Recipe("dominoes", FOLDER, vehicles.LABELS, vehicles.write_into),
}
NAMES = tuple(_RECIPES)
"""Every name `write` accepts; the MNIST variants are made from the same files."""


def write(name: str, root: Path, size: int = 400, seed: int = 0) -> Path:
    """Write the stand-in of a dataset below `root` and return the folder with its label file.

    An earlier stand-in in the same place is replaced; anything else is left alone. The new data
    is built beside its destination and moved there in one step, so a killed process leaves no
    half-written dataset behind that a loader would trip over.

    Args:
        name: One of `NAMES`.
        root: The folder that holds all datasets.
        size: Training images; for MNIST and CIFAR-10 those of the train files, from which
            validation is taken as well.
        seed: The same name, size and seed give the same files, byte for byte.

    Raises:
        UsageError: For a wrong argument, or where the folder holds data that is not a stand-in.
        DataCorrupt: Where the folder has a marker that cannot be read.
    """
    recipe = _RECIPES.get(name)
    if recipe is None:
        raise UsageError(f"there is no stand-in for {name!r}", f"choose one of {', '.join(NAMES)}")
    if size < SMALLEST:
        raise UsageError(
            f"size must be at least {SMALLEST} but got {size}", f"ask for {SMALLEST} or more images"
        )
    if size > LARGEST:
        raise UsageError(f"size must be at most {LARGEST} but got {size}", "stand-ins are small")
    if not 0 <= seed < LIMIT:
        raise UsageError(f"seed must be at least 0 and below 10^18 but got {seed}", "e.g. 0")

    folder = Path(root) / recipe.folder
    # A link to another disk stays a link: the data behind it is what gets replaced.
    place = folder.resolve()
    _refuse_foreign_data(folder, recipe)
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".standin-{recipe.dataset}-", dir=place.parent))
    try:
        # One level deeper, because mkdtemp's own folder is closed to all other users.
        fresh = staging / "fresh"
        fresh.mkdir()
        counts = recipe.write_into(fresh, size, seed)
        write_marker(fresh, Marker(recipe.dataset, size, seed, counts))
        _swap_in(fresh, place, aside=staging / "former")
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _refuse_foreign_data(folder: Path, recipe: _Recipe) -> None:
    """Raise unless the folder is absent, empty or an untouched stand-in of the same dataset.

    The number of labels is compared too: real files unpacked over a stand-in would otherwise be
    deleted together with the marker they lie beside.
    """
    if not folder.exists():
        return
    remedy = "give another root, or move that folder away first"
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", remedy)
    marker = read_marker(folder)
    if marker is None:
        if any(folder.iterdir()):
            raise UsageError(f"{folder} holds data that is not a stand-in", remedy)
        return
    written = sum(sum(groups.values()) for groups in marker.counts.values()) or marker.size
    found = _count_labels(folder / recipe.labels)
    if found not in (0, written):
        raise UsageError(
            f"{folder} is marked as a stand-in of {written} labels but holds {found}; "
            "it seems that other data was put there since",
            remedy,
        )


def _count_labels(path: Path) -> int:
    """Return how many images a label file speaks of: a table with a head, or an IDX file."""
    if not path.is_file():
        return 0
    if path.suffix == ".csv":
        return path.read_bytes().count(b"\n") - 1
    return path.stat().st_size - digits.LABELS_HEADER


def _swap_in(fresh: Path, place: Path, aside: Path) -> None:
    """Put `fresh` where `place` is, and give the former folder back if that fails."""
    had_former = place.exists()
    if had_former:
        place.rename(aside)
    try:
        fresh.rename(place)
    except OSError:
        if had_former:
            aside.rename(place)
        raise
