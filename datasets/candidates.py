"""What lies at a path that a user gives: a table of files, a folder for each class, or features.

Nothing is checked here but what has to be known to read it; every form becomes a table with a row a
sample, whose labels, splits and further columns have the same names whatever they were called.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from datasets.errors import DataCorrupt, UsageError
from datasets.own import META, Form, feature_columns, rows_of

TABLES = ("metadata.csv", "metadata.parquet")
FILE_COLUMNS = ("file", "filename", "file_name", "img_filename", "image", "path")
LABEL_COLUMNS = ("label", "y", "class")
SPLIT_COLUMN = "split"
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "0"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "1"), "val"),
    **dict.fromkeys(("test", "testing", "2"), "test"),
}
IMAGE_ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
LISTED = 10  # files that a message names


@dataclass(frozen=True)
class Candidates:
    """What was found before anything of it was checked.

    Attributes:
        table: a row a sample with `label`, `split` (none where not given), `file` for images, and
            the further columns under names that begin with `meta_`.
        length: how many numbers a row of features has.
        ignored: files that are no images by their ending.
    """

    form: Form
    source: Path
    table: pd.DataFrame
    length: int = 0
    ignored: int = 0


def look(path: Path) -> Candidates:
    """Find out what lies at a path, and read its table."""
    if not path.exists():
        raise UsageError(f"there is nothing at {path}", "correct the path")
    path = path.resolve()
    if path.is_file():
        if path.suffix == ".npz":
            return _features(path, _read_npz(path))
        if path.suffix in (".csv", ".parquet"):
            table = _read_table(path)
            rows = "x" in table or bool(feature_columns(list(map(str, table))))
            return _features(path, table) if rows else _table(path, table)
        raise UsageError(
            f"{path} is neither a folder nor a table",
            "give a folder of images, a .csv or .parquet table, or a .npz of features",
        )
    for file in (path / name for name in TABLES):
        if file.is_file():
            return _table(file, _read_table(file))
    return _class_folders(path)


def _read_table(path: Path) -> pd.DataFrame:
    """Read a table; every value of a CSV as text, empty ones as missing."""
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        return pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:  # pandas's and pyarrow's are ValueErrors
        raise DataCorrupt(
            f"{path} cannot be read as a table: {error}", "save it as UTF-8 text with commas"
        ) from error


def _column(table: pd.DataFrame, names: Sequence[str]) -> str:
    known = {str(column).strip().lower(): column for column in table.columns}
    return next((known[name] for name in names if name in known), "")


def _table(path: Path, table: pd.DataFrame) -> Candidates:
    """Read a table of files and labels; WILDS's calls the label `y` and numbers the splits."""
    file, label = _column(table, FILE_COLUMNS), _column(table, LABEL_COLUMNS)
    for what, found, names in (("files", file, FILE_COLUMNS), ("labels", label, LABEL_COLUMNS)):
        if not found:
            raise DataCorrupt(
                f"{path} has no column of {what}; it has {', '.join(map(str, table.columns))}",
                f"name that column {' or '.join(names[:2])}"
                if len(table.columns) > 1
                else "separate the columns by commas",
            )
    columns = _common(table, label, {file})
    columns["file"] = table[file].astype("string")
    if (missing := columns["file"].isna()).any():
        raise DataCorrupt(
            f"{path} names no file in {int(missing.sum())} rows, the first of them "
            f"{int(missing.to_numpy().argmax()) + 1}",
            "fill in or delete these rows",
        )
    twice = columns["file"].duplicated()
    if twice.any():
        raise DataCorrupt(
            f"{path} names {listed(columns['file'][twice])} more than once",
            "keep one row for each file",
        )
    return Candidates("table", path.parent, columns)


def _common(table: pd.DataFrame, label: str, known: set[str]) -> pd.DataFrame:
    """Return label, split and further columns of a table, under the names used here."""
    split = _column(table, (SPLIT_COLUMN,))
    further = [
        name
        for name in table.columns
        if name not in {*known, label, split} and not str(name).startswith("Unnamed:")
    ]
    columns = {f"{META}{name}": _typed(table[name]) for name in further}
    columns["label"] = as_text(table[label])
    columns["split"] = as_text(table[split]) if split else pd.Series(pd.NA, table.index, "string")
    return pd.DataFrame(columns)


def as_text(values: pd.Series) -> pd.Series:
    """Return values as text, whole numbers without a decimal point; missing ones stay missing."""
    if pd.api.types.is_float_dtype(values) and (values.dropna() % 1 == 0).all():
        values = values.astype("Int64")
    return values.astype("string").str.strip()


def _typed(values: pd.Series) -> pd.Series:
    """Return a further column as numbers where all of it are numbers, else as text."""
    if values.dtype == object or pd.api.types.is_string_dtype(values):
        numbers = pd.to_numeric(values, errors="coerce")
        return numbers if (numbers.notna() == values.notna()).all() else values.astype("string")
    return values


def _class_folders(path: Path) -> Candidates:
    """Read a folder with a folder for each class, within `train`, `val` and `test` or without."""
    inside = _folders(path)
    by_name = {folder: SPLIT_NAMES.get(folder.name.lower(), "") for folder in inside}
    splits = {f: s for f, s in by_name.items() if s and not s.isdecimal() and _folders(f)}
    splits = {f: s for f, s in splits.items() if not f.name.isdecimal()}
    if splits and (others := [folder.name for folder in inside if folder not in splits]):
        raise DataCorrupt(
            f"{path} has {listed(others)} beside {listed(f.name for f in splits)}",
            "put a folder for each class into train, val and test, and nothing else beside them",
        )
    rows: list[tuple[str, str, str | None]] = []
    ignored = 0
    for top, split in splits.items() or {path: None}.items():
        for folder in _folders(top):
            files, other = _images_in(folder)
            ignored += other
            rows += [(os.path.relpath(file, path), folder.name, split) for file in files]
    if not rows:
        flat, _ = _images_in(path)
        what = f"{len(flat):,} images but no labels" if flat else "no images"
        raise DataCorrupt(
            f"{path} holds {what}: neither a metadata.csv nor a folder for each class",
            "write a metadata.csv with the columns file and label, or sort the images into a "
            "folder for each class",
        )
    table = pd.DataFrame(rows, columns=["file", "label", "split"]).astype("string")
    return Candidates("folder", path, table, ignored=ignored)


def _folders(path: Path) -> list[Path]:
    with os.scandir(path) as entries:
        found = [Path(e.path) for e in entries if e.is_dir() and not e.name.startswith(".")]
    return sorted(found)


def _images_in(folder: Path) -> tuple[list[str], int]:
    """Return the images in a folder and below, in order, and how many other files there are."""
    images, others = [], 0
    for where, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if os.path.splitext(name)[1].lower() in IMAGE_ENDINGS:
                images.append(os.path.join(where, name))
            else:
                others += 1
    return images, others


def _read_npz(path: Path) -> pd.DataFrame | dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataCorrupt(
            f"{path} cannot be read as a file of features: {error}",
            "write it with numpy.savez(file, x=rows, y=labels), labels as numbers or text",
        ) from error


def _features(path: Path, found: pd.DataFrame | dict[str, np.ndarray]) -> Candidates:
    """Read rows with labels, of an .npz (x, y, split, group, ...) or of a table."""
    if isinstance(found, pd.DataFrame):
        try:
            rows = rows_of(found)
        except (ValueError, TypeError) as error:
            raise DataCorrupt(
                f"the rows of {path} are not all of one length, or not numbers: {error}",
                "give every row the same number of numbers",
            ) from error
        table = found.drop(
            columns=["x"] if "x" in found else feature_columns(list(map(str, found)))
        )
    else:
        if "x" not in found or not ({"y", "label"} & set(found)):
            raise DataCorrupt(
                f"{path} has the arrays {', '.join(found) or 'none'}, not x and y",
                "write it with numpy.savez(file, x=rows, y=labels)",
            )
        rows = found.pop("x")
        for name, column in found.items():
            if column.shape != (len(rows),):
                raise DataCorrupt(
                    f"{path}: {name} has the shape {column.shape} and x {rows.shape}: there has to "
                    "be one value for each row",
                    "save arrays of equal length",
                )
        table = pd.DataFrame(found)
    if rows.ndim != 2 or rows.shape[1] == 0 or rows.dtype.kind not in "fiub":
        raise DataCorrupt(
            f"{path}: x is {rows.dtype} of shape {rows.shape}, not a table of numbers",
            "save x with one row for each sample and one number in each column",
        )
    broken = ~np.isfinite(rows.astype(np.float32, copy=False)).all(axis=1)
    if broken.any():
        raise DataCorrupt(
            f"{path}: x is not finite in {int(broken.sum())} rows, the first of them row "
            f"{int(broken.argmax())}",
            "leave out these rows, or fill in their numbers",
        )
    label = _column(table, LABEL_COLUMNS)
    if not label:
        raise DataCorrupt(
            f"{path} has no column of labels; beside x it has {', '.join(map(str, table.columns))}",
            "name that column label or y",
        )
    return Candidates("features", path, _common(table, label, set()), length=rows.shape[1])


def listed(names: Iterable[object]) -> str:
    """Return the first names of many, and how many more there are."""
    every = [f"'{name}'" for name in names]
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more
