"""`bench list`: the methods with their tiers, the datasets with their counts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cli.output import print_json, print_table
from datasets.base import Labels
from datasets.catalogue import load_datasets
from datasets.fetch import get_command
from methods.base import load_methods

SPLITS = ("train", "val", "test")


def run(arguments: Namespace) -> None:
    """List what there is."""
    methods, datasets = method_rows(), dataset_rows(arguments.data_root)
    if arguments.json:
        print_json({"methods": methods, "datasets": datasets})
        return
    tier = ("T: train groups", "V: val groups", "I: interpretable")
    words = {True: "yes", False: "no"}
    lines = [[words[v] if isinstance(v, bool) else v for v in row.values()] for row in methods]
    print_table("Methods", ("method", "title", "version", *tier), lines)
    columns = ("dataset", "title", "protocol", "metric", "groups", "train / val / test", "on disk")
    rows = [
        (
            *(row[name] for name in ("name", "title", "protocol", "metric")),
            len(row["groups"]),
            " / ".join(f"{row['counts'].get(split, 0):,}" for split in SPLITS),
            *(state(row), "" if row["on_disk"] else row["get_command"]),
        )
        for row in datasets
    ]
    print_table("Datasets", (*columns, "how to get it"), rows)


def method_rows() -> list[dict[str, object]]:
    """Describe every method under its default settings, in the order of tables, for `--json`."""
    rows: list[dict[str, object]] = []
    for method in sorted(load_methods().values(), key=lambda m: (m.order, m.name)):
        config = method.config_type()
        named = {"name": method.name, "title": method.title, "version": method.version_of(config)}
        rows.append({**named, **asdict(method.supervision(config))})
    return rows


def dataset_rows(root: Path) -> list[dict[str, Any]]:
    """Describe every dataset under its default protocol, in the order of tables, for `--json`.

    A stand-in is counted; the real data is what its protocol says.
    """
    rows = []
    for name, dataset in load_datasets().items():
        config, found = dataset.config_type(), dataset.locate(root)
        facts = dataset.info_on_disk(config, found)
        counts, group_counts = facts.counts, facts.group_counts
        if found is not None and found.standin:
            labels = dataset.labels(found.folder, config)
            counts = {split: len(own) for split, own in labels.items()}
            group_counts = count_groups(labels, len(facts.groups))
        rows.append(
            {
                "name": name,
                "title": dataset.title,
                "protocol": facts.protocol,
                "metric": facts.metric,
                "groups": facts.groups,
                "counts": counts,
                "group_counts": group_counts,
                "on_disk": found is not None,
                "standin": found is not None and found.standin,
                "data_kind": "" if found is None else found.data_kind,
                "folder": str(found.folder) if found is not None else "",
                "get_command": get_command(name, root),
            }
        )
    return rows


def state(row: Mapping[str, Any]) -> str:
    """Return in a word whether a dataset is on disk."""
    words = {"": "no", "release": "yes", "standin": "stand-in"}
    return words.get(row["data_kind"], str(row["data_kind"]))


def count_groups(labels: Mapping[str, Labels], groups: int) -> dict[str, tuple[int, ...]]:
    """Return how many samples each group has, by split; none where groups are not known."""
    found = {
        split: own.groups[own.groups >= 0].bincount(minlength=groups)
        for split, own in labels.items()
    }
    return {split: tuple(counts.tolist()) for split, counts in found.items()}
