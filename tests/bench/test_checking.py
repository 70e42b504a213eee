"""Stored runs are checked: one changed number, prediction, label, seed or digest names the run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from records import a_job, a_record

import bench
from bench.checking import (
    CheckResult,
    Predictions,
    beyond_tolerance,
    differences,
    find_runs,
    other_conditions,
)
from bench.job import NO_DATA
from bench.provenance import Environment
from bench.record import Metrics, Outcome
from bench.resources import published_folder
from datasets.catalogue import get_dataset
from datasets.errors import UsageError

PUBLISHED = published_folder() / "runs"
EARLIER = Path(__file__).parents[1] / "schema_1"  # runs published before records had a checksum
CHANGED = "erm-cmnist-s1-952869a555"
COPIED = ("erm-cmnist-s0-6bd327180d", CHANGED, "jtt-cmnist-s0-2d03fa0b07")
Edit = Callable[[Any], None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A results folder with three runs on the same data."""
    for name in COPIED:
        shutil.copytree(EARLIER / name, tmp_path / "runs" / name)
    return tmp_path


def edit_record(folder: Path, change: Edit) -> None:
    raw = json.loads((folder / "record.json").read_text())
    change(raw)
    raw.pop("checksum", None)  # as one who means it would
    (folder / "record.json").write_text(json.dumps(raw))


def edit_table(folder: Path, change: Edit, name: str = "predictions") -> None:
    table = pd.read_parquet(folder / f"{name}.parquet")
    change(table)
    table.to_parquet(folder / f"{name}.parquet", index=False)


def problems(found: CheckResult) -> list[str]:
    """What does not hold of the one run that was changed; the others have to hold."""
    assert {one.run_id for one in found.problems} <= {CHANGED}
    return [one.problem for one in found.problems]


@pytest.mark.slow
def test_published_runs_hold(mnist_root: Path) -> None:
    found = bench.check(published_folder(), data_root=mnist_root)
    assert found.runs == len([*PUBLISHED.iterdir()])
    assert found.ok, found.problems


@pytest.mark.parametrize("root", ["data", "no data"])
def test_runs_hold_with_and_without_the_data(store: Path, root: str, mnist_root: Path) -> None:
    found = bench.check(store, data_root=mnist_root if root == "data" else NO_DATA)
    assert (found.runs, found.problems) == (3, ())
    assert found.notes == (
        "made before records had a digest of the code: they have the commit (3 runs)",
    )


def set_metric(raw: Any) -> None:
    raw["metrics"]["test"]["avg"] += 0.01


def set_seed(raw: Any) -> None:
    raw["seed"] = 2


def set_digest(raw: Any) -> None:
    raw["label_digest"] = "0" + raw["label_digest"][1:]


def set_prediction(table: Any) -> None:
    table.loc[table.index[-1], "pred"] = (table["pred"].iloc[-1] + 1) % 5


def set_label(table: Any) -> None:
    """Of a sample that is wrong before and after, so that no metric changes but by its class."""
    wrong = table.index[(table["split"] == "test") & (table["pred"] != table["y"])][0]
    others = {*range(5)} - {table.loc[wrong, "y"], table.loc[wrong, "pred"]}
    table.loc[wrong, "y"] = min(others)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_metric, "metrics.test.avg is"),
        (set_prediction, "1 of its predicted classes are not those with the highest score"),
        (set_label, "1 of its test samples have another y than the data"),
        (set_seed, "its id is not that of its settings and seed"),
        (set_digest, "its label digest is 0"),
    ],
)
def test_one_changed_value_names_the_run(
    change: Edit, said: str, store: Path, mnist_root: Path
) -> None:
    edit = edit_table if change in (set_prediction, set_label) else edit_record
    edit(store / "runs" / CHANGED, change)
    found = problems(bench.check(store, data_root=mnist_root))
    assert any(one.startswith(said) for one in found), found


def at(*keys: str, value: Any) -> Edit:
    def change(raw: Any) -> None:
        for key in keys[:-1]:
            raw = raw[int(key) if isinstance(raw, list) else key]
        raw[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at("seed_tree", "root", value=7), "its seed tree that of"),
        (at("command", value="python -m bench run --seeds 0,"), "and its command is"),
        (at("data_fingerprint", value="0" * 16), "its data fingerprint is"),
        (at("supervision", "val_groups", value=True), "its tier is"),
        (at("config", "method", "lr", value=0.5), "but its config.method.lr is 0.5 and not"),
        (at("overrides", value={"erm.epochs": "3"}), "but its config.method.epochs is"),
        (at("preset", value="best"), "there is no preset 'best'"),
        (at("preset", value="tuned"), "there is no tuned preset"),
        (at("stages", "0", "key", value="0" * 16), "its stage erm-0000000000000000 is not that of"),
        (at("stages", "1", "key", value="erm-cmnist-s0-6bd327180d"), "its fit is that of"),
        (at("selection", "epoch", value=1000), "epoch 1000, which is not in its history"),
        (at("metrics", "val", "made_up", value=1.0), "made_up is no metric of the dataset"),
        (at("metrics", "val", "group_count", "digits_0_1/red", value=1), "group_count.digits_0_1"),
        (at("method", value="unknown"), "unknown method 'unknown'"),
        (at("schema_version", value=99), "its record cannot be read"),
        (at("files", value={"history.parquet": {"bytes": 1, "sha256": ""}}), "bytes of 1"),
    ],
)
def test_what_else_a_record_may_say_wrongly(store: Path, change: Edit, said: str) -> None:
    edit_record(store / "runs" / CHANGED, change)
    found = problems(bench.check(store, data_root=NO_DATA))
    assert any(said in one for one in found), found


def test_checksums_are_compared_where_there_are_any(store: Path) -> None:
    folder = store / "runs" / CHANGED
    size = (folder / "history.parquet").stat().st_size
    known = {"bytes": size, "sha256": "0" * 64}
    edit_record(folder, at("files", value={"history.parquet": known, "gone.parquet": known}))
    assert problems(bench.check(store, data_root=NO_DATA)) == [
        "the checksum of history.parquet does not fit",
        "gone.parquet is missing",
    ]


def test_missing_tables_and_records_are_named(store: Path) -> None:
    (store / "runs" / CHANGED / "history.parquet").unlink()
    found = problems(bench.check(store, data_root=NO_DATA))
    assert found == ["it is done, but has no history"]
    (store / "runs" / CHANGED / "record.json").unlink()
    (reason,) = problems(bench.check(store, data_root=NO_DATA))
    assert reason == "its record cannot be read: there is none"


def test_a_torn_table_costs_one_line(store: Path) -> None:
    (store / "runs" / CHANGED / "predictions.parquet").write_bytes(b"PAR1")
    (reason,) = problems(bench.check(store, data_root=NO_DATA))
    assert reason.startswith("cannot be checked: ")


def test_labels_are_compared_between_runs_where_there_is_no_data(store: Path) -> None:
    edit_table(store / "runs" / CHANGED, set_label)
    found = problems(bench.check(store, data_root=NO_DATA))
    assert any("ids, labels or groups are not those of 2 other runs" in one for one in found)


def test_group_sizes_are_the_protocols(store: Path) -> None:
    def move(table: Any) -> None:
        table.loc[table.index[-1], "group"] = (table["group"].iloc[-1] + 1) % 25

    folder = store / "runs" / CHANGED
    edit_table(folder, move)
    found = [one.problem for one in bench.check(folder, data_root=NO_DATA).problems]
    assert any(one.startswith("its test groups have [") for one in found), found


def test_the_quality_of_a_partition_is_computed_again(store: Path) -> None:
    folder = store / "runs" / COPIED[2]
    edit_record(folder, at("partition", "recall", value=0.9))
    (found,) = bench.check(folder, data_root=NO_DATA).problems
    assert found.problem.startswith("partition.recall is 0.9, and 0.")


def test_one_run_under_two_seeds_or_names_is_found(store: Path, mnist_root: Path) -> None:
    first, second = store / "runs" / COPIED[0], store / "runs" / CHANGED
    for name in ("predictions", "history"):
        shutil.copy(first / f"{name}.parquet", second)
    metrics = json.loads((first / "record.json").read_text())["metrics"]
    edit_record(second, at("metrics", value=metrics))
    found = bench.check(store, data_root=mnist_root)
    said = {one.run_id: one.problem for one in found.problems if "another seed" in one.problem}
    assert said == {
        CHANGED: f"its predictions are those of {COPIED[0]}, which has another seed",
        COPIED[0]: f"its predictions are those of {CHANGED}, which has another seed",
    }
    shutil.rmtree(second)
    shutil.copytree(first, second)
    found = bench.check(store, data_root=mnist_root)
    assert {one.run_id for one in found.problems} == {CHANGED}
    assert any(COPIED[0] in one.problem for one in found.problems)


def test_a_store_a_folder_of_runs_or_one_run(store: Path, tmp_path: Path) -> None:
    assert len(find_runs(store)) == len(find_runs(store / "runs")) == 3
    assert find_runs(store / "runs" / CHANGED) == [(store / "runs" / CHANGED).absolute()]
    for nothing in (tmp_path / "nowhere", store / "runs" / CHANGED / "record.json"):
        with pytest.raises(UsageError, match="there are no runs in"):
            find_runs(nothing)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_aurocs_have_to_lie_within_the_rounding_of_scores(tmp_path: Path, dtype: Any) -> None:
    """Scores close to each other are ties in half precision, which must not fail an honest run."""
    facts = get_dataset("isic").facts(get_dataset("isic").config_type())
    generator = torch.Generator().manual_seed(0)
    count = 400
    y = torch.randint(0, 2, (count,), generator=generator)
    logits = 10 + 0.01 * torch.randn(count, 2, generator=generator)
    groups = torch.where(y == 1, 2, torch.randint(0, 2, (count,), generator=generator))
    columns: dict[str, Any] = {"id": np.arange(count), "split": "test", "y": y, "group": groups}
    columns |= {f"group_{name}": groups for name in facts.extra_groupings}
    scores = {f"score_{c}": logits[:, c].numpy().astype(dtype) for c in (0, 1)}
    table = pd.DataFrame({**columns, "pred": logits.argmax(1), **scores})
    table.to_parquet(tmp_path / "predictions.parquet")
    low, high = Predictions(tmp_path, facts).metrics("test", None)
    from methods.metrics import auroc, margin_score

    true = auroc(margin_score(logits), y)
    assert low.values["auroc"] <= true <= high.values["auroc"]
    assert "avg_train_weighted" not in low.values
    rounded = auroc(margin_score(logits.half().double()), y)
    assert not math.isclose(rounded, true), "else the test would show nothing"


def test_what_makes_two_machines_different() -> None:
    one = a_record(job=a_job())
    assert other_conditions(one, one) == ""

    def with_environment(**changes: Any) -> Any:
        environment = replace(one.provenance.environment, **changes)
        return replace(one, provenance=replace(one.provenance, environment=environment))

    assert "processor" in other_conditions(with_environment(processor="a 6502"), one)
    assert "torch 0.4 (now" in other_conditions(with_environment(libraries={"torch": "0.4"}), one)
    assert other_conditions(with_environment(python="3.99", platform="BeOS"), one) == ""
    told_more = with_environment(extra={"flags": "avx2"})
    assert "flags None (now avx2)" in other_conditions(one, told_more)
    assert isinstance(one.provenance.environment, Environment)


def test_tolerance_is_the_spread_of_the_seeds_or_a_few_points() -> None:
    def seeded(seed: int, avg: float) -> Any:
        outcome = Outcome({"test": Metrics({"avg": avg, "auroc": avg / 100})})
        return a_record(job=a_job(seed=seed), outcome=outcome)

    alone, near, far = seeded(0, 80.0), seeded(0, 84.0), seeded(0, 86.0)
    assert beyond_tolerance(alone, near, [alone]) == []
    assert [one.split()[1] for one in beyond_tolerance(alone, far, [alone])] == ["avg", "auroc"]
    steady = [alone, seeded(1, 80.5), seeded(2, 81.0)]
    assert len(beyond_tolerance(alone, near, steady)) == 2, "more than twice the seeds' range"
    loose = [alone, seeded(1, 70.0), seeded(2, 90.0)]
    assert beyond_tolerance(alone, far, loose) == []


@pytest.fixture(scope="module")
def quick_store(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two quick runs on stand-in data."""
    results = tmp_path_factory.mktemp("checked")
    bench.run("erm", "umnist", 2, quick=True, data_root=digits_root, results=results)
    return results


def test_a_run_is_made_again(quick_store: Path, digits_root: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    found = bench.check(
        quick_store, recompute=1, pick_seed=5, data_root=digits_root, log=lines.append
    )
    assert found.ok, found.problems
    (again,) = found.recomputed
    assert (again.comparison, again.differences, found.pick_seed) == ("bit by bit", (), 5)
    assert f"--pick-seed 5 picks {again.run_id}" in lines
    assert not [*quick_store.glob("runs/.*")], "nothing is left in the store"

    shutil.copytree(quick_store, tmp_path / "changed")
    folder = tmp_path / "changed" / "runs" / again.run_id

    def nudge(table: Any) -> None:
        best = table[["score_0", "score_1"]].max(axis=1)
        table["score_0"] = table["score_0"].where(table["score_0"] < best, table["score_0"] + 1)

    edit_table(folder, nudge)
    edit_record(folder, lambda raw: raw.pop("files", None))
    assert bench.check(folder, data_root=digits_root).ok, "no check of one run alone can see it"
    changed = bench.check(tmp_path / "changed", recompute=1, pick_seed=5, data_root=digits_root)
    assert [(one.run_id, one.problem) for one in changed.problems] == [
        (again.run_id, "made again, predictions differ in score_0")
    ]
    edit_record(folder, at("environment", "processor", value="a 6502"))
    elsewhere = bench.check(tmp_path / "changed", recompute=1, pick_seed=5, data_root=digits_root)
    assert elsewhere.ok
    assert elsewhere.recomputed[0].comparison.startswith("within a tolerance (every metric within")


@pytest.mark.parametrize("root", ["no data", "the real data"])
def test_stand_ins_that_are_not_there_are_a_note(
    quick_store: Path, root: str, mnist_root: Path
) -> None:
    found = bench.check(quick_store, data_root=NO_DATA if root == "no data" else mnist_root)
    assert found.ok, found.problems
    assert any("standin data that is not on disk" in note for note in found.notes)


def test_plug_ins_are_told_from_what_is_ours(quick_store: Path, tmp_path: Path) -> None:
    shutil.copytree(quick_store, tmp_path / "changed")
    folder = next((tmp_path / "changed" / "runs").iterdir())
    edit_record(folder, at("plugin", value={"distribution": "theirs"}))
    found = [one.problem for one in bench.check(folder, data_root=NO_DATA).problems]
    assert found == [
        "its identity and its record disagree on whether it is a plug-in's",
        "it claims to be a run of theirs, whose method and dataset are not there",
    ]


def test_settings_and_identity_of_a_newer_record_agree(
    quick_store: Path, digits_root: Path, tmp_path: Path
) -> None:
    shutil.copytree(quick_store, tmp_path / "changed")
    folder = next((tmp_path / "changed" / "runs").iterdir())
    edit_record(folder, at("config", "method", "lr", value=0.5))
    found = [one.problem for one in bench.check(folder, data_root=digits_root).problems]
    assert any(one.startswith("its config.method.lr is 0.5, and ") for one in found), found


def test_two_runs_of_a_job_are_compared_bit_by_bit(tmp_path: Path) -> None:
    one = EARLIER / COPIED[2]
    other = tmp_path / one.name
    shutil.copytree(one, other)
    assert differences(one, other) == []
    edit_table(other, lambda table: table.__setitem__("seconds", 1.0), "history")
    assert differences(one, other) == []
    edit_table(other, lambda table: table.__setitem__("loss", -table["loss"]), "history")
    edit_table(other, lambda table: table.__setitem__("leaf", 0))
    edit_record(other, at("metrics", "test", "wga", value=1.0))
    (other / "partition.parquet").unlink()
    assert differences(one, other) == [
        "predictions differ in leaf",
        "only one of them has partition",
        "history differ in loss",
        "metrics.test differ in wga",
    ]
