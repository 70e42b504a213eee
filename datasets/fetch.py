"""Downloading, resuming and verifying: the mechanism behind `bench data get`.

Dataset hosts go down, break off half-way, and answer with a quota page that is saved as a zip. So
nothing gets its final name before it is complete and verified, a broken download continues where it
stopped, and each failure says what a person has to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import shlex
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from platformdirs import user_cache_dir

from datasets.errors import DataCorrupt, DataMissing
from datasets.files import DATA, NO_SPACE, UNWRITABLE, storage_errors
from datasets.lock import Lock

Log = Callable[[str], None]
"""Called with a line about what is being done."""

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there, and how many there will be where that is known."""

ROOT_VARIABLE = "BENCH_ROOT_IN_USE"
"""Environment variable that tells child processes the data root of the command they belong to."""

BLOCK_BYTES = 1 << 18
ATTEMPTS = 3
RERUN = "run the same command again"


def default_data_root() -> Path:
    """Return where data lives without `--data-root`: BENCH_DATA, else the user's cache."""
    chosen = os.environ.get("BENCH_DATA")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("nct-bench")) / "data"


def use_data_root(root: Path) -> None:
    """Make the data registered below a root known here, and in every process started from here."""
    os.environ[ROOT_VARIABLE] = str(root.absolute())


def data_root_in_use() -> Path:
    """Return the data root whose registered data is known."""
    chosen = os.environ.get(ROOT_VARIABLE)
    return Path(chosen) if chosen else default_data_root()


def get_command(name: str, root: Path) -> str:
    """Return the exact shell command that gets `name`."""
    command = f"python -m bench data get {name}"
    if root.absolute() != default_data_root().absolute():
        command += f" --data-root {shlex.quote(str(root))}"
    return command


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def md5_of(path: Path) -> str:
    """Return the MD5 of a file: against accidents only, where no better sum was published."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "md5").hexdigest()


@contextlib.contextmanager
def fetch_lock(root: Path, name: str) -> Iterator[None]:
    """Hold the one lock for fetching `name` under `root`, so that parallel jobs fetch it once."""
    with Lock(root / ".locks" / f"{name}.lock", DATA).hold(wait=True):
        yield


def download(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    progress: Progress | None = None,
    timeout: float = 30,
) -> Path:
    """Download `url` to `target`, continuing an earlier broken download of it.

    The bytes go to `<target>.part`, which gets the final name only when complete and verified. A
    file already at `target` is verified and kept. A prefix of a SHA-256 is enough, because model
    hubs publish only that.
    """
    if target.exists():
        check_sums(target, url, sha256, md5)
        return target
    part = target.with_name(target.name + ".part")
    with storage_errors(target, DATA):
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists() and part.stat().st_size > 0
        _complete(url, part, target, progress, timeout)
        try:
            check_sums(part, url, sha256, md5)
        except DataCorrupt:
            # Bytes that are wrong must not be continued by the next attempt.
            part.unlink()
            if not resumed:
                raise
            # The old half may belong to an older version of the file: take it whole, once.
            return download(url, target, sha256=sha256, md5=md5, progress=progress, timeout=timeout)
        os.replace(part, target)
    return target


def _complete(
    url: str, part: Path, target: Path, progress: Progress | None, timeout: float
) -> None:
    """Call the server until `part` is complete, as long as each call brings new bytes."""
    for attempt in range(1, ATTEMPTS + 1):
        before = part.stat().st_size if part.exists() else 0
        try:
            if _transfer(url, part, before, target, progress, timeout):
                return
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:
                if _total_of(error.headers.get("Content-Range")) == before:
                    return
                part.unlink()  # longer than the file on the server: not a beginning of it
                continue
            reason = f"the server answered {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            # urllib wraps what happens while connecting, so these come from writing the file.
            if isinstance(error, OSError) and error.errno in NO_SPACE + UNWRITABLE:
                raise
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
        now = part.stat().st_size if part.exists() else 0
        if now <= before or attempt == ATTEMPTS:
            raise DataMissing(
                f"could not download {url}: {reason} (after {now:,} bytes)",
                f"check the network and {RERUN} (it continues where it stopped), or fetch the "
                f"file elsewhere and put it at {target}",
            )
    raise DataMissing(f"could not download {url}: the server's answers disagree", RERUN)


def _transfer(
    url: str, part: Path, start: int, target: Path, progress: Progress | None, timeout: float
) -> bool:
    """Append one response to `part`; return whether the file is complete afterwards."""
    headers = {"User-Agent": "nct-bench", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        done = start if response.status == 206 else 0
        span = response.headers.get("Content-Range", "")
        if done and not span.startswith(f"bytes {start}-"):
            raise OSError(f"the server sent the range '{span}', not the one asked for")
        length = response.headers.get("Content-Length")
        total = _total_of(span) if done else None
        if total is None and length is not None:
            total = done + int(length)
        block = response.read(BLOCK_BYTES)
        html_type = response.headers.get_content_type() == "text/html"
        if target.suffix not in (".html", ".htm") and (
            html_type or (done == 0 and looks_like_html(block))
        ):
            # Before `part` is touched: an earlier good half survives a passing quota page.
            raise web_page_error(url, target)
        with part.open("ab" if done else "wb") as handle:
            while block:
                handle.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
                block = response.read(BLOCK_BYTES)
            handle.flush()
            if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                os.fsync(handle.fileno())
    return total is None or done == total


def _total_of(content_range: str | None) -> int | None:
    """Return the size of the whole file, from a Content-Range header such as `bytes 5-9/10`."""
    match = re.search(r"/(\d+)$", content_range or "")
    return int(match[1]) if match else None


def looks_like_html(head: bytes) -> bool:
    """Return whether a file begins as a web page does."""
    return head[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html"))


def web_page_error(source: object, target: Path) -> DataCorrupt:
    """Return the error for a page that was served where a file was asked for."""
    return DataCorrupt(
        f"{source} is a web page, not the file (often a quota, login or licence page)",
        f"open the address in a browser, save the real file as {target}, and {RERUN}",
    )


def describe_sum(path: Path, compared: str = "") -> str:
    """Return in a line by which published sum a file was checked, or its own if there is none."""
    if compared:
        return f"{path.name} has the published {compared}"
    return f"{path.name} is not pinned (no sum was published): its SHA-256 is {sha256_of(path)}"


def check_sums(path: Path, url: object, sha256: str | None, md5: str | None) -> None:
    """Raise `DataCorrupt` with both sums where a file differs from a known one."""
    for kind, expected, measure in (("SHA-256", sha256, sha256_of), ("MD5", md5, md5_of)):
        if expected and not (actual := measure(path)).startswith(expected.lower()):
            raise DataCorrupt(
                f"{path} from {url} has the {kind} {actual}, expected {expected}",
                f"delete {path} if it is still there and {RERUN}; if it happens again, the host "
                "serves another file",
            )
