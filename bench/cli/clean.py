"""`bench clean`: how much room everything besides runs takes, and free it.

Runs, studies and presets are never touched, nor is anything that a process holds the lock of. While
a run of the store is under way, on this machine or on a cluster, only what no run can ask for is
freed: checkpoints of runs that nobody executes, and launches that have ended.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from bench.cli.arguments import store_to_read
from bench.cli.output import log, print_json, print_table
from bench.cli.parser import CLEANED
from bench.store import Store
from datasets.catalogue import load_datasets
from datasets.decode import FOLDER_NAME
from datasets.errors import UsageError, did_you_mean
from datasets.lock import Lock, LockBusy

STALE_SECONDS = 3600.0


@dataclass(frozen=True, eq=False)
class Item:
    """Files that go together, and the lock of whoever may be using them."""

    kind: str
    paths: tuple[Path, ...]
    lock: Lock | None = None
    in_use: bool = False

    def size(self) -> int:
        """Return the bytes it takes."""
        return sum(_size(path) for path in self.paths)

    def free(self) -> bool:
        """Delete it, unless it is in use; return whether it is gone."""
        if self.in_use:
            return False
        try:
            with self.lock.hold(wait=False) if self.lock else contextlib.nullcontext():
                for path in self.paths:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except (LockBusy, OSError):
            return False
        return True


def run(arguments: Namespace) -> None:
    """Show what each kind takes, and free the named ones, or all with --yes."""
    for name in arguments.kinds:
        if name not in CLEANED:
            near = did_you_mean(name, CLEANED)
            raise UsageError(f"unknown kind '{name}'{near}", f"choose from {', '.join(CLEANED)}")
    chosen = CLEANED if arguments.yes else arguments.kinds
    root = store_to_read(arguments).root
    stores = [Store(root), *(Store(study) for study in sorted((root / "studies").glob("*/")))]
    busy = any(_is_busy(store) for store in stores)
    items = [item for store in stores for item in _items(store, busy)]
    items += _decoded(arguments.data_root, busy)
    rows, shown = [], []
    for kind, meaning in CLEANED.items():
        own = {item: item.size() for item in items if item.kind == kind}
        freed = {item for item in own if kind in chosen and item.free()}
        row = {"items": len(own), "bytes": sum(own.values())}
        row["freed"] = sum(own[item] for item in freed)
        row["in_use"] = sum(item.in_use or (kind in chosen and item not in freed) for item in own)
        rows.append({"kind": kind, **row})
        sizes = (f"{row[name] / 1e6:.1f} MB" for name in ("bytes", "freed"))
        shown.append((kind, row["items"], *sizes, row["in_use"], meaning))
    if arguments.json:
        print_json({"kinds": rows})
        return
    columns = ("kind", "items", "takes", "freed", "in use", "what it is")
    print_table(f"besides the runs in {root}", columns, shown)
    if not chosen:
        log("nothing was freed: name what to free, or give --yes for all of it")


def _items(store: Store, busy: bool) -> Iterator[Item]:
    """Find what a store has besides runs."""
    names = set()
    for folder in _inside(store.work):
        names.add(folder.name)
        paths = (folder, *_existing(store.audits / f"{folder.name}.jsonl"))
        yield Item("work", paths, Lock(folder / "lock"), Lock(folder / "lock").held())
    for folder in _inside(store.stages):
        if not folder.is_dir():
            continue
        name = folder.name.removesuffix(".work")
        names.add(name)
        lock = Lock(store.stages / f"{name}.lock")
        audit = _existing(store.audits / f"{name}.jsonl")
        unfinished = name != folder.name
        paths = (folder,) if unfinished else (folder, *audit)
        yield Item("work" if unfinished else "stages", paths, lock, busy or lock.held())
    if store.root == store.features.parent:  # a study's are those of the folder that it is in
        for folder in filter(Path.is_dir, _inside(store.features)):
            name = folder.name.removesuffix(".work")
            lock = Lock(store.features / f"{name}.lock")
            kind = "features" if name == folder.name else "work"
            yield Item(kind, (folder,), lock, busy or lock.held())
    for file in _inside(store.audits):
        if file.suffix == ".jsonl" and file.stem not in names:
            yield Item("audits", (file,), in_use=busy)
    for folder in _inside(store.launches):
        if (folder / "launch.json").is_file():
            yield Item("launches", (folder,), in_use=not (folder / "ended").exists())
    folders = store.runs, store.stages, store.features, store.work, store.audits, store.launches
    for folder in folders:
        for left in (*folder.glob(".*.part"), *folder.glob(".*.old")):
            # A folder that was only half replaced is a run, and is put back by the next `run`.
            own = left.with_name(left.name[1:].rsplit(".", 2)[0])
            stale = time.time() - left.stat().st_mtime > STALE_SECONDS
            if stale and (left.suffix == ".part" or own.exists()):
                yield Item("leftovers", (left,), in_use=busy)
    for left in _inside(store.root / "damaged"):
        yield Item("leftovers", (left,), in_use=busy)


def _decoded(data_root: Path, busy: bool) -> Iterator[Item]:
    """Find decoded photographs, beside the data and in the user's cache."""
    places = [dataset.locate(data_root) for dataset in load_datasets().values()]
    beside = [place.folder / FOLDER_NAME for place in places if place is not None]
    cached = (Path(platformdirs.user_cache_dir("nct-bench")) / "decoded").glob("*/")
    for folder in dict.fromkeys((*beside, *cached)):
        found = (
            path
            for path in _inside(folder)
            if path.suffix in (".u8", ".npy", ".building", ".journal")
        )
        for target in sorted({path.with_suffix("") for path in found}):
            lock, ends = (
                Lock(Path(f"{target}.lock")),
                (".json", ".u8", ".npy", ".building", ".journal"),
            )
            paths = _existing(*(Path(f"{target}{end}") for end in ends))
            yield Item("decoded", paths, lock, busy or lock.held())


def _is_busy(store: Store) -> bool:
    """Return whether a run of the store is under way, here or on a cluster."""
    executed = any(Lock(folder / "lock").held() for folder in _inside(store.work))
    launches = (file.parent for file in store.launches.glob("*/launch.json"))
    return executed or any(not (folder / "ended").exists() for folder in launches)


def _inside(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if not path.name.startswith("."))


def _existing(*paths: Path) -> tuple[Path, ...]:
    return tuple(path for path in paths if path.exists())


def _size(path: Path) -> int:
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else (path,)
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # it may go while we look
            total += file.stat().st_size if file.is_file() else 0
    return total
