"""Data some of whose images are missing: refused, or used without them and called a subset."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from bench.job import Request, expand
from datasets import standins
from datasets.base import SPLITS
from datasets.catalogue import get_dataset
from datasets.errors import DataCorrupt, DataMissing
from datasets.standins import MARKER_NAME
from datasets.waterbirds import Waterbirds, WaterbirdsConfig

CONFIG = WaterbirdsConfig(resolution=32)
FACTS = Waterbirds.facts


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in, written once; tests take copies."""
    root = tmp_path_factory.mktemp("standin")
    standins.write("waterbirds", root, size=60)
    return root


@pytest.fixture
def folder(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small release: a stand-in without its marker, under a protocol of its counts."""
    shutil.copytree(standin, tmp_path, dirs_exist_ok=True)
    folder = Waterbirds().require(tmp_path).folder
    (folder / MARKER_NAME).unlink()
    labels = Waterbirds().labels(folder, CONFIG)
    counts = {split: len(own) for split, own in labels.items()}
    changes: dict[str, Any] = {"counts": counts, "group_counts": {}, "label_digest": None}
    monkeypatch.setattr(Waterbirds, "facts", lambda self, own: replace(FACTS(self, own), **changes))
    return folder


def rows(folder: Path, split: str) -> pd.DataFrame:
    table = Waterbirds().table(folder, CONFIG)
    return table[table["split"] == SPLITS.index(split)]


def lose(folder: Path, files: list[str]) -> None:
    for file in files:
        (folder / file).unlink()


def test_a_subset_is_what_is_there_under_a_name_of_its_own(folder: Path, tmp_path: Path) -> None:
    dataset = get_dataset("waterbirds")
    whole = dataset.load(tmp_path, CONFIG)
    (cache,) = {Path(split.images.path).parent for split in whole.splits.values()}  # type: ignore[attr-defined]
    for file in cache.iterdir():
        file.unlink()
    lost = rows(folder, "train").groupby("group").head(2)
    lose(folder, lost["file"].tolist())
    with pytest.raises(DataMissing, match=r"of 140 images of waterbirds are missing") as caught:
        dataset.load(tmp_path, CONFIG)
    assert "--allow-subset" in caught.value.remedy
    some = dataset.load(tmp_path, CONFIG, allow_subset=True)
    assert some.data_kind == "subset"
    train = some.splits["train"]
    assert not set(train.labels.ids.tolist()) & set(lost["id"])
    assert len(train) == 60 - len(lost) == len(train.images) == some.facts.counts["train"]
    for split in ("val", "test"):
        assert torch.equal(some.splits[split].labels.ids, whole.splits[split].labels.ids)
    kept = ~torch.isin(whole.splits["train"].labels.ids, torch.tensor(lost["id"].to_numpy()))
    before = whole.splits["train"].labels[kept.nonzero()[:, 0]]
    assert torch.equal(train.labels.groups, before.groups)
    assert some.facts.protocol.startswith("released-subset-")
    assert some.facts.fingerprint() != whole.facts.fingerprint()
    assert some.facts.label_digest == some.label_digest != whole.label_digest
    # Another subset is another one; the whole again is none.
    more = rows(folder, "test")["file"].tolist()[-1]
    (folder / more).rename(tmp_path / "kept.jpg")
    other = dataset.load(tmp_path, CONFIG, allow_subset=True)
    assert other.facts.fingerprint() != some.facts.fingerprint()
    assert other.facts.protocol != some.facts.protocol


def test_nothing_missing_is_no_subset(standin: Path, folder: Path, tmp_path: Path) -> None:
    data = get_dataset("waterbirds").load(tmp_path, CONFIG, allow_subset=True)
    assert data.data_kind == "release" and data.facts.protocol == "released"
    other = Path(shutil.copytree(standin, tmp_path / "other"))
    lose(own := Waterbirds().require(other).folder, [rows(own, "val")["file"].iloc[0]])
    with pytest.raises(DataMissing):
        get_dataset("waterbirds").load(other, CONFIG, allow_subset=True)


def test_a_group_that_is_gone_is_no_subset(folder: Path, tmp_path: Path) -> None:
    val = rows(folder, "val")
    smallest = val["group"].value_counts().idxmin()
    lose(folder, val[val["group"] == smallest]["file"].tolist())
    with pytest.raises(DataCorrupt, match=r"images of \w+ in the val split of waterbirds none is"):
        get_dataset("waterbirds").load(tmp_path, CONFIG, allow_subset=True)


def test_rebuilt_data_can_be_a_subset_as_well(folder: Path, tmp_path: Path) -> None:
    (folder / "origin.toml").write_text('kind = "rebuilt"\nname = "other"\n')
    lose(folder, [rows(folder, "train")["file"].iloc[0]])
    data = get_dataset("waterbirds").load(tmp_path, CONFIG, allow_subset=True)
    assert data.data_kind == "subset"
    assert data.facts.protocol.startswith("released-rebuilt-other-subset-")


def test_jobs_on_a_subset_are_labelled_and_have_other_ids(folder: Path, tmp_path: Path) -> None:
    settings = {"backbone.pretrained": "false", "waterbirds.resolution": "32"}
    request = Request(("erm",), ("waterbirds",), (0,), tmp_path, overrides=settings)
    (release,) = expand(request)
    assert expand(replace(request, allow_subset=True)) == [release], "nothing is missing"
    lose(folder, rows(folder, "train").groupby("group").head(1)["file"].tolist())
    assert expand(request) == [release], "whether images are missing shows when they are decoded"
    (job,) = expand(replace(request, allow_subset=True))
    assert job.data_kind == "subset" and job.labels == ["subset"]
    assert job.run_id != release.run_id and job.fingerprint != release.fingerprint
    assert job.command().endswith("--allow-subset")
    assert "--allow-subset" not in release.command()
