"""What UMNIST and CMNIST have in common: the MNIST files below them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datasets.base import Labels
from datasets.dataset import Dataset
from datasets.fetch import Log
from datasets.idx import read_idx
from datasets.mnist_source import ensure_mnist, holds_mnist, verify_mnist

Part = Literal["train", "t10k"]


class MnistDataset(Dataset):
    """A dataset made from MNIST's four files.

    An id is an image's position in the training file, or, for test images, that position counted
    on from the end of the training file: it names one image of MNIST in every protocol.
    """

    search_paths: ClassVar[tuple[str, ...]] = ("mnist", "MNIST/raw", ".")
    source: ClassVar[str] = "mnist"
    files_pinned: ClassVar[bool] = True

    def matches(self, folder: Path) -> bool:
        """Return whether the four files are in `folder` itself."""
        return holds_mnist(folder)

    def check_files(self, folder: Path, standin: bool) -> None:
        """Check the sums of the four files."""
        if not standin:
            verify_mnist(folder)

    def fetch(self, root: Path, log: Log) -> bool:
        """Fetch the four files from the first source that has them."""
        ensure_mnist(root, log)
        return True

    @staticmethod
    def digits(folder: Path, part: Part) -> npt.NDArray[np.int64]:
        """Read the digits of the training or the test file."""
        return read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)

    @classmethod
    def pixels(cls, folder: Path, labels: Mapping[str, Labels]) -> dict[str, Tensor]:
        """Read the grey (N, H, W) images of each split, each in a tensor of its own."""
        test_labels = {split: part for split, part in labels.items() if split == "test"}
        train_labels = {split: part for split, part in labels.items() if split != "test"}
        pixels: dict[str, Tensor] = {}
        if train_labels:
            train = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte"))
            pixels |= {split: train[part.ids] for split, part in train_labels.items()}
        if test_labels:
            test = torch.from_numpy(read_idx(folder / "t10k-images-idx3-ubyte"))
            first = len(cls.digits(folder, "train"))
            pixels |= {split: test[part.ids - first] for split, part in test_labels.items()}
        return pixels


def as_tensor(values: npt.NDArray[Any]) -> Tensor:
    """Turn whole numbers into the tensor type labels have."""
    return torch.from_numpy(values.astype(np.int64))
