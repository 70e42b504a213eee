"""The loaders on the released label files of Waterbirds and CelebA, which lie beside the clone.

They are other people's data under their own terms, so the repository does not hold them; without
them these tests skip and say so. `NCT_BENCH_LABELS` names another place.
"""

from __future__ import annotations

import gzip
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from datasets import dataset as module
from datasets.base import SPLITS, Labels, check_counts, label_digest
from datasets.celeba import Celeba, CelebaConfig
from datasets.errors import DataCorrupt
from datasets.waterbirds import Waterbirds, WaterbirdsConfig

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def released() -> Path:
    """The folder of released label files.

    Only its absence is a reason to skip: a folder that is there but lacks a file fails, so that
    continuous integration with the files beside its clone never passes without reading them.
    """
    folder = Path(os.environ.get("NCT_BENCH_LABELS", BESIDE))
    if not folder.is_dir():
        pytest.skip("the released label files are not beside the clone (NCT_BENCH_LABELS)")
    return folder


def digest_and_groups(labels: dict[str, Labels]) -> tuple[str, list[list[int]]]:
    groups = [torch.bincount(labels[split].groups, minlength=4).tolist() for split in SPLITS]
    return label_digest(labels), groups


def test_waterbirds(released: Path) -> None:
    dataset, config = Waterbirds(), WaterbirdsConfig()
    folder = released / "waterbirds"
    assert dataset.matches(folder)
    labels = dict(dataset.labels(folder, config))
    facts = dataset.facts(config)
    check_counts(facts, labels, str(folder))
    assert digest_and_groups(labels) == (
        facts.label_digest,
        [[3498, 184, 56, 1057], [467, 466, 133, 133], [2255, 2255, 642, 642]],
    )
    ids = torch.cat([part.ids for part in labels.values()])
    assert torch.equal(ids.sort().values, torch.arange(1, 11_789))


def test_the_official_layout_is_read_and_rebuilt_photos_are_told_from_it(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release's folder names and its table; in the place of each photo one of a few."""
    monkeypatch.setattr(module, "QUICK_SIZES", {"train": 40, "val": 20, "test": 20})
    folder = tmp_path / "waterbirds" / "waterbird_complete95_forest2water2"
    folder.mkdir(parents=True)
    shutil.copy(released / "waterbirds" / "metadata.csv", folder)
    sizes = [(500, 375), (375, 500), (112, 112)]
    for number, size in enumerate(sizes):
        Image.linear_gradient("L").resize(size).convert("RGB").save(tmp_path / f"{number}.jpg")
    dataset, config = Waterbirds(), WaterbirdsConfig(resolution=96)
    files = dataset.table(folder, config)["file"].tolist()
    assert all(file.count("/") == 1 and file.endswith(".jpg") for file in files)
    for number, file in enumerate(files):
        (folder / file).parent.mkdir(exist_ok=True)
        os.link(tmp_path / f"{number % len(sizes)}.jpg", folder / file)
    found = dataset.require(tmp_path)
    assert found.folder == folder and found.data_kind == "release"
    data = dataset.load(tmp_path, config, quick=True)
    assert data.data_kind == "release" and data.facts.protocol == "released"
    kept = {tuple(row) for row in data.splits["train"].images.sizes.tolist()}  # type: ignore[attr-defined]
    assert kept == {(112, 112), (116, 154), (154, 116)}, "scaled, all but the small one"

    for file in files:  # as the rebuilt photos are: all of one size
        (folder / file).unlink()
        os.link(tmp_path / "2.jpg", folder / file)
    with pytest.raises(DataCorrupt, match="all are 112 x 112, the released ones of many sizes"):
        dataset.load(tmp_path, config, quick=True)
    (folder / "origin.toml").write_text('kind = "rebuilt"\nname = "other-scenes"\n')
    rebuilt = dataset.load(tmp_path, config, quick=True)
    assert rebuilt.data_kind == "rebuilt"
    assert rebuilt.facts.protocol == "released-rebuilt-other-scenes"
    assert rebuilt.facts.fingerprint() != data.facts.fingerprint()


def test_one_changed_label_is_noticed(released: Path, tmp_path: Path) -> None:
    """Two samples that swap their places keep every count, so only the digest can tell."""
    lines = (released / "waterbirds" / "metadata.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    one = next(row for row in cells if row[2:5] == ["0", "0", "0"])
    two = next(row for row in cells if row[2:5] == ["0", "0", "1"])
    one[4], two[4] = two[4], one[4]
    (tmp_path / "metadata.csv").write_text("\n".join(map(",".join, cells)) + "\n")
    dataset, config = Waterbirds(), WaterbirdsConfig()
    labels = dataset.labels(tmp_path, config)
    with pytest.raises(DataCorrupt, match="expected label digest de7dafdd"):
        check_counts(dataset.facts(config), labels, str(tmp_path))


@pytest.fixture(scope="module")
def celeba_text(released: Path) -> dict[str, str]:
    """The two lists in the authors' own form."""
    with zipfile.ZipFile(released / "celeba" / "list_attr_celeba.zip") as zipped:
        attributes = zipped.read("list_attr_celeba.txt").decode()
    with gzip.open(released / "celeba" / "list_eval_partition.txt.gz", "rt") as packed:
        partition = packed.read()
    return {"list_attr_celeba": attributes, "list_eval_partition": partition}


def write_form(form: str, text: dict[str, str], folder: Path) -> None:
    """Write the lists as the authors do, as Kaggle does, or as GEORGE and CnC do."""
    if form == "original":
        for stem, content in text.items():
            (folder / f"{stem}.txt").write_text(content)
        return
    _, header, *rows = text["list_attr_celeba"].splitlines()
    tables = {
        "list_attr_celeba": [f"image_id {header}", *rows],
        "list_eval_partition": [
            "image_id partition",
            *text["list_eval_partition"].splitlines(),
        ],
    }
    between = "," if form == "comma" else " "
    for stem, lines in tables.items():
        content = "".join(between.join(line.split()) + "\n" for line in lines)
        (folder / f"{stem}.csv").write_text(content)


@pytest.mark.parametrize("form", ["original", "comma", "whitespace"])
def test_celeba_in_all_its_forms(form: str, celeba_text: dict[str, str], tmp_path: Path) -> None:
    write_form(form, celeba_text, tmp_path)
    dataset, config = Celeba(), CelebaConfig()
    assert not dataset.matches(tmp_path), "without the images it is not complete"
    (tmp_path / "img_align_celeba").mkdir()
    assert dataset.matches(tmp_path)
    labels = dict(dataset.labels(tmp_path, config))
    facts = dataset.facts(config)
    check_counts(facts, labels, str(tmp_path))
    # The digest covers ids, classes and groups, so equal digests are equal labels.
    assert digest_and_groups(labels) == (
        facts.label_digest,
        [[71629, 66874, 22880, 1387], [8535, 8276, 2874, 182], [9767, 7535, 2480, 180]],
    )
    ids = torch.cat([part.ids for part in labels.values()])
    assert torch.equal(ids.sort().values, torch.arange(1, 202_600))
