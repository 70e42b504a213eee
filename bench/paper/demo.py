"""What `bench demo` runs: digits in colour, on which a shortcut is learnt and undone.

The digits are synthetic, in MNIST's files, and coloured as CMNIST's are. In training 95 of 100 have
the colour of their class; CMNIST's own 99.5 would leave 27 others in so small a set. Every run has
its own short recipe, which is no preset: nothing of it is a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.job import Job, Request, expand
from bench.record import Record
from datasets import standins
from datasets.catalogue import get_dataset
from methods.base import get_method

DATASET, IMAGES = "cmnist", 6000
PLAIN, KNOWS_GROUPS = "erm", "groupdro"
METHODS = (PLAIN, KNOWS_GROUPS, "jtt", "nct", "nct_plus")
FITTED = {"optimizer": "adam", "lr": "1e-3", "batch_size": "64"}
TREE = {
    "iterations": "2",
    "epochs": "2,10",
    "phase1_ratio": "0.0,0.2",
    "head_lr": "1e-3",
}
RECIPES: Mapping[str, Mapping[str, str]] = {
    PLAIN: {"epochs": "4"},
    KNOWS_GROUPS: {"epochs": "6", **FITTED},
    "jtt": {"epochs": "3", "upweight": "10", **FITTED},
    "nct": TREE,
    "nct_plus": TREE,
}
CONFLICTS = "0.05"


def write_standins(root: Path, log: Callable[[str], None]) -> None:
    """Write what is not there yet: the same demo goes on where it was stopped."""
    found = get_dataset(DATASET).locate(root)
    if found is None or found.marker is None or found.marker.size != IMAGES:
        log(f"drawing {IMAGES:,} digits ...")
        standins.write(DATASET, root, size=IMAGES)


def demo_jobs(data_root: Path) -> list[Job]:
    """Return a run of each method of the demo."""
    settings = {f"{DATASET}.conflicts": CONFLICTS}
    for method, recipe in RECIPES.items():
        settings |= {f"{method}.{knob}": value for knob, value in recipe.items()}
    return expand(Request(METHODS, (DATASET,), (0,), data_root, overrides=settings))


def what_happened(records: Sequence[Record]) -> list[str]:
    """Return in sentences what the runs show, by their own numbers."""
    found = {record.job.method: record.test for record in records}
    plain = found.pop(PLAIN, None)
    if plain is None or plain.get("wga") is None:
        return []
    like_training, worst = plain.get("avg_train_weighted"), plain.get("wga")
    lines = [
        f"{_title(PLAIN)} learnt the colour: {like_training:.0f}% right on digits coloured as in "
        f"training, {worst:.0f}% in the worst group of class and colour."
    ]
    better = {name: wga for name, test in found.items() if (wga := test.get("wga")) is not None}
    undone = [name for name, wga in better.items() if wga > 50.0 + (worst or 0.0)]
    seeing = [name for name in undone if name == KNOWS_GROUPS]
    blind = [name for name in undone if name != KNOWS_GROUPS]
    if seeing:
        lines.append(f"{_scores(seeing, better)}: it is told the colour of every training image.")
    if blind:
        lines.append(f"{_scores(blind, better)}: without it.")
    if others := [name for name in better if name not in undone]:
        lines.append(f"Not undone by {_scores(others, better)}.")
    return lines


def _title(name: str) -> str:
    return get_method(name).title


def _scores(names: Sequence[str], worst: Mapping[str, float]) -> str:
    return ", ".join(f"{_title(name)} {worst[name]:.0f}%" for name in names)
