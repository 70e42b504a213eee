"""`data add`: from a stranger's folder or table to a registered dataset, or one clear refusal.

What lies there is told apart by looking: a table of files with labels (WILDS's among them), a
folder for each class, or a file of features. Every image is opened once, for its content and to
find those that cannot be read. Splits that are missing are drawn, and only when everything holds
are the two files of the registration written.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
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
from datasets.candidates import LISTED, SPLIT_NAMES, as_text, listed, look
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
    labels_of,
)

GROUP_COLUMN = "group"
JOINTS = ("_", "__", " | ")  # between the parts of a group's name; the first that keeps them apart
SHARES = {"val": 0.2, "test": 0.2}  # of the samples from which a missing split is drawn
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

    def __post_init__(self) -> None:
        for name, value in (("--split-seed", self.split_seed), ("--resolution", self.resolution)):
            if value < 0:
                raise UsageError(f"{name} must not be negative but got {value}", "leave it out")


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
            f"unknown split {listed(unknown)} in {source}",
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
    columns = [as_text(table[f"{META}{name}"]) for name in named]
    different = len(pd.concat(columns, axis=1).dropna().drop_duplicates())
    for joint in JOINTS:  # the first that tells "a_b" and "c" from "a" and "b_c"
        joined = columns[0]
        for more in columns[1:]:
            joined = joined + joint + more
        if joined.nunique() == different:
            break
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
            counts = ", ".join(f"'{n}' ({count} in all)" for n, count in [*has.items()][:LISTED])
            counts += f" and {len(has) - LISTED} more classes" if len(has) > LISTED else ""
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
    for joint in JOINTS:
        names = tuple(value if nested else f"{label}{joint}{value}" for label, value in ordered)
        if len({*names}) == len(names):
            break
    number = {pair: place for place, pair in enumerate(ordered)}
    attribute = table["attribute"].fillna("")
    numbered = [number.get(p, -1) for p in zip(table["label"], attribute, strict=True)]
    return names, np.array(numbered, dtype=np.int64), group_splits


def _network(options: AddOptions, sizes: list[tuple[int, int]]) -> tuple[str, bool, int]:
    """Return the network trained by default, whether it is pretrained, and its resolution.

    As asked; else a LeNet on small images, ResNet-50 on others, and an MLP on rows.
    """
    if not sizes:
        if options.resolution:
            raise UsageError("rows of features have no --resolution", "leave it out")
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


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "\n    ".join([*lines[:LISTED], *more])
