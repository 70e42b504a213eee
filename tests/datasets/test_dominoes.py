"""Dominoes: the pairs as proposed, on the real files and on any labels, and how they look."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from datasets import dominoes, standins
from datasets.base import SPLITS, label_digest
from datasets.cifar_source import TEST_IMAGES, TRAIN_IMAGES, TRAIN_LABELS, holds_cifar10
from datasets.dominoes import DIGITS, ID_BASE, VEHICLES, Dominoes, DominoesConfig, stacked
from datasets.errors import DataCorrupt, DataMissing, UsageError
from datasets.idx import read_idx
from datasets.mnist import MnistDataset
from datasets.sources import get
from datasets.standins.marker import MARKER_NAME
from datasets.transforms import PaddedRandomCrop, WholeImage

# SHA-256 of photograph, digit, class and digit class, each counted from the start of its own file.
PUBLISHED = {
    0.95: {"train": "1aa68bbecd71efd4", "val": "426c9179310ab22f", "test": "3a720694765edeaf"},
    0.99: {"train": "7b7f30dd2e5d0375", "val": "426c9179310ab22f", "test": "3a720694765edeaf"},
}


@pytest.fixture(scope="session")
def cifar_root(mnist_root: Path) -> Path:
    """The data root, if CIFAR-10 is there: it is too large to be fetched for a test."""
    if not holds_cifar10(mnist_root / "cifar10"):
        pytest.skip(f"CIFAR-10 is not in {mnist_root} (python -m bench data get dominoes)")
    return mnist_root


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("standin")
    standins.write("dominoes", root, size=100)
    return root


@pytest.mark.parametrize("correlation", [0.95, 0.99])
def test_pairs_of_the_real_files(cifar_root: Path, correlation: float) -> None:
    dataset, config = Dominoes(), DominoesConfig(correlation)
    facts, found, labels = dataset.check(cifar_root, config)
    assert found.data_kind == "release"
    assert facts.label_digest == label_digest(dict(labels)) is not None
    rare = {0.95: 200, 0.99: 40}[correlation]
    assert facts.group_counts["train"] == (4000 - rare, rare, rare, 4000 - rare)
    folder, mnist = found.folder, dominoes._required_mnist(found.folder)
    photos = [read_idx(folder / f"cifar10-{part}-labels-idx1-ubyte") for part in ("train", "test")]
    digits = [MnistDataset.digits(mnist, part) for part in ("train", "t10k")]
    drawn = dominoes._paired([one.astype(np.int64) for one in photos], digits, correlation)
    for split, pairs in drawn.items():
        first = (50_000, 60_000) if split == "test" else (0, 0)
        columns = (pairs.photos - first[0], pairs.digits - first[1], pairs.y, pairs.digit)
        content = b"".join(column.astype("<i8").tobytes() for column in columns)
        assert hashlib.sha256(content).hexdigest()[:16] == PUBLISHED[correlation][split]


def test_the_real_images_are_the_halves_that_ids_name(cifar_root: Path) -> None:
    data = Dominoes().load(cifar_root, DominoesConfig(), splits=("val", "test"))
    assert data.data_kind == "release"
    folder = cifar_root / "cifar10"
    for split, prefix, file, offsets in (
        ("val", "train", TRAIN_IMAGES, (0, 0)),
        ("test", "t10k", TEST_IMAGES, (50_000, 60_000)),
    ):
        own = data.splits[split]
        photos, digits = (own.labels.ids // ID_BASE).numpy(), (own.labels.ids % ID_BASE).numpy()
        pixels = own.images.batch(torch.tensor([7])).pixels[0]
        photo = read_idx(folder / file)[photos[7] - offsets[0]]
        assert torch.equal(pixels[:, 32:], torch.from_numpy(photo).permute(2, 0, 1))
        mnist = dominoes._required_mnist(folder)
        digit = read_idx(mnist / f"{prefix}-images-idx3-ubyte")[digits[7] - offsets[1]]
        assert torch.equal(pixels[:, 2:30, 2:30], torch.from_numpy(digit).expand(3, -1, -1))


@pytest.mark.parametrize("correlation", [0.5, 0.9, 0.95, 0.999])
def test_rules_hold_for_any_labels(correlation: float) -> None:
    rng = np.random.default_rng(1)
    photos = [rng.permutation(np.arange(size) % 10) for size in (3000, 700)]
    digits = [rng.permutation(np.arange(size) % 3) for size in (1200, 150)]
    pairs = dominoes._paired(photos, digits, correlation)
    used_photos = np.concatenate([own.photos for own in pairs.values()])
    used_digits = np.concatenate([own.digits for own in pairs.values()])
    assert len(np.unique(used_photos)) == len(used_photos), "no photograph occurs twice"
    assert len(np.unique(used_digits)) == len(used_digits), "no digit occurs twice"
    shown, written = np.concatenate(photos), np.concatenate(digits)
    for split, own in pairs.items():
        assert np.array_equal(shown[own.photos], np.array(VEHICLES)[own.y])
        assert np.array_equal(written[own.digits], np.array(DIGITS)[own.digit])
        assert (np.isin(own.photos, np.arange(3000, 3700)) == (split == "test")).all()
    counts = {split: np.bincount(2 * own.y + own.digit) for split, own in pairs.items()}
    # The smallest pool decides: 300 photographs of a class in training, 50 digits in test.
    rare = max(1, round((1 - correlation) * 240))
    assert counts["train"].tolist() == [240 - rare, rare, rare, 240 - rare]
    assert counts["val"].tolist() == [30] * 4 and counts["test"].tolist() == [25] * 4


def test_a_digit_stands_above_its_photograph() -> None:
    digits = torch.full((1, 28, 28), 200, dtype=torch.uint8)
    photos = torch.arange(3, dtype=torch.uint8).expand(1, 32, 32, 3)
    (image,) = stacked(digits, photos)
    assert image.shape == (3, 64, 32)
    assert (image[:, 2:30, 2:30] == 200).all() and image[:, :32].sum() == 3 * 28 * 28 * 200
    assert all((image[channel, 32:] == channel).all() for channel in range(3))


def test_images_keep_their_shape_on_their_way_to_the_network() -> None:
    facts = Dominoes().facts(DominoesConfig())
    assert facts.backbone == "lenet5_tall"
    assert facts.train_transform.shape == facts.eval_transform.shape == (64, 32)
    assert facts.train_transform.cut == PaddedRandomCrop(4) and facts.train_transform.hflip
    assert facts.eval_transform.cut == WholeImage()


@pytest.mark.parametrize("wrong", [0.49, 1.0, -1.0])
def test_a_correlation_without_rare_groups_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match=r"correlation must be from 0\.5 to 0.999"):
        DominoesConfig(wrong)


def test_each_correlation_is_a_protocol() -> None:
    facts = [Dominoes().facts(DominoesConfig(own)) for own in (0.95, 0.99, 0.9)]
    assert [one.protocol for one in facts] == ["correlation-95", "correlation-99", "correlation-90"]
    assert len({one.fingerprint() for one in facts}) == 3
    assert facts[0].label_digest and facts[1].label_digest and facts[2].label_digest is None


def test_a_stand_in_is_complete_by_itself(standin: Path) -> None:
    data = Dominoes().load(standin, DominoesConfig())
    assert data.standin
    assert {split: len(data.splits[split]) for split in SPLITS} == {
        "train": 80,
        "val": 20,
        "test": 100,
    }
    assert torch.bincount(data.splits["train"].labels.groups).tolist() == [38, 2, 2, 38]


def test_real_photographs_are_never_paired_with_drawn_digits(standin: Path, tmp_path: Path) -> None:
    """A folder of CIFAR-10 without a marker, beside a stand-in of MNIST."""
    shutil.copytree(standin / "cifar10", tmp_path / "cifar10")
    for left in (*(tmp_path / "cifar10").glob("t*-ubyte"), tmp_path / "cifar10" / MARKER_NAME):
        left.unlink()
    assert Dominoes().locate(tmp_path) is None, "MNIST is nowhere"
    standins.write("mnist", tmp_path, size=100)
    assert Dominoes().locate(tmp_path) is not None
    with pytest.raises(UsageError, match="mnist is a stand-in for mnist"):
        Dominoes().check(tmp_path, DominoesConfig())
    with pytest.raises(UsageError, match="is a stand-in"):
        get("dominoes", tmp_path, print)


def test_the_sums_of_the_real_files_are_demanded(standin: Path, tmp_path: Path) -> None:
    shutil.copytree(standin / "cifar10", tmp_path / "cifar10")
    (tmp_path / "cifar10" / MARKER_NAME).unlink()
    with pytest.raises(DataCorrupt, match=f"{TRAIN_LABELS}|{TRAIN_IMAGES}"):
        Dominoes().check(tmp_path, DominoesConfig())


def test_without_mnist_the_error_names_the_command(standin: Path, tmp_path: Path) -> None:
    shutil.copytree(standin / "cifar10", tmp_path / "cifar10")
    for left in (tmp_path / "cifar10").glob("t*-ubyte"):
        left.unlink()
    with pytest.raises(DataMissing, match="dominoes is not in") as caught:
        Dominoes().require(tmp_path)
    assert f"data get dominoes --data-root {tmp_path}" in caught.value.remedy
