"""Writing files so that a reader sees the old content or the new, never a half of either."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets.errors import BenchError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StorageError(BenchError):
    """Results could not be written."""

    kind = "storage"


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the ways writing can fail into one message with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageError(
                f"no room left to write {path}: {error.strerror}",
                "free disk space or point --results at a larger disk, then run the command again",
            ) from error
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}",
            "point --results at a folder that can be written to",
        ) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on success it takes the place of `path`."""
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
    """Give a temporary folder to fill; on success it takes the place of `path`."""
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
            os.replace(draft, path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def tidy(folder: Path, older_than: float = 3600.0) -> None:
    """Clear what killed writers left: put a half-replaced folder back, drop abandoned drafts."""
    for left in folder.glob(".*.old"):
        path = left.with_name(left.name[1:].rsplit(".", 2)[0])
        if not path.exists():
            with contextlib.suppress(OSError):
                os.replace(left, path)
    for left in (*folder.glob(".*.old"), *folder.glob(".*.part")):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > older_than:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def to_json(value: Any) -> str:
    """Serialise, with NaN and infinities as null: they are not JSON."""
    return json.dumps(_plain(value), indent=1, sort_keys=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def digest(value: Any, length: int = 16) -> str:
    """Hash a JSON-ready value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as sink:
            # A line that a killed process left torn must not swallow this one.
            torn = sink.tell() > 0 and sink.seek(-1, os.SEEK_END) >= 0 and sink.read(1) != b"\n"
            sink.write((b"\n" if torn else b"") + json.dumps(_plain(row)).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, leaving out one that a killed process left torn."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
