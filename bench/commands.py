"""Commands that were given and are not finished, so that `status` can say how to go on.

commands/<digest of the run ids>.json    what was typed, and the runs it was to make
commands/<digest>.lock.<n>               held while the command works at them

A file is there from the moment a command begins until all of its runs have ended; an interrupted or
killed command leaves it. Runs that were never begun are known from nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.store import Store
from datasets.errors import BenchError
from datasets.files import Damaged, atomic_file, digest, read_checked, with_checksum
from datasets.lock import Lock


@dataclass(frozen=True)
class GivenCommand:
    """A command, and the runs it was to make that have not ended.

    Attributes:
        running: whether a process works at them now.
    """

    command: str
    created: float
    runs: tuple[str, ...]
    running: bool


@contextmanager
def unfinished_command(store: Store, command: str, runs: Sequence[str]) -> Iterator[None]:
    """Remember a command while its runs are made, and forget it when all of them have ended.

    What cannot be written (a full disk, say) is no reason to stop: the runs themselves say so.
    """
    if not command:
        yield
        return
    path = _folder(store) / f"{digest(sorted(runs), 10)}.json"
    lock = Lock(path.with_suffix(".lock"))
    with contextlib.ExitStack() as held:
        with contextlib.suppress(BenchError, OSError):
            _forget_ended(store)
            with atomic_file(path) as draft:
                content = {"command": command, "created": time.time(), "runs": [*runs]}
                draft.write_text(with_checksum(content))
            held.enter_context(lock.hold(wait=False))
        try:
            yield
        except BenchError:  # there was something wrong with the command or its data
            if not any(store.has_progress(run) or store.record_mtime(run) for run in runs):
                _forget(path)
            raise
    with contextlib.suppress(OSError):
        _forget(path)


def unfinished_commands(store: Store, ended: Callable[[str], bool]) -> list[GivenCommand]:
    """Return the commands that have runs left, oldest first.

    Args:
        store: where they were to put their runs.
        ended: whether a run is done or failed.
    """
    found = []
    for path in _folder(store).glob("*.json"):
        try:
            content = read_checked(path)
            runs = tuple(str(run) for run in content["runs"] if not ended(str(run)))
            command, created = str(content["command"]), float(content["created"])
        except (Damaged, OSError, LookupError, TypeError, ValueError):
            continue  # it only helps to remember: its runs are simply missing
        if runs:
            running = Lock(path.with_suffix(".lock")).held()
            found.append(GivenCommand(command, created, runs, running))
    return sorted(found, key=lambda given: given.created)


def _folder(store: Store) -> Path:
    return store.root / "commands"


def _forget_ended(store: Store) -> None:
    """Forget the commands whose runs other commands have made meanwhile."""
    for path in _folder(store).glob("*.json"):
        with contextlib.suppress(Damaged, LookupError):
            if all(store.record_mtime(str(run)) for run in read_checked(path)["runs"]):
                _forget(path)


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)
    for lock in path.parent.glob(f"{path.stem}.lock.*"):
        lock.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others are in it
        path.parent.rmdir()
