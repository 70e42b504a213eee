"""Decoding a split's image files once, into one memory-mapped file.

The pixel file is written under a temporary name by the process that holds the lock, and the small
header that makes it valid is written last: a killed build leaves nothing that could be taken for a
cache. The header has the file's length and the checksum of every block of it, so that a cache that
was cut off, zeroed or exchanged afterwards is noticed and made again.

Beside the temporary file, a journal has what was decoded so far. The next build goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import platformdirs
import torch
from PIL import Image

from datasets.base import LabelledSplit
from datasets.bounded import Bound, scaled
from datasets.errors import DataCorrupt, DataMissing
from datasets.files import DECODED, StorageError, storage_errors
from datasets.images import MappedImages
from datasets.lock import Lock, LockLost
from datasets.pixels import Size, spread

FOLDER_NAME = ".decoded"
DECODED_AHEAD = 64  # images, of the writer: bounds memory, keeps the cores busy
MAX_SIZES_READ = 1000  # that enter a cache's identity; a stat of every file is slow on NFS
MAX_HEADERS_READ = 200  # from which the size of a cache is estimated
CHECKPOINT_SECONDS = 2.0  # of decoding that a kill costs at most
NAMED = 5  # missing files that a message names

# Every run opens its caches, so it cannot check all of them: CelebA's have 24 GB. 64 blocks of 1 MB
# spread over each file cost 0.03 s, find a cache that is zeroed or of other images for certain, and
# damage to a share p of the blocks with probability 1 - (1 - p)^64. `data verify` checks every one.
# CRC-32 is enough against accidents, and faster than a disk.
BLOCK_BYTES = 1 << 20
CHECKED_BLOCKS = 64

IF_MISSING = (
    "complete the download; or run on the images that are there, labelled as a subset and kept out "
    "of published tables, with --allow-subset"
)
"""What to do about image files of a release that are not there."""

Source = TypeVar("Source")
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


@dataclass(frozen=True)
class Cache:
    """The decoded images of some files, and where they are kept.

    Attributes:
        target: path of the cache's files, without their endings.
        elsewhere: another such path, which is used where it has them but never built. Beside shared
            data that only its owner may write, every user would otherwise decode gigabytes.
        bound: what images are scaled down to; none keeps them as they are.
        digests: by which each file is known, if they are known.
    """

    files: list[Path]
    target: Path
    elsewhere: Path | None = None
    bound: Bound | None = None
    digests: Sequence[bytes] | None = None

    def find(self) -> MappedImages | None:
        """Open the images where they are decoded already."""
        identity = self.identity()
        for target in dict.fromkeys((self.target, self.elsewhere)):
            opened = _open(target, identity) if target is not None else None
            if opened is not None:
                return opened
        return None

    def open(self, progress: Callable[[int, int], None]) -> MappedImages:
        """Open the images, decoding them first where that was not done before."""
        opened = self.find()
        if opened is not None:
            return opened
        target = self.target
        with Lock(Path(f"{target}.lock"), DECODED).hold(wait=True) as lock:
            identity = self.identity()
            opened = _open(target, identity)  # another process may have built it meanwhile
            if opened is None:
                if fault := cache_fault(target, identity):
                    log.warning("the decoded images %s.u8 %s: decoding again", target, fault)
                _build(self, identity, progress, lock)
                opened = _open(target, identity)
        if opened is None:
            raise DataCorrupt(
                f"the decoded images at {target} vanished while being built", "run again"
            )
        return opened

    def identity(self) -> str:
        """Digest the names of all files, the sizes of a spread of them, and the bound."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.parent.name}/{file.name}\n".encode())
        for file in self.files[:: max(1, len(self.files) // MAX_SIZES_READ)]:
            digest.update(str(file.stat().st_size if file.exists() else -1).encode())
        if self.bound is not None:
            digest.update(repr(self.bound).encode())
        return digest.hexdigest()

    def missing_bytes(self) -> int:
        """Estimate how much is still to be written, from the headers of some of the files."""
        pixels = []
        for place in spread(len(self.files), MAX_HEADERS_READ):
            with (
                contextlib.suppress(OSError, ValueError, SyntaxError),
                Image.open(self.files[place]) as image,
            ):
                size = image.size if self.bound is None else self.bound.size(*image.size)
                pixels.append(size[0] * size[1])
        whole = 3 * len(self.files) * sum(pixels) // max(1, len(pixels))
        written = Path(f"{self.target}.building")
        return max(0, whole - (written.stat().st_size if written.is_file() else 0))


def open_all(
    caches: Mapping[str, Cache],
    progress: Callable[[str, int, int], None],
    what: str,
    if_missing: str = IF_MISSING,
) -> dict[str, MappedImages]:
    """Open several caches; what speaks against decoding those that are not there is raised first.

    Args:
        caches: by name.
        progress: called with the name while images are decoded.
        what: the dataset, for messages.
        if_missing: what to do about files that are not there.
    """
    opened = {name: cache.find() for name, cache in caches.items()}
    unbuilt = [cache for name, cache in caches.items() if opened[name] is None]
    if unbuilt:
        files = [file for cache in unbuilt for file in cache.files]
        notes = unbuilt[0].target.parent
        require_files(files, missing_files(files), what, notes, if_missing)
        _require_space(unbuilt)
    return {
        name: cache.open(partial(progress, name)) if found is None else found
        for (name, cache), found in zip(caches.items(), opened.values(), strict=True)
    }


def missing_files(files: Iterable[Path]) -> list[Path]:
    """Return the files that are not there; a folder is listed once, which is fast on NFS too."""
    listed: dict[Path, set[str]] = {}
    absent = []
    for file in files:
        folder = file.parent
        if folder not in listed:
            listed[folder] = set()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                listed[folder] = set(os.listdir(folder))
        if file.name not in listed[folder]:
            absent.append(file)
    return absent


def require_files(
    files: Sequence[Path], absent: Sequence[Path], what: str, notes: Path, if_missing: str
) -> None:
    """Raise `DataMissing` if files are missing: how many, the first of them, and a list of all.

    Args:
        files: all that are needed.
        absent: those of them that are missing.
        what: the dataset.
        notes: a folder for the list.
        if_missing: what to do.
    """
    if not absent:
        return
    summary = sum_up([str(file) for file in absent], notes / f"missing-{what}.txt")
    raise DataMissing(
        f"{len(absent):,} of {len(files):,} images of {what} are missing:\n    {summary}",
        if_missing,
    )


def sum_up(lines: Sequence[str], file: Path) -> str:
    """Return the first of many lines and where all of them are, which is written to `file`."""
    if len(lines) <= NAMED:
        return "\n    ".join(lines)
    with storage_errors(file, DECODED):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return "\n    ".join([*lines[:NAMED], f"and {len(lines) - NAMED:,} more; all are in {file}"])


def _require_space(caches: Sequence[Cache]) -> None:
    """Raise `StorageError` where decoding would fill the disk."""
    folder = caches[0].target.parent
    needed = sum(cache.missing_bytes() for cache in caches)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the decoded images need about {needed / 1e9:.1f} GB in {folder}, where "
            f"{free / 1e9:.1f} GB are free",
            f"{DECODED.if_full}; at a smaller resolution they need less",
        )


def decode(file: Path | io.BytesIO, bound: Bound | None = None) -> np.ndarray:
    """Decode one image to H x W x 3 bytes; raise `DataCorrupt` with the name of a bad file."""
    return _decode(file, bound)[0]


def _decode(
    file: Path | io.BytesIO, bound: Bound | None = None, digest: bytes | None = None
) -> tuple[np.ndarray, Size]:
    """Decode one image, and return its width and height before it was scaled as well."""
    error = None
    try:
        source = file
        if digest is not None and isinstance(file, Path):
            source = io.BytesIO(content := file.read_bytes())
            if content_digest(content) != digest:
                raise ValueError("not the file that was registered")
        with Image.open(source) as image:
            native = image.size
            if bound is None:
                return np.asarray(_eight_bits(image).convert("RGB")), native
            size = bound.size(*native)
            image.draft("RGB", size)  # a JPEG is worked out at 1/2, 1/4 or 1/8, if that is enough
            return np.asarray(scaled(_eight_bits(image).convert("RGB"), size)), native
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as caught:
        error = caught
    raise DataCorrupt(
        f"{file} is not a readable image: {error}",
        "python -m bench data verify lists every bad file; replace them and run again",
    ) from error


def content_digest(content: bytes) -> bytes:
    """Return the digest by which a registered file is known."""
    return hashlib.blake2b(content, digest_size=16).digest()


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


def _open(target: Path, identity: str) -> MappedImages | None:
    if not Path(f"{target}.json").is_file() or cache_fault(target, identity):
        return None
    try:
        index = np.load(f"{target}.npy")
    except FileNotFoundError:  # another process is replacing it
        return None
    sizes = torch.from_numpy(index[:, 1:3])
    return MappedImages(f"{target}.u8", torch.from_numpy(index[:, 0]), sizes)


def file_sizes(splits: Mapping[str, LabelledSplit]) -> list[Size]:
    """Return the different sizes of photographs as they are in their files, width first.

    Other images than decoded photographs have none.
    """
    found: set[Size] = set()
    for split in splits.values():
        if isinstance(images := split.images, MappedImages):
            index = np.load(Path(images.path).with_suffix(".npy"))
            own = index[np.isin(index[:, 0], images.offsets.numpy())]
            # What was not bounded has one size only.
            found |= {(w, h) for h, w in np.unique(own[:, -2:], axis=0).tolist()}
    return sorted(found, key=lambda size: size[::-1])


class Draft:
    """A cache that is being written: pixels, and a journal of those that are safely on disk.

    The same files give the same bytes at the same places, so that a builder which was taken for
    dead and goes on writing does no harm.
    """

    def __init__(self, target: Path, identity: str) -> None:
        self.path, self.journal = Path(f"{target}.building"), Path(f"{target}.journal")
        self.rows: list[tuple[int, ...]] = []
        self.position, self.blocks = 0, BlockSums()
        self._identity, self._written, self._crc = identity, 0, 0
        if not self._resume():
            self.rows, self.position, self.blocks = [], 0, BlockSums()
            self._written = self._crc = 0
            # Not truncated but replaced: a builder taken for dead may still write other images.
            self.remove()
            self.path.touch()
        self._sink = self.path.open("r+b")
        self._sink.truncate(self.position)
        self._sink.seek(self.position)
        self._last = time.monotonic()

    def _resume(self) -> bool:
        """Take up what an earlier builder of the same images left; return whether it holds."""
        try:
            first, *lines = self.journal.read_text().splitlines(keepends=True)
            if json.loads(first)["identity"] != self._identity:
                return False
            last = {"bytes": 0, "crc": 0}
            for line in lines:
                if not line.endswith("\n"):  # torn when it was killed
                    break
                last = json.loads(line)
                self.rows += [tuple(row) for row in last["rows"]]
            with self.path.open("rb") as source:
                while self.position < last["bytes"]:
                    part = source.read(min(BLOCK_BYTES, last["bytes"] - self.position))
                    if not part:
                        return False
                    self._crc = zlib.crc32(part, self._crc)
                    self.blocks.add(part)
                    self.position += len(part)
            self._written = len(self.rows)
            return self._crc == last["crc"] and bool(self.rows)
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def add(self, image: np.ndarray, native: Size, *, bounded: bool) -> None:
        """Write the next image."""
        own = (native[1], native[0]) if bounded else ()
        self.rows.append((self.position, *image.shape[:2], *own))
        self._sink.write(content := image.tobytes())
        self.blocks.add(content)
        self._crc = zlib.crc32(content, self._crc)
        self.position += image.nbytes

    def checkpoint(self, lock: Lock, *, due: float = CHECKPOINT_SECONDS) -> None:
        """Make what was written safe, if the last time is `due` seconds ago."""
        if time.monotonic() - self._last < due or self._written == len(self.rows):
            return
        self.flush()
        lock.check()
        new = not self.journal.exists()
        with self.journal.open("a") as sink:
            if new:
                sink.write(json.dumps({"identity": self._identity}) + "\n")
            rows = self.rows[self._written :]
            sink.write(json.dumps({"rows": rows, "bytes": self.position, "crc": self._crc}) + "\n")
            sink.flush()
            os.fsync(sink.fileno())
        self._written, self._last = len(self.rows), time.monotonic()

    def flush(self) -> None:
        """Wait until the pixels are on disk, else a power cut leaves zeros that count as images."""
        self._sink.flush()
        os.fsync(self._sink.fileno())

    def close(self) -> None:
        """Close the file; what was not flushed then is of a build that failed."""
        with contextlib.suppress(OSError):
            self._sink.close()

    def remove(self) -> None:
        """Remove what was written."""
        self.path.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)


def _build(cache: Cache, identity: str, progress: Callable[[int, int], None], lock: Lock) -> None:
    target, files = cache.target, cache.files
    pixels, header, index = (Path(f"{target}{end}") for end in (".u8", ".json", ".npy"))
    with storage_errors(target, DECODED):
        header.unlink(missing_ok=True)
        pixels.unlink(missing_ok=True)  # gigabytes, of no use without a header
        draft = Draft(target, identity)
    try:
        with storage_errors(target, DECODED):
            if done := len(draft.rows):
                log.info("%s: %d of %d images are decoded already", target, done, len(files))
            known: Sequence[bytes | None] = cache.digests or [None] * len(files)
            rest = islice(zip(files, known, strict=True), done, None)
            for image, native in decode_all(rest, lambda f: _decode(f[0], cache.bound, f[1])):
                draft.add(image, native, bounded=cache.bound is not None)
                draft.checkpoint(lock, due=CHECKPOINT_SECONDS)
                progress(len(draft.rows), len(files))
            draft.flush()
            lock.check()
            np.save(table := io.BytesIO(), np.array(draft.rows, dtype=np.int64))
            index.write_bytes(table.getvalue())
            os.replace(draft.path, pixels)
            part = Path(f"{target}.json.part")
            facts = {
                "identity": identity,
                "bytes": draft.position,
                "images": len(files),
                "index": zlib.crc32(table.getvalue()),
                "blocks": draft.blocks.sums,
            }
            part.write_text(json.dumps(facts))
            os.replace(part, header)
            draft.journal.unlink(missing_ok=True)
    except LockLost:  # the files of that name are the other builder's
        raise
    except StorageError:  # the room is better used by others
        draft.remove()
        raise
    except BaseException:
        with contextlib.suppress(OSError, LockLost):
            draft.checkpoint(lock, due=0)
        raise
    finally:
        draft.close()


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


def decode_all(sources: Iterable[Source], decode: Callable[[Source], Decoded]) -> Iterator[Decoded]:
    """Decode in threads (Pillow releases the interpreter lock), a bounded number ahead."""
    rest = iter(sources)
    with ThreadPoolExecutor(_cores() + 1) as pool:
        ahead: deque[Future[Decoded]] = deque()
        try:
            while True:
                ahead += (
                    pool.submit(decode, one) for one in islice(rest, DECODED_AHEAD - len(ahead))
                )
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for waiting in ahead:
                waiting.cancel()


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
