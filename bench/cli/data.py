"""`bench data`: what is on disk, getting it, checking it, and stand-ins for what cannot be had."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cli.list import SPLITS, count_groups, dataset_rows, state
from bench.cli.output import log, print_json, print_table
from bench.launch.progress import preparation_bar
from datasets import standins
from datasets.base import Facts, Labels
from datasets.catalogue import datasets_from, get_dataset, load_datasets
from datasets.dataset import Dataset, OnDisk, Progress
from datasets.decode import sum_up
from datasets.errors import BenchError, DataCorrupt
from datasets.pixels import ImageCheck
from datasets.sources import get

OWN_VERBS = ("add", "show", "remove")
"""What is done with a user's own data, in `own_data`."""


@dataclass(frozen=True)
class Verified:
    """A dataset whose labels and images hold."""

    dataset: Dataset
    facts: Facts
    found: OnDisk
    labels: Mapping[str, Labels]
    images: ImageCheck

    @property
    def pixels_pinned(self) -> bool:
        """Whether all pixels were compared with those of the release."""
        known = self.facts.full_pixel_digest is not None or self.dataset.files_pinned
        return known and self.found.data_kind == "release"

    def lines(self) -> list[str]:
        """Return in sentences what was verified, and what could not be."""
        counted = "equal to the protocol's" if self.facts.counts else "not asserted by the protocol"
        labels = "pinned, equal" if self.facts.label_digest is not None else "not pinned"
        pixels = "pinned, equal" if self.pixels_pinned else "not pinned"
        origin = self.found.origin
        bound, name = self.facts.bound, self.dataset.name
        kept = (
            f"photos are kept at {bound.words()} ({name}.decode=native keeps them whole)"
            if bound
            else ""
        )
        return [
            *([f"{origin.name}: {origin.note}"] if origin is not None and origin.note else []),
            *([kept] if kept else []),
            f"counts: {counted}; labels: {labels}",
            f"pixels {pixels}: digest {self.images.full_digest} of all images, "
            f"{self.images.sample_digest} of those a run samples",
            *(f"note: {note}" for note in self.images.notes),
        ]

    def as_json(self) -> dict[str, object]:
        """Return the counts and digests."""
        facts, images = self.facts, self.images
        return {
            "name": self.dataset.name,
            "protocol": facts.protocol,
            "standin": self.found.standin,
            "data_kind": self.found.data_kind,
            "folder": str(self.found.folder),
            "groups": facts.groups,
            "unions": facts.group_sets,
            "counts": {split: len(own) for split, own in self.labels.items()},
            "group_counts": count_groups(self.labels, len(facts.groups)),
            "labels_pinned": facts.label_digest is not None,
            "pixels_pinned": self.pixels_pinned,
            "pixel_digest": images.sample_digest,
            "full_pixel_digest": images.full_digest,
            "notes": images.notes,
            "bound": None if facts.bound is None else asdict(facts.bound),
        }

    def print(self) -> None:
        """Print the counts, and below them what was verified."""
        facts, counts = self.facts, count_groups(self.labels, len(self.facts.groups))
        rows = [(g, *(f"{counts[s][i]:,}" for s in SPLITS)) for i, g in enumerate(facts.groups)]
        for title, members in facts.group_sets.items():
            rows.append((title, *(f"{sum(counts[s][g] for g in members):,}" for s in SPLITS)))
        rows.append(("all", *(f"{sum(counts[s]):,}" for s in SPLITS)))
        unpinned = "" if self.pixels_pinned else " but for pixels"
        kinds = {"release": f"verified{unpinned}", "standin": "stand-in"}
        kind = kinds.get(self.found.data_kind, f"{self.found.data_kind}, not the release")
        print_table(f"{self.dataset.name} ({facts.protocol}): {kind}", ("group", *SPLITS), rows)
        print("\n".join(self.lines()))


def run(arguments: Namespace) -> None:
    """Do what the sub-verb says."""
    if arguments.data_verb in OWN_VERBS:
        from bench.cli import own_data

        getattr(own_data, f"run_{arguments.data_verb}")(arguments)
    elif arguments.data_verb == "standin":
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
    if found is not None and found.data_kind in ("release", "own"):
        log(f"{name}: already there: {found.folder}")
        return found.folder
    return get(name, root, log)


def _verify(names: Sequence[str], root: Path, *, as_json: bool) -> None:
    """Recount every dataset and decode its images; every problem is listed before it ends."""
    verified: list[Verified] = []
    problems: list[BenchError] = []
    with preparation_bar() as bar:
        for name in _meant(names, root):
            before = len(problems)
            try:
                found = _verify_one(get_dataset(name), root, bar, problems)
            except BenchError as error:
                problems.append(error)
            if len(problems) == before:
                verified.append(found)
    if as_json:
        print_json([own.as_json() for own in verified])
    else:
        for own in verified:
            own.print()
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataCorrupt("\n".join(str(problem) for problem in problems))


def _verify_one(
    dataset: Dataset, root: Path, progress: Progress, problems: list[BenchError]
) -> Verified:
    """Check labels and images of a dataset; adds what is wrong with its images to `problems`."""
    config = dataset.config_type()
    found = dataset.require(root)
    try:
        facts, found, labels = dataset.check(root, config)
    except BenchError:
        with suppress(BenchError):  # the labels may be what is broken
            images = dataset.check_images(found.folder, config, progress)
            problems += _unreadable(images, dataset, found.folder)
        raise
    images = dataset.check_images(found.folder, config, progress)
    problems += _unreadable(images, dataset, found.folder)
    if found.data_kind == "release" and not images.bad_files and not images.missing:
        dataset.require_release(found, facts.pixel_digest, images.sample_digest, images.sizes)
        dataset.require_release(found, facts.full_pixel_digest, images.full_digest, images.sizes)
    return Verified(dataset, facts, found, labels, images)


def _unreadable(images: ImageCheck, dataset: Dataset, folder: Path) -> list[BenchError]:
    """Return what is wrong with the images: how many are missing or broken, and the first few."""
    errors: list[BenchError] = []
    kinds = (
        ("missing", images.missing, dataset.if_missing(folder)),
        ("unreadable", images.bad_files, "replace them by the released files and verify again"),
    )
    for kind, lines, remedy in kinds:
        if lines and images.folder is not None:
            first = sum_up(lines, images.folder / f"{kind}-{dataset.name}.txt")
            errors.append(DataCorrupt(f"{len(lines):,} {kind} image(s):\n    {first}", remedy))
    return errors


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
