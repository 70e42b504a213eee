"""Decoding a split's image files once, into one memory-mapped file.

The pixel file is written under a temporary name by the process that holds the lock, and the small
header that makes it valid is written last: a killed build leaves nothing that could be taken for a
cache. The header has the file's length and the checksum of every block of it, so that a cache that
was cut off, zeroed or exchanged afterwards is noticed and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import platformdirs
import torch
from PIL import Image

from datasets.errors import DataCorrupt
from datasets.files import DECODED, storage_errors
from datasets.images import MappedImages
from datasets.lock import Lock, LockLost
from datasets.pixels import spread

FOLDER_NAME = ".decoded"
DECODED_AHEAD = 256  # of the writer: bounds memory, keeps the cores busy
MAX_SIZES_READ = 1000  # that enter a cache's identity; a stat of every file is slow on NFS

# Every run opens its caches, so it cannot check all of them: CelebA's have 24 GB. 64 blocks of 1 MB
# spread over each file cost 0.03 s, find a cache that is zeroed or of other images for certain, and
# damage to a share p of the blocks with probability 1 - (1 - p)^64. `data verify` checks every one.
# CRC-32 is enough against accidents, and faster than a disk.
BLOCK_BYTES = 1 << 20
CHECKED_BLOCKS = 64

Decoded = TypeVar("Decoded")

log = logging.getLogger("nct-bench")


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
            if fault := cache_fault(target, identity):
                log.warning("the decoded images %s.u8 %s: decoding again", target, fault)
            _build(files, target, identity, progress, lock)
            opened = _open(target, identity)
    if opened is None:
        raise DataCorrupt(f"the decoded images at {target} vanished while being built", "run again")
    return opened


def find_mapped(files: list[Path], *targets: Path | None) -> MappedImages | None:
    """Open the decoded images of `files` in the first of several places that has them."""
    identity = _identity(files)
    for target in dict.fromkeys(targets):
        opened = _open(target, identity) if target is not None else None
        if opened is not None:
            return opened
    return None


def decode(file: Path) -> np.ndarray:
    """Decode one image to H x W x 3 bytes; raise `DataCorrupt` with the name of a bad file."""
    error = None
    try:
        with Image.open(file) as image:
            return np.asarray(_eight_bits(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as caught:
        error = caught
    raise DataCorrupt(
        f"{file} is not a readable image: {error}",
        "python -m bench data verify lists every bad file; replace them and run again",
    ) from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits as one of 8; `convert` would make all from 255 up white.

    The upper byte is taken, as Pillow itself does for colour images of 16 bits.
    """
    # Pillow has had 16-bit PNG and PGM files as mode I, whose pixels have 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}) have no known scale; use 8 or 16")
    return image


def cache_fault(target: Path, identity: str | None, blocks: int | None = CHECKED_BLOCKS) -> str:
    """Return what is wrong with a cache; nothing if it is sound, or was never finished.

    Args:
        target: path of the cache's files, without their endings.
        identity: that of the files whose images it should hold; None if any.
        blocks: how many blocks of the pixel file are checked; None for all.
    """
    try:
        header = json.loads(Path(f"{target}.json").read_text())
        if identity not in (None, header["identity"]):
            return "belong to other image files"
        pixels, sums = Path(f"{target}.u8"), header["blocks"]
        if (size := pixels.stat().st_size) != header["bytes"]:
            return f"have {size:,} bytes instead of {header['bytes']:,}"
        if zlib.crc32(Path(f"{target}.npy").read_bytes()) != header["index"]:
            return "have an index with a wrong checksum"
        with pixels.open("rb") as source:
            for block in spread(len(sums), blocks or len(sums)):
                source.seek(block * BLOCK_BYTES)
                if zlib.crc32(source.read(BLOCK_BYTES)) != sums[block]:
                    return f"have a wrong checksum in block {block} of {len(sums)}"
    except FileNotFoundError as error:
        absent = Path(str(error.filename)).suffix
        return "" if absent == ".json" else f"lack their {absent} file"
    except KeyError:
        return "were made by an older version, without checksums"
    except (OSError, ValueError, TypeError) as error:
        return f"cannot be read ({error})"
    return ""


def remove_damaged(folder: Path, prefix: str) -> list[str]:
    """Check all of every cache in `folder`, and remove those that are damaged; return notes."""
    notes = []
    for header in sorted(folder.glob(f"{prefix}*.json")):
        target = header.with_suffix("")
        if fault := cache_fault(target, None, None):
            notes.append(f"the decoded images {target}.u8 {fault}: removed, the next run decodes")
            with contextlib.suppress(OSError):  # another user's: theirs to remove, nobody uses it
                header.unlink(missing_ok=True)
                Path(f"{target}.u8").unlink(missing_ok=True)
    return notes


def _identity(files: list[Path]) -> str:
    """Digest the names of all files and the sizes of a spread of them."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.parent.name}/{file.name}\n".encode())
    for file in files[:: max(1, len(files) // MAX_SIZES_READ)]:
        digest.update(str(file.stat().st_size if file.exists() else -1).encode())
    return digest.hexdigest()


def _open(target: Path, identity: str) -> MappedImages | None:
    if not Path(f"{target}.json").is_file() or cache_fault(target, identity):
        return None
    try:
        index = np.load(f"{target}.npy")
    except FileNotFoundError:  # another process is replacing it
        return None
    sizes = torch.from_numpy(index[:, 1:])
    return MappedImages(f"{target}.u8", torch.from_numpy(index[:, 0]), sizes)


def _build(
    files: list[Path],
    target: Path,
    identity: str,
    progress: Callable[[int, int], None],
    lock: Lock,
) -> None:
    pixels, header, index = Path(f"{target}.u8"), Path(f"{target}.json"), Path(f"{target}.npy")
    temporary = Path(f"{target}.building")
    rows, position, blocks = [], 0, BlockSums()
    try:
        with storage_errors(target, DECODED):
            header.unlink(missing_ok=True)
            pixels.unlink(missing_ok=True)  # gigabytes, of no use without a header
            # Not truncated but replaced: a builder taken for dead may still write to the old one.
            temporary.unlink(missing_ok=True)
            with temporary.open("wb") as sink:
                for done, image in enumerate(decode_all(files, decode), start=1):
                    rows.append((position, *image.shape[:2]))
                    sink.write(content := image.tobytes())
                    blocks.add(content)
                    position += image.nbytes
                    progress(done, len(files))
                sink.flush()
                os.fsync(sink.fileno())  # else a power cut leaves zeros under a valid header
            lock.check()
            np.save(table := io.BytesIO(), np.array(rows, dtype=np.int64))
            index.write_bytes(table.getvalue())
            os.replace(temporary, pixels)
            draft = Path(f"{target}.json.part")
            facts = {
                "identity": identity,
                "bytes": position,
                "images": len(files),
                "index": zlib.crc32(table.getvalue()),
                "blocks": blocks.sums,
            }
            draft.write_text(json.dumps(facts))
            os.replace(draft, header)
    except LockLost:  # the file of that name is the other builder's
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class BlockSums:
    """Checksums of the blocks of a stream of bytes; the last block may be shorter."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self._size = 0

    def add(self, content: bytes) -> None:
        """Go on with the next bytes of the stream."""
        rest = memoryview(content)
        while rest:
            filled = self._size % BLOCK_BYTES
            if filled == 0:
                self.sums.append(0)
            part = rest[: BLOCK_BYTES - filled]
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            self._size += len(part)
            rest = rest[len(part) :]


def decode_all(files: list[Path], decode: Callable[[Path], Decoded]) -> Iterator[Decoded]:
    """Decode in threads (Pillow releases the interpreter lock), a bounded number ahead."""
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), DECODED_AHEAD):
            yield from pool.map(decode, files[start : start + DECODED_AHEAD])
