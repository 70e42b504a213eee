"""Samples as users have them: arrays, tensors, torch datasets, feature rows and image files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datasets.bounded import Bound
from datasets.decode import decode
from datasets.errors import DataCorrupt, UsageError
from datasets.features import FeatureRows
from datasets.images import ImageBatch, Images, MemoryImages
from datasets.own import read_rows as read_feature_table

CHANNELS = (1, 3)
ROWS = "(N, D) for rows of features"
IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
ROW_FILES = (".npy", ".npz", ".parquet")
BATCH_BYTES = 2**24  # of image files that are read at once; as floats they take four times as much
LAYOUTS = "(N, C, H, W) or (N, H, W[, C]) with 1 or 3 channels"


@dataclass(frozen=True)
class Samples:
    """Images with a label each, and a group each where groups are known."""

    images: Images
    y: npt.NDArray[Any]
    groups: npt.NDArray[Any] | None = None


def to_samples(given: Any, what: str) -> Samples:
    """Read `(x, y)`, `(x, y, groups)` or a torch dataset of such items; `what` names it."""
    if not isinstance(given, tuple | list) and hasattr(given, "__getitem__"):
        given = _columns(given, what)
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise UsageError(
            f"{what} must be (x, y), (x, y, groups) or a torch dataset of such items",
            f"e.g. {what}=(images, labels)",
        )
    images = to_images(given[0], what=what)
    if not len(images):
        raise UsageError(f"{what} has no samples", "give some")
    names = ("labels", "groups")[: len(given) - 1]
    columns = zip(given[1:], names, strict=True)
    return Samples(images, *(_labels(own, len(images), what, name) for own, name in columns))


def _columns(dataset: Any, what: str) -> tuple[Any, ...]:
    """Read every item of a torch dataset."""
    try:
        items = [dataset[position] for position in range(len(dataset))]
    except TypeError as error:
        raise UsageError(f"{what} has no length: {error}", "give a map-style dataset") from error
    sizes = {len(item) if isinstance(item, tuple | list) else 0 for item in items}
    if not sizes <= {2, 3} or len(sizes) != 1:
        raise UsageError(f"the items of {what} must be (x, y) or (x, y, group)", "wrap the dataset")
    shapes = {np.shape(item[0]) for item in items}
    if len(shapes) > 1:
        raise UsageError(
            f"the images of {what} have {len(shapes)} sizes, {min(shapes)} among them",
            "resize them in the dataset's transform, or register the folder: "
            "python -m bench data add",
        )
    x = np.stack([np.asarray(item[0]) for item in items])
    return x, *(np.array([_scalar(item[i]) for item in items]) for i in range(1, sizes.pop()))


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _labels(column: Any, count: int, what: str, name: str) -> npt.NDArray[Any]:
    """Check a column of labels: whole numbers or text, one a sample."""
    values = np.asarray(column.detach().cpu() if isinstance(column, Tensor) else column)
    if values.ndim != 1 or len(values) != count:
        raise UsageError(
            f"{what} has {count} samples, but its {name} have the shape {values.shape}",
            "give one a sample",
        )
    if values.dtype.kind == "f" and np.all(values == np.round(values)):
        values = values.astype(np.int64)  # NaN is not equal to itself, and goes on to the error
    if values.dtype == object and all(isinstance(value, str) for value in values):
        values = values.astype(str)
    if values.dtype.kind not in "iubUS":
        raise UsageError(
            f"the {name} of {what} must be whole numbers or text but are {values.dtype}",
            "one-hot labels: give their argmax; leave out samples without a label",
        )
    return values.astype(str) if values.dtype.kind == "S" else values


def to_images(
    x: Any, channels: int | None = None, *, rows: bool | None = None, what: str = "x"
) -> Images:
    """Turn an array or tensor into images, or rows of features, as the loop takes them.

    Floats from 0 to 1 become bytes, as an image file would have them; rows stay as they are.

    Args:
        x: images or rows; SciPy's sparse matrices are rows.
        channels: how many a model takes, of rows how many numbers; any where there is no model yet.
        rows: whether a model takes rows.
        what: names it in messages.
    """
    if hasattr(x, "toarray"):
        x = x.toarray()
    values = x.detach().cpu() if isinstance(x, Tensor) else _tensor(x, what)
    if rows is not None and rows != (values.ndim == 2):
        wanted = ROWS if rows else LAYOUTS
        raise UsageError(f"{what} has the shape {tuple(values.shape)}", f"the model takes {wanted}")
    if values.ndim == 2:
        return _rows(values, channels, what)
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[1] not in CHANNELS and values.shape[3] in CHANNELS:
        values = values.permute(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in CHANNELS:
        shape = tuple(values.shape)
        raise UsageError(f"{what} has the shape {shape}", f"give images as {LAYOUTS}, or {ROWS}")
    if channels is not None and values.shape[1] != channels:
        have, want = values.shape[1], channels
        raise UsageError(f"{what} has {have} channels, the model takes {want}", "convert them")
    return MemoryImages(_bytes(values, what).contiguous())


def _rows(values: Tensor, length: int | None, what: str) -> FeatureRows:
    if length not in (None, values.shape[1]):
        have = f"{what} has rows of {values.shape[1]} numbers"
        raise UsageError(f"{have}, the model takes {length}", "give the features of its training")
    if not values.shape[1]:
        raise UsageError(f"{what} has rows without numbers", "give some features")
    rows = values.float()
    if not bool(torch.isfinite(rows).all()):
        raise UsageError(f"{what} has numbers that are not finite", "replace or leave out NaN")
    return FeatureRows(rows)


def _tensor(x: Any, what: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(x))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} is no array of numbers: {error}", f"give {LAYOUTS}") from error


def _bytes(values: Tensor, what: str) -> Tensor:
    """Return pixels as bytes; values whose scale is not known are an error."""
    if values.dtype == torch.uint8:
        return values
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if not len(values):
        return values.to(torch.uint8)
    low, high = float(values.min()), float(values.max())
    if values.is_floating_point() and low >= 0 and high <= 1:
        return (values * 255).round().to(torch.uint8)
    if not values.is_floating_point() and low >= 0 and high <= 255:
        return values.to(torch.uint8)
    raise UsageError(
        f"the pixels of {what} lie between {low:g} and {high:g}",
        "give bytes, or floats from 0 to 1; the scaling to mean 0 is done by the suite",
    )


def read_rows(path: Path) -> npt.NDArray[Any]:
    """Read rows of features from a `.npy` file, or from a table as `data add` takes it."""
    if not path.is_file() or path.suffix not in ROW_FILES:
        kinds = ", ".join(ROW_FILES)
        raise UsageError(f"{path} is no file of feature rows", f"give one of these: {kinds}")
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        return read_feature_table(path).numpy()
    except (OSError, ValueError, KeyError) as error:
        raise DataCorrupt(f"{path} cannot be read: {error}", "write it with numpy.savez") from error


def find_image_files(path: Path) -> list[Path]:
    """Return an image file, or all below a folder, in the order of their names."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UsageError(f"there is no file or folder {path}", "give a folder of images")
    found = (file for file in path.rglob("*") if file.suffix.lower() in IMAGE_FILES)
    files = sorted(file for file in found if file.is_file())
    if not files:
        kinds = ", ".join(IMAGE_FILES)
        raise UsageError(f"there are no images in {path}", f"these are looked for: {kinds}")
    return files


def read_batches(
    files: Sequence[Path],
    channels: int,
    unreadable: Callable[[str], None],
    bound: Bound | None = None,
) -> Iterator[tuple[list[Path], ImageBatch]]:
    """Read image files, in colour or grey, some at a time, scaled down to a bound if there is one.

    A file that cannot be read is left out, and `unreadable` is told what is wrong with it.
    """
    names: list[Path] = []
    arrays: list[npt.NDArray[np.uint8]] = []
    for file in files:
        try:
            array = decode(file, bound)
        except DataCorrupt as error:
            unreadable(error.message)
            continue
        largest = np.max([one.shape for one in (*arrays, array)], axis=0)  # all are padded to it
        if arrays and (len(arrays) + 1) * int(largest.prod()) > BATCH_BYTES:
            yield names, to_batch(arrays, channels)
            names, arrays = [], []
        names.append(file)
        arrays.append(array)
    if arrays:
        yield names, to_batch(arrays, channels)


def to_batch(arrays: Sequence[npt.NDArray[np.uint8]], channels: int) -> ImageBatch:
    """Put colour images of any sizes into a batch, grey where a model takes one channel."""
    sizes = torch.tensor([array.shape[:2] for array in arrays])
    pixels = np.zeros((len(arrays), *sizes.amax(dim=0).tolist(), 3), dtype=np.uint8)
    for slot, array in enumerate(arrays):
        pixels[slot, : array.shape[0], : array.shape[1]] = array
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    if channels == 1:
        batch = batch.float().mean(dim=1, keepdim=True).round().to(torch.uint8)
    return ImageBatch(batch, sizes)
