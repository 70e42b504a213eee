"""`bench list`: the methods with their tiers, the datasets with their counts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.commands.common import add_places, print_json, print_table
from datasets.catalogue import DATASETS
from datasets.fetch import get_command
from methods.base import load_methods


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_places(parser, results=False)


def run(arguments: argparse.Namespace) -> int:
    """List what there is."""
    content = {"methods": methods(), "datasets": datasets(arguments.data_root)}
    if arguments.json:
        print_json(content)
        return 0
    print_table(
        "Methods",
        ("method", "version", "T: train groups", "V: val groups", "I: interpretable"),
        [
            (
                m["name"],
                m["version"],
                *map(_tick, (m["train_groups"], m["val_groups"], m["interpretable"])),
            )
            for m in content["methods"]
        ],
    )
    print_table(
        "Datasets",
        (
            "dataset",
            "protocol",
            "metric",
            "groups",
            "train / val / test",
            "on disk",
            "how to get it",
        ),
        [
            (
                d["name"],
                d["protocol"],
                d["metric"],
                len(d["groups"]),
                " / ".join(f"{d['counts'].get(s, 0):,}" for s in ("train", "val", "test")),
                ("stand-in" if d["standin"] else "yes") if d["on_disk"] else "no",
                "" if d["on_disk"] else d["get_command"],
            )
            for d in content["datasets"]
        ],
    )
    return 0


def methods() -> list[dict[str, Any]]:
    """Describe every method under its default configuration."""
    rows = []
    for method in load_methods().values():
        tier = method.supervision(method.config_type())
        rows.append(
            {
                "name": method.name,
                "version": method.version,
                "train_groups": tier.train_groups,
                "val_groups": tier.val_groups,
                "interpretable": tier.interpretable,
            }
        )
    return rows


def datasets(root: Path) -> list[dict[str, Any]]:
    """Describe every dataset under its default protocol."""
    rows = []
    for dataset in DATASETS.values():
        found = dataset.locate(root)
        facts = dataset.facts_of(dataset.config_type(), found)
        counts, group_counts = dict(facts.counts), facts.group_counts
        if found is not None and found.marker is not None:
            counted = dataset.labels(found.folder, dataset.config_type())
            counts = {split: len(part) for split, part in counted.items()}
            group_counts = {
                split: tuple(part.groups.bincount(minlength=len(facts.groups)).tolist())
                for split, part in counted.items()
            }
        rows.append(
            {
                "name": dataset.name,
                "protocol": facts.protocol,
                "metric": facts.metric,
                "groups": list(facts.groups),
                "counts": counts,
                "group_counts": {split: list(n) for split, n in group_counts.items()},
                "on_disk": found is not None,
                "standin": found is not None and found.marker is not None,
                "get_command": get_command(dataset.name, root),
            }
        )
    return rows


def _tick(value: bool) -> str:
    return "yes" if value else "no"
