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
from datasets.idx import read_idx
from datasets.mnist_source import holds_mnist, verify_mnist

Part = Literal["train", "t10k"]


class MnistDataset(Dataset):
    """A dataset made from MNIST's four files.

    An id is an image's position in the training file, or, for test images, that position counted
    on from the end of the training file: it names one image of MNIST in every protocol.
    """

    places: ClassVar[tuple[str, ...]] = ("mnist", "MNIST/raw", ".")

    def holds(self, folder: Path) -> bool:
        """Tell whether the four files are in `folder` itself."""
        return holds_mnist(folder)

    def check_files(self, folder: Path, standin: bool) -> None:
        """Check the sums of the four files."""
        if not standin:
            verify_mnist(folder)

    @staticmethod
    def digits(folder: Path, part: Part) -> npt.NDArray[np.int64]:
        """Read the digits of the training or the test file."""
        return read_idx(folder / f"{part}-labels-idx1-ubyte").astype(np.int64)

    @staticmethod
    def pixels(folder: Path, labels: Mapping[str, Labels]) -> dict[str, Tensor]:
        """Read the grey (N, H, W) images of each split, each in a tensor of its own."""
        train = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte"))
        test = torch.from_numpy(read_idx(folder / "t10k-images-idx3-ubyte"))
        everything = torch.cat([train, test])
        return {split: everything[part.ids] for split, part in labels.items()}


def as_tensor(values: npt.NDArray[Any]) -> Tensor:
    """Turn whole numbers into the tensor type labels have."""
    return torch.from_numpy(values.astype(np.int64))
