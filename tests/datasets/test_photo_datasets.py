"""Waterbirds, CelebA and ISIC end to end, on stand-ins that lie on disk as the releases do."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from datasets import standins
from datasets.base import SPLITS, LoadedData
from datasets.catalogue import get_dataset
from datasets.dataset import Dataset
from datasets.errors import DataCorrupt, DataMissing
from datasets.isic import Isic, IsicConfig
from datasets.standins import MARKER_NAME, read_marker

PHOTOS = ("waterbirds", "celeba", "isic")
TABLES = {"waterbirds": "metadata.csv", "celeba": "list_attr_celeba.csv", "isic": "labels.csv"}


@pytest.fixture(scope="module")
def standin_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three, written once; tests that change something take a copy."""
    root = tmp_path_factory.mktemp("photos")
    for name in PHOTOS:
        standins.write(name, root, size=40)
    return root


@pytest.fixture
def root(standin_root: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(standin_root, tmp_path / "data"))


def small(name: str, **settings: Any) -> tuple[Dataset, Any]:
    dataset = get_dataset(name)
    return dataset, dataset.config_type(resolution=32, **{"decode": "native", **settings})


def folder_of(name: str, root: Path) -> Path:
    return get_dataset(name).require(root).folder


def load(name: str, root: Path, **settings: Any) -> LoadedData:
    dataset, config = small(name, **settings)
    return dataset.load(root, config)


@pytest.mark.parametrize("name", PHOTOS)
def test_loads_end_to_end(name: str, root: Path) -> None:
    dataset, config = small(name)
    seen: list[tuple[str, int, int]] = []
    data = dataset.load(root, config, lambda *at: seen.append(at))
    marker = read_marker(folder_of(name, root))
    assert data.standin and marker is not None
    assert data.facts.protocol.endswith("-standin-40-0")
    assert set(data.splits) == set(SPLITS)
    table = dataset.table(folder_of(name, root), config)  # type: ignore[attr-defined]
    for number, split in enumerate(SPLITS):
        part = data.splits[split]
        counts = torch.bincount(part.labels.groups, minlength=len(data.facts.groups)).tolist()
        assert dict(zip(data.facts.groups, counts, strict=True)) == marker.counts[split]
        assert seen.count((f"decoding {name} {split}", len(part), len(part))) == 1
        batch = part.images.batch(torch.tensor([1, 0]))
        evaluated = data.facts.eval_transform(batch)
        trained = data.facts.train_transform(batch, torch.Generator().manual_seed(0))
        assert evaluated.shape == trained.shape == (2, 3, 32, 32)
        # The pixels belong to the labels beside them.
        row = table[table["split"] == number].iloc[0]
        with Image.open(folder_of(name, root) / row["file"]) as picture:
            expected = np.asarray(picture.convert("RGB"))
        height, width = batch.sizes[1].tolist()
        found = batch.pixels[1, :, :height, :width].permute(1, 2, 0).numpy()
        assert np.array_equal(found, expected)
        assert int(part.labels.ids[0]) == row["id"] and int(part.labels.y[0]) == row["y"]
    ids = torch.cat([data.splits[split].labels.ids for split in SPLITS])
    assert len(ids.unique()) == len(ids)
    seen.clear()
    dataset.load(root, config, lambda *at: seen.append(at))
    assert not seen, "the second time nothing is decoded"


@pytest.mark.parametrize("name", PHOTOS)
def test_without_the_marker_the_real_counts_are_demanded(name: str, root: Path) -> None:
    (folder_of(name, root) / MARKER_NAME).unlink()
    real = get_dataset(name).facts(small(name)[1]).counts["train"]
    with pytest.raises(DataCorrupt, match=f"expected train size {real}, found 40") as caught:
        load(name, root)
    assert f"data get {name}" in caught.value.remedy


@pytest.mark.parametrize("name", PHOTOS)
def test_a_standin_that_lost_rows_is_noticed(name: str, root: Path) -> None:
    table = "list_eval_partition.csv" if name == "celeba" else TABLES[name]
    for path in {folder_of(name, root) / table, folder_of(name, root) / TABLES[name]}:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        frame.iloc[:-1].to_csv(path, index=False)
    with pytest.raises(DataCorrupt, match=r"expected (train|val|test) size \d+, found \d+"):
        load(name, root)


@pytest.mark.parametrize("name", PHOTOS)
def test_missing_data_names_the_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match=f"{name} is not in") as caught:
        load(name, tmp_path)
    assert caught.value.remedy == f"python -m bench data get {name} --data-root {tmp_path}"
    assert get_dataset(name).locate(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "column"),
    [("waterbirds", "place"), ("celeba", "Male"), ("isic", "patch"), ("isic", "fold")],
)
def test_a_missing_column_is_named(name: str, column: str, root: Path) -> None:
    path = folder_of(name, root) / TABLES[name]
    pd.read_csv(path).drop(columns=column).to_csv(path, index=False)
    with pytest.raises(DataCorrupt, match=f"no column {column}; it has"):
        load(name, root)


BROKEN = {
    "empty": b"",
    "binary": bytes(range(128, 256)) * 40,
    "ragged": b'img_filename,Image Index,b\n1,2,3\n"4,5,6,7,8,9\n1,1,1,1,1,1,1\n',
    "a count and nothing else": b"202599\n",
}


@pytest.mark.parametrize("damage", BROKEN)
@pytest.mark.parametrize("name", PHOTOS)
def test_a_broken_table_is_corrupt(name: str, damage: str, root: Path) -> None:
    folder = folder_of(name, root)
    dataset, config = small(name)
    (folder / TABLES[name]).write_bytes(BROKEN[damage])
    with pytest.raises(DataCorrupt) as caught:
        dataset.labels(folder, config)
    assert caught.value.remedy
    assert str(folder) in caught.value.message


@pytest.mark.parametrize("name", PHOTOS)
@pytest.mark.parametrize("cell", ["", "many", "7", "-1"])
def test_a_cell_that_is_no_label_is_corrupt(name: str, cell: str, root: Path) -> None:
    folder = folder_of(name, root)
    column = {"waterbirds": "y", "celeba": "partition", "isic": "patch"}[name]
    path = folder / ("list_eval_partition.csv" if name == "celeba" else TABLES[name])
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    row = 0 if name != "isic" else int(np.flatnonzero(table["benign_malignant"] == "benign")[0])
    table.loc[row, column] = cell
    table.to_csv(path, index=False)
    with pytest.raises(DataCorrupt):
        load(name, root)


def test_celeba_lists_of_different_images_do_not_fit(root: Path) -> None:
    path = folder_of("celeba", root) / "list_eval_partition.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(DataCorrupt, match="do not fit together"):
        load("celeba", root)


@pytest.mark.parametrize("name", PHOTOS)
def test_unreadable_images_are_named_all_of_them(name: str, root: Path) -> None:
    dataset, config = small(name)
    folder = folder_of(name, root)
    table = dataset.table(folder, config)  # type: ignore[attr-defined]
    files = [folder / file for file in table["file"]]
    seen: list[int] = []
    sound = dataset.check_images(folder, config, lambda what, done, total: seen.append(done))
    assert sound.bad_files == [] and sound.full_digest
    assert seen == list(range(1, len(files) + 1))
    truncated, page, absent = files[3], files[7], files[-1]
    truncated.write_bytes(truncated.read_bytes()[:-300])
    page.write_bytes(b"<!DOCTYPE html>")
    absent.unlink()
    found = dataset.check_images(folder, config, lambda *at: None)
    assert not found.full_digest and not found.sample_digest
    bad = dict(line.split(": ", 1) for line in found.bad_files)
    assert set(bad) == {str(truncated), str(page)} and found.missing == [str(absent)]
    assert "truncated" in bad[str(truncated)]
    with pytest.raises(
        DataMissing, match=f"1 of {len(files)} images of {name} are missing"
    ) as gone:
        dataset.load(root, config)
    assert str(absent) in gone.value.message
    shutil.copy(files[0], absent)
    with pytest.raises(DataCorrupt, match="is not a readable image") as caught:
        dataset.load(root, config)
    assert any(str(file) in caught.value.message for file in (truncated, page))
    assert "data verify" in caught.value.remedy


def in_downloader_schema(root: Path) -> Path:
    """Rearrange the ISIC stand-in as GEORGE's downloader leaves it."""
    before, after = root / "isic", root / "isic" / "processed"
    after.mkdir()
    for name in ("images", MARKER_NAME):
        (before / name).rename(after / name)
    table = pd.read_csv(before / "labels.csv")
    (before / "labels.csv").unlink()
    pd.DataFrame(
        {
            "_id": table["Image Index"].str.removesuffix(".jpg"),
            "is_malignant": table["Diagnosis"],
            "split": table["fold"],
            "patch": table["patch"],
            "meta.clinical.benign_malignant": table["benign_malignant"],
            "meta.clinical.diagnosis_confirm_type": table["diagnosis_confirm_type"],
        }
    ).to_csv(after / "labels.csv", index=False)
    return after


@pytest.mark.parametrize("unknown", ["benign", "drop"])
def test_both_isic_schemas_are_the_same_data(unknown: str, standin_root: Path, root: Path) -> None:
    after = in_downloader_schema(root)
    assert folder_of("isic", root) == after
    one, two = (load("isic", place, unknown=unknown) for place in (standin_root, root))
    for split in SPLITS:
        first, second = one.splits[split], two.splits[split]
        for field in ("ids", "y", "groups"):
            assert torch.equal(getattr(first.labels, field), getattr(second.labels, field))
        for key, values in first.labels.extra_groupings.items():
            assert torch.equal(values, second.labels.extra_groupings[key])
        index = torch.arange(len(first))
        assert torch.equal(first.images.batch(index).pixels, second.images.batch(index).pixels)


def test_isic_unknown_diagnoses_count_as_benign_or_are_dropped(root: Path) -> None:
    table = pd.read_csv(root / "isic" / "labels.csv")
    counted, dropped = (load("isic", root, unknown=rule) for rule in ("benign", "drop"))
    for split in SPLITS:
        rows = table[table["fold"] == split]
        unknown = rows["benign_malignant"].isna().sum()
        assert unknown > 0
        all_of_them, known = counted.splits[split], dropped.splits[split]
        assert (len(all_of_them), len(known)) == (len(rows), len(rows) - unknown)
        ids = torch.tensor(rows.index[rows["benign_malignant"].notna()].to_numpy())
        assert torch.equal(known.labels.ids, ids)
        extra = ~torch.isin(all_of_them.labels.ids, ids)
        assert not all_of_them.labels.y[extra].any(), "an unknown one counts as benign"
    # Each has a cache of its own: going back decodes nothing.
    seen: list[Any] = []
    dataset, config = small("isic", unknown="benign")
    dataset.load(root, config, lambda *at: seen.append(at))
    assert not seen


def test_isic_labels_follow_georges_ontologies(root: Path) -> None:
    table = pd.read_csv(root / "isic" / "labels.csv")
    labels = Isic().labels(root / "isic", IsicConfig())
    for part in labels.values():
        rows = table.loc[part.ids.tolist()]
        malignant = rows["benign_malignant"] == "malignant"
        histopathology = rows["diagnosis_confirm_type"] == "histopathology"
        assert part.y.tolist() == malignant.astype(int).tolist() == rows["Diagnosis"].tolist()
        assert part.groups.tolist() == np.where(malignant, 2, rows["patch"]).tolist()
        expected = np.where(malignant, 2, histopathology.astype(int)).tolist()
        assert part.extra_groupings["histopath"].tolist() == expected
        assert set(expected) == {0, 1, 2}


def test_isic_unknown_split_names_and_empty_splits_are_refused(root: Path) -> None:
    path = root / "isic" / "labels.csv"
    table = pd.read_csv(path)
    table.replace({"fold": {"val": "validation"}}).to_csv(path, index=False)
    with pytest.raises(DataCorrupt, match=r"unknown splits \['validation'\]"):
        load("isic", root)
    table[table["fold"] != "val"].to_csv(path, index=False)
    with pytest.raises(DataCorrupt, match="names no val images"):
        load("isic", root, unknown="drop")


def test_isic_pipelines_differ_as_documented() -> None:
    paper, george = (Isic().facts(IsicConfig(pipeline=name)) for name in ("paper", "george"))
    assert paper.eval_transform.cut != george.eval_transform.cut
    assert george.train_transform.cut == george.eval_transform.cut
    for facts in (paper, george):
        assert facts.train_transform.hflip and facts.train_transform.vflip
        assert not facts.eval_transform.hflip
    paper, george = (replace(facts, bound=None) for facts in (paper, george))
    assert paper.fingerprint() == george.fingerprint(), "the samples are the same"
    dropped = Isic().facts(IsicConfig(unknown="drop", decode="native"))
    assert paper.fingerprint() != dropped.fingerprint()


@pytest.mark.parametrize("name", PHOTOS)
def test_a_root_that_is_the_folder_itself_is_found(name: str, standin_root: Path) -> None:
    folder = folder_of(name, standin_root)
    assert get_dataset(name).require(folder).folder == folder
