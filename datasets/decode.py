"""Decoding a split's image files once, into one memory-mapped file.

The pixel file is written under a temporary name by the process that holds the lock, and the small
header that makes it valid is written last: a killed build leaves nothing that could be taken for a
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import platformdirs
import torch
from PIL import Image

from datasets.errors import DataCorrupt
from datasets.files import DECODED, storage_errors
from datasets.images import MappedImages
from datasets.lock import Lock, LockLost

FOLDER_NAME = ".decoded"
DECODED_AHEAD = 256  # of the writer: bounds memory, keeps the cores busy
MAX_SIZES_READ = 1000  # that enter a cache's identity; a stat of every file is slow on NFS


def decoded_folder(folder: Path) -> Path:
    """Return where decoded images go: beside the data, or in the user's cache if that is closed."""
    beside = folder / FOLDER_NAME
    try:
        beside.mkdir(exist_ok=True)
        if os.access(beside, os.W_OK):
            return beside
    except OSError:
        pass
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    cache = Path(platformdirs.user_cache_dir("nct-bench")) / "decoded" / name
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def mapped_images(
    files: list[Path],
    target: Path,
    progress: Callable[[int, int], None],
    elsewhere: Path | None = None,
) -> MappedImages:
    """Open the decoded images of `files`, building the cache at `target` if it is not there.

    A cache at `elsewhere` is used too but never built: beside shared data that only its owner may
    write, every user would otherwise decode gigabytes of their own.
    """
    opened = find_mapped(files, target, elsewhere)
    if opened is not None:
        return opened
    with Lock(Path(f"{target}.lock"), DECODED).hold(wait=True) as lock:
        identity = _identity(files)
        opened = _open(target, identity)  # another process may have built it meanwhile
        if opened is None:
            _build(files, target, identity, progress, lock)
            opened = _open(target, identity)
    if opened is None:
        raise DataCorrupt(f"the decoded images at {target} vanished while being built", "run again")
    return opened


def find_mapped(files: list[Path], *targets: Path | None) -> MappedImages | None:
    """Open the decoded images of `files` in the first of several places that has them."""
    identity = _identity(files)
    for target in targets:
        opened = _open(target, identity) if target is not None else None
        if opened is not None:
            return opened
    return None


def decode(file: Path) -> np.ndarray:
    """Decode one image to H x W x 3 bytes; raise `DataCorrupt` with the name of a bad file."""
    error = None
    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as caught:
        error = caught
    raise DataCorrupt(
        f"{file} is not a readable image: {error}",
        "python -m bench data verify lists every bad file; replace them and run again",
    ) from error


def decode_error(file: Path) -> str | None:
    """Return why an image cannot be decoded, or None if it can."""
    try:
        decode(file)
    except DataCorrupt as error:
        return str(error.__cause__)
    return None


def _identity(files: list[Path]) -> str:
    """Digest the names of all files and the sizes of a spread of them."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}\n".encode())
    for file in files[:: max(1, len(files) // MAX_SIZES_READ)]:
        digest.update(str(file.stat().st_size if file.exists() else -1).encode())
    return digest.hexdigest()


def _open(target: Path, identity: str) -> MappedImages | None:
    pixels, header = Path(f"{target}.u8"), Path(f"{target}.json")
    try:
        facts = json.loads(header.read_text())
        index = np.load(f"{target}.npy")
        if facts["identity"] != identity or pixels.stat().st_size != facts["bytes"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    sizes = torch.from_numpy(index[:, 1:])
    return MappedImages(str(pixels), torch.from_numpy(index[:, 0]), sizes)


def _build(
    files: list[Path],
    target: Path,
    identity: str,
    progress: Callable[[int, int], None],
    lock: Lock,
) -> None:
    pixels, header, index = Path(f"{target}.u8"), Path(f"{target}.json"), Path(f"{target}.npy")
    temporary = Path(f"{target}.building")
    rows, position = [], 0
    try:
        with storage_errors(target, DECODED):
            header.unlink(missing_ok=True)
            # Not truncated but replaced: a builder taken for dead may still write to the old one.
            temporary.unlink(missing_ok=True)
            with temporary.open("wb") as sink:
                for done, image in enumerate(_decoded(files), start=1):
                    rows.append((position, *image.shape[:2]))
                    sink.write(image.tobytes())
                    position += image.nbytes
                    progress(done, len(files))
            lock.check()
            np.save(index, np.array(rows, dtype=np.int64))
            os.replace(temporary, pixels)
            draft = Path(f"{target}.json.part")
            facts = {"identity": identity, "bytes": position, "images": len(files)}
            draft.write_text(json.dumps(facts))
            os.replace(draft, header)
    except LockLost:  # the file of that name is the other builder's
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _decoded(files: list[Path]) -> Iterator[np.ndarray]:
    """Decode in threads (Pillow releases the interpreter lock), a bounded number ahead."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), DECODED_AHEAD):
            yield from pool.map(decode, files[start : start + DECODED_AHEAD])
