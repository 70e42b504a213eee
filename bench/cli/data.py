"""`bench data`: what is on disk, getting it, checking it, and stand-ins for what cannot be had."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from bench.cli.list import SPLITS, count_groups, dataset_rows, state
from bench.cli.output import log, print_json, print_table
from bench.launch.progress import PreparationBar
from datasets import standins
from datasets.base import Facts, Labels
from datasets.catalogue import datasets_from, get_dataset, load_datasets
from datasets.dataset import Dataset, OnDisk, Progress
from datasets.errors import BenchError, DataCorrupt
from datasets.sources import get

Checked = tuple[Facts, OnDisk, Mapping[str, Labels]]


def run(arguments: Namespace) -> None:
    """Do what the sub-verb says."""
    if arguments.data_verb == "standin":
        folder = standins.write(arguments.name, arguments.root, arguments.size, arguments.seed)
        print(f"stand-in (synthetic, not the real data) written to {folder}")
    elif arguments.data_verb == "get":
        folders = {name: str(_get(name, arguments.data_root)) for name in arguments.names}
        if arguments.json:
            print_json(folders)
        else:
            print("\n".join(f"{name}: {place}" for name, place in folders.items()))
    elif arguments.data_verb == "verify":
        _verify(arguments.names, arguments.data_root, as_json=arguments.json)
    else:
        _status(arguments.data_root, as_json=arguments.json)


def _status(root: Path, *, as_json: bool) -> None:
    rows = dataset_rows(root)
    if as_json:
        print_json({"data_root": str(root), "datasets": rows})
    else:
        lines = [(row["name"], state(row), row["folder"] or row["get_command"]) for row in rows]
        print_table(f"Data root: {root}", ("dataset", "on disk", "folder or command"), lines)


def _get(name: str, root: Path) -> Path:
    """Fetch, unless the dataset lies in any of the places where it is looked for."""
    dataset = load_datasets().get(name)
    found = dataset.locate(root) if dataset is not None else None
    if found is not None and not found.standin:
        log(f"{name}: already there: {found.folder}")
        return found.folder
    return get(name, root, log)


def _verify(names: Sequence[str], root: Path, *, as_json: bool) -> None:
    """Recount every dataset and decode its images; every problem is listed before it ends."""
    checked: dict[str, Checked] = {}
    problems: list[BenchError] = []
    with closing(PreparationBar()) as bar:
        for name in _meant(names, root):
            dataset = get_dataset(name)
            try:
                checked[name] = dataset.check(root, dataset.config_type())
            except BenchError as error:
                problems.append(error)
            problems += _undecodable(dataset, root, bar)
    if as_json:
        print_json([_as_json(name, found) for name, found in checked.items()])
    else:
        for name, found in checked.items():
            _print_counts(name, found)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataCorrupt("\n".join(str(problem) for problem in problems))


def _meant(names: Sequence[str], root: Path) -> list[str]:
    """Return the datasets that names mean: `all` what is on disk, a source all that it is for."""
    known = load_datasets()
    meant: list[str] = []
    for name in names:
        if name == "all":
            meant += [own for own, dataset in known.items() if dataset.locate(root) is not None]
        else:
            meant += [name] if name in known else datasets_from(name) or [get_dataset(name).name]
    return [*dict.fromkeys(meant)]


def _undecodable(dataset: Dataset, root: Path, progress: Progress) -> list[BenchError]:
    found = dataset.locate(root)
    if found is None:
        return []
    try:
        bad = dataset.bad_files(found.folder, dataset.config_type(), progress)
    except BenchError:
        return []  # the labels themselves are broken, which the recount has said
    message = f"{len(bad)} unreadable image(s):\n    " + "\n    ".join(bad)
    remedy = "replace them by the released files and verify again"
    return [DataCorrupt(message, remedy)] if bad else []


def _as_json(name: str, checked: Checked) -> dict[str, object]:
    facts, found, labels = checked
    return {
        "name": name,
        "protocol": facts.protocol,
        "standin": found.standin,
        "folder": str(found.folder),
        "groups": facts.groups,
        "unions": facts.group_sets,
        "counts": {split: len(own) for split, own in labels.items()},
        "group_counts": count_groups(labels, len(facts.groups)),
    }


def _print_counts(name: str, checked: Checked) -> None:
    facts, found, labels = checked
    counts = count_groups(labels, len(facts.groups))
    rows = [(g, *(f"{counts[s][i]:,}" for s in SPLITS)) for i, g in enumerate(facts.groups)]
    for title, members in facts.group_sets.items():
        rows.append((title, *(f"{sum(counts[s][g] for g in members):,}" for s in SPLITS)))
    rows.append(("all", *(f"{sum(counts[s]):,}" for s in SPLITS)))
    kind = "stand-in" if found.standin else "verified"
    print_table(f"{name} ({facts.protocol}): {kind}", ("group", *SPLITS), rows)
