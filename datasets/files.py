"""Writing files so that a reader sees the old content or the new, never a half of either."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.errors import BenchError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class StorageError(BenchError):
    """A file could not be written."""

    kind = "storage"


class Damaged(BenchError):
    """A file is not as it was written: torn, changed, or another's."""

    kind = "damaged"


@dataclass(frozen=True)
class StorageArea:
    """What to do when files of one kind cannot be written.

    Attributes:
        if_full: the remedy when there is no space left.
        if_unwritable: the remedy for every other failure.
        all_errors: treat every `OSError` as a failure to write. Where files come from a network or
            an archive, other errors mean something else and pass unchanged.
    """

    if_full: str
    if_unwritable: str
    all_errors: bool


RESULTS = StorageArea(
    if_full="free disk space or point --results at a larger disk, then run the command again",
    if_unwritable="point --results at a folder that can be written to, then run the command again",
    all_errors=True,
)
CHOSEN = StorageArea(
    if_full="free disk space or name another place, then run the command again",
    if_unwritable="name a place that can be written to, then run the command again",
    all_errors=True,
)
DATA = StorageArea(
    if_full="free some space or choose another disk with --data-root, then run the same command "
    "again; what was already downloaded is kept and continued",
    if_unwritable="choose a folder you may write to with --data-root or BENCH_DATA",
    all_errors=False,
)
DECODED = StorageArea(
    if_full="free disk space there, or move the data root to a larger disk, and run again",
    if_unwritable="make that folder writable, or move the data root (--data-root or BENCH_DATA), "
    "and run again",
    all_errors=True,
)


@contextmanager
def storage_errors(path: Path, area: StorageArea = RESULTS) -> Iterator[None]:
    """Raise a full or unwritable disk as a `StorageError` with the remedy of the area."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageError(
                f"no room left to write {path}: {error.strerror}", area.if_full
            ) from error
        if area.all_errors or error.errno in UNWRITABLE:
            raise StorageError(
                f"cannot write {path}: {error.strerror or error}", area.if_unwritable
            ) from error
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it takes the place of `path`."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            yield draft
            with draft.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it takes the place of `path`."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unique = uuid.uuid4().hex[:8]
        draft = path.with_name(f".{path.name}.{unique}.part")
        old = path.with_name(f".{path.name}.{unique}.old")
        try:
            draft.mkdir()
            yield draft
            for file in draft.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if path.exists():
                os.replace(path, old)
            try:
                os.replace(draft, path)
            except OSError:
                if old.exists():
                    os.replace(old, path)
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def remove_stale_temporaries(folder: Path, in_use: Callable[[str], bool]) -> None:
    """Remove what killed writers left, and put back a folder that was only half replaced.

    What `in_use` says of a name (that a process may be writing it just now) is left alone.
    """
    for left in (*folder.glob(".*.old"), *folder.glob(".*.part")):
        path = left.with_name(left.name[1:].rsplit(".", 2)[0])
        with contextlib.suppress(OSError):
            if in_use(path.name):
                continue
            if left.suffix == ".old" and not path.exists():
                os.replace(left, path)
            else:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def set_aside(path: Path, folder: Path, reason: str) -> Path:
    """Move a file or folder that is damaged out of the way, with a note why; return its place."""
    with storage_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{path.name}.{uuid.uuid4().hex[:8]}"
        os.replace(path, place)
    append_line(folder / "notes.jsonl", {"name": place.name, "was": str(path), "reason": reason})
    return place


def to_json(value: Any) -> str:
    """Return a value as JSON, with NaN and infinities as null: they are not JSON."""
    return json.dumps(_plain(value), indent=1, sort_keys=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def digest(value: Any, length: int = 16) -> str:
    """Return the SHA-256 of a JSON-ready value in canonical form, cut to `length` digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def with_checksum(content: Mapping[str, object]) -> str:
    """Return JSON with a key `checksum`, by which a reader notices every later change."""
    plain = _plain(content)
    return to_json({**plain, "checksum": digest(plain, 64)})


def read_checked(path: Path) -> dict[str, Any]:
    """Read a JSON object, raising `Damaged` unless it is as written; the checksum is left out.

    Files of earlier versions have no checksum and are taken as they are.
    """
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Damaged("it is not a JSON object")
    checksum = content.pop("checksum", None)
    if checksum is not None and checksum != digest(content, 64):
        raise Damaged("its checksum does not fit its content: it was changed or damaged")
    return content


@dataclass(frozen=True)
class FileFacts:
    """By what a file is known to be as it was written."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileFacts:
        """Measure a file."""
        with path.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
            return FileFacts(source.tell(), found)

    def check(self, path: Path, *, content: bool = True) -> None:
        """Raise `Damaged` unless the file is as it was; without `content`, by its length alone."""
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise Damaged(f"{path.name} is missing")
        if found != self.bytes:
            raise Damaged(f"{path.name} has {found} bytes of {self.bytes}")
        if content and FileFacts.of(path) != self:
            raise Damaged(f"the checksum of {path.name} does not fit")


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON line."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as sink:
            # A line that a killed process left torn must not swallow this one.
            torn = sink.tell() > 0 and sink.seek(-1, os.SEEK_END) >= 0 and sink.read(1) != b"\n"
            sink.write((b"\n" if torn else b"") + json.dumps(_plain(row)).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects that are lines of a file, without those that were torn or zeroed."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows
