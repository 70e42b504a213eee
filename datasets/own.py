"""A user's own data: a folder of images or a table of features that `data add` registered.

`<data root>/own/NAME` has two files: `dataset.toml`, which a person can read and edit, and
`samples.parquet`, a row for each sample. Images and features stay where they are. From then on the
name is one like any other; what the two files say are the constants that a released dataset has in
its module.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from datasets.base import SPLITS, Facts, Labels
from datasets.bounded import Decoding
from datasets.config import added, as_plain, build_config, require
from datasets.dataset import TABLE_METRICS, Dataset, OnDisk, Progress, silent
from datasets.errors import DataCorrupt, DataMissing, UsageError
from datasets.features import FeatureRows, RowTransform
from datasets.fetch import sha256_of
from datasets.images import Images, MappedImages, MemoryImages
from datasets.photos import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    PhotoDataset,
    photo_bound,
    photo_transforms,
)
from datasets.pixels import ImageCheck
from datasets.transforms import PaddedRandomCrop, ResizedCentreCrop, Transform

if TYPE_CHECKING:
    import pandas as pd

FOLDER, DESCRIPTION, TABLE = "own", "dataset.toml", "samples.parquet"
META = "meta_"  # what the names of further columns begin with
SMALL_SIDE = 64  # side of images that are shifted by few pixels instead of cropped at random
SHIFT = 2  # pixels
IN_MEMORY_BYTES = 2**28  # of images of one size that are read whole
PROTOCOL = "own"
ARRAYS = "arrays"  # the protocol of data that is given to the library

Form = Literal["folder", "table", "features"]


@dataclass(frozen=True)
class Description:
    """What `dataset.toml` says of a dataset.

    Attributes:
        source: the folder that file names are relative to, or the file of features.
        form: a folder for each class, a table of files, or a file of features.
        attributes: the columns that form groups with the label.
        group_splits: the splits whose groups are known.
        backbone, pretrained, resolution: what is trained by default; no resolution for features.
        length: how many numbers a row of features has; 0 for images.
        drawn: the splits that were not given and were drawn, by `split_seed`.
        content: digest of what the files hold.
        skipped: files that were left out because they cannot be read.
    """

    name: str
    source: str
    form: Form
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    attributes: tuple[str, ...]
    group_splits: tuple[str, ...]
    counts: Mapping[str, int]
    group_counts: Mapping[str, tuple[int, ...]]
    label_digest: str
    content: str
    backbone: str
    pretrained: bool = False
    resolution: int = 0
    length: int = 0
    title: str = ""
    split_seed: int = 0
    drawn: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.classes) >= 2, f"classes must be at least 2 but got {len(self.classes)}")
        require(bool(self.groups), "groups cannot be empty")
        require(set(self.group_splits) <= set(SPLITS), f"group_splits are {', '.join(SPLITS)}")
        require(
            bool(self.group_splits) or self.groups == self.classes,
            "without group_splits the groups are the classes",
        )
        images = self.length == 0
        require(self.resolution >= 8 * images, f"resolution must be at least 8: {self.resolution}")

    def to_toml(self) -> str:
        """Write the file: what a person may want to change comes first."""
        said = {**as_plain(self), "title": self.title or self.name}
        first = ("name", "title", "source", "form", "backbone", "pretrained", "resolution")
        tables = {key: value for key, value in said.items() if isinstance(value, Mapping)}
        lines = [
            f"# Registered by `python -m bench data add {self.name}`; the images stay in `source`.",
            "# Names, title, backbone, pretrained and resolution may be edited. Counts and digests",
            "# are checked against samples.parquet when the data is loaded.",
        ]
        for key in dict.fromkeys((*first, *said)):
            if key not in tables:
                lines.append(f"{key} = {_toml(said[key])}")
        for key, table in tables.items():
            lines += ["", f"[{key}]", *(f"{name} = {_toml(own)}" for name, own in table.items())]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Return a value as TOML has it: as JSON does, for what occurs here."""
    if isinstance(value, list | tuple):
        items = [_toml(item) for item in value]
        short = len(", ".join(items)) < 80
        return (
            f"[{', '.join(items)}]" if short else "[\n" + "".join(f"  {i},\n" for i in items) + "]"
        )
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass(frozen=True)
class OwnConfig:
    """How a user's own data is seen.

    Attributes:
        resolution: side of the images the network sees; 0 is what `dataset.toml` says.
        decode: whether images are kept scaled down as far as no crop loses resolution.
    """

    resolution: int = 0
    decode: Decoding = added("native", default="bounded")

    def __post_init__(self) -> None:
        require(
            self.resolution == 0 or self.resolution >= 8,
            f"resolution must be at least 8 but got {self.resolution}",
        )


class Own(PhotoDataset):
    """A registered dataset; each has a class of its own, made when its description is read."""

    config_type = OwnConfig
    search_paths = ()
    home: ClassVar[Path]
    description: ClassVar[Description]

    def facts(self, config: OwnConfig) -> Facts:
        """Return what the description says."""
        known = self.description
        train, evaluate = _transforms(known, config.resolution or known.resolution)
        grouped = ", ".join(known.attributes)
        return Facts(
            name=known.name,
            protocol=PROTOCOL,
            task="a user's own classes",
            spurious=grouped or ("group" if known.group_splits else "not labelled"),
            classes=known.classes,
            groups=known.groups,
            metric="wga" if "test" in known.group_splits else "worst_class",
            counts=known.counts,
            group_counts=known.group_counts,
            backbone=known.backbone,
            channels=known.length or 3,
            train_transform=train,
            eval_transform=evaluate,
            label_digest=known.label_digest,
            full_pixel_digest=known.content,
            group_splits=known.group_splits,
            pretrained=known.pretrained,
            bound=None if known.length else photo_bound(config.decode, train, evaluate),
        )

    def matches(self, folder: Path) -> bool:
        """Return whether a folder has the two files."""
        return (folder / DESCRIPTION).is_file() and (folder / TABLE).is_file()

    def locate(self, root: Path) -> OnDisk | None:
        """Find the registration below the data root."""
        folder = root / FOLDER / self.name
        return OnDisk(folder, None, own=True) if self.matches(folder) else None

    def require(self, root: Path) -> OnDisk:
        """Find the registration, and what it refers to."""
        found = self.locate(root)
        if found is None:
            raise DataMissing(f"{self.name} is not registered in {root}", _add_command(self.name))
        if not Path(self.description.source).exists():
            raise DataMissing(
                f"{self.name} was registered with {self.description.source}, which is gone",
                f"put it back, or correct `source` in {found.folder / DESCRIPTION}",
            )
        return found

    def check(
        self, root: Path, config: OwnConfig, *, allow_subset: bool = False
    ) -> tuple[Facts, OnDisk, Mapping[str, Labels]]:
        """Read the labels and check that they are those that were registered, all of them."""
        try:
            return super().check(root, config)
        except DataCorrupt as error:
            raise DataCorrupt(error.message, _again(self.name, self.description.source)) from error

    def absent(self, folder: Path, config: OwnConfig) -> Mapping[str, torch.Tensor]:
        """Return the ids of each split whose image files are not there; rows have no files."""
        return {} if self.description.length else super().absent(folder, config)

    def if_missing(self, folder: Path) -> str:
        """Return what to do about image files that are not there: what was registered is whole."""
        again = _again(self.name, self.description.source)
        return f"put them back; or, for what is there, {again}"

    def samples(self, folder: Path) -> pd.DataFrame:
        """Read the table of samples."""
        import pandas as pd

        try:
            return pd.read_parquet(folder / TABLE)
        except (OSError, ValueError) as error:
            raise DataCorrupt(
                f"{folder / TABLE} cannot be read: {error}",
                _again(self.name, self.description.source),
            ) from error

    def table(self, folder: Path, config: OwnConfig) -> pd.DataFrame:
        """Read what a run needs of the samples; files by their whole path."""
        table = self.samples(folder)
        names = [name for name in map(str, table) if not name.startswith(META)]
        table = table[names]
        if "file" in table:
            table["file"] = [os.path.join(self.description.source, file) for file in table["file"]]
        return table

    def labels(self, folder: Path, config: OwnConfig) -> Mapping[str, Labels]:
        """Read the labels of every split; groups that are not known are -1."""
        table = self.table(folder, config)
        found = {}
        for number, name in enumerate(SPLITS):
            found[name] = labels_of(table[table["split"] == number])
        return found

    def images(
        self, folder: Path, config: OwnConfig, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Open the images, whole in memory where they are small and of one size; or the rows."""
        if self.description.length == 0:
            opened = super().images(folder, config, labels, progress)
            if self.facts(config).eval_transform.rounded:  # photos, of which there may be many
                return opened
            return {name: _in_memory(images) for name, images in opened.items()}
        rows = read_rows(Path(self.description.source), self.description.content)
        return {name: FeatureRows(rows[part.ids]) for name, part in labels.items()}

    def prepare(
        self, root: Path, config: OwnConfig, progress: Progress = silent, **what: Any
    ) -> None:
        """Check the labels and decode the images."""
        self.load(root, config, progress, **what)

    def check_images(self, folder: Path, config: OwnConfig, progress: Progress) -> ImageCheck:
        """Read every image again and find those that are not what was registered."""
        from datasets.intake import changed_files

        if self.description.length:
            return Dataset.check_images(self, folder, config, progress)
        found = super().check_images(folder, config, progress)
        changed = changed_files(self.samples(folder), Path(self.description.source))
        known = {*found.missing, *(line.split(": ", 1)[0] for line in found.bad_files)}
        more = [
            f"{file}: not the file that was registered" for file in changed if file not in known
        ]
        return replace(found, bad_files=[*found.bad_files, *more])

    def metadata(self, folder: Path, config: OwnConfig) -> pd.DataFrame | None:
        """Return the further columns of the table that was registered, if it had any."""
        table = self.samples(folder)
        columns = [name for name in map(str, table) if name.startswith(META)]
        named = {name: name.removeprefix(META) for name in columns}
        return table[["id", *columns]].rename(columns=named) if columns else None


def labels_of(table: pd.DataFrame) -> Labels:
    """Return id, class and group of every row of a table of samples."""
    ids, y, groups = (
        torch.from_numpy(table[column].to_numpy("int64", copy=True))
        for column in ("id", "y", "group")
    )
    return Labels(ids, y, groups)


def _in_memory(images: Images) -> Images:
    """Read small images of one size into memory, where no batch has to be put together."""
    if not isinstance(images, MappedImages) or len(images) == 0:
        return images
    height, width = images.sizes[0].tolist()
    uniform = bool((images.sizes == images.sizes[0]).all())
    if not uniform or 3 * height * width * len(images) > IN_MEMORY_BYTES:
        return images
    return MemoryImages(images.batch(torch.arange(len(images))).pixels.contiguous())


def _transforms(known: Description, resolution: int) -> tuple[Transform, Transform]:
    """Return how images are cut for training and evaluation; small ones are only shifted."""
    if known.length:
        return RowTransform(length=known.length), RowTransform(length=known.length)
    if resolution > SMALL_SIDE:
        return photo_transforms(resolution)
    look = resolution, IMAGENET_MEAN, IMAGENET_STD
    return (
        Transform(PaddedRandomCrop(SHIFT), *look),
        Transform(ResizedCentreCrop(resolution), *look),
    )


def read_rows(file: Path, content: str = "") -> torch.Tensor:
    """Read the rows of a file of features; `content` is the digest it must have, if given."""
    if content and sha256_of(file) != content:
        raise DataCorrupt(f"{file} is not the file that was registered", "register it again")
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            rows = arrays["x"]
    else:
        import pandas as pd

        rows = rows_of(pd.read_parquet(file))
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))


def rows_of(table: pd.DataFrame) -> np.ndarray:
    """Return the rows in a table: a column `x` of lists, or columns x0, x1, ... (x_0, x_1, ...)."""
    if "x" in table:
        return np.stack([np.asarray(row, dtype=np.float32) for row in table["x"]])
    return table[feature_columns(list(map(str, table)))].to_numpy(dtype=np.float32)


def feature_columns(columns: list[str]) -> list[str]:
    """Return the columns x0, x1, ... or x_0, x_1, ... in the order of their numbers."""
    numbered = {c: c.removeprefix("x").removeprefix("_") for c in columns if c.startswith("x")}
    found = [name for name, number in numbered.items() if number.isdecimal()]
    return sorted(found, key=lambda name: int(numbered[name]))


def _add_command(name: str) -> str:
    return f"python -m bench data add {name} PATH"


def _again(name: str, source: str) -> str:
    return (
        f"register it again: python -m bench data remove {name}, then "
        f"python -m bench data add {name} {source}"
    )


def read_description(folder: Path) -> Description:
    """Read `dataset.toml`; raise `DataCorrupt` where it is none or does not fit its folder."""
    path = folder / DESCRIPTION
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
        known = build_config(Description, said, DESCRIPTION)
        require(known.name == folder.name, f"name is '{known.name}', its folder '{folder.name}'")
    except (OSError, ValueError, TypeError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}", _add_command(folder.name)) from error
    except UsageError as error:
        raise DataCorrupt(f"{path}: {error.message}", "correct it, or register again") from error
    return known


_KNOWN: dict[Path, tuple[int, Own]] = {}


def read_own(folder: Path) -> Own:
    """Return the dataset that a folder describes."""
    stamp = (folder / DESCRIPTION).stat().st_mtime_ns
    if folder not in _KNOWN or _KNOWN[folder][0] != stamp:
        known = read_description(folder)
        metric = "wga" if "test" in known.group_splits else "worst_class"
        attributes = {
            "name": known.name,
            "title": known.title or known.name,
            "source": known.name,
            "table_metrics": TABLE_METRICS[metric],
            "home": folder,
            "description": known,
        }
        _KNOWN[folder] = stamp, type(f"Own_{known.name}", (Own,), attributes)()
    return _KNOWN[folder][1]
