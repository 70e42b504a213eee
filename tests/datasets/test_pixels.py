"""Digests of decoded pixels, and data that is not the release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from datasets import standins
from datasets.base import SPLITS, Facts, LabelledSplit, Labels, LoadedData
from datasets.catalogue import get_dataset
from datasets.celeba import Celeba
from datasets.dataset import Dataset, silent
from datasets.decode import decoded_folder
from datasets.errors import DataCorrupt
from datasets.images import MemoryImages
from datasets.pixels import SAMPLED, pixel_digest, spread
from datasets.standins import MARKER_NAME
from datasets.standins.marker import Origin, read_origin
from datasets.waterbirds import Waterbirds, WaterbirdsConfig

CONFIG = WaterbirdsConfig(resolution=32)
REBUILT = 'kind = "rebuilt"\nname = "other-scenes"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    standins.write("waterbirds", tmp_path, size=60)
    return tmp_path


def load(dataset: Dataset, root: Path, config: Any = CONFIG, **options: Any) -> LoadedData:
    return dataset.load(root, config, **options)


def blacken(root: Path, place: int, split: str = "test") -> None:
    """Replace a photograph, counted in the order of ids, by a black one."""
    folder = Waterbirds().require(root).folder
    table = Waterbirds().table(folder, CONFIG)
    part = table[table["split"] == SPLITS.index(split)].sort_values("id")
    file = folder / part["file"].iloc[place]
    with Image.open(file) as image:
        black = Image.new("RGB", image.size)
    black.save(file)


class Unmarked(Waterbirds):
    """Waterbirds whose release is a stand-in without a marker, so that its digests are known."""

    pins: ClassVar[dict[str, str]] = {}

    def facts(self, config: WaterbirdsConfig) -> Facts:
        known = super().facts(config)
        return replace(known, counts={}, group_counts={}, label_digest=None, **self.pins)


@pytest.fixture
def unmarked(root: Path) -> type[Unmarked]:
    """The release as it is known by its pins."""
    folder = Waterbirds().require(root).folder
    (folder / MARKER_NAME).unlink()
    found = Unmarked().check_images(folder, CONFIG, silent)
    pins = {"pixel_digest": found.sample_digest, "full_pixel_digest": found.full_digest}
    return type("Pinned", (Unmarked,), {"pins": pins})


def test_positions_are_spread() -> None:
    assert spread(3, 22) == [0, 1, 2] and spread(0, 5) == []
    assert spread(100, 4) == [0, 25, 50, 75]
    assert len(set(spread(5794, SAMPLED))) == SAMPLED


@pytest.mark.parametrize("name", ["waterbirds", "celeba", "isic", "umnist", "cmnist"])
def test_a_run_and_verify_agree(name: str, tmp_path: Path) -> None:
    """One reads the decoded cache, the other the files."""
    standins.write(name, tmp_path, size=60)
    dataset = get_dataset(name)
    data = load(dataset, tmp_path, dataset.config_type())
    checked = dataset.check_images(dataset.require(tmp_path).folder, dataset.config_type(), silent)
    assert data.pixel_digest == checked.sample_digest == pixel_digest(data.splits)
    assert checked.full_digest == pixel_digest(data.splits, whole=True) != checked.sample_digest
    if name in ("umnist", "cmnist"):
        return
    # At a smaller resolution a run reads smaller images; verify still reads the whole ones.
    config = dataset.config_type(resolution=32)
    small = dataset.check_images(dataset.require(tmp_path).folder, config, silent)
    assert small.full_digest == checked.full_digest
    assert small.sample_digest == load(dataset, tmp_path, config).pixel_digest
    assert small.sample_digest != checked.sample_digest


def test_black_photographs_change_the_digest_and_nothing_else(root: Path) -> None:
    dataset, folder = Waterbirds(), Waterbirds().require(root).folder
    before, all_before = load(dataset, root), dataset.check_images(folder, CONFIG, silent)
    count = len(before.splits["test"])
    sampled = spread(count, SAMPLED)
    blacken(root, next(n for n in range(count) if n not in sampled))
    all_after = dataset.check_images(folder, CONFIG, silent)
    assert all_after.sample_digest == all_before.sample_digest
    assert all_after.full_digest != all_before.full_digest, "verify looks at all of them"
    blacken(root, sampled[3])
    after = load(dataset, root)
    assert after.pixel_digest != before.pixel_digest
    assert after.label_digest == before.label_digest
    assert after.facts.fingerprint() == before.facts.fingerprint()


def test_the_digest_follows_ids_and_sizes_and_not_the_order_of_a_table() -> None:
    pixels = torch.arange(6 * 12, dtype=torch.uint8).view(6, 1, 3, 4)
    ids, order = torch.tensor([5, 3, 9, 1, 7, 2]), torch.tensor([3, 1, 4, 0, 5, 2])

    def digest(ids: torch.Tensor, pixels: torch.Tensor) -> str:
        return pixel_digest({"val": LabelledSplit(Labels(ids, ids, ids), MemoryImages(pixels))})

    assert digest(ids, pixels) == digest(ids[order], pixels[order])
    assert digest(ids, pixels) != digest(ids, pixels[order])
    assert digest(ids, pixels) != digest(ids, pixels.view(6, 1, 4, 3))


def test_pins_enter_the_fingerprint_only_where_they_are_known() -> None:
    facts = Waterbirds().facts(WaterbirdsConfig(decode="native"))
    pinned = [replace(facts, **{n: "a"}) for n in ("pixel_digest", "full_pixel_digest")]
    assert len({f.fingerprint() for f in (facts, *pinned)}) == 3
    assert facts.fingerprint() == "7a123ebcd64d939e", "that of before there were such digests"


def test_pinned_pixels_are_compared(root: Path, unmarked: type[Unmarked]) -> None:
    assert load(unmarked(), root).data_kind == "release"
    blacken(root, 0)
    with pytest.raises(DataCorrupt, match="are not the released ones: expected pixel dig") as error:
        load(unmarked(), root)
    assert "origin.toml" in error.value.remedy and 'kind = "rebuilt"' in error.value.remedy


def test_rebuilt_data_is_called_so_and_has_runs_of_its_own(
    root: Path, unmarked: type[Unmarked]
) -> None:
    release = load(unmarked(), root)
    blacken(root, 0)
    folder = unmarked().require(root).folder
    (folder / "origin.toml").write_text(REBUILT)
    rebuilt = load(unmarked(), root)
    assert rebuilt.data_kind == "rebuilt" and not rebuilt.standin
    assert rebuilt.facts.protocol == "released-rebuilt-other-scenes"
    assert rebuilt.facts.fingerprint() != release.facts.fingerprint()
    (folder / "origin.toml").write_text(REBUILT.replace("other", "more"))
    assert load(unmarked(), root).facts.fingerprint() != rebuilt.facts.fingerprint()


def test_rebuilt_data_has_the_labels_of_the_release(root: Path) -> None:
    folder = Waterbirds().require(root).folder
    (folder / MARKER_NAME).unlink()
    (folder / "origin.toml").write_text(REBUILT)
    with pytest.raises(DataCorrupt, match="expected train size 4795, found 60"):
        load(Waterbirds(), root)


def test_sizes_that_no_release_has_are_noticed(root: Path) -> None:
    folder = Waterbirds().require(root).folder
    (folder / MARKER_NAME).unlink()
    assert load(Unmarked(), root).data_kind == "release"
    for file in folder.rglob("*.jpg"):
        with Image.open(file) as image:
            image.resize((112, 112)).save(file)
    for quick in (False, True):
        with pytest.raises(DataCorrupt, match="all are 112 x 112, the released ones of many sizes"):
            load(Unmarked(), root, quick=quick)
    (folder / "origin.toml").write_text(REBUILT)
    assert load(Unmarked(), root).data_kind == "rebuilt"
    assert Celeba().why_not_release([(178, 218)]) == ""
    assert "images of 64 x 64" in Celeba().why_not_release([(64, 64), (178, 218)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind = ",
        'kind = "release"\nname = "a"',
        'kind = "rebuilt"',
        'kind = "rebuilt"\nname = "../a"',
        'kind = "rebuilt"\nname = 3',
    ],
)
def test_an_origin_that_says_nothing_is_an_error(text: str, root: Path) -> None:
    """Taking the folder for the release is the one mistake the file is there to prevent."""
    folder = Waterbirds().require(root).folder
    (folder / "origin.toml").write_text(text)
    with pytest.raises(DataCorrupt, match=r"origin\.toml") as caught:
        Waterbirds().locate(root)
    assert 'kind = "rebuilt"' in caught.value.remedy


def test_an_origin_is_read(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
    (tmp_path / "origin.toml").write_text(REBUILT + 'note = "by hand"\n')
    assert read_origin(tmp_path) == Origin("other-scenes", "by hand")


def test_verify_removes_a_damaged_cache(root: Path) -> None:
    folder = Waterbirds().require(root).folder
    load(Waterbirds(), root)
    pixels = decoded_folder(folder) / "waterbirds-released-val-37-45.u8"
    pixels.write_bytes(bytes(pixels.stat().st_size))
    (note,) = Waterbirds().check_images(folder, CONFIG, silent).notes
    assert str(pixels) in note and "wrong checksum" in note and not pixels.exists()
    assert not Waterbirds().check_images(folder, CONFIG, silent).notes
