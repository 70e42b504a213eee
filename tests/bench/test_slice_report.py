"""The slices of stored runs: what is known with and without data, and of methods of each kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from records import published_run
from report_records import jobs, record

import bench
from bench.record import Record
from bench.reporting.slices_html import slices_page
from bench.resources import published_folder
from bench.slice_report import SliceReport, confidence, slice_report
from bench.store import Store
from datasets.errors import UsageError
from methods.base import Method, load_methods

NOWHERE = Path("/nonexistent")
Finder = Callable[[str], SliceReport]


@pytest.fixture(scope="module")
def published() -> Finder:
    """The report of a published run, without its data."""
    store = Store(published_folder())

    def find(name: str, split: str | None = None) -> SliceReport:
        found = store.record(published_run(name))
        assert found is not None
        return slice_report(found, store, NOWHERE, split)

    return find


@pytest.fixture(scope="module")
def stores(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Path]:
    """Where quick runs go, and where their data is."""
    return Store(tmp_path_factory.mktemp("results")), digits_root


@pytest.fixture(scope="module")
def quick(stores: tuple[Store, Path]) -> dict[str, SliceReport]:
    """Reports of quick runs, with their data and models: a tree, clusters, an error set."""
    store, digits_root = stores
    grid = bench.run(
        "nct,george,jtt",
        "umnist",
        1,
        quick=True,
        results=store.root,
        data_root=digits_root,
        keep_models=True,
    )
    return {one.job.method: slice_report(one, store, digits_root) for one in grid.records()}


def test_leaves_reach_every_split_and_have_names(published: Finder) -> None:
    report = published("nct-umnist-s0")
    found = report.analysis
    assert (found.split, report.again, found.assigned) == ("val", "test", ("train", "val", "test"))
    names = {one.name for one in found.slices}
    assert all(name.startswith(("0-4", "5-9")) for name in names) and len(names) >= 2
    for split, size in {"train": 43_542, "val": 12_000, "test": 10_000}.items():
        assert sum(one.sizes[split] for one in found.slices) == size
    kept = report.record.val.avg
    assert kept is not None and found.accuracy == pytest.approx(kept / 100)
    makeup = pd.DataFrame([vars(t) for one in found.slices for t in one.groups])
    assert makeup.groupby("value")["count"].sum().to_dict() == report.record.val.group_count
    (note,) = report.notes
    assert "There are no pictures" in note
    assert not report.pictures and "<img" not in slices_page(report)


def test_pseudo_groups_are_of_validation_alone(published: Finder) -> None:
    report = published("exmap-umnist-s0")
    assert report.analysis.assigned == ("val",) and report.again is None
    assert all(one.again is None for one in report.analysis.slices)
    assert "training and test samples are in none" in slices_page(report)


@pytest.mark.parametrize("name", ["george-umnist-s1", "jtt-cmnist-s0", "eiil-cmnist-s0"])
def test_training_slices_without_a_model_have_no_accuracy_and_say_why(
    published: Finder, name: str
) -> None:
    report = published(name)
    assert report.analysis.assigned == ("train",) and report.analysis.worst is None
    assert "--keep-models" in report.no_accuracy
    assert all(one.accuracy is None for one in report.analysis.slices)
    page = slices_page(report)
    assert "Cannot be told from this run" in page and "Worst slice, of" not in page


def test_a_split_without_slices_cannot_be_ranked_on(published: Any) -> None:
    with pytest.raises(UsageError, match="no validation sample") as caught:
        published("jtt-cmnist-s0", "val")
    assert caught.value.remedy == "give --split train"
    found = published("nct-cmnist-s0", "test")
    assert found.analysis.split == "test" and found.again is None


def test_a_run_without_a_partition_names_those_that_have_one(published: Finder) -> None:
    with pytest.raises(UsageError, match="has no slices") as caught:
        published("erm-umnist-s0")
    methods = caught.value.remedy.removeprefix("give a run of ").split(";")[0]
    assert {"nct", "george"} <= set(methods.split(", "))


def test_the_slices_of_another_run_on_the_same_data() -> None:
    """ERM's predictions in NCT's leaves: the sizes are NCT's, the accuracy is ERM's."""
    store = Store(published_folder())
    erm, nct, other = (
        store.record(published_run(name))
        for name in ("erm-umnist-s0", "nct-umnist-s0", "nct-cmnist-s0")
    )
    assert erm is not None and nct is not None and other is not None
    report = slice_report(erm, store, NOWHERE, by=(nct, store))
    own = slice_report(nct, store, NOWHERE)
    sizes = {one.name: one.sizes for one in own.analysis.slices}
    assert {one.name: one.sizes for one in report.analysis.slices} == sizes
    assert erm.val.avg is not None
    assert report.analysis.accuracy == pytest.approx(erm.val.avg / 100)
    predictions = store.predictions(erm.run_id)
    assert predictions is not None
    inside = predictions.set_index("id")
    for one in report.analysis.slices:
        members = report.members(one).query("split != 'train'")
        assert (inside.loc[members["id"], "pred"].to_numpy() == members["pred"]).all()
    assert f"in the slices of {nct.run_id}" in slices_page(report)
    with pytest.raises(UsageError, match="of other data"):
        slice_report(erm, store, NOWHERE, by=(other, store))


def test_a_tree_on_disk_has_pictures(quick: dict[str, SliceReport]) -> None:
    report = quick["nct"]
    found = report.analysis
    assert found.split == "val" and report.again == "test" and not report.notes
    shown = {s.id for one in found.slices for s in (*one.typical, *one.wrong)}
    assert set(report.pictures) == shown
    assert all(url.startswith("data:image/png;base64,") for url in report.pictures.values())
    page = slices_page(report)
    assert page.count("<img") >= len(shown) and "quick smoke run" in page


def test_clusters_reach_validation(quick: dict[str, SliceReport]) -> None:
    """GEORGE puts validation samples into its clusters; the run keeps them, as it counted them."""
    report = quick["george"]
    found = report.analysis
    assert found.assigned == ("train", "val") and found.split == "val" and report.again is None
    said: Any = report.record.details["george"]
    by_number = {one.number: one.sizes for one in found.slices}
    for split, key in (("train", "sizes"), ("val", "val_sizes")):
        assert [by_number[n][split] for n in range(len(said[key]))] == said[key]
    for one in found.slices:
        assert sum(trait.count for trait in one.classes) == one.sizes["val"]
        assert len(one.classes) <= 1  # a cluster is within a class


def test_of_clusters_the_first_model_is_judged_unless_asked_otherwise(
    quick: dict[str, SliceReport], stores: tuple[Store, Path]
) -> None:
    report, (store, root) = quick["george"], stores
    predictions = store.predictions(report.record.run_id)
    assert predictions is not None
    val = predictions[predictions["split"] == "val"]
    assert (predictions["first"][predictions["split"] == "test"] == -1).all()
    found = report.analysis
    assert found.by_first and found.own_accuracy == pytest.approx((val.y == val.pred).mean())
    assert found.accuracy == pytest.approx((val["y"] == val["first"]).mean())
    page = slices_page(report)
    assert "by the first model" in page and "Does this run still fail there?" in page
    own = slice_report(report.record, store, root, judge="own")
    assert not own.analysis.by_first and own.analysis.accuracy == found.own_accuracy
    assert "by the first model" not in slices_page(own)
    other = slice_report(quick["nct"].record, store, root, by=(report.record, store))
    assert not other.analysis.by_first
    with pytest.raises(UsageError, match="no predictions of a first model"):
        slice_report(quick["nct"].record, store, root, judge="first")


def test_a_kept_model_predicts_the_training_samples(quick: dict[str, SliceReport]) -> None:
    report = quick["jtt"]
    found = report.analysis
    assert found.split == "train" and not report.no_accuracy and found.accuracy is not None
    assert any("predicted again by the kept model" in note for note in report.notes)
    training = report.samples[report.samples["split"] == "train"]
    assert (training["pred"] >= 0).all() and (training["y"] >= 0).all()
    assert training["confidence"].between(0.5, 1).all()  # of two classes
    assert found.accuracy == pytest.approx((training["pred"] == training["y"]).mean())


def test_of_development_seeds_test_and_hidden_groups_are_left_out(tmp_path: Path) -> None:
    store = Store(published_folder())
    name = published_run("nct-umnist-s0")
    own = store.record(name)
    assert own is not None
    shutil.copytree(store.runs / name, tmp_path / "runs" / name)
    developed = replace(own, job=replace(own.job, seed=100), stored_id=name)
    report = slice_report(developed, Store(tmp_path), NOWHERE)
    assert set(report.samples["split"]) == {"train", "val"} and report.again is None
    assert all(not one.groups for one in report.analysis.slices)
    assert any("development seed" in note for note in report.notes)
    assert "test" not in report.analysis.sizes


def test_true_groups_are_shown_only_where_they_are_known(tmp_path: Path) -> None:
    """Groups of a split that has none are -1, and nothing is said of them."""
    frame, one = made_up_predictions(), made_up_record()
    for groups in (frame["group"], np.full(len(frame), -1)):
        store = Store(tmp_path / str(len(list(tmp_path.iterdir()))))
        store.write(one, predictions=frame.assign(group=groups))
        found = slice_report(one, store, None).analysis
        known = bool((np.asarray(groups) >= 0).all())
        assert all(bool(own.groups) == known for own in found.slices)
        assert found.worst is not None and found.worst.number == 1


def made_up_record() -> Record:
    return record(jobs("erm", "umnist", 1)[0], 90.0)


def made_up_predictions() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 800)
    leaf = draw.integers(0, 2, 800)
    pred = np.where(draw.random(800) < np.where(leaf == 1, 0.4, 0.05), 1 - y, y)
    split = np.where(np.arange(800) < 400, "val", "test")
    frame = pd.DataFrame({"id": range(800), "split": split, "y": y, "group": y, "pred": pred})
    return frame.assign(score_0=1.0 - pred, score_1=1.0 * pred, leaf=leaf)


def test_members_are_what_the_slice_counts(published: Finder) -> None:
    report = published("nct-umnist-s0")
    one = report.analysis.slices[-1]
    members = report.members(one)
    assert members["split"].value_counts().to_dict() == dict(one.sizes)
    assert report.find("worst") is report.analysis.slices[0]
    assert report.find(one.name) is one
    assert report.find(str(one.number)) is one
    with pytest.raises(UsageError, match="has no slice 'nowhere'"):
        report.find("nowhere")


def test_confidence_is_the_softmax_of_the_highest_score() -> None:
    scores = np.array([[0.0, 0.0], [np.log(3), 0.0], [-500.0, 500.0]])
    assert confidence(scores) == pytest.approx([0.5, 0.75, 1.0])


@pytest.mark.parametrize("method", load_methods().values(), ids=lambda method: method.name)
def test_methods_that_partition_say_what_their_slices_are(method: Method) -> None:
    store = Store(published_folder())
    done = [name for name in store.run_ids() if name.startswith(f"{method.name}-")]
    if not done and method.extended:
        pytest.skip("no run of it is published yet")
    having = any((store.runs / name / "partition.parquet").is_file() for name in done)
    assert having == bool(method.slices)
