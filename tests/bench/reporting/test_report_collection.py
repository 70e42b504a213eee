"""Where a run belongs: only what the contract allows reaches a table of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_records import (
    CLEAN,
    DIRTY,
    MadeUpStore,
    changed_jobs,
    collection,
    failed,
    given,
    jobs,
    record,
    stage,
)

from bench.job import DEFAULT_PRESET, NO_DATA, Request, expand
from bench.provenance import GitState
from bench.record import Unreadable
from bench.reporting import collection as module
from bench.reporting.collection import Kind, VariantSpec, clear_cached_tables, collect
from bench.reporting.main_table import main_results
from bench.store import Store
from datasets.catalogue import get_dataset
from datasets.dataset import DATASETS, register
from methods.base import METHODS, get_method

SWEEP = [
    VariantSpec("sweep", f"lr={lr}", "erm", "umnist", {"erm.lr": lr}, (0, 1, 2), (0, 1, 2, 3))
    for lr in ("0.123", str(get_method("erm").config_type().lr))
]


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, "published", ""),
        ({"standin": True}, "smoke", "stand-in data"),
        ({"quick": True}, "smoke", "quick run"),
        ({"preset": "mine"}, "left out", "preset mine"),
        ({"git": DIRTY}, "left out", "code with uncommitted changes, or of no known commit"),
        ({"git": GitState()}, "left out", "code with uncommitted changes"),
        ({"data_kind": "rebuilt"}, "left out", "data that is not the release: rebuilt"),
        ({"data_kind": "subset"}, "left out", "data that is not the release: subset"),
        (
            {"stages": [stage("erm", "a", 1.0, resumed_from=("aaa",))]},
            "left out",
            "begun by one code and resumed by another",
        ),
        (
            {"stages": [stage("erm", "a", 1.0, git=DIRTY)]},
            "left out",
            "code with uncommitted changes",
        ),
        ({"run_id": "erm-umnist-s0-old"}, "left out", "its id is not that of its settings"),
        ({"details": {"stack": 5}}, "left out", "seeds stacked into one model"),
    ],
)
def test_a_run_is_placed_with_the_reason(changes: dict[str, Any], kind: Kind, reason: str) -> None:
    (run,) = collection(record(jobs("erm", "umnist")[0], 90.0, **changes)).runs
    assert run.kind == kind
    assert run.reason.startswith(reason)
    assert bool(run.reason) == (kind != "published")


def test_a_failed_run_is_left_out_with_its_kind() -> None:
    (run,) = collection(failed(jobs("erm", "umnist")[0], "out_of_memory")).runs
    assert (run.kind, run.reason) == ("left out", "failed (out_of_memory)")


@pytest.mark.parametrize(
    ("seed", "reason"), [(10, "a seed that is not shown here"), (100, "development seed")]
)
def test_seeds_have_roles(seed: int, reason: str) -> None:
    (job,) = expand(Request(("erm",), ("umnist",), (seed,), NO_DATA))
    (run,) = collection(record(job, 90.0)).runs
    assert (run.kind, run.reason) == ("left out", reason)


def test_a_report_can_keep_to_the_papers_seeds() -> None:
    made = [record(job, 90.0) for job in jobs("erm", "umnist", 10)]
    assert len(collection(*made).of_kind("published")) == 10
    runs = collect(MadeUpStore(Path("runs"), made), seeds=range(5))
    assert [run.job.seed for run in runs.of_kind("published")] == [0, 1, 2, 3, 4]
    assert {run.reason for run in runs.of_kind("left out")} == {"a seed that is not shown here"}


def test_settings_changed_by_hand_are_named() -> None:
    (job,) = changed_jobs("erm", "umnist", (0,), lr="0.123", batch_size="7")
    (run,) = collection(record(job, 90.0)).runs
    usual = jobs("erm", "umnist")[0].method_config()
    assert run.reason == (
        f"settings changed by hand: batch_size 7, preset now {usual.batch_size}; "
        f"lr 0.123, preset now {usual.lr}"
    )


def with_identity(**changes: Any) -> Any:
    """A record whose identity had other parts when it was made."""
    job = jobs("erm", "umnist")[changes.get("seed", 0)]
    config = {**job.identity["config"], **changes.pop("config", {})}  # type: ignore[dict-item]
    older = replace(job, identity={**job.identity, "config": config, **changes})
    return record(replace(older, version=changes.get("version", job.version)), 90.0)


def test_a_preset_that_changed_since_is_named_field_by_field() -> None:
    usual = jobs("erm", "umnist")[0].identity["config"]
    assert isinstance(usual, dict)
    made = with_identity(config={"method": {**usual["method"], "lr": 0.5}})
    assert collection(made).runs[0].reason == f"lr 0.5, preset now {usual['method']['lr']}"


def test_an_earlier_version_stands_until_todays_has_as_many_seeds() -> None:
    now = jobs("erm", "umnist")[0].version
    alone = collection(with_identity(version=0))
    (run,) = alone.published("erm", "umnist")
    assert run.outdated == f"version 0, now {now}"
    assert f"ERM on UMNIST (version 0, now {now})" in alone.outdated_note([run.run_id])
    older, newer = with_identity(version=0), record(jobs("erm", "umnist")[1], 80.0)
    both = collection(older, newer)
    assert [run.reason for run in both.runs] == [f"version 0, now {now}", ""]
    assert both.outdated_note(run.run_id for run in both.runs) == ""
    fewer = collection(older, with_identity(version=0, seed=1), newer)
    assert [run.job.version for run in fewer.published("erm", "umnist")] == [0, 0]
    assert "fewer runs so far than the earlier version" in [run.reason for run in fewer.runs]


def test_columns_of_a_campaign_are_of_one_version() -> None:
    """Of the earlier one while today's has fewer runs of the campaign, wherever its cell stands."""
    usual = jobs("erm", "umnist")[:3]
    changed = changed_jobs("erm", "umnist", (0, 1, 2), lr="0.123")
    now = [record(job, 80.0) for job in usual]
    new = [record(job, 90.0) for job in changed]
    earlier = [
        record(replace(job, version=0, identity={**job.identity, "version": 0}), 70.0)
        for job in (*usual, *changed)
    ]
    columns = [
        VariantSpec("sweep", lr, "erm", "umnist", {"erm.lr": lr}, (0, 1, 2))
        for lr in ("0.002", "0.123")
    ]

    def shown(*made: Any) -> tuple[list[float | None], ...]:
        runs = collection(*made, variants=columns)
        found = (runs.variant("sweep", spec.variant, "umnist") for spec in columns)
        places = (runs.published("erm", "umnist"), *found)
        return tuple([run.record.test.get("wga") for run in place] for place in places)

    assert shown(*now, *earlier) == ([80.0] * 3, [70.0] * 3, [70.0] * 3)
    assert shown(*now, *earlier, *new[:2]) == ([80.0] * 3, [70.0] * 3, [70.0] * 3)
    assert shown(*now, *earlier, *new) == ([80.0] * 3, [80.0] * 3, [90.0] * 3)


def test_runs_of_an_earlier_version_agree_on_their_settings() -> None:
    usual = jobs("erm", "umnist")[0].identity["config"]
    assert isinstance(usual, dict)
    odd = with_identity(version=0, config={"method": {**usual["method"], "lr": 0.5}})
    alike = [with_identity(version=0, seed=seed) for seed in (0, 1)]
    runs = collection(*alike, odd)
    assert [run.record for run in runs.published("erm", "umnist")] == alike
    assert "settings unlike those of the other runs" in runs.runs[-1].reason


def test_other_data_is_named_by_the_setting_that_makes_it_other() -> None:
    request = Request(("erm",), ("cmnist",), (0,), NO_DATA, overrides={"cmnist.protocol": "cnc"})
    (run,) = collection(record(expand(request)[0], 90.0)).runs
    assert run.reason == "settings changed by hand: cmnist.protocol cnc, now nominal"
    assert collection(with_identity(fingerprint="x")).runs[0].reason.startswith("fingerprint x, ")


def test_a_method_that_is_no_longer_registered_is_left_out() -> None:
    job = jobs("erm", "umnist")[0]
    gone = replace(job, method="gone", identity={**job.identity, "method": "gone"})
    (run,) = collection(record(gone, 90.0)).runs
    assert run.kind == "left out" and "unknown method 'gone'" in run.reason


def test_a_campaigns_run_stands_in_its_column_alone() -> None:
    made = [record(job, 60.0) for job in changed_jobs("erm", "umnist", range(4), lr="0.123")]
    runs = collection(*made, variants=SWEEP)
    assert [run.kind for run in runs.runs] == ["variant"] * 3 + ["left out"]  # three seeds
    assert [run.job.seed for run in runs.variant("sweep", "lr=0.123", "umnist")] == [0, 1, 2]
    assert runs.published("erm", "umnist") == []


def test_a_default_column_holds_the_main_runs() -> None:
    usual = str(jobs("erm", "umnist")[0].method_config().lr)
    column = VariantSpec("s", "same", "erm", "umnist", {"erm.lr": usual}, (0, 1), (0, 1, 2, 3))
    made = [record(job, 95.0) for job in jobs("erm", "umnist")]
    runs = collection(*made, variants=[column])
    assert {run.kind for run in runs.runs} == {"published"}
    assert [run.job.seed for run in runs.variant("s", "same", "umnist")] == [0, 1, 2, 3]
    shorter = collection(*made, variants=[replace(column, default_seeds=())])
    assert [run.job.seed for run in shorter.variant("s", "same", "umnist")] == [0, 1]


def test_runs_of_another_preset_do_not_mix_with_the_papers() -> None:
    first, second = jobs("erm", "umnist")[:2]
    tuned = record(second, 99.0, preset="tuned")
    assert [r.kind for r in collection(tuned).runs] == ["published"]
    runs = collection(record(first, 90.0), tuned)
    assert [run.kind for run in runs.runs] == ["published", "left out"]
    assert "paper's preset" in runs.runs[1].reason


@pytest.fixture
def plug_in() -> Iterator[str]:
    """A method without a preset anywhere."""
    erm = type(get_method("erm"))
    METHODS["plugged"] = type("Plugged", (erm,), {"name": "plugged", "title": "Plugged in"})()
    yield "plugged"
    del METHODS["plugged"]
    jobs.cache_clear()


def test_a_method_without_a_preset_is_published_with_its_defaults(plug_in: str) -> None:
    made = [record(job, 90.0) for job in jobs(plug_in, "umnist", 2)]
    assert {one.job.preset for one in made} == {DEFAULT_PRESET}
    table = main_results(given(collection(*made)))
    (row,) = [row for row in table.rows if row.header[0] == "Plugged in"]
    (cell,) = [c for c in row.cells if (c.key.dataset, c.key.metric) == ("umnist", "wga")]
    assert (cell.mean, cell.n, cell.note) == (90.0, 2, "default settings")


@pytest.fixture
def sixth_dataset() -> Iterator[str]:
    """A dataset that no file of this repository names."""
    umnist = type(get_dataset("umnist"))
    register(type("Sixth", (umnist,), {"name": "sixth", "title": "Sixth", "order": 99}))
    yield "sixth"
    del DATASETS["sixth"]
    jobs.cache_clear()


def test_a_dataset_from_elsewhere_gets_its_columns(sixth_dataset: str) -> None:
    made = [record(job, 80.0) for job in jobs("erm", sixth_dataset, 2)]
    table = main_results(given(collection(*made)))
    assert [(c.group, c.title) for c in table.columns[-2:]] == [("Sixth", "WGA"), ("Sixth", "Avg")]
    (row,) = [row for row in table.rows if row.header[0] == "ERM"]
    assert [(cell.mean, cell.note) for cell in row.cells[-2:]] == [
        (80.0, "default settings"),
        (82.0, "default settings"),
    ]


def test_absence_names_what_became_of_the_runs() -> None:
    first, second = jobs("erm", "umnist")[:2]
    runs = collection(failed(first, "data"), record(second, 1.0, standin=True))
    assert runs.absence("erm", "umnist") == (
        "no run that may stand here (1 failed (data), 1 stand-in data)"
    )
    assert runs.absence("jtt", "umnist") == "not run"


def test_runs_on_data_that_is_not_the_release_are_left_out() -> None:
    """Even under the release's own protocol and id."""
    job = jobs("erm", "umnist")[0]
    (run,) = collection(record(job, 90.0, data_kind="rebuilt")).runs
    assert (run.kind, run.reason) == ("left out", "data that is not the release: rebuilt")


def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(record(jobs("erm", "umnist")[0], 90.0))
    (store.runs / "broken").mkdir()
    (store.runs / "broken" / "record.json").write_text("{")
    runs = collect(store)
    assert [run.kind for run in runs.runs] == ["published"]
    assert [one.run_id for one in runs.unreadable] == ["broken"]
    assert (runs.count("published"), runs.count("left out")) == (1, 1)


def test_settings_are_resolved_once_for_each_preset_and_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Request] = []

    def counted(request: Request) -> Any:
        asked.append(request)
        return expand(request)

    monkeypatch.setattr(module, "expand", counted)
    made = [record(job, 1.0) for m in ("erm", "jtt") for job in jobs(m, "umnist")]
    collection(*made, Unreadable("x", Path("x"), "damaged"), variants=SWEEP)
    assert len(asked) == 2 + len(SWEEP)  # a preset each, and the columns of ERM
    assert all(request.seeds == (0,) for request in asked)


def test_tables_beside_a_record_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = Store(tmp_path), record(jobs("erm", "umnist")[0], 90.0, git=CLEAN)
    frame = pd.DataFrame({"id": [0], "split": ["test"], "y": [1]})
    store.write(made, frame.drop(columns="id"), predictions=frame)
    read: list[Path] = []
    whole = pd.read_parquet
    monkeypatch.setattr(pd, "read_parquet", lambda path, **_: read.append(path) or whole(path))
    run = collect(store).runs[0]
    for columns in (["id"], ["split", "y"], None):
        table = run.predictions(columns)
        assert table is not None and list(table) == (columns or ["id", "split", "y"])
        assert run.history() is not None
    assert sorted(path.stem for path in read) == ["history", "predictions"]
    clear_cached_tables()
    assert run.history() is not None and len(read) == 3
