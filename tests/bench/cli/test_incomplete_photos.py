"""Commands on photos of which some are missing or broken."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench
from datasets import standins
from datasets.standins import MARKER_NAME
from datasets.waterbirds import Waterbirds, WaterbirdsConfig

FACTS = Waterbirds.facts
SMALL = ("--set", "backbone.name=test_resnet", "backbone.pretrained=false")
SMALL = (*SMALL, "waterbirds.resolution=32")


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in, written once; tests take copies."""
    root = tmp_path_factory.mktemp("standin")
    standins.write("waterbirds", root, size=60)
    return root


@pytest.fixture
def folder(standin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small release: a stand-in without its marker, under a protocol that asserts no counts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(standin, "data")
    folder = Waterbirds().require(Path("data")).folder
    (folder / MARKER_NAME).unlink()
    changes: dict[str, Any] = {"counts": {}, "group_counts": {}, "label_digest": None}
    monkeypatch.setattr(Waterbirds, "facts", lambda self, own: replace(FACTS(self, own), **changes))
    return folder


def files_of(folder: Path) -> list[Path]:
    """One file of each group of the training split, after the first of each, and more of others."""
    table = Waterbirds().table(folder, WaterbirdsConfig())
    second = table[table["split"] == 0].groupby("group").nth(1)["file"].tolist()
    many = table[(table["split"] == 2) & (table["group"] == 0)]["file"].tolist()[:4]
    return [folder / file for file in (*second, *many)]


def test_verify_sums_up_what_is_missing_and_what_is_broken(folder: Path, cli: Any) -> None:
    gone = files_of(folder)
    for file in gone:
        file.unlink()
    table = Waterbirds().table(folder, WaterbirdsConfig())
    broken = next(folder / file for file in table["file"] if (folder / file).exists())
    broken.write_bytes(b"<html>")
    told = cli("data", "verify", "waterbirds", "--data-root", "data")
    assert told.code == 2 and "verified" not in told.out
    assert f"{len(gone)} missing image(s)" in told.err and "1 unreadable image(s)" in told.err
    assert sum(str(file) in told.err for file in gone) == 5
    (listed,) = (folder / ".decoded").glob("missing-*.txt")
    assert str(listed) in told.err
    assert sorted(listed.read_text().splitlines()) == sorted(map(str, gone))
    assert str(broken) in told.err


def test_run_refuses_what_is_missing_and_allows_a_subset(folder: Path, cli: Any) -> None:
    words = ("--methods", "erm", "--datasets", "waterbirds", "--seeds", "100,", *SMALL)
    words = (*words, "--set", "erm.epochs=1", "--data-root", "data")
    gone = files_of(folder)
    for file in gone:
        file.unlink()
    told = cli("run", *words)
    assert told.code == 2 and f"{len(gone)} of 140 images of waterbirds are missing" in told.err
    settings = dict(word.split("=") for word in words if "=" in word)
    # In this process: a worker would not know the protocol of this test.
    asked: dict[str, Any] = {"settings": settings, "data_root": "data", "allow_subset": True}
    chosen = {"methods": "erm", "datasets": "waterbirds", "seeds": "100,"}
    done = bench.run(**chosen, **asked, isolate=False, audit="off")
    (record,) = done.records()
    assert record.job.data_kind == "subset" and "-subset-" in record.job.protocol
    assert record.metrics("test").group_count["landbird_on_land"] > 0
    assert sum(record.metrics("test").group_count.values()) == 40 - 4
    assert [job.run_id for job in bench.plan(**chosen, **asked).jobs] == [record.run_id]
    checked = cli("check", "results", "--data-root", "data")
    assert checked.code == 0, checked.out
