"""Two-colour MNIST with noisy labels: in training the colour tells the label better than the digit.

Paper: Arjovsky et al. 2019 (invariant risk minimisation). A quarter of all labels is wrong, so that
who reads the digit is right in 75% of any group; the colour agrees with the label in 80% (images at
even positions) and 90% (odd ones) of training and validation, and in 10% of test. What the paper
fixes is followed: class 1 is the digits below 5, training is the first 50,000 images of MNIST's
training file. The rest is a proposal of ours and no published protocol: a fixed draw (the authors
draw anew at every start), validation from the remaining 10,000 images with the colours of training
(the authors test on these, and choose by that), test from MNIST's test file, and therefore all
counts and digests. Images keep their 28 x 28 pixels in red or green with an empty blue channel,
where the authors keep every second pixel of two channels. As there, nothing is augmented.
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

from datasets.base import Facts, Labels
from datasets.dataset import Progress, register
from datasets.images import Images, MemoryImages
from datasets.mnist import MnistDataset, as_tensor
from datasets.transforms import ResizedCentreCrop, ResizedRandomCrop, Transform

Numbers = npt.NDArray[np.int64]
PROTOCOL = "two-environments"
SEED = 42  # of all noise; never the training seed
LABEL_NOISE = 0.25
COLOUR_NOISE = (0.2, 0.1)  # of the two environments of training: even and odd positions
TEST_COLOUR_NOISE = 0.9
TRAIN_SHARE = 5, 6  # of the training file: 50,000 of 60,000
CLASSES = ("labelled_5_9", "labelled_0_4")  # a quarter of each shows a digit of the other
COLOURS = ("red", "green")
COUNTS = {
    "train": (21_004, 3_676, 3_872, 21_448),
    "val": (4_212, 774, 724, 4_290),
    "test": (495, 4_422, 4_540, 543),
}
LABEL_DIGEST = "5bee9e674b37119d9baecb17df5bf53e0c417c80457262ac256939701d461bdf"
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class CmnistIrmConfig:
    """Nothing can be chosen: the noise levels are the paper's."""


@register
class CmnistIrm(MnistDataset):
    """MNIST whose colour is a better guess of the label than the digit, until the test."""

    name: ClassVar[str] = "cmnist_irm"
    title: ClassVar[str] = "CMNIST-IRM"
    extended: ClassVar[bool] = True
    order: ClassVar[int] = 70
    table_metrics: ClassVar[tuple[str, ...]] = ("wga", "avg")
    config_type: ClassVar[type[CmnistIrmConfig]] = CmnistIrmConfig

    def facts(self, config: CmnistIrmConfig) -> Facts:
        """Return the protocol's constants."""
        # With one window there is nothing to draw, and resized copies are kept.
        whole = ResizedRandomCrop(32)
        return Facts(
            name=self.name,
            protocol=PROTOCOL,
            task="Digit range (binary, noisy labels)",
            spurious="Color",
            classes=CLASSES,
            codes=("5-9", "0-4"),
            groups=tuple(f"{name}/{colour}" for name in CLASSES for colour in COLOURS),
            metric="wga",
            counts={split: sum(counts) for split, counts in COUNTS.items()},
            group_counts=COUNTS,
            backbone="lenet5",
            channels=3,
            train_transform=Transform(whole, 32, HALF, HALF),
            eval_transform=Transform(ResizedCentreCrop(32), 32, HALF, HALF),
            label_digest=LABEL_DIGEST,
            group_sets={"aligned": (0, 3), "conflicting": (1, 2)},
        )

    def labels(self, folder: Path, config: CmnistIrmConfig) -> Mapping[str, Labels]:
        """Make labels and colours noisy, split by split from one generator."""
        low = self.digits(folder, "train") < 5
        low_test = self.digits(folder, "t10k") < 5
        positions, cut = np.arange(len(low)), len(low) * TRAIN_SHARE[0] // TRAIN_SHARE[1]
        rng = np.random.RandomState(SEED)
        environments = np.array(COLOUR_NOISE)
        test_ids = len(low) + np.arange(len(low_test))
        test_noise = np.full(len(low_test), TEST_COLOUR_NOISE)
        return {
            "train": _noisy(positions[:cut], low[:cut], environments[positions[:cut] % 2], rng),
            "val": _noisy(positions[cut:], low[cut:], environments[positions[cut:] % 2], rng),
            "test": _noisy(test_ids, low_test, test_noise, rng),
        }

    def images(
        self,
        folder: Path,
        config: CmnistIrmConfig,
        labels: Mapping[str, Labels],
        progress: Progress,
    ) -> Mapping[str, Images]:
        """Put each image into the channel of its colour."""
        pixels = self.pixels(folder, labels)
        return {
            split: MemoryImages(coloured(pixels[split], part.groups % 2))
            for split, part in labels.items()
        }


def coloured(grey: Tensor, colour: Tensor) -> Tensor:
    """Return (N, H, W) grey images as red (0) or green (1) ones."""
    images = torch.zeros(len(grey), 3, *grey.shape[1:], dtype=torch.uint8)
    images[torch.arange(len(grey)), colour] = grey
    return images


def _noisy(
    ids: Numbers,
    low: npt.NDArray[np.bool_],
    colour_noise: npt.NDArray[np.float64],
    rng: np.random.RandomState,
) -> Labels:
    """Flip labels, then colours, which agree with the noisy label unless flipped."""
    label = low ^ (rng.uniform(size=len(low)) < LABEL_NOISE)
    colour = label ^ (rng.uniform(size=len(low)) < colour_noise)
    return Labels(as_tensor(ids), as_tensor(label), as_tensor(2 * label + colour))
