"""`check`, `publish` and `clean` from the command line."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.cli.parser import CLEANED
from bench.job import NO_DATA, Job, Request, expand
from bench.record import SCHEMA_VERSION
from bench.resources import published_folder
from bench.store import Store
from datasets.lock import Lock

Cli = Callable[..., Any]
EARLIER = Path(__file__).parents[2] / "schema_1"  # runs published before records had a checksum
MAIN = "erm-cmnist-s1-952869a555"
SETTINGS = {"nct.heads": "mlp"}  # a column of a campaign


def variant_job(**settings: str) -> Job:
    request = Request(("nct",), ("cmnist",), (0,), NO_DATA, overrides={**SETTINGS, **settings})
    return expand(request)[0]


VARIANT = variant_job().run_id
NOWHERE = ("--data-root", os.devnull)


@pytest.fixture
def own(tmp_path: Path) -> Store:
    """A store with two runs that may be published: a main run and a campaign's variant."""
    published, store = published_folder() / "runs", Store(tmp_path / "own")
    shutil.copytree(EARLIER / MAIN, store.runs / MAIN)
    # Whichever run of the method is published, as if it had been made with these settings.
    shutil.copytree(next(iter(sorted(published.glob("nct-cmnist-s0-*")))), store.runs / VARIANT)
    make_run_of(store, VARIANT, variant_job())
    return store


def make_run_of(store: Store, name: str, job: Job) -> None:
    """Have a stored run say that it is one of another job."""
    raw = json.loads((store.runs / name / "record.json").read_text())
    own = {"schema_version": SCHEMA_VERSION, "run_id": job.run_id, "command": job.command()}
    stages = [{**raw["stages"][-1], "key": job.run_id}]
    edit(store, name, **{**job.to_json(), **own, "stages": stages})
    (store.runs / name).rename(store.runs / job.run_id)


def edit(store: Store, name: str, **values: Any) -> None:
    path = store.runs / name / "record.json"
    raw = {**json.loads(path.read_text()), **values}
    raw.pop("checksum", None)
    path.write_text(json.dumps(raw))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_check_prints_a_line_for_each_problem(cli: Cli, own: Store) -> None:
    told = cli("check", own.root, *NOWHERE)
    assert (told.code, told.out) == (0, "2 runs checked: 0 problems in 0 of them, 1 notes\n")
    assert "note: made before records had a digest of the code" in told.err
    edit(own, MAIN, seed=2)
    told = cli("check", own.root, *NOWHERE)
    assert told.code == 1
    *lines, summary = told.out.splitlines()
    assert lines and all(line.startswith(f"{MAIN}: ") for line in lines)
    assert summary.startswith(f"2 runs checked: {len(lines)} problems in 1 of them")
    found = cli("check", own.root, "--json", *NOWHERE)
    assert (found.code, found.json["ok"], found.json["runs"]) == (1, False, 2)
    assert {one["run_id"] for one in found.json["problems"]} == {MAIN}


def test_check_of_nothing_is_wrong_use(cli: Cli, tmp_path: Path) -> None:
    told = cli("check", tmp_path / "nowhere")
    assert told.code == 2
    assert "there are no runs in" in told.err and "-> give a results folder" in told.err
    shutil.copytree(published_folder() / "runs" / MAIN, tmp_path / MAIN)
    assert cli("check", tmp_path / MAIN, "--recompute", -1).code == 2


def test_publish_copies_checked_runs_and_writes_the_table(
    cli: Cli, own: Store, tmp_path: Path
) -> None:
    (own.runs / MAIN / "notes.txt").write_text("not the run's")
    before, target = content(own.root), tmp_path / "published"
    told = cli("publish", own.root, "--to", target, *NOWHERE)
    assert told.code == 0, told.out + told.err
    assert f"published: {MAIN}" in told.out
    assert "2 published, 0 already there, 0 refused" in told.out
    assert content(own.root) == before, "nothing is taken away"
    del before[f"runs/{MAIN}/notes.txt"]
    published = content(target)
    table = published.pop("results.csv")
    assert published == before
    assert list(pd.read_csv(target / "results.csv")["run_id"]) == [MAIN, VARIANT]
    again = cli("publish", own.runs, "--to", target, "--json", *NOWHERE)
    assert (again.code, again.json["already_there"]) == (0, [MAIN, VARIANT])
    assert (again.json["published"], again.json["table"]) == ([], None)
    assert content(target) == {**published, "results.csv": table}


def test_publish_overwrites_nothing(cli: Cli, own: Store, tmp_path: Path) -> None:
    target = tmp_path / "published"
    assert cli("publish", own.runs / MAIN, "--to", target, *NOWHERE).code == 0
    before = content(target / "runs")
    history = own.history(MAIN)
    assert history is not None
    history.assign(loss=0.5).to_parquet(own.runs / MAIN / "history.parquet", index=False)
    told = cli("publish", own.root, "--to", target, *NOWHERE)
    assert told.code == 1
    reason = "another result is published: history differ in loss"
    assert f"not published: {MAIN}: {reason}" in told.out
    assert f"published: {VARIANT}" in told.out, "what is right is published all the same"
    assert before.items() <= content(target / "runs").items()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"git": {"commit": "0" * 40, "dirty": True}}, "uncommitted changes"),
        ({"quick": True}, "quick run"),
        ({"seed": 2}, "its id is not that of its settings"),
        ({"standin": True}, "stand-in data"),
        ({"status": "failed"}, "failed"),
        ({"label_digest": "0" * 64}, "its label digest is"),
    ],
)
def test_publish_refuses(
    cli: Cli, own: Store, tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    edit(own, MAIN, **values)
    told = cli("publish", own.runs / MAIN, "--to", tmp_path / "published", *NOWHERE)
    assert told.code == 1
    assert told.out.startswith(f"not published: {MAIN}: ")
    assert reason in told.out
    assert not (tmp_path / "published").exists()


def test_publish_refuses_data_that_is_not_the_release(cli: Cli, own: Store, tmp_path: Path) -> None:
    record = own.record(MAIN)
    assert record is not None
    edit(own, MAIN, **replace(record, job=replace(record.job, data_kind="own")).to_json())
    told = cli("publish", own.runs / MAIN, "--to", tmp_path / "published", *NOWHERE)
    reason = "data that is not the release: own"
    assert (told.code, told.out.splitlines()[0]) == (1, f"not published: {MAIN}: {reason}")


def test_publish_refuses_settings_of_no_campaign(cli: Cli, own: Store, tmp_path: Path) -> None:
    """The same as a variant that may be published, but for one value."""
    job = variant_job(**{"nct.z": "1.5"})
    run_id = job.run_id
    make_run_of(own, VARIANT, job)
    assert cli("check", own.runs / run_id, *NOWHERE).code == 0
    told = cli("publish", own.runs / run_id, "--to", tmp_path / "published", *NOWHERE)
    assert told.code == 1
    assert told.out.startswith(f"not published: {run_id}: settings changed by hand: heads mlp")


def fill(folder: Path, size: int = 1000) -> Path:
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(b"0" * size)
    return folder


@pytest.fixture
def full(own: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with something of every kind, and decoded photographs."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_: str(tmp_path / "cache"))
    fill(own.stages / "erm-0123")
    fill(own.stages / "erm-4567.work")
    fill(own.features / "birds-train-0123")
    fill(own.features / "birds-val-4567.work")
    fill(own.work / "erm-cmnist-s9-aaaaaaaaaa")
    fill(own.launches / "ended-1")
    (own.launches / "ended-1" / "launch.json").write_text("{}")
    (own.launches / "ended-1" / "ended").touch()
    own.audits.mkdir()
    for name in ("erm-0123", "erm-cmnist-s9-aaaaaaaaaa", "gone-89ab"):
        (own.audits / f"{name}.jsonl").write_text("0" * 100)
    old, new = fill(own.runs / ".x.1.part"), fill(own.runs / ".x.2.part")
    os.utime(old, (time.time() - 7200,) * 2)
    fill(own.root / "presets")
    fill(own.root / "damaged" / "erm-cmnist-s8-bbbbbbbbbb")
    half = fill(own.runs / ".erm-cmnist-s7-cccccccccc.1.old")
    os.utime(half, (time.time() - 7200,) * 2)
    for ending in (".u8", ".npy", ".json"):
        (tmp_path / "cache" / "decoded" / "abc").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / "decoded" / "abc" / f"train{ending}").write_bytes(b"0" * 500)
    assert new.exists()
    return own


def clean(cli: Cli, store: Store, *words: str) -> dict[str, dict[str, int]]:
    told = cli("clean", *words, "--results", store.root, "--json", *NOWHERE)
    assert told.code == 0, told.err
    return {row.pop("kind"): row for row in told.json["kinds"]}


def test_clean_shows_first(cli: Cli, full: Store) -> None:
    before = content(full.root)
    found = clean(cli, full)
    assert {kind: (row["items"], row["bytes"]) for kind, row in found.items()} == {
        "stages": (1, 1100),
        "features": (1, 1000),
        "work": (3, 3100),
        "audits": (1, 100),
        "launches": (1, 1002),
        "decoded": (1, 1500),
        "leftovers": (2, 2000),
    }
    assert not any(row["freed"] or row["in_use"] for row in found.values())
    assert content(full.root) == before
    told = cli("clean", "--results", full.root, *NOWHERE)
    assert "nothing was freed" in told.err
    assert all(kind in told.out for kind in CLEANED)


def test_clean_frees_what_is_named(cli: Cli, full: Store) -> None:
    found = clean(cli, full, "stages", "audits")
    assert {kind: row["freed"] for kind, row in found.items() if row["freed"]} == {
        "stages": 1100,
        "audits": 100,
    }
    assert not (full.stages / "erm-0123").exists()
    assert (full.stages / "erm-4567.work").exists()
    assert [path.stem for path in full.audits.iterdir()] == ["erm-cmnist-s9-aaaaaaaaaa"]


def test_clean_frees_everything_but_runs(cli: Cli, full: Store, tmp_path: Path) -> None:
    runs = {name: data for name, data in content(full.runs).items() if "part" not in name[:12]}
    clean(cli, full, "--yes")
    assert runs.items() <= content(full.runs).items()
    assert (full.runs / ".x.2.part").exists(), "somebody may be writing it"
    half_replaced = full.runs / ".erm-cmnist-s7-cccccccccc.1.old"
    assert half_replaced.exists(), "it is a run, which `run` puts back"
    assert (full.root / "presets" / "content").exists()
    assert not [*(tmp_path / "cache").rglob("*.u8")]
    left = clean(cli, full)
    assert {row["items"] for row in left.values()} == {0}


def test_clean_leaves_what_a_running_run_may_need(cli: Cli, full: Store) -> None:
    with full.lock("erm-cmnist-s9-aaaaaaaaaa").hold(wait=False):
        found = clean(cli, full, "--yes")
    assert {kind for kind, row in found.items() if row["freed"]} == {"launches"}
    assert (full.features / "birds-train-0123").exists()
    assert (full.work / "erm-cmnist-s9-aaaaaaaaaa" / "content").exists()
    assert (full.stages / "erm-0123").exists()


def test_clean_leaves_what_a_submitted_run_may_need(cli: Cli, full: Store) -> None:
    (full.launches / "ended-1" / "ended").unlink()
    found = clean(cli, full, "--yes")
    assert found["launches"] == {"items": 1, "bytes": 1002, "freed": 0, "in_use": 1}
    assert found["stages"]["freed"] == found["decoded"]["freed"] == 0
    assert (full.stages / "erm-0123").exists()


def test_clean_leaves_a_stage_that_is_being_made(cli: Cli, full: Store) -> None:
    with Lock(full.stages / "erm-4567.lock").hold(wait=False):
        found = clean(cli, full, "--yes")
    assert (full.stages / "erm-4567.work").exists()
    assert (found["work"]["in_use"], found["stages"]["freed"]) == (1, 1100)


def test_clean_does_not_know_other_kinds(cli: Cli, full: Store) -> None:
    told = cli("clean", "runs", "--results", full.root)
    assert told.code == 2
    assert "unknown kind 'runs'" in told.err and "stages, features" in told.err
    assert "did you mean 'stages'" in cli("clean", "stage", "--results", full.root).err
