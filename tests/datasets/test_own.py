"""What a registered dataset is to the harness: facts, splits that are drawn, groups in part."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from bench.evaluation import evaluate
from bench.job import Request, expand
from bench.runner import RunOptions, run_job
from bench.store import Store
from datasets.base import SPLITS, LabelledSplit, Labels, LoadedData
from datasets.catalogue import get_dataset
from datasets.errors import DataMissing
from datasets.fetch import use_data_root
from datasets.images import MappedImages, MemoryImages
from datasets.intake import AddOptions, add, in_order
from datasets.own import read_description
from methods.metrics import calibration_error
from methods.presets import KINDS

sys.path.append(str(Path(__file__).parents[1]))
from planted import write_planted


def registered(tmp_path: Path, options: AddOptions | None = None, **written: float) -> set[str]:
    """Register planted shapes below `data`; return the files that break the shortcut."""
    minority = write_planted(tmp_path / "shapes", **written)  # type: ignore[arg-type]
    add("shapes", tmp_path / "shapes", tmp_path / "data", options or AddOptions())
    use_data_root(tmp_path / "data")
    return minority


def test_images_are_those_of_their_labels(tmp_path: Path) -> None:
    registered(tmp_path, count=60)
    dataset = get_dataset("shapes")
    data = dataset.load(tmp_path / "data", dataset.config_type())
    table = pd.read_parquet(tmp_path / "data/own/shapes/samples.parquet").set_index("id")
    assert data.data_kind == "own" and data.facts.group_splits == ()
    for split in data.splits.values():
        assert isinstance(split.images, MemoryImages)
        for place in (0, len(split) - 1):
            file = str(table.loc[int(split.labels.ids[place]), "file"])
            shown = split.images.batch(torch.tensor([place])).pixels[0].permute(1, 2, 0).numpy()
            assert np.array_equal(shown, np.asarray(Image.open(tmp_path / "shapes" / file)))
            assert data.facts.classes[int(split.labels.y[place])] == file.split("/")[0]
        assert torch.equal(split.labels.groups, split.labels.y)


def test_images_of_several_sizes_stay_in_a_file(tmp_path: Path) -> None:
    write_planted(tmp_path / "shapes", count=30)
    Image.effect_noise((48, 40), 50).save(tmp_path / "shapes/round/grey.png")
    add("shapes", tmp_path / "shapes", tmp_path / "data", AddOptions(backbone="resnet18"))
    use_data_root(tmp_path / "data")
    dataset = get_dataset("shapes")
    data = dataset.load(tmp_path / "data", dataset.config_type())
    assert sum(len(split) for split in data.splits.values()) == 31
    assert any(isinstance(split.images, MappedImages) for split in data.splits.values())
    assert (data.facts.backbone, data.facts.pretrained) == ("resnet18", True)


def test_photos_stay_in_a_file_even_if_of_one_size(tmp_path: Path) -> None:
    """What a run takes is not to grow with their number."""
    write_planted(tmp_path / "shapes", count=30)
    options = AddOptions(backbone="resnet18", resolution=96)
    add("shapes", tmp_path / "shapes", tmp_path / "data", options)
    use_data_root(tmp_path / "data")
    dataset = get_dataset("shapes")
    data = dataset.load(tmp_path / "data", dataset.config_type())
    assert all(isinstance(split.images, MappedImages) for split in data.splits.values())


def test_missing_files_are_put_back_or_registered_without(tmp_path: Path) -> None:
    registered(tmp_path, count=30)
    next((tmp_path / "shapes").rglob("*.png")).unlink()
    dataset = get_dataset("shapes")
    with pytest.raises(DataMissing, match="1 of 30 images of shapes are missing") as caught:
        dataset.load(tmp_path / "data", dataset.config_type())
    assert "data remove shapes" in caught.value.remedy
    assert "--allow-subset" not in caught.value.remedy, "it is for releases alone"


def test_copies_of_an_image_stay_in_one_split(tmp_path: Path) -> None:
    write_planted(tmp_path / "shapes", count=60)
    for file in sorted((tmp_path / "shapes").rglob("*.png")):
        for copy in "bc":
            file.with_name(f"{file.stem}{copy}.png").write_bytes(file.read_bytes())
    add("shapes", tmp_path / "shapes", tmp_path / "data", AddOptions())
    table = pd.read_parquet(tmp_path / "data/own/shapes/samples.parquet")
    assert len(table) == 180
    assert (table.groupby("content")["split"].nunique() == 1).all()
    assert table["split"].value_counts().to_dict() == {0: 108, 1: 36, 2: 36}


def test_description_survives_writing_and_reading(tmp_path: Path) -> None:
    registered(tmp_path, count=30)
    folder = tmp_path / "data/own/shapes"
    known = read_description(folder)
    odd = replace(known, title='a "quoted" \\ title\n\x7f\tü', skipped=("x" * 90, "é.png: 'no'"))
    (folder / "dataset.toml").write_text(odd.to_toml())
    assert read_description(folder) == odd


def test_fingerprint_follows_content_labels_and_known_groups(tmp_path: Path) -> None:
    registered(tmp_path, count=30)
    dataset = get_dataset("shapes")
    facts = dataset.facts(dataset.config_type())
    before = facts.fingerprint()
    changed = [
        replace(facts, full_pixel_digest="x"),
        replace(facts, group_splits=("val",)),
        replace(facts, classes=("a", "b")),
    ]
    assert len({before, *(other.fingerprint() for other in changed)}) == 4
    assert replace(facts, group_splits=SPLITS).fingerprint() != before
    first = next((tmp_path / "shapes/round").iterdir())
    Image.new("RGB", (32, 32)).save(first)
    add("again", tmp_path / "shapes", tmp_path / "data", AddOptions())
    again = get_dataset("again")
    other = replace(again.facts(again.config_type()), name="shapes")
    assert other.fingerprint() != before and other.label_digest == facts.label_digest


def test_names_are_in_a_persons_order() -> None:
    assert in_order(["10", "9", "1", "9"]) == ["1", "9", "10"]
    assert in_order(["b2", "b10", "A", "a1"]) == ["A", "a1", "b2", "b10"]


def test_calibration_error_is_that_of_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(500, 3, generator=generator).softmax(dim=1)
    y = torch.randint(0, 3, (500,), generator=generator)
    confidence, pred = probabilities.max(dim=1)
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            right = (pred[inside] == y[inside]).float().mean()
            expected += float(inside.float().mean() * (confidence[inside].mean() - right).abs())
    assert calibration_error(probabilities, y) == pytest.approx(expected, abs=1e-6)
    assert calibration_error(torch.eye(3), torch.arange(3)) == 0


def test_a_split_without_groups_is_judged_by_classes(tmp_path: Path) -> None:
    registered(tmp_path, count=60)
    dataset = get_dataset("shapes")
    facts = dataset.facts(dataset.config_type())
    facts = replace(facts, groups=("a", "b", "c"), group_splits=("val",))
    ids, y = torch.arange(6), torch.tensor([0, 0, 0, 1, 1, 1])
    images = MemoryImages(torch.zeros(6, 3, 32, 32, dtype=torch.uint8))
    unknown = LabelledSplit(Labels(ids, y, torch.full((6,), -1)), images)
    known = LabelledSplit(Labels(ids, y, torch.tensor([0, 0, 1, 2, 2, 2])), images)
    data = LoadedData(facts, {"train": unknown, "val": known, "test": unknown}, "own")
    logits = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [0, 1], [0, 1]])
    val, test = evaluate(data, "val", logits), evaluate(data, "test", logits)
    assert val.group_accuracy == {"a": 100.0, "b": 0.0, "c": 100.0} and val.wga == 0
    assert list(test.group_accuracy) == ["round", "square"]
    assert "wga" not in test.values and test.values["balanced"] == pytest.approx(100 * 5 / 6)
    assert "avg_train_weighted" not in val.values


MISTAKES = ("eiil", "cnc", "george")  # they learn from a first model's


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_has_a_recipe_for_every_kind(kind: str, tmp_path: Path) -> None:
    from methods.base import load_methods

    registered(tmp_path, count=30)
    methods = load_methods()
    default = {name: method.config_type() for name, method in methods.items()}
    names = tuple(
        name
        for name, method in methods.items()
        if name != "dfr" and not method.supervision(default[name]).train_groups
    )
    free = {name for name in names if methods[name].supervision(default[name]).val_groups}
    settings = {f"{name}.selection": "val_avg" for name in free}
    request = Request(names, ("shapes",), (100,), tmp_path / "data", kind, settings)
    jobs = expand(request)
    assert {job.preset for job in jobs} == {f"kind-{kind}"}
    assert all(f"--preset {kind}" in job.command() for job in jobs)
    rates = {job.method: job.config.method["erm"] for job in jobs if "erm" in job.config.method}
    for learns_from_mistakes in (True, False):  # one recipe, whichever method begins with it
        own = {name: r for name, r in rates.items() if (name in MISTAKES) == learns_from_mistakes}
        first = {str(sorted(recipe.items())) for recipe in own.values()}  # type: ignore[attr-defined]
        assert len(first) == 1 and len(own) >= 1


def shares(tmp_path: Path, minority: set[str], method: str, preset: str, **short: str) -> Path:
    settings = {f"{method}.{name}": value for name, value in short.items()}
    request = Request((method,), ("shapes",), (100,), tmp_path / "data", preset, settings)
    options = RunOptions(tmp_path / "data", tmp_path / "results", isolate=False, audit_every=0)
    record = run_job(expand(request)[0], options, lambda _: None)
    assert record.done, record.failure
    return Store(options.results).runs / record.run_id


def minority_by(table: pd.DataFrame, column: str) -> pd.Series:
    return table.groupby(column)["minority"].mean()


def with_minority(table: pd.DataFrame, tmp_path: Path, minority: set[str]) -> pd.DataFrame:
    samples = pd.read_parquet(tmp_path / "data/own/shapes/samples.parquet")
    samples["minority"] = samples["file"].isin(minority)
    return table.merge(samples[["id", "minority"]], on="id")


@pytest.mark.slow
def test_nct_and_george_find_the_planted_minority(tmp_path: Path) -> None:
    minority = registered(tmp_path, count=900, seed=5)
    run = shares(tmp_path, minority, "nct", "small")
    found = with_minority(pd.read_parquet(run / "predictions.parquet"), tmp_path, minority)
    right = (found["y"] == found["pred"]).groupby(found["leaf"]).mean()
    worst = minority_by(found, "leaf")[right.idxmin()]
    assert worst >= 3 * found["minority"].mean()
    run = shares(tmp_path, minority, "george", "small")
    parts = with_minority(pd.read_parquet(run / "partition.parquet"), tmp_path, minority)
    assert minority_by(parts, "part").max() >= 3 * parts["minority"].mean()


def test_nct_separates_an_easy_shortcut_within_seconds(tmp_path: Path) -> None:
    minority = registered(tmp_path, count=300, share=0.15, seed=3)
    short = {"epochs": "4,10,10", "iterations": "2", "batch_size": "16"}
    run = shares(tmp_path, minority, "nct", "small", **short)
    parts = with_minority(pd.read_parquet(run / "partition.parquet"), tmp_path, minority)
    assert minority_by(parts, "part").max() >= 3 * parts["minority"].mean()
