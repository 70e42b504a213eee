"""Records come back as they were written, those of schema 1 included, and damage costs one run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records import a_job, a_record

from bench.job import NO_DATA, Request, expand
from bench.provenance import code_digest
from bench.record import (
    SCHEMA_VERSION,
    Metrics,
    Record,
    Selection,
    Status,
    Unreadable,
    code_of,
    failed_record,
    new_record,
    read_record,
)
from bench.resources import published_folder
from datasets.catalogue import get_dataset
from datasets.errors import BenchError
from datasets.files import digest, to_json
from methods.base import METHODS, Supervision, get_method, register

PUBLISHED = sorted((published_folder() / "runs").glob("*/record.json"))


def again(record: Record) -> Record:
    return Record.from_json(json.loads(to_json(record.to_json())))


def test_round_trip_of_every_published_record() -> None:
    assert len(PUBLISHED) >= 214
    for path in PUBLISHED:
        raw = json.loads(path.read_text())
        record = read_record(path)
        assert isinstance(record, Record), record
        written = json.loads(to_json(record.to_json()))
        assert written["schema_version"] == SCHEMA_VERSION
        added = ("schema_version", "checksum")  # by what writes the file
        changed = [k for k in raw if k not in added and written.get(k) != raw[k]]
        assert not changed, f"{path.parent.name}: {changed}"
        assert again(record).to_json() == record.to_json()


def test_id_is_the_digest_of_the_stored_identity() -> None:
    for path in PUBLISHED:
        record = read_record(path)
        assert isinstance(record, Record)
        assert record.run_id == path.parent.name == record.job.run_id
        assert path.parent.name.endswith(f"-{digest(record.job.identity, 10)}")


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED, Status.RUNNING])
def test_typed_record_comes_back(status: Status) -> None:
    record = a_record(status, details={"mine": {"errors": 3}})
    read = again(record)
    assert replace(read, stored_id="") == replace(
        record, provenance=replace(record.provenance, device=read.provenance.device)
    )
    assert read.job.supervision == Supervision()


def test_unknown_keys_inside_parts_survive() -> None:
    raw = json.loads(to_json(a_record().to_json()))
    raw["environment"]["flags"] = "avx2"
    raw["stages"][0]["energy"] = 1.5
    raw["selection"]["ties"] = 2
    raw["metrics"]["test"]["wga_new"] = 7.5
    raw["later"] = {"any": ["thing"]}
    written = json.loads(to_json(Record.from_json(raw).to_json()))
    assert written == raw


def stored(root: Path, raw: dict[str, Any]) -> Path:
    path = root / a_job().run_id / "record.json"
    path.parent.mkdir()
    path.write_text(json.dumps(raw))
    return path


def test_record_of_an_earlier_version_has_no_checksum(tmp_path: Path) -> None:
    raw = json.loads(to_json(a_record().to_json()))
    assert isinstance(read_record(stored(tmp_path, raw)), Record)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "many"},
        {"seed": None},
        {"config": None},
        {"metrics": 3},
        {"stages": [{"name": "fit"}]},
        {"status": "perhaps"},
        {"git": []},
        {"files": ["history.parquet"]},
        {"files": {"history.parquet": {"bytes": 3}}},
        {"schema_version": 1, "config": {"backbone": 3}},
        {"supervision": {"train_groups": "so"}},
    ],
)
def test_wrong_field_makes_an_unreadable_record(tmp_path: Path, change: dict[str, Any]) -> None:
    raw = json.loads(to_json(a_record().to_json())) | change
    found = read_record(stored(tmp_path, raw))
    assert isinstance(found, Unreadable)
    assert found.reason and "is the record of" not in found.reason


@pytest.mark.parametrize("name", ["method", "dataset", "seed", "config", "git", "identity"])
def test_missing_field_makes_an_unreadable_record(tmp_path: Path, name: str) -> None:
    raw = json.loads(to_json(a_record().to_json()))
    del raw[name]
    found = read_record(stored(tmp_path, raw))
    assert isinstance(found, Unreadable) and "is the record of" not in found.reason


def test_newer_schema_asks_for_an_update(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    found = read_record(path)
    assert isinstance(found, Unreadable)
    assert "update nct-bench" in found.reason


def test_no_file_is_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path / "record.json") is None


def test_failed_record_says_what_to_do() -> None:
    record = failed_record(a_job(), BenchError("no luck", "try again"), 0.0, "--results here")
    assert record.failure is not None
    assert (record.failure.message, record.failure.remedy) == ("no luck", "try again")
    assert record.failure.command.endswith("--seeds 0, --results here --rerun failed")
    assert not record.failure.interrupted
    memory = failed_record(a_job(), RuntimeError("can't allocate memory: 5 GB"), 0.0)
    assert memory.failure is not None and memory.failure.kind == "out_of_memory"


def test_development_seed_shows_what_the_tier_grants() -> None:
    metrics = Metrics({"wga": 1.0, "avg": 2.0, "worst_class": 1.5})
    outcome = a_record().outcome
    assert outcome is not None
    for method, shown in (("erm", {"avg", "worst_class", "selection"}), ("jtt", {"wga", "avg"})):
        job = a_job(method, seed=100)
        record = a_record(job=job, outcome=replace(outcome, metrics={"val": metrics}))
        assert shown <= set(record.shown_metrics())
        assert ("wga" in record.shown_metrics()) == (method == "jtt")


def test_value_that_is_not_finite_can_be_read_again() -> None:
    outcome = a_record().outcome
    assert outcome is not None
    record = a_record(outcome=replace(outcome, selection=Selection("val_auroc", math.nan, 3)))
    read = again(record)
    assert read.selection == Selection("val_auroc", None, 3)


def test_the_code_of_a_run_includes_the_plug_in_it_hangs_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (job,) = expand(Request(("erm",), ("umnist",), (0,), NO_DATA))
    assert code_of(job) == code_digest()
    monkeypatch.setattr(get_method("erm"), "distribution", "elsewhere")
    (outside,) = expand(Request(("erm",), ("umnist",), (0,), NO_DATA))
    own, _, theirs = code_of(outside).partition("+")
    assert own == code_digest() and len(theirs) == 16
    monkeypatch.setattr(get_dataset("umnist"), "distribution", "somewhere")
    (outside,) = expand(Request(("erm",), ("umnist",), (0,), NO_DATA))
    assert len({*code_of(outside).split("+")}) == 3, "the dataset's code is another package's"


def test_a_method_that_a_program_defines_is_not_taken_for_ours() -> None:
    kind = type("Here", (type(get_method("erm")),), {"__module__": __name__})
    register("here", version=1, config=get_method("erm").config_type)(kind)
    try:
        (job,) = expand(Request(("here",), ("umnist",), (0,), NO_DATA))
        record = new_record(job, Status.RUNNING)
        code = code_of(job)
    finally:
        METHODS.pop("here")
    plugin = record.provenance.plugin
    assert plugin is not None and job.identity["plugin"] == {"method": __name__}
    assert (plugin.distribution, plugin.version) == (__name__, None)
    assert plugin.digest and code == f"{code_digest()}+{plugin.digest}"
