"""`bench data`: what is on disk, getting it, checking it, and stand-ins for what cannot be had."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.commands.common import add_places, print_json, print_table, say
from bench.commands.listing import datasets
from bench.progress import Steps
from datasets import standins
from datasets.base import SPLITS
from datasets.catalogue import DATASETS, get_dataset
from datasets.errors import BenchError, DataCorrupt
from datasets.sources import get

ALIASES = {"mnist": ("umnist", "cmnist")}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the four sub-verbs."""
    verbs = parser.add_subparsers(
        dest="data_verb", required=True, metavar="status|get|verify|standin"
    )
    add_places(verbs.add_parser("status", help="what is on disk"), results=False)
    getting = verbs.add_parser("get", help="fetch datasets, mnist or weights")
    getting.add_argument("names", nargs="+", metavar="NAME", help="dataset, mnist, weights")
    add_places(getting, results=False)
    verifying = verbs.add_parser("verify", help="recount labels and decode every image")
    verifying.add_argument("names", nargs="+", metavar="NAME", help="dataset, mnist, or all")
    add_places(verifying, results=False)
    standing = verbs.add_parser("standin", help="write small synthetic data in the real format")
    standing.add_argument("name", metavar="NAME", help=", ".join(standins.NAMES))
    standing.add_argument("--root", type=Path, required=True, metavar="DIR", help="a data root")
    standing.add_argument("--size", type=int, default=400, metavar="N", help="training images")
    standing.add_argument("--seed", type=int, default=0, metavar="S")


def run(arguments: argparse.Namespace) -> int:
    """Do what the sub-verb says."""
    if arguments.data_verb == "standin":
        folder = standins.write(arguments.name, arguments.root, arguments.size, arguments.seed)
        print(f"stand-in (synthetic, not the real data) written to {folder}")
        return 0
    root = arguments.data_root
    if arguments.data_verb == "get":
        places = {name: str(_get(name, root)) for name in arguments.names}
        if arguments.json:
            print_json(places)
        for name, place in {} if arguments.json else places.items():
            print(f"{name}: {place}")
        return 0
    if arguments.data_verb == "verify":
        return verify(arguments.names, root, as_json=arguments.json)
    rows = datasets(root)
    if arguments.json:
        print_json({"data_root": str(root), "datasets": rows})
        return 0
    print_table(
        f"Data root: {root}",
        ("dataset", "on disk", "folder or command"),
        [(row["name"], _state(row), _where(row, root)) for row in rows],
    )
    return 0


def _get(name: str, root: Path) -> Path:
    """Fetch, unless the dataset lies in any of the places a loader looks in."""
    found = DATASETS[name].locate(root) if name in DATASETS else None
    if found is not None and found.marker is None:
        say(f"{name}: already there: {found.folder}")
        return found.folder
    return get(name, root, say)


def verify(names: Sequence[str], root: Path, *, as_json: bool) -> int:
    """Recount every dataset and decode its images; every problem is listed before it ends."""
    here = [name for name, dataset in DATASETS.items() if dataset.locate(root) is not None]
    wanted = [n for name in names for n in (here if name == "all" else ALIASES.get(name, (name,)))]
    for name in wanted:
        get_dataset(name)
    report: list[dict[str, Any]] = []
    problems: list[BenchError] = []
    steps = Steps()
    try:
        for name in dict.fromkeys(wanted):
            try:
                report.append(_recount(name, root))
            except BenchError as error:
                problems.append(error)
            found = get_dataset(name).locate(root)
            if found is not None:
                problems += _undecodable(name, found.folder, steps)
    finally:
        steps.close()
    if as_json:
        print_json(report)
    else:
        _print(report)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataCorrupt("\n".join(str(problem) for problem in problems))
    return 0


def _recount(name: str, root: Path) -> dict[str, Any]:
    dataset = get_dataset(name)
    facts, found, labels = dataset.check(root, dataset.config_type())
    return {
        "name": name,
        "protocol": facts.protocol,
        "standin": found.marker is not None,
        "folder": str(found.folder),
        "groups": list(facts.groups),
        "unions": {name: list(members) for name, members in facts.unions.items()},
        "counts": {split: len(labels[split]) for split in SPLITS},
        "group_counts": {
            split: torch.bincount(labels[split].groups, minlength=len(facts.groups)).tolist()
            for split in SPLITS
        },
    }


def _undecodable(name: str, folder: Path, steps: Steps) -> list[BenchError]:
    dataset = get_dataset(name)
    try:
        bad = dataset.bad_files(folder, dataset.config_type(), steps)
    except BenchError:
        return []  # the labels themselves are broken, which the recount has said
    if not bad:
        return []
    return [
        DataCorrupt(
            f"{len(bad)} unreadable image(s):\n    " + "\n    ".join(bad),
            "replace them by the released files and verify again",
        )
    ]


def _print(report: list[dict[str, Any]]) -> None:
    for entry in report:
        groups, counts = entry["groups"], entry["group_counts"]
        rows = [(g, *(f"{counts[s][i]:,}" for s in SPLITS)) for i, g in enumerate(groups)]
        for name, members in entry["unions"].items():
            rows.append((name, *(f"{sum(counts[s][g] for g in members):,}" for s in SPLITS)))
        rows.append(("all", *(f"{sum(counts[s]):,}" for s in SPLITS)))
        kind = "stand-in" if entry["standin"] else "verified"
        print_table(f"{entry['name']} ({entry['protocol']}): {kind}", ("group", *SPLITS), rows)


def _state(row: dict[str, object]) -> str:
    return ("stand-in" if row["standin"] else "yes") if row["on_disk"] else "no"


def _where(row: dict[str, object], root: Path) -> str:
    found = get_dataset(str(row["name"])).locate(root)
    return str(found.folder) if found else str(row["get_command"])
