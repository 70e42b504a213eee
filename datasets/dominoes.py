"""Dominoes: a digit above a photograph of a vehicle, whose class the digit gives away in training.

Paper: Shah et al. 2020 (pitfalls of simplicity bias), whose pairs these are: MNIST's 0 above
CIFAR-10's automobiles, its 1 above the trucks, the digit padded to 32 x 32. There the pairs are
perfectly correlated, and a network is judged by randomising one half; the form with rare
conflicting pairs is that of Kirichenko et al. 2023 (DFR), who published no generator. Which images
are paired, how many, and with them all counts and digests are therefore a proposal of ours and no
published protocol: 95% (default) or another share of training images show the digit of their class;
in validation and test one in two does; no digit and no photograph occurs twice. Augmentation is
that of Qiu et al. 2023 (AFR): cropped with 4 pixels of padding, and mirrored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from datasets.base import Facts, Labels
from datasets.cifar_source import (
    FOLDER,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    holds_cifar10,
    verify_cifar10,
)
from datasets.config import require
from datasets.dataset import Dataset, Progress, register
from datasets.errors import DataMissing
from datasets.fetch import get_command
from datasets.idx import map_idx, read_idx
from datasets.images import Images, MemoryImages
from datasets.mnist import MnistDataset, as_tensor
from datasets.mnist_source import find_mnist, holds_mnist, verify_mnist
from datasets.standins.marker import refuse_marked
from datasets.transforms import PaddedRandomCrop, Transform, WholeImage

Numbers = npt.NDArray[np.int64]
SEED = 42  # of the pairs; never the training seed
VEHICLES = (1, 9)  # CIFAR-10's automobile and truck, the classes 0 and 1 here
DIGITS = (0, 1)
CLASSES = ("automobile", "truck")
TRAIN_SHARE = 4, 5  # of the smallest pool of training images: 4,000 of 5,000
ID_BASE = 10_000_000  # an id is a photograph's number times this, plus its digit's number
EVALUATION = {"val": (500,) * 4, "test": (490,) * 4}
TRAIN_EACH = 4_000
DIGESTS: Mapping[float, str] = {  # other shares are checked by their counts
    0.95: "2acc5510e5fcb5ad01cabffd1e850b2db915f1719c1c6aea0747224c8ef38561",
    0.99: "393f025cdacd1f596102280712a53ad11c8665ac2f83323a523cd864c9ee82ae",
}
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class DominoesConfig:
    """How far the digit gives the class away.

    Attributes:
        correlation: share of training images with the digit of their class.
    """

    correlation: float = 0.95

    def __post_init__(self) -> None:
        # At least one image in each conflicting group, also of a small stand-in.
        require(
            0.5 <= self.correlation <= 0.999,
            f"correlation must be from 0.5 to 0.999 but got {self.correlation}",
        )


@dataclass(frozen=True)
class _Pairs:
    """Positions of the photographs and digits of one split, with their classes."""

    photos: Numbers
    digits: Numbers
    y: Numbers
    digit: Numbers


@register
class Dominoes(Dataset):
    """Photographs of vehicles below a digit that is easier to learn.

    An id says which two images are paired: `10_000_000 * photograph + digit`, each a position in
    the training file or, for test images, that position counted on from its end.
    """

    name: ClassVar[str] = "dominoes"
    title: ClassVar[str] = "Dominoes"
    extended: ClassVar[bool] = True
    order: ClassVar[int] = 60
    table_metrics: ClassVar[tuple[str, ...]] = ("wga", "avg")
    config_type: ClassVar[type[DominoesConfig]] = DominoesConfig
    search_paths: ClassVar[tuple[str, ...]] = (FOLDER, ".")
    files_pinned: ClassVar[bool] = True

    def facts(self, config: DominoesConfig) -> Facts:
        """Return the protocol's constants."""
        conflicts = _conflicts(config.correlation, TRAIN_EACH)
        aligned = TRAIN_EACH - conflicts
        counts = {"train": (aligned, conflicts, conflicts, aligned), **EVALUATION}
        return Facts(
            name=self.name,
            protocol=f"correlation-{100 * config.correlation:g}",
            task="Vehicle (binary)",
            spurious="Digit above it",
            classes=CLASSES,
            codes=("auto", "truck"),
            groups=tuple(f"{name}/digit_{digit}" for name in CLASSES for digit in DIGITS),
            metric="wga",
            counts={split: sum(own) for split, own in counts.items()},
            group_counts=counts,
            backbone="lenet5_tall",
            channels=3,
            train_transform=Transform(PaddedRandomCrop(4), 64, HALF, HALF, hflip=True, columns=32),
            eval_transform=Transform(WholeImage(), 64, HALF, HALF, columns=32),
            label_digest=DIGESTS.get(config.correlation),
            group_sets={"aligned": (0, 3), "conflicting": (1, 2)},
        )

    def matches(self, folder: Path) -> bool:
        """Return whether `folder` has CIFAR-10, and MNIST lies in it or beside it."""
        return holds_cifar10(folder) and _mnist_folder(folder) is not None

    def check_files(self, folder: Path, standin: bool) -> None:
        """Check the sums of CIFAR-10's and MNIST's files."""
        if not standin:
            digits = _required_mnist(folder)
            refuse_marked(digits)
            verify_cifar10(folder)
            verify_mnist(digits)

    def labels(self, folder: Path, config: DominoesConfig) -> Mapping[str, Labels]:
        """Pair photographs with digits."""
        mnist = _required_mnist(folder)
        photos = [read_idx(folder / name).astype(np.int64) for name in (TRAIN_LABELS, TEST_LABELS)]
        digits = [MnistDataset.digits(mnist, part) for part in ("train", "t10k")]
        pairs = _paired(photos, digits, config.correlation)
        return {split: _labels(own) for split, own in pairs.items()}

    def images(
        self, folder: Path, config: DominoesConfig, labels: Mapping[str, Labels], progress: Progress
    ) -> Mapping[str, Images]:
        """Put each digit above its photograph."""
        mnist = _required_mnist(folder)
        numbers = {
            split: Labels(part.ids % ID_BASE, part.y, part.groups) for split, part in labels.items()
        }
        digits = MnistDataset.pixels(mnist, numbers)
        train, test = map_idx(folder / TRAIN_IMAGES), map_idx(folder / TEST_IMAGES)
        opened: dict[str, Images] = {}
        for split, part in labels.items():
            photo = (part.ids // ID_BASE).numpy()
            file, first = (test, len(train)) if split == "test" else (train, 0)
            opened[split] = MemoryImages(
                stacked(digits[split], torch.from_numpy(file[photo - first]))
            )
        return opened


def stacked(digits: Tensor, photos: Tensor) -> Tensor:
    """Put (N, 28, 28) digits, padded to 32 and grey, above (N, 32, 32, 3) photographs."""
    above = functional.pad(digits, (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1)
    return torch.cat([above, photos.permute(0, 3, 1, 2)], dim=2)


def _mnist_folder(folder: Path) -> Path | None:
    """Return where MNIST is: in CIFAR-10's folder, as in a stand-in, or where that folder lies."""
    return folder if holds_mnist(folder) else find_mnist(folder.parent)


def _required_mnist(folder: Path) -> Path:
    found = _mnist_folder(folder)
    if found is None:
        command = get_command("dominoes", folder.parent)
        raise DataMissing(f"MNIST is not in {folder.parent}", f"run `{command}`")
    return found


def _paired(photos: list[Numbers], digits: list[Numbers], correlation: float) -> dict[str, _Pairs]:
    """Draw the pairs of each split from the classes of the training and the test files."""
    rng = np.random.RandomState(SEED)
    kinds = [(file, own) for file in (0, 1) for own in ((photos, VEHICLES), (digits, DIGITS))]
    train_photos, train_digits, test_photos, test_digits = (
        [rng.permutation(np.flatnonzero(classes[file] == one)) for one in ones]
        for file, (classes, ones) in kinds
    )
    each = min(map(len, [*train_photos, *train_digits]))
    cut = each * TRAIN_SHARE[0] // TRAIN_SHARE[1]
    tested = min(map(len, [*test_photos, *test_digits]))
    pairs = {
        "train": _matched(
            [own[:cut] for own in train_photos],
            [own[:cut] for own in train_digits],
            _conflicts(correlation, cut),
        ),
        "val": _matched(
            [own[cut:each] for own in train_photos],
            [own[cut:each] for own in train_digits],
            (each - cut) // 2,
        ),
        "test": _matched(
            [len(photos[0]) + own[:tested] for own in test_photos],
            [len(digits[0]) + own[:tested] for own in test_digits],
            tested // 2,
        ),
    }
    return pairs


def _conflicts(correlation: float, size: int) -> int:
    """Count the images of a class that show the other digit; a tiny stand-in has one."""
    return max(1, round((1 - correlation) * size))


def _matched(photos: list[Numbers], digits: list[Numbers], conflicts: int) -> _Pairs:
    """Pair the first photographs of each class with the other digit; digits in their order."""
    left = [iter(own) for own in digits]
    y = np.repeat((0, 1), [len(own) for own in photos])
    place = np.concatenate([np.arange(len(own)) for own in photos])
    digit = np.where(place < conflicts, 1 - y, y)
    taken = np.array([next(left[one]) for one in digit.tolist()], dtype=np.int64)
    return _Pairs(np.concatenate(photos), taken, y, digit)


def _labels(pairs: _Pairs) -> Labels:
    """Sort by photograph, so that a sample's position tells nothing about its digit."""
    order = np.argsort(pairs.photos)
    ids, groups = ID_BASE * pairs.photos + pairs.digits, 2 * pairs.y + pairs.digit
    return Labels(as_tensor(ids[order]), as_tensor(pairs.y[order]), as_tensor(groups[order]))
