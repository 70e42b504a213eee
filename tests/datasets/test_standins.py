"""Stand-ins are in the released formats, skewed as the real data is, and never overwrite it."""

from __future__ import annotations

import csv
import json
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from datasets import standins
from datasets.errors import DataCorrupt, UsageError
from datasets.standins import birds, faces, lesions
from datasets.standins.marker import MARKER_NAME, Counts, read_marker
from datasets.standins.skew import SPLITS, Skew, apportion

PHOTOS = ("waterbirds", "celeba", "isic")
STORED = ("mnist", *PHOTOS, "dominoes")
SKEWS = {"waterbirds": birds.SKEW, "celeba": faces.SKEW, "isic": lesions.SKEW}
SIZE = 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One root with every stand-in, written once for all tests that only read."""
    folder = tmp_path_factory.mktemp("standins")
    for name in STORED:
        standins.write(name, folder, size=SIZE)
    return folder


def read_idx(path: Path) -> NDArray[np.uint8]:
    content = path.read_bytes()
    zero, kind, dimensions = struct.unpack(">HBB", content[:4])
    assert (zero, kind) == (0, 8)
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    return np.frombuffer(content[4 + 4 * dimensions :], dtype=np.uint8).reshape(shape)


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def counted(skew: Skew, members: list[tuple[int, int]]) -> Counts:
    """Count (split, group) pairs in the shape of a marker."""
    found = Counter(members)
    return {
        name: {group: found[split, index] for index, group in enumerate(skew.groups)}
        for split, name in enumerate(SPLITS)
    }


def bytes_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_mnist_is_in_idx_and_shared_by_its_variants(tmp_path: Path) -> None:
    for name in ("mnist", "umnist", "cmnist", "cmnist_irm"):
        folder = standins.write(name, tmp_path, size=120)
        assert folder == tmp_path / "mnist"
    for prefix, count in (("train", 120), ("t10k", 100)):
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte")
        assert images.shape == (count, 28, 28)
        assert labels.shape == (count,)
        assert np.bincount(labels).tolist() == [count // 10] * 10
        assert images.max() > 200 and not images[:, [0, -1]].any()
    assert read_marker(folder) == standins.Marker("mnist", 120, 0, {})


def test_waterbirds_layout(root: Path) -> None:
    folder = root / "waterbirds" / "waterbird_complete95_forest2water2"
    rows = read_table(folder / "metadata.csv")
    assert ",".join(rows[0]) == "img_id,img_filename,y,split,place,place_filename"
    assert [int(row["img_id"]) for row in rows] == list(range(1, len(rows) + 1))
    sizes = {Image.open(folder / row["img_filename"]).size for row in rows}
    assert len(sizes) > 10
    assert all(119 <= side <= 200 for size in sizes for side in size)
    assert all(width != height for width, height in sizes)
    members = [(int(row["split"]), 2 * int(row["y"]) + int(row["place"])) for row in rows]
    marker = read_marker(folder)
    assert marker is not None and marker.counts == counted(birds.SKEW, members)


def test_celeba_layout(root: Path) -> None:
    folder = root / "celeba"
    attributes = read_table(folder / "list_attr_celeba.csv")
    partition = read_table(folder / "list_eval_partition.csv")
    columns = list(attributes[0])
    assert len(columns) == 41
    # The positions by which the space-separated release of the same table is read.
    assert (columns[0], columns[9 + 1], columns[20 + 1]) == ("image_id", "Blond_Hair", "Male")
    assert list(partition[0]) == ["image_id", "partition"]
    assert attributes[0]["image_id"] == "000001.jpg"
    members = []
    for face, part in zip(attributes, partition, strict=True):
        assert face["image_id"] == part["image_id"]
        assert {face[column] for column in columns[1:]} == {"-1", "1"}
        with Image.open(folder / "img_align_celeba" / face["image_id"]) as picture:
            assert picture.size == (178, 218)
        group = 2 * (face["Blond_Hair"] == "1") + (face["Male"] == "1")
        members.append((int(part["partition"]), group))
    marker = read_marker(folder)
    assert marker is not None and marker.counts == counted(faces.SKEW, members)


def test_isic_layout(root: Path) -> None:
    folder = root / "isic"
    rows = read_table(folder / "labels.csv")
    assert tuple(rows[0]) == lesions.COLUMNS
    members = []
    for row in rows:
        with Image.open(folder / "images" / row["Image Index"]) as picture:
            assert picture.size == (224, 224)
        malignant, patch = row["Diagnosis"] == "1", row["patch"] == "1"
        assert not (malignant and patch)
        assert (row["benign_malignant"] == "malignant") == malignant
        if malignant:
            assert row["diagnosis_confirm_type"] == "histopathology"
        members.append((SPLITS.index(row["fold"]), 2 if malignant else int(patch)))
    marker = read_marker(folder)
    assert marker is not None and marker.counts == counted(lesions.SKEW, members)


@pytest.mark.parametrize("fold", SPLITS)
def test_isic_has_confirmed_benign_and_unknown_rows_in_every_fold(root: Path, fold: str) -> None:
    rows = [row for row in read_table(root / "isic" / "labels.csv") if row["fold"] == fold]
    unknown = [row for row in rows if row["benign_malignant"] == ""]
    assert unknown and all(row["Diagnosis"] == "0" for row in unknown)
    confirmed = Counter(
        row["diagnosis_confirm_type"] for row in rows if row["benign_malignant"] == "benign"
    )
    assert 0 < confirmed["histopathology"] < sum(confirmed.values())


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("size", [40, 400, 5000])
def test_skew_follows_the_real_counts(name: str, size: int) -> None:
    skew = SKEWS[name]
    counts = skew.counts(size)
    evaluation = max(40, size // 2)
    totals = {split: sum(groups.values()) for split, groups in counts.items()}
    assert totals == {"train": size, "val": evaluation, "test": evaluation}
    for split in SPLITS:
        assert tuple(counts[split]) == skew.groups
        small = list(counts[split].values())
        assert min(small) >= 3
        real = getattr(skew, split)
        ascending = [small[index] for index in np.argsort(real, kind="stable")]
        assert ascending == sorted(ascending)


def test_largest_remainder() -> None:
    assert apportion((50, 30, 20), 10) == [4, 3, 3]
    assert apportion((3498, 184, 56, 1057), 4795) == [3498, 184, 56, 1057]
    assert apportion((1000, 1), 40) == [37, 3]
    with pytest.raises(ValueError, match="cannot give 3"):
        apportion((1, 1), 5)


@pytest.mark.parametrize("name", STORED)
def test_same_arguments_give_the_same_bytes(name: str, root: Path, tmp_path: Path) -> None:
    again = standins.write(name, tmp_path, size=SIZE)
    assert bytes_below(root / again.relative_to(tmp_path)) == bytes_below(again)


@pytest.mark.parametrize("name", ["mnist", "isic"])
def test_another_seed_gives_other_pictures(name: str, root: Path, tmp_path: Path) -> None:
    folder = standins.write(name, tmp_path, size=SIZE, seed=1)
    one, other = bytes_below(root / name), bytes_below(folder)
    pictures = [file for file in one if file.endswith((".jpg", "images-idx3-ubyte"))]
    assert pictures and all(one[file] != other[file] for file in pictures)


def test_a_stand_in_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    standins.write("isic", tmp_path, size=60)
    folder = standins.write("isic", tmp_path, size=40, seed=1)
    marker = read_marker(folder)
    assert marker is not None and (marker.size, marker.seed) == (40, 1)
    assert len(list((folder / "images").iterdir())) == 40 + 40 + 40
    assert [path.name for path in tmp_path.iterdir()] == ["isic"]


@pytest.mark.parametrize("file", ["train-labels-idx1-ubyte", "notes.txt"])
def test_data_without_a_marker_is_left_alone(file: str, tmp_path: Path) -> None:
    real = tmp_path / "mnist" / file
    real.parent.mkdir()
    real.write_bytes(b"precious")
    with pytest.raises(UsageError, match="not a stand-in") as caught:
        standins.write("umnist", tmp_path, size=40)
    assert caught.value.remedy
    assert bytes_below(tmp_path) == {f"mnist/{file}": b"precious"}


@pytest.mark.parametrize(
    ("name", "labels"), [("mnist", "train-labels-idx1-ubyte"), ("isic", "labels.csv")]
)
def test_real_data_unpacked_over_a_stand_in_is_left_alone(
    name: str, labels: str, tmp_path: Path
) -> None:
    folder = standins.write(name, tmp_path, size=40)
    (folder / labels).write_bytes(b"a row\n" * 5000)
    with pytest.raises(UsageError, match="other data was put there"):
        standins.write(name, tmp_path, size=40)
    assert (folder / labels).stat().st_size == 30000


def test_a_failed_write_keeps_the_former_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = standins.write("mnist", tmp_path, size=40)
    before = bytes_below(folder)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(standins, "write_marker", fail)
    with pytest.raises(OSError, match="no space"):
        standins.write("mnist", tmp_path, size=50)
    assert bytes_below(tmp_path) == {f"mnist/{name}": content for name, content in before.items()}


def test_a_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch" / "digits"
    elsewhere.mkdir(parents=True)
    (tmp_path / "mnist").symlink_to(elsewhere)
    for seed in (0, 1):
        standins.write("mnist", tmp_path, size=40, seed=seed)
    assert (tmp_path / "mnist").is_symlink()
    assert (elsewhere / MARKER_NAME).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "no stand-in for 'imagenet'"),
        ({"name": "mnist", "size": 39}, "size must be at least 40 but got 39"),
        ({"name": "mnist", "seed": -1}, "seed must be at least 0 and below .* but got -1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, str | int], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        standins.write(root=tmp_path, **arguments)  # type: ignore[arg-type]
    assert caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_marker_content(root: Path) -> None:
    content = json.loads((root / "isic" / MARKER_NAME).read_text(encoding="utf-8"))
    assert list(content) == ["standin", "dataset", "size", "seed", "counts", "note"]
    assert content["standin"] is True
    assert (content["dataset"], content["size"], content["seed"]) == ("isic", SIZE, 0)
    assert content["note"] == "synthetic stand-in, not the real data"


def test_no_marker_is_none(tmp_path: Path) -> None:
    assert read_marker(tmp_path) is None
    assert read_marker(tmp_path / "absent") is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"standin": false}',
        '{"standin": true, "dataset": 3, "size": 40, "seed": 0, "counts": {}}',
        '{"standin": true, "dataset": "isic", "size": "40", "seed": 0, "counts": {}}',
        '{"standin": true, "dataset": "isic", "size": 40, "seed": 0, "counts": {"train": 3}}',
        '{"standin": true, "dataset": "isic", "size": 40, "seed": 0}',
    ],
)
def test_a_broken_marker_is_an_error(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "isic"
    folder.mkdir()
    (folder / MARKER_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(DataCorrupt, match="broken") as caught:
        read_marker(folder)
    assert "write the stand-in again" in caught.value.remedy
    with pytest.raises(DataCorrupt):
        standins.write("isic", tmp_path, size=40)


def ridge_accuracy(
    train: NDArray[np.float64],
    train_labels: NDArray[np.int64],
    test: NDArray[np.float64],
    test_labels: NDArray[np.int64],
) -> float:
    """Class-balanced accuracy of a linear model in closed form; every class weighs the same."""
    classes = np.unique(train_labels)
    targets = np.where(train_labels[:, None] == classes, 1.0, -1.0)
    weight = 1 / np.bincount(train_labels)[train_labels]
    centre = train.mean(axis=0)
    x = np.hstack([train - centre, np.ones((len(train), 1))])
    # The kernel form is small whatever the number of pixels.
    scale = np.sqrt(weight / weight.mean())[:, None]
    gram = (x * scale) @ (x * scale).T
    penalty = 0.05 * np.trace(gram) / len(gram)
    dual = np.linalg.solve(gram + penalty * np.eye(len(gram)), targets * scale)
    scores = np.hstack([test - centre, np.ones((len(test), 1))]) @ ((x * scale).T @ dual)
    right = classes[scores.argmax(axis=1)] == test_labels
    return float(np.mean([right[test_labels == label].mean() for label in classes]))


def test_digits_can_be_learnt(tmp_path: Path) -> None:
    folder = standins.write("mnist", tmp_path, size=600)
    pixels, labels = (
        [read_idx(folder / f"{prefix}-{kind}") for prefix in ("train", "t10k")]
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    train, test = (images.reshape(-1, 784) / 255 for images in pixels)
    known, wanted = (digits.astype(np.int64) for digits in labels)
    assert ridge_accuracy(train, known, test, wanted) > 0.8


def test_cars_and_trucks_can_be_learnt_and_are_drawn_alike_otherwise(tmp_path: Path) -> None:
    folder = standins.write("dominoes", tmp_path, size=400)
    pixels, labels = (
        [read_idx(folder / f"cifar10-{part}-{kind}") for part in ("train", "test")]
        for kind in ("images-idx4-ubyte", "labels-idx1-ubyte")
    )
    assert pixels[0].shape == (400, 32, 32, 3) and set(labels[0].tolist()) == {1, 9}
    train, test = (images.reshape(len(images), -1) / 255 for images in pixels)
    known, wanted = ((own == 9).astype(np.int64) for own in labels)
    assert ridge_accuracy(train, known, test, wanted) > 0.8
    # What is above the roofs says little of the class.
    skies = [images[:, :3].mean(axis=(1, 2)) / 255 for images in pixels]
    assert ridge_accuracy(skies[0], known, skies[1], wanted) < 0.65
    digits = read_idx(folder / "train-labels-idx1-ubyte")
    assert np.bincount(digits).tolist() == [200, 200]


@pytest.mark.parametrize("cue", ["y", "place"])
def test_birds_and_places_can_both_be_learnt(root: Path, cue: str) -> None:
    folder = root / "waterbirds" / "waterbird_complete95_forest2water2"
    rows = read_table(folder / "metadata.csv")
    pixels = np.stack(
        [
            np.asarray(Image.open(folder / row["img_filename"]).resize((12, 12))).ravel() / 255
            for row in rows
        ]
    )
    labels = np.array([int(row[cue]) for row in rows])
    # Even rows against odd ones: in the training split alone the two cues are nearly the same.
    accuracy = ridge_accuracy(pixels[::2], labels[::2], pixels[1::2], labels[1::2])
    assert accuracy > 0.75
