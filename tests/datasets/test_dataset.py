"""Loading: the samples of a quick load, the files that a part of the splits opens, who may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from datasets import dataset as dataset_module
from datasets import idx, standins
from datasets.base import SPLITS, LabelledSplit, Labels, LoadedData, label_digest
from datasets.catalogue import get_dataset
from datasets.dataset import QUICK_SIZES, quick_subset
from datasets.decode import FOLDER_NAME
from datasets.errors import BenchError

REPOSITORY = Path(__file__).resolve().parents[2]
Calls = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    standins.write("mnist", root, size=2400)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    standins.write("waterbirds", tmp_path, size=40)
    return tmp_path


@pytest.fixture
def small_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a quick load cut the small stand-ins too."""
    monkeypatch.setattr(dataset_module, "QUICK_SIZES", {"train": 30, "val": 20, "test": 25})
    monkeypatch.setattr(dataset_module, "QUICK_GROUP_MINIMUM", 2)


def cut_after_loading(split: LabelledSplit, size: int, minimum: int = 8) -> LabelledSplit:
    """The rule by which published quick runs were cut, applied to a split whose images are open."""

    def first(mine: Tensor, share: float) -> Tensor:
        positions = mine.nonzero()[:, 0]
        return positions[: max(round(share * len(positions)), min(minimum, len(positions)))]

    if len(split) <= size:
        return split
    share = size / len(split)
    kept = [first(split.labels.groups == g, share) for g in split.labels.groups.unique()]
    return split.subset(torch.cat(kept).sort().values)


def load(name: str, root: Path, **options: Any) -> LoadedData:
    dataset = get_dataset(name)
    return dataset.load(root, dataset.config_type(), **options)


def assert_same(one: LabelledSplit, other: LabelledSplit) -> None:
    assert len(one) == len(one.images) == len(other)
    for field in ("ids", "y", "groups"):
        assert torch.equal(getattr(one.labels, field), getattr(other.labels, field))
    assert set(one.labels.extra_groupings) == set(other.labels.extra_groupings)
    for name, values in one.labels.extra_groupings.items():
        assert torch.equal(values, other.labels.extra_groupings[name])
    index = torch.arange(len(one))
    ours, theirs = one.images.batch(index), other.images.batch(index)
    assert torch.equal(ours.pixels, theirs.pixels) and torch.equal(ours.sizes, theirs.sizes)


@pytest.mark.parametrize("name", ["umnist", "cmnist"])
def test_a_quick_load_of_digits_is_the_cut_of_a_whole_one(name: str, digits: Path) -> None:
    whole, quick = load(name, digits), load(name, digits, quick=True)
    assert len(whole.splits["train"]) > QUICK_SIZES["train"] > 0
    for split in SPLITS:
        assert_same(quick.splits[split], cut_after_loading(whole.splits[split], QUICK_SIZES[split]))
    assert quick.facts == whole.facts and quick.standin and quick.data_kind == "standin"
    assert quick.label_digest == label_digest({s: quick.splits[s].labels for s in SPLITS})
    assert whole.label_digest == label_digest({s: whole.splits[s].labels for s in SPLITS})
    assert quick.label_digest != whole.label_digest


def test_a_quick_load_of_the_real_digits_is_the_one_that_was_published(mnist_root: Path) -> None:
    umnist, cmnist = (load(name, mnist_root, quick=True) for name in ("umnist", "cmnist"))
    assert [len(umnist.splits[split]) for split in SPLITS] == [1500, 500, 500]
    assert [len(cmnist.splits[split]) for split in SPLITS] == [1652, 499, 501]
    assert umnist.label_digest.startswith("48c67114e898")
    assert cmnist.label_digest.startswith("fc4b757c8e5e")
    assert umnist.data_kind == "release"


def test_a_quick_load_of_photographs_decodes_only_what_it_keeps(
    photos: Path, small_cut: None
) -> None:
    calls: Calls = []
    quick = load("waterbirds", photos, quick=True, progress=lambda *at: calls.append(at))
    decoded = {what: total for what, _, total in calls}
    assert decoded == {f"decoding waterbirds {s}": len(quick.splits[s]) for s in SPLITS}
    assert len(calls) == sum(decoded.values()) < 80
    calls.clear()
    again = load("waterbirds", photos, quick=True, progress=lambda *at: calls.append(at))
    assert not calls, "the second time nothing is decoded"

    whole = load("waterbirds", photos)
    sizes = dataset_module.QUICK_SIZES
    for split in SPLITS:
        expected = cut_after_loading(whole.splits[split], sizes[split], minimum=2)
        assert_same(quick.splits[split], expected)
        assert_same(again.splits[split], expected)


def test_a_quick_load_takes_a_whole_split_that_is_decoded(photos: Path, small_cut: None) -> None:
    whole = load("waterbirds", photos)
    calls: Calls = []
    quick = load("waterbirds", photos, quick=True, progress=lambda *at: calls.append(at))
    assert not calls
    folder = get_dataset("waterbirds").require(photos).folder / FOLDER_NAME
    assert not [name for name in os.listdir(folder) if "-part" in name]
    for split, size in dataset_module.QUICK_SIZES.items():
        assert_same(quick.splits[split], cut_after_loading(whole.splits[split], size, minimum=2))


def test_the_cut_keeps_something_of_every_group() -> None:
    groups = torch.tensor([0] * 2000 + [1] * 900 + [2] * 5 + [3] * 20)
    ids = torch.arange(len(groups))
    cut = quick_subset(Labels(ids, groups, groups, {"other": groups + 7}), 300)
    assert torch.bincount(cut.groups).tolist() == [205, 92, 5, 8]
    assert torch.equal(cut.ids, cut.ids.sort().values)
    assert torch.equal(cut.extra_groupings["other"], cut.groups + 7)
    small = Labels(ids[:10], groups[:10], groups[:10])
    assert quick_subset(small, 10) is small


@pytest.mark.parametrize("quick", [False, True])
def test_only_the_wanted_photographs_are_opened(photos: Path, small_cut: None, quick: bool) -> None:
    calls: Calls = []
    wanted = ("val", "train")
    part = load(
        "waterbirds", photos, splits=wanted, quick=quick, progress=lambda *at: calls.append(at)
    )
    assert list(part.splits) == ["train", "val"]
    assert {what for what, _, _ in calls} == {f"decoding waterbirds {s}" for s in wanted}
    folder = get_dataset("waterbirds").require(photos).folder / FOLDER_NAME
    assert not [name for name in os.listdir(folder) if "-test" in name]
    whole = load("waterbirds", photos, quick=quick)
    assert part.label_digest == whole.label_digest, "it speaks of every split all the same"
    assert_same(part.splits["val"], whole.splits["val"])


def test_only_the_wanted_digits_are_read(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: Path) -> Any:
        read.append(path.name)
        return idx.read_idx(path)

    monkeypatch.setattr("datasets.mnist.read_idx", counted)
    whole = load("cmnist", digits)
    assert "t10k-images-idx3-ubyte" in read
    for splits, absent in (
        (("train", "val"), "t10k-images-idx3-ubyte"),
        (("test",), "train-images-idx3-ubyte"),
    ):
        read.clear()
        part = load("cmnist", digits, splits=splits)
        assert tuple(part.splits) == splits and absent not in read
        assert part.label_digest == whole.label_digest
        for split in splits:
            assert_same(part.splits[split], whole.splits[split])


def test_prepare_decodes_once(photos: Path, digits: Path) -> None:
    waterbirds, umnist = get_dataset("waterbirds"), get_dataset("umnist")
    calls: Calls = []
    waterbirds.prepare(photos, waterbirds.config_type(), lambda *at: calls.append(at))
    assert len(calls) == 40 + 40 + 40
    calls.clear()
    load("waterbirds", photos, progress=lambda *at: calls.append(at))
    umnist.prepare(digits, umnist.config_type(), lambda *at: calls.append(at))
    assert not calls


def test_mnist_sets_fetch_themselves_and_the_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def fetch(root: Path, log: Callable[[str], None]) -> Path:
        log("fetched")
        asked.append(root)
        return root / "mnist"

    monkeypatch.setattr("datasets.mnist.ensure_mnist", fetch)
    lines: list[str] = []
    assert get_dataset("umnist").fetch(tmp_path, lines.append)
    assert get_dataset("cmnist").fetch(tmp_path, lines.append)
    assert asked == [tmp_path] * 2 and lines == ["fetched"] * 2
    for name in ("waterbirds", "celeba", "isic"):
        assert not get_dataset(name).fetch(tmp_path, lines.append)


def test_loading_can_be_forbidden_for_a_process(digits: Path) -> None:
    script = (
        "import pathlib, sys\n"
        "from datasets.catalogue import get_dataset\n"
        "from datasets.dataset import forbid_loading\n"
        "umnist, root = get_dataset('umnist'), pathlib.Path(sys.argv[1])\n"
        "umnist.load(root, umnist.config_type())\n"
        "forbid_loading()\n"
        "for refused in (umnist.load, umnist.check):\n"
        "    try:\n"
        "        refused(root, umnist.config_type())\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script, str(digits)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    refusal = f"{BenchError.__name__} a fit is given its data; it cannot load a dataset\n"
    assert done.stdout == 2 * refusal
