"""`bench list`: the methods with their tiers, the datasets with their counts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cli.output import print_json, print_table
from datasets.base import Labels
from datasets.catalogue import load_datasets
from datasets.fetch import get_command
from methods.base import load_methods

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class DatasetRow:
    """A dataset under its default protocol, as `--json` has it."""

    name: str
    title: str
    protocol: str
    metric: str
    groups: tuple[str, ...]
    counts: Mapping[str, int]
    group_counts: Mapping[str, tuple[int, ...]]
    on_disk: bool
    standin: bool
    data_kind: str
    folder: str
    get_command: str

    @property
    def state(self) -> str:
        """Whether it is on disk, in a word."""
        words = {"release": "yes", "standin": "stand-in"}
        return words.get(self.data_kind, self.data_kind) if self.on_disk else "no"


def run(arguments: Namespace) -> None:
    """List what there is."""
    methods, datasets = method_rows(), dataset_rows(arguments.data_root)
    if arguments.json:
        print_json({"methods": methods, "datasets": [*map(asdict, datasets)]})
        return
    tier = ("T: train groups", "V: val groups", "I: interpretable")
    words = {True: "yes", False: "no"}
    lines = [[words[v] if isinstance(v, bool) else v for v in row.values()] for row in methods]
    print_table("Methods", ("method", "title", "version", *tier), lines)
    columns = ("dataset", "title", "protocol", "metric", "groups", "train / val / test", "on disk")
    rows = [
        (
            *(d.name, d.title, d.protocol, d.metric, len(d.groups)),
            " / ".join(f"{d.counts.get(split, 0):,}" for split in SPLITS),
            *(d.state, "" if d.on_disk else d.get_command),
        )
        for d in datasets
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


def dataset_rows(root: Path) -> list[DatasetRow]:
    """Describe every dataset under its default protocol, in the order of tables.

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
            DatasetRow(
                *(name, dataset.title, facts.protocol, facts.metric, facts.groups),
                counts=counts,
                group_counts=group_counts,
                on_disk=found is not None,
                standin=found is not None and found.standin,
                data_kind="" if found is None else found.data_kind,
                folder=str(found.folder) if found is not None else "",
                get_command=get_command(name, root),
            )
        )
    return rows


def count_groups(labels: Mapping[str, Labels], groups: int) -> dict[str, tuple[int, ...]]:
    """Return how many samples each group has, by split."""
    found = {split: own.groups.bincount(minlength=groups) for split, own in labels.items()}
    return {split: tuple(counts.tolist()) for split, counts in found.items()}
