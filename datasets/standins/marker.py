"""The markers that tell a stand-in, or a dataset that somebody rebuilt, from the release.

A result on other pictures must never reach a table of the released ones. A marker lies in the
folder of the label file, so that a reader of the labels sees it without knowing how they were made.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.errors import DataCorrupt, UsageError

MARKER_NAME = "standin.json"
ORIGIN_NAME = "origin.toml"
ORIGIN_EXAMPLE = 'kind = "rebuilt" and, in the next line, name = "NAME"'
NOTE = "synthetic stand-in, not the real data"

Counts = dict[str, dict[str, int]]
"""Images by split and group name; empty where the files on disk know neither, as for MNIST."""


@dataclass(frozen=True)
class Marker:
    """What was written: enough to write it again, and the counts a loader should find."""

    dataset: str
    size: int
    seed: int
    counts: Counts


@dataclass(frozen=True)
class Origin:
    """What `origin.toml` says of data that has the release's labels but not its pictures.

    Attributes:
        name: lower-case letters, digits and dashes; it is part of the protocol's name, so that runs
            on two such datasets are never taken for each other.
        note: what it was made from, in a sentence.
    """

    name: str
    note: str = ""


def read_origin(folder: Path) -> Origin | None:
    """Return what `origin.toml` in `folder` says, or None where there is none.

    Raises:
        DataCorrupt: The file is there but says nothing that is understood.
    """
    path = Path(folder) / ORIGIN_NAME
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}", f"write {ORIGIN_EXAMPLE}") from error
    name, note = content.get("name"), content.get("note", "")
    named = isinstance(name, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", name) is not None
    if content.get("kind") != "rebuilt" or not named:
        raise DataCorrupt(
            f"{path} does not say what the data is",
            f"write {ORIGIN_EXAMPLE} (lower-case letters, digits, dashes)",
        )
    return Origin(str(name), str(note))


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker file into `folder`."""
    content = {
        "standin": True,
        "dataset": marker.dataset,
        "size": marker.size,
        "seed": marker.seed,
        "counts": marker.counts,
        "note": NOTE,
    }
    (folder / MARKER_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_marker(folder: Path) -> Marker | None:
    """Return the marker in `folder`, or None where the data carries none.

    A marker that cannot be read is an error and not None: taking the folder for real data is the
    one mistake the marker is there to prevent.

    Raises:
        DataCorrupt: The marker file is there but is not what `write_marker` writes.
    """
    path = Path(folder) / MARKER_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, str(error)) from error
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _broken(path, f"it is not JSON ({error})") from error
    return _parsed(path, content)


def refuse_marked(folder: Path) -> None:
    """Raise where the release is asked for and `folder` holds something else.

    Fetching must neither take that for the release nor tell the user to delete it.

    Raises:
        UsageError: The folder carries a marker.
    """
    marker, origin = read_marker(folder), read_origin(folder)
    if marker is not None:
        raise UsageError(
            f"{folder} is a stand-in for {marker.dataset}, not the real data",
            "choose another --data-root for the real data, so that the stand-in stays as it is",
        )
    if origin is not None:
        raise UsageError(
            f"{folder} is rebuilt data ({origin.name}), not the release",
            "choose another --data-root for the release, so that the rebuilt data stays as it is",
        )


def _parsed(path: Path, content: Any) -> Marker:
    """Check every field by hand, for the file may have been edited."""
    if not isinstance(content, dict) or content.get("standin") is not True:
        raise _broken(path, 'it does not say "standin": true')
    dataset, size, seed = content.get("dataset"), content.get("size"), content.get("seed")
    if not isinstance(dataset, str):
        raise _broken(path, "dataset is not a name")
    if not isinstance(size, int) or not isinstance(seed, int):
        raise _broken(path, "size or seed is not a whole number")
    counts = content.get("counts")
    if not isinstance(counts, dict) or not all(_is_group_count(part) for part in counts.values()):
        raise _broken(path, "counts is not a table of whole numbers by split and group")
    return Marker(dataset, size, seed, counts)


def _is_group_count(part: Any) -> bool:
    return isinstance(part, dict) and all(isinstance(count, int) for count in part.values())


def _broken(path: Path, reason: str) -> DataCorrupt:
    return DataCorrupt(
        f"the stand-in marker {path} is broken: {reason}",
        f"delete the folder {path.parent} and write the stand-in again",
    )
