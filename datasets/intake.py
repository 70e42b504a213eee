"""`data add`: from a stranger's folder or table to a registered dataset, or one clear refusal.

What lies there is told apart by looking: a table of files with labels (WILDS's among them), a
folder for each class, or a file of features. Every image is opened once, for its content and to
find those that cannot be read. Splits that are missing are drawn, and only when everything holds
are the two files of the registration written.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from datasets.base import SPLITS, label_digest
from datasets.dataset import NAME, RESERVED, Progress, silent
from datasets.decode import content_digest, decode_all
from datasets.errors import BenchError, DataCorrupt, UsageError
from datasets.fetch import sha256_of
from datasets.files import DATA, atomic_folder, storage_errors
from datasets.own import (
    DESCRIPTION,
    FOLDER,
    META,
    TABLE,
    Description,
    Form,
    feature_columns,
    labels_of,
    rows_of,
)

TABLES = ("metadata.csv", "metadata.parquet")
FILE_COLUMNS = ("file", "filename", "file_name", "img_filename", "image", "path")
LABEL_COLUMNS = ("label", "y", "class")
SPLIT_COLUMN, GROUP_COLUMN = "split", "group"
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "0"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "1"), "val"),
    **dict.fromkeys(("test", "testing", "2"), "test"),
}
IMAGE_ENDINGS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
SHARES = {"val": 0.2, "test": 0.2}  # of the samples from which a missing split is drawn
LISTED = 10  # files that a message names
LENET_SIDE = 32
SMALL_IMAGES = 40  # side up to which a LeNet is trained by default
PHOTO_SIDE = 224


@dataclass(frozen=True)
class AddOptions:
    """What a user may say beside name and path.

    Attributes:
        groups: columns that form groups with the label.
        split_seed: of the splits that have to be drawn.
        skip_bad: whether images that cannot be read are left out.
        backbone: the network that is trained by default.
        resolution: side of the images it sees.
        scratch: whether it starts without ImageNet weights.
    """

    groups: tuple[str, ...] = ()
    split_seed: int = 0
    skip_bad: bool = False
    backbone: str = ""
    resolution: int = 0
    scratch: bool = False


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


@dataclass(frozen=True)
class Added:
    """What was registered, and what there is to say about it."""

    description: Description
    folder: Path
    notes: list[str] = field(default_factory=list)


def add(
    name: str,
    path: Path,
    root: Path,
    options: AddOptions,
    progress: Progress = silent,
    check_network: Callable[[str, bool], None] = lambda name, rows: None,
) -> Added:
    """Register a dataset; raise with one message, and leave nothing behind, if that cannot be.

    Args:
        name: by which it is known then.
        path: where it lies.
        root: the data root.
        options: what else was said.
        progress: called while images are read.
        check_network: raises where there is no such network, or none for images or for rows.
    """
    folder = _free_name(name, root)
    found = look(path)
    if options.backbone:
        check_network(options.backbone, found.form == "features")
    table, notes = _with_attribute(_checked(found.table, found.source), options)
    if found.ignored:
        notes.append(f"{found.ignored:,} files are no images by their ending and were passed over")
    skipped: list[str] = []
    sizes: list[tuple[int, int]] = []
    if found.form != "features":
        table, skipped, sizes, more = _examine(table, found.source, options, progress)
        notes += more
        content = _content_digest(table)
    else:
        content = sha256_of(found.source)
    table, drawn = _draw_missing(table, options.split_seed)
    classes = in_order(table["label"])
    _require_classes(table, classes)
    groups, numbers, group_splits = _groups(table, classes)
    order = {label: number for number, label in enumerate(classes)}
    table = table.assign(
        y=table["label"].map(order).astype("int64"),
        group=numbers,
        split=table["split"].map({split: n for n, split in enumerate(SPLITS)}).astype("int64"),
    ).drop(columns=["label", "attribute"])
    labels = {name: labels_of(table[table["split"] == n]) for n, name in enumerate(SPLITS)}
    backbone, pretrained, resolution = _network(options, sizes)
    description = Description(
        name=name,
        source=str(found.source),
        form=found.form,
        classes=tuple(classes),
        groups=groups,
        attributes=options.groups or ((GROUP_COLUMN,) if group_splits else ()),
        group_splits=group_splits,
        counts={split: len(own) for split, own in labels.items()},
        group_counts={
            split: tuple(torch.bincount(own.groups, minlength=len(groups)).tolist())
            for split, own in labels.items()
            if not group_splits or split in group_splits
        },
        label_digest=label_digest(labels),
        content=content,
        split_seed=options.split_seed,
        drawn=drawn,
        skipped=tuple(skipped),
        length=found.length,
        backbone=backbone,
        pretrained=pretrained,
        resolution=resolution,
    )
    _write(folder, description, table)
    return Added(description, folder, notes)


def _free_name(name: str, root: Path) -> Path:
    """Return where a new dataset of this name goes; refuse a name that is none, or is taken."""
    from datasets.catalogue import load_datasets

    if NAME.fullmatch(name) is None or name in RESERVED:
        raise UsageError(
            f"'{name}' cannot be the name of a dataset",
            "use up to 40 lower-case letters, digits and underscores, beginning with a letter, and "
            f"none of {', '.join(RESERVED)}",
        )
    folder = root / FOLDER / name
    if folder.exists():
        raise UsageError(
            f"'{name}' is registered already, in {folder}",
            f"choose another name, or python -m bench data remove {name}",
        )
    if name in load_datasets():
        raise UsageError(f"'{name}' is the name of another dataset", "choose another name")
    return folder


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
                f"name that column {' or '.join(names[:2])}",
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
            f"{path} names {_listed(columns['file'][twice])} more than once",
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
    columns["label"] = _as_text(table[label])
    columns["split"] = _as_text(table[split]) if split else pd.Series(pd.NA, table.index, "string")
    return pd.DataFrame(columns)


def _as_text(values: pd.Series) -> pd.Series:
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
            f"{path} has {_listed(others)} beside {_listed(f.name for f in splits)}",
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


def _checked(table: pd.DataFrame, source: Path) -> pd.DataFrame:
    """Return a table all of whose rows have a label and, if any has one, a split."""
    if table.empty:
        raise DataCorrupt(f"{source} has no samples", "give a table with a row for each sample")
    unlabelled = table["label"].isna()
    if unlabelled.any():
        raise DataCorrupt(
            f"{int(unlabelled.sum())} of {len(table):,} samples in {source} have no label, the "
            f"first of them row {int(unlabelled.to_numpy().argmax()) + 1}",
            "label them, or leave them out of the table",
        )
    if table["label"].nunique() < 2:
        raise DataCorrupt(
            f"all {len(table):,} samples in {source} are of one class, '{table['label'].iloc[0]}'",
            "a classifier needs two classes at least",
        )
    given = table["split"].notna()
    if given.any() and not given.all():
        raise DataCorrupt(
            f"{int((~given).sum())} of {len(table):,} samples in {source} have no split",
            "name the split of every sample, or of none: then splits are drawn",
        )
    splits = table["split"].str.lower().map(SPLIT_NAMES)
    unknown = table["split"][given & splits.isna()].unique()
    if len(unknown):
        raise DataCorrupt(
            f"unknown split {_listed(unknown)} in {source}",
            "splits are train, val and test (or 0, 1 and 2)",
        )
    if given.any() and "train" not in set(splits):
        raise DataCorrupt(f"no sample in {source} is of the split train", "name what to train on")
    return table.assign(split=splits)


def _with_attribute(table: pd.DataFrame, options: AddOptions) -> tuple[pd.DataFrame, list[str]]:
    """Add the column `attribute`, which forms groups with the label; missing where unknown."""
    further = [n.removeprefix(META) for n in map(str, table) if n.startswith(META)]
    named = options.groups
    if absent := [name for name in named if name not in further]:
        raise UsageError(
            f"--groups {','.join(named)}: there is no further column '{absent[0]}'",
            f"the further columns are {', '.join(further)}"
            if further
            else "write a table (metadata.csv) with file, label and the columns that form groups",
        )
    notes = []
    if not named and GROUP_COLUMN in further:
        named = (GROUP_COLUMN,)
        notes.append(f"groups are formed by the column '{GROUP_COLUMN}'")
    if not named:
        return table.assign(attribute=pd.Series(pd.NA, table.index, "string")), notes
    columns = [_as_text(table[f"{META}{name}"]) for name in named]
    joined = columns[0]
    for more in columns[1:]:
        joined = joined + "_" + more
    return table.assign(attribute=joined.mask(joined == "")), notes


def in_order(values: Iterable[str]) -> list[str]:
    """Return the different values: numbers by size, else text with the numbers in it by size."""

    def key(text: str) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", text.lower())
        return [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in parts if p]

    return sorted(dict.fromkeys(map(str, values)), key=lambda text: (key(text), text))


@dataclass(frozen=True)
class ImageFile:
    """What opening an image file told: its content's digest, width, height and mode."""

    content: bytes
    width: int
    height: int
    mode: str


def examine(file: Path) -> ImageFile | str:
    """Read an image to its end; return what it is, or why it cannot be read."""
    try:
        content = file.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            size, mode = image.size, image.mode
            image.draft("RGB", (64, 64))  # a JPEG is read to its end, but not worked out in full
            image.load()
    except FileNotFoundError:
        return "there is no such file"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return re.sub(r"<_io\.\w+ object at \w+>", "the file", str(error)) or type(error).__name__
    if mode in ("I", "F") and file.suffix.lower() not in (".png", ".pgm", ".ppm"):
        return f"pixels of 32 bits (mode {mode}) have no known scale"
    return ImageFile(content_digest(content), *size, mode)


def _examine(
    table: pd.DataFrame, source: Path, options: AddOptions, progress: Progress
) -> tuple[pd.DataFrame, list[str], list[tuple[int, int]], list[str]]:
    """Open every image; return the readable ones with their content, and what was noticed."""
    contents, sizes, modes = [], Counter[tuple[int, int]](), Counter[str]()
    bad: list[str] = []
    good = np.ones(len(table), dtype=bool)
    files = [source / file for file in table["file"]]
    for place, found in enumerate(decode_all(files, examine)):
        progress("reading images", place + 1, len(files))
        if isinstance(found, str):
            good[place] = False
            bad.append(f"{table['file'].iloc[place]}: {found}")
            continue
        contents.append(found.content)
        sizes[found.width, found.height] += 1
        modes[found.mode] += 1
    if bad and not options.skip_bad:
        raise DataCorrupt(
            f"{len(bad)} of {len(table):,} images cannot be read:\n    " + _lines(bad),
            "replace them, or leave them out with --skip-bad",
        )
    table = _checked(table[good].assign(content=contents), source)
    _refuse_shared(table)
    notes = [f"left out, since it cannot be read: {line}" for line in bad[:LISTED]]
    copies = int(table["content"].duplicated().sum())
    labels = table.groupby("content")["label"].nunique() if copies else pd.Series(dtype=int)
    if copies:
        notes.append(f"{copies:,} images are copies of others; copies stay in one split")
    if contrary := int((labels > 1).sum()):
        notes.append(f"{contrary:,} images have copies with another label")
    notes.append("modes: " + ", ".join(f"{mode} {count:,}" for mode, count in modes.most_common()))
    widths, heights = ([size[axis] for size in sizes] for axis in (0, 1))
    notes.append(
        f"sizes: {widths[0]} x {heights[0]}, all of them"
        if len(sizes) == 1
        else f"sizes: {min(widths)} to {max(widths)} wide, {min(heights)} to {max(heights)} high"
    )
    return table, bad, list(sizes.elements()), notes


def _refuse_shared(table: pd.DataFrame) -> None:
    """Refuse a file that is in two splits, by content."""
    if table["split"].isna().all() or not (twice := table["content"].duplicated(keep=False)).any():
        return
    copies = table[twice].groupby("content", sort=False)
    shared = [own for _, own in copies if own["split"].nunique() > 1]
    if not shared:
        return
    lines = [" = ".join(f"{row.file} ({row.split})" for row in own.itertuples()) for own in shared]
    raise DataCorrupt(
        f"{len(shared):,} images are in two splits:\n    " + _lines(lines),
        "keep each in one split: a model is judged on images it was not trained on",
    )


def changed_files(table: pd.DataFrame, source: Path) -> list[str]:
    """Return the files whose content is not what was registered."""
    files = [source / file for file in table["file"]]
    found = decode_all(files, lambda file: _digest(file))
    pairs = zip(files, table["content"], found, strict=True)
    return [str(file) for file, known, now in pairs if known != now]


def _digest(file: Path) -> bytes:
    try:
        return content_digest(file.read_bytes())
    except OSError:
        return b""


def _content_digest(table: pd.DataFrame) -> str:
    """Digest what all files hold, in the order of their names."""
    digest = hashlib.sha256()
    for content in table.sort_values("file")["content"]:
        digest.update(content)
    return digest.hexdigest()


def _draw_missing(table: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Number the samples, and draw the splits that are missing from those of train.

    The same samples, by name and content, are drawn the same way on every machine. The draw is
    stratified by class and attribute; copies of one image stay together.
    """
    if "file" in table:
        table = table.sort_values("file", kind="stable")
    table = table.reset_index(drop=True)
    table.insert(0, "id", np.arange(len(table)))
    given = set(table["split"].dropna())
    drawn = tuple(split for split in SHARES if split not in given)
    split = table["split"].fillna("train").to_numpy(dtype=object).copy()
    if not drawn:
        return table, ()
    pool = table[split == "train"]
    keys = pool["content"] if "content" in pool else pool["id"]
    first = pool[~keys.duplicated()]
    strata = first.groupby(["label", first["attribute"].fillna("")], sort=True)
    chosen: dict[object, str] = {}
    for names, own in strata:
        rng = np.random.default_rng([seed, zlib.crc32("\0".join(names).encode())])
        order, begin = keys[own.index].to_numpy()[rng.permutation(len(own))], 0
        for name in drawn:
            count = round(SHARES[name] * len(own)) or int(len(own) > len(drawn))
            chosen |= dict.fromkeys(order[begin : begin + count], name)
            begin += count
    split[pool.index] = [chosen.get(key, "train") for key in keys]
    return table.assign(split=split), drawn


def _require_classes(table: pd.DataFrame, classes: Sequence[str]) -> None:
    """Refuse a split that lacks a class."""
    for split in SPLITS:
        present = set(table["label"][table["split"] == split])
        if lacking := [name for name in classes if name not in present]:
            has = {name: int((table["label"] == name).sum()) for name in lacking}
            counts = ", ".join(f"'{name}' ({count} in all)" for name, count in has.items())
            raise DataCorrupt(
                f"the {split} split has no sample of {counts}",
                "add samples, or leave that class out; where splits are drawn a class needs three",
            )


def _groups(
    table: pd.DataFrame, classes: Sequence[str]
) -> tuple[tuple[str, ...], np.ndarray, tuple[str, ...]]:
    """Return the names of groups, each sample's number, and the splits whose groups are known."""
    known = table["attribute"].notna()
    by_split = {split: known[table["split"] == split] for split in SPLITS}
    for split, own in by_split.items():
        if own.any() and not own.all():
            raise DataCorrupt(
                f"the column that forms groups is empty in {int((~own).sum()):,} of {len(own):,} "
                f"samples of {split}",
                "fill it in for all samples of a split, or for none",
            )
    group_splits = tuple(split for split, own in by_split.items() if own.any())
    if not group_splits:
        numbers = table["label"].map({label: n for n, label in enumerate(classes)})
        return tuple(classes), numbers.to_numpy(dtype=np.int64), ()
    labelled = table[known]
    values = in_order(labelled["attribute"])
    pairs = set(zip(labelled["label"], labelled["attribute"], strict=True))
    nested = len(pairs) == len(values)  # each value is of one class alone
    ordered = [(c, v) for c in classes for v in values if (c, v) in pairs]
    names = tuple(value if nested else f"{label}_{value}" for label, value in ordered)
    number = {pair: place for place, pair in enumerate(ordered)}
    attribute = table["attribute"].fillna("")
    numbered = [number.get(p, -1) for p in zip(table["label"], attribute, strict=True)]
    return names, np.array(numbered, dtype=np.int64), group_splits


def _network(options: AddOptions, sizes: list[tuple[int, int]]) -> tuple[str, bool, int]:
    """Return the network trained by default, whether it is pretrained, and its resolution.

    As asked; else a LeNet on small images, ResNet-50 on others, and an MLP on rows.
    """
    if not sizes:
        return options.backbone or "mlp", False, 0
    side = sorted(min(size) for size in sizes)[len(sizes) // 2]
    backbone = options.backbone or ("lenet5" if side <= SMALL_IMAGES else "resnet50")
    lenet = backbone.startswith("lenet")
    if lenet and options.resolution not in (0, LENET_SIDE):
        raise UsageError(
            f"{backbone} takes images of side {LENET_SIDE} but got --resolution "
            f"{options.resolution}",
            "leave --resolution out, or choose another --backbone",
        )
    fitting = LENET_SIDE if lenet else min(PHOTO_SIDE, -(-side // 32) * 32)
    return backbone, not lenet and not options.scratch, options.resolution or fitting


def _write(folder: Path, description: Description, table: pd.DataFrame) -> None:
    """Write the registration, both files or none."""
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        with storage_errors(folder, replace(DATA, all_errors=True)), atomic_folder(folder) as draft:
            table.to_parquet(draft / TABLE, index=False)
            (draft / DESCRIPTION).write_text(description.to_toml(), encoding="utf-8")
    except BenchError:
        for parent in made:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def remove(name: str, root: Path) -> Path:
    """Take a registration away, with what was decoded for it; the data itself stays."""
    folder = root / FOLDER / name
    if NAME.fullmatch(name) is None or not folder.is_dir():
        known = sorted(path.parent.name for path in (root / FOLDER).glob(f"*/{DESCRIPTION}"))
        raise UsageError(
            f"'{name}' is not registered in {root}",
            f"registered: {', '.join(known)}" if known else "python -m bench data add NAME PATH",
        )
    with storage_errors(folder, DATA):
        shutil.rmtree(folder)
    return folder


def _listed(names: Iterable[object]) -> str:
    """Return the first names of many, and how many more there are."""
    every = [f"'{name}'" for name in names]
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n    ".join([*lines[:LISTED], *more])
