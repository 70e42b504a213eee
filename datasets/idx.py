"""IDX, the format of MNIST's files: a header of sizes, then bytes; packed by gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

import numpy as np
import numpy.typing as npt

from datasets.errors import DataCorrupt, DataMissing


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read an IDX file of bytes, gzipped or not; `<path>.gz` is read where `path` is not there."""
    remedy = "delete it and get it again"
    found = on_disk(path)
    if found is None:
        raise DataMissing(f"{path} is missing", "get it again")
    with open_idx(found) as handle:
        try:
            content = bytearray(handle.read())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataCorrupt(f"{found} cannot be decompressed: {error}", remedy) from error
    dimensions = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * dimensions
    if content[:3] != b"\0\0\x08" or dimensions == 0 or len(content) < start:
        raise DataCorrupt(
            f"{found} has no IDX header of unsigned bytes: it begins with "
            f"0x{bytes(content[:4]).hex()}",
            remedy,
        )
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataCorrupt(
            f"{found} has {len(content):,} bytes, but its header {shape} asks for {expected:,}",
            remedy,
        )
    # From a bytearray the array is writable, which torch.from_numpy asks for.
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def map_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Open an IDX file of bytes that is not gzipped, reading only what is then asked for."""
    with path.open("rb") as handle:
        head = handle.read(4 + 4 * 255)
    dimensions = head[3] if len(head) >= 4 else 0
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(head[at : at + 4], "big") for at in range(4, start, 4))
    size = start + math.prod(shape)
    if not shape or head[:start] != idx_header(shape) or path.stat().st_size != size:
        raise DataCorrupt(
            f"{path} is no IDX file of unsigned bytes, or not all of one",
            "delete it and get it again",
        )
    return np.memmap(path, dtype=np.uint8, mode="r", offset=start, shape=shape)


def idx_header(shape: Sequence[int]) -> bytes:
    """Return the header of an IDX file of bytes."""
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()


def on_disk(path: Path) -> Path | None:
    """Return the file itself, or its .gz, or None."""
    zipped = path.with_name(path.name + ".gz")
    return path if path.is_file() else zipped if zipped.is_file() else None


def open_idx(path: Path) -> IO[bytes]:
    """Open by content, not by name: browsers unpack a .gz and keep its name."""
    with path.open("rb") as handle:
        zipped = handle.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")
