"""Unpacking archives of unknown origin: all of an archive or nothing, and nothing outside.

An archive from the web may be cut off, may be a quota page, may name files outside of the folder it
is unpacked into, and may unpack to more than any disk holds. Each of these ends in an error that
says so, and in no half folder that a loader would take for data.
"""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import uuid
import zipfile
import zlib
from pathlib import Path, PurePosixPath, PureWindowsPath

from datasets.errors import BenchError, DataCorrupt
from datasets.fetch import BLOCK_BYTES, RERUN, looks_like_html, web_page_error
from datasets.files import DATA, StorageError, storage_errors

# Far above the largest archive there is reason to unpack: CelebA has 202,600 files and 1.5 GB.
MOST_MEMBERS = 1_000_000
MOST_BYTES = 64 << 30


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar (plain or compressed) or zip as the new folder `into`, all of it or nothing.

    Refused: absolute names, `..`, device files, and links that are absolute, contain `..` or sit in
    a zip. Links that only point downwards cannot leave the folder, however they are chained, so
    this does not rest on the standard library's filter alone, whose early versions had holes.
    Refused before it is written, too: more members or bytes than the limits, or than fit the disk.
    """
    if into.exists() and any(into.iterdir()):
        raise BenchError(f"{into} is already there", f"move it away and {RERUN}")
    staging = into.parent / f".{into.name}.{uuid.uuid4().hex[:8]}.unpacking"
    try:
        with archive.open("rb") as handle:
            head = handle.read(512)
        if looks_like_html(head):
            raise web_page_error(archive, archive)
        with storage_errors(into, DATA):
            staging.mkdir(parents=True)
            unpack_members = _unpack_zip if head[:2] == b"PK" else _unpack_tar
            unpack_members(archive, staging)
            staging.rename(into)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise _bad_archive(archive, str(error)) from error
    except (OSError, RuntimeError, NotImplementedError, ValueError) as error:
        # gzip's bad header and checksum are OSErrors without a number; a password is RuntimeError.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _bad_archive(archive, str(error)) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack_tar(archive: Path, staging: Path) -> None:
    limits = Limits(archive, staging)
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            limits.count(member.size)
            _check_name(member.name, archive)
            if member.islnk() or member.issym():
                _check_name(member.linkname, archive)
            tar.extract(member, staging, filter="data")
        # tarfile stops at its own end mark; reading on makes gzip compare its checksum.
        while tar.fileobj is not None and tar.fileobj.read(BLOCK_BYTES):
            pass


def _unpack_zip(archive: Path, staging: Path) -> None:
    limits = Limits(archive, staging)
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():  # never writes more of a member than its size says
            limits.count(member.file_size)
        for member in zipped.infolist():
            _check_name(member.orig_filename, archive)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _bad_archive(archive, f"'{member.filename}' is a link or a device")
            zipped.extract(member, staging)


class Limits:
    """Counts what an archive unpacks to, and refuses what is too much."""

    def __init__(self, archive: Path, staging: Path) -> None:
        self.archive = archive
        self.free = shutil.disk_usage(staging).free
        self.members = self.size = 0

    def count(self, size: int) -> None:
        """Count a member of this size; raise where the archive is too large with it."""
        self.members += 1
        self.size += size
        if self.members > MOST_MEMBERS or self.size > MOST_BYTES:
            raise DataCorrupt(
                f"{self.archive} is refused: it unpacks to more than {MOST_MEMBERS:,} files or "
                f"{MOST_BYTES / 2**30:,.0f} GB, which no dataset here does",
                f"delete {self.archive} and fetch it from where it was released",
            )
        if self.size > self.free:
            raise StorageError(
                f"no room left to unpack {self.archive}: it needs more than {self.size:,} bytes, "
                f"{self.free:,} are free",
                DATA.if_full,
            )


def _check_name(name: str, archive: Path) -> None:
    """Refuse a member or link name that could leave the folder, by either system's rules."""
    windows = PureWindowsPath(name)
    absolute = PurePosixPath(name).is_absolute() or bool(windows.drive or windows.root)
    if absolute or ".." in windows.parts or "\0" in name:
        raise _bad_archive(archive, f"'{name}' points outside of it")


def _bad_archive(archive: Path, reason: str) -> DataCorrupt:
    return DataCorrupt(
        f"{archive} cannot be unpacked: {reason}", f"delete {archive} and {RERUN} to fetch it anew"
    )
