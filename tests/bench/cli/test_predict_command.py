"""`bench predict`, and kept models that were copied to another folder."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import bench
from bench.runner import load_data
from bench.store import Store
from datasets.errors import BenchError, DataMissing, UsageError


@pytest.fixture(scope="module")
def store(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Quick runs whose models were kept."""
    grid = bench.run(
        "erm,nct",
        "umnist",
        1,
        quick=True,
        keep_models=True,
        isolate=False,
        audit="off",
        data_root=digits_root,
        results=tmp_path_factory.mktemp("kept"),
    )
    assert grid.counts()["done"] == 2
    return grid.store


@pytest.fixture(scope="module")
def photos(store: Store, digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images of the runs as files, in two folders, named by their ids."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "more").mkdir()
    (record,) = (one for one in store.records() if one.job.method == "nct")
    part = load_data(record.job, digits_root).splits["test"]
    pixels = part.images.batch(torch.arange(len(part))).pixels
    for number, (sample, image) in enumerate(zip(part.labels.ids.tolist(), pixels, strict=True)):
        place = folder / "more" if number % 2 else folder
        Image.fromarray(image[0].numpy()).save(place / f"{sample}.png")
    return folder


def expected(store: Store, method: str) -> pd.DataFrame:
    """What the run itself predicted, by sample."""
    run_id = store.find(method)
    table = store.predictions(run_id)
    assert table is not None
    return table[table["split"] == "test"].set_index("id")


def test_csv_has_what_the_run_predicted(store: Store, photos: Path, cli: Any) -> None:
    told = cli("predict", "nct", photos, "--results", store.root)
    assert told.code == 0, told.err
    rows = list(csv.DictReader(io.StringIO(told.out)))
    assert list(rows[0]) == ["file", "class", "probability", "leaf", "route"]
    table, model = expected(store, "nct"), bench.load_model("nct", store.root)
    assert len(rows) == len(table)
    for row in rows:
        own = table.loc[int(Path(row["file"]).stem)]
        assert row["class"] == model.classes_[own["pred"]]
        assert int(row["leaf"]) == own["leaf"]
        assert row["route"] == model.fitted.leaf_names()[own["leaf"]]
        assert 0.5 <= float(row["probability"]) <= 1


def test_method_without_leaves_has_empty_columns(store: Store, photos: Path, cli: Any) -> None:
    rows = cli("predict", "erm", photos, "--results", store.root, "--json").json["predictions"]
    assert {row["leaf"] for row in rows} == {row["route"] for row in rows} == {None}
    assert len(rows) == len(expected(store, "erm"))


@pytest.mark.parametrize("method", ["erm", "nct"])
def test_copied_model_predicts_the_same_in_another_process(
    method: str, store: Store, photos: Path, tmp_path: Path
) -> None:
    """The folder of the run under another name, elsewhere; and the model's file alone."""
    run_id = store.find(method)
    copied = shutil.copytree(store.runs / run_id, tmp_path / "elsewhere" / "my model")
    alone = shutil.copy(copied / "model.safetensors", tmp_path / "alone.safetensors")
    for number, source in enumerate((copied, alone)):
        out = tmp_path / f"{number}.csv"
        words = ["-m", "bench", "predict", str(source), str(photos), "--out", str(out)]
        subprocess.run([sys.executable, *words], check=True, cwd=tmp_path)
        found = pd.read_csv(out).set_index("file")
        table = expected(store, method)
        for file, row in found.iterrows():
            own = table.loc[int(Path(str(file)).stem)]
            assert row["class"] == bench.load_model(copied).classes_[own["pred"]]


def test_model_of_an_earlier_version_needs_its_record(store: Store, tmp_path: Path) -> None:
    """Its file says nothing of the model; the record beside it does."""
    from safetensors.torch import load_file, save_file

    run_id = store.find("nct")
    old = shutil.copytree(store.runs / run_id, tmp_path / run_id)
    model = old / "model.safetensors"
    save_file(load_file(model), model)
    record = (old / "record.json").read_text()
    raw = json.loads(record)
    del raw["files"], raw["checksum"]
    (old / "record.json").write_text(json.dumps(raw))
    x = np.zeros((2, 28, 28), np.uint8)
    assert torch.equal(
        bench.load_model(old).logits(x), bench.load_model("nct", store.root).logits(x)
    )
    (old / "record.json").unlink()
    with pytest.raises(BenchError, match="says nothing"):
        bench.load_model(model)


def test_sizes_may_differ_and_bad_files_are_named(
    store: Store, photos: Path, tmp_path: Path, cli: Any
) -> None:
    first = sorted(photos.glob("*.png"))[0]
    with Image.open(first) as image:
        image.save(tmp_path / "a.png")
        image.convert("RGB").resize((90, 50)).save(tmp_path / "b.jpg")
    (tmp_path / "bad.png").write_bytes(b"not an image")
    (tmp_path / "notes.txt").write_text("nothing")
    told = cli("predict", "nct", tmp_path, "--results", store.root)
    assert told.code == 1 and "bad.png" in told.err
    rows = list(csv.DictReader(io.StringIO(told.out)))
    assert [Path(row["file"]).name for row in rows] == ["a.png", "b.jpg"]
    # Beside a larger image it is what it is by itself.
    (alone,) = csv.DictReader(
        io.StringIO(cli("predict", "nct", tmp_path / "a.png", "--results", store.root).out)
    )
    assert (rows[0]["class"], rows[0]["leaf"]) == (alone["class"], alone["leaf"])
    assert float(rows[0]["probability"]) == pytest.approx(float(alone["probability"]), abs=1e-4)


def test_rows_of_features(tmp_path: Path, cli: Any) -> None:
    draws = np.random.default_rng(0)
    y = np.arange(60) % 2
    rows = (draws.normal(0, 1, (60, 3)) + 2 * y[:, None]).astype(np.float32)
    path = bench.fit("erm", (rows, y), (rows, y), epochs=2).save(tmp_path / "m.safetensors")
    np.save(tmp_path / "x.npy", rows)
    np.savez(tmp_path / "x.npz", x=rows)
    found = [cli("predict", path, tmp_path / name).out for name in ("x.npy", "x.npz")]
    assert found[0] == found[1]
    table = list(csv.DictReader(io.StringIO(found[0])))
    assert [int(row["row"]) for row in table] == list(range(60))
    assert [int(row["class"]) for row in table] == bench.load_model(path).predict(rows).tolist()
    told = cli("predict", path, tmp_path)
    assert told.code == 2 and "feature rows" in told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing", "."), "no run matches 'nothing'"),
        (("nct", "/nowhere"), "no file or folder /nowhere"),
        (("nct", "EMPTY"), "no images in"),
        (("nct", "EMPTY", "--json", "--out", "x.csv"), "--json and --out"),
        (("/nowhere/m.safetensors", "."), "there is no /nowhere/m.safetensors"),
    ],
)
def test_wrong_use(
    words: tuple[str, ...], said: str, store: Store, tmp_path: Path, cli: Any
) -> None:
    named = [str(tmp_path) if word == "EMPTY" else word for word in words]
    told = cli("predict", *named, "--results", store.root)
    assert (told.code, told.out) == (2, "") and said in told.err


def test_run_without_a_model_says_how_to_keep_it(store: Store, tmp_path: Path) -> None:
    run_id = store.find("erm")
    shutil.copytree(store.runs / run_id, tmp_path / run_id)
    (tmp_path / run_id / "model.safetensors").unlink()
    with pytest.raises(DataMissing) as missing:
        bench.load_model(tmp_path / run_id)
    assert "--keep-models" in missing.value.remedy
    with pytest.raises(UsageError, match="no run"):
        bench.load_model(tmp_path)
