"""`bench publish RUNS|STORE`: put checked runs among the published ones.

Runs are copied, and the copies compared with the originals byte by byte before they take their
place; nothing is removed from where they come from, and nothing that is published is overwritten.
"""

from __future__ import annotations

import filecmp
import shutil
from argparse import Namespace
from pathlib import Path

from bench.api import write_results_table
from bench.checking import check, differences, find_runs
from bench.cli.arguments import published_store
from bench.cli.output import log, print_json
from bench.job import PUBLISHED_SEEDS
from bench.paper.campaigns import variant_specs
from bench.record import Record, read_record
from bench.reporting.collection import Classifier
from bench.store import Store
from datasets.errors import BenchError
from datasets.files import atomic_folder

TABLES = ("history.parquet", "predictions.parquet", "partition.parquet")
FILES = ("record.json", *TABLES, "model.safetensors")


def run(arguments: Namespace) -> int:
    """Publish what may be; print what may not, and why."""
    store = published_store() if arguments.to is None else Store(arguments.to)
    folders = find_runs(arguments.path)
    found = check(arguments.path, data_root=arguments.data_root, log=log)
    refused: dict[str, str] = {}
    for one in found.problems:
        refused.setdefault(one.run_id, one.problem)
    classifier = Classifier(variant_specs(), PUBLISHED_SEEDS)
    new, equal = [], []
    for folder in folders:
        target = store.runs / folder.name
        # What a run is comes first: of one that is kept out anyway, a missing figure says little.
        why = _kept_out(folder, classifier) or refused.get(folder.name) or _changed(folder, target)
        if why:
            refused[folder.name] = why
        elif target.is_dir():
            equal.append(folder.name)
        else:
            _copy(folder, target)
            new.append(folder.name)
    table = write_results_table(store) if new else None
    if arguments.json:
        content = {"published": new, "already_there": equal, "refused": refused}
        print_json({**content, "to": str(store.root), "table": table and str(table)})
        return 1 if refused else 0
    lines = [f"published: {run_id}" for run_id in new]
    lines += [f"already there, with the same results: {run_id}" for run_id in equal]
    lines += [f"not published: {run_id}: {reason}" for run_id, reason in refused.items()]
    counts = f"{len(new)} published, {len(equal)} already there, {len(refused)} refused"
    print(*lines, f"{counts}: {store.runs}", sep="\n")
    return 1 if refused else 0


def _kept_out(folder: Path, classifier: Classifier) -> str:
    """Return why a run is none that is published, right or not; nothing if it may be."""
    record = read_record(folder / "record.json")
    if not isinstance(record, Record):
        return ""  # `check` has refused it
    placed = classifier.place(record, folder)
    kept_out = placed.kind in ("smoke", "left out") or placed.outdated
    return placed.reason or placed.outdated if kept_out else ""


def _changed(folder: Path, target: Path) -> str:
    """Return how a run differs from the one of its id that is published."""
    known = target.is_dir() and target.resolve() != folder.resolve()
    changed = differences(folder, target) if known else []
    return f"another result is published: {'; '.join(changed)}" if changed else ""


def _copy(folder: Path, target: Path) -> None:
    """Copy the files of a run, and nothing else that may lie there."""
    names = [name for name in FILES if (folder / name).is_file()]
    with atomic_folder(target) as draft:
        for name in names:
            shutil.copyfile(folder / name, draft / name)
        if filecmp.cmpfiles(folder, draft, names, shallow=False)[0] != names:
            raise BenchError(f"{folder} was changed while it was copied", "publish it again")
