from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import a_job, a_record, named
from safetensors.torch import load_file

from bench.record import RECORD_KEYS, Record, Status, Unreadable
from bench.store import Store, write_samples
from datasets.errors import UsageError
from datasets.files import (
    FileFacts,
    append_line,
    atomic_file,
    atomic_folder,
    read_lines,
    to_json,
)
from datasets.lock import Lock

RUN = "erm-cmnist-s0-0123456789"
KNOWN = RECORD_KEYS

# A process of its own, so that forking is safe: nothing in it has started a thread before.
KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
import pandas as pd
import torch
from bench.store import Store
sys.path.insert(0, sys.argv[2])
from records import a_record, named

whole = a_record(details={"filler": ["x" * 50] * 2000})
store = Store(Path(sys.argv[1]))
rng = random.Random(0)
frame = pd.DataFrame({"value": range(20_000)})
model = {"weight": torch.zeros(200_000)}
for trial in range(20):
    child = os.fork()
    if child == 0:
        number = 0
        while True:
            name = f"run-{trial}-{number % 3}"  # the later ones replace the earlier
            store.write(named(whole, name), frame, frame, frame, model)
            number += 1
    time.sleep(rng.uniform(0.05, 0.6))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def hold_lock(root: Path, held: Any, release: Any) -> None:
    with Store(root).lock(RUN).hold(wait=False):
        held.set()
        release.wait(60)


def test_killed_writers_leave_no_half_run(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", KILLED_WRITERS, str(tmp_path), str(Path(__file__).parent)],
        check=True,
        timeout=120,
    )
    store = Store(tmp_path)
    records = list(store.records())
    visible = [p for p in store.runs.iterdir() if not p.name.startswith(".")]
    assert len(records) == len(visible) >= 5
    assert any(p.name.startswith(".") for p in store.runs.iterdir()), "no writer was interrupted"
    for record, folder in zip(records, sorted(visible), strict=True):
        assert record.run_id == folder.name
        assert len(pd.read_parquet(folder / "history.parquet")) == 20_000
        assert len(pd.read_parquet(folder / "predictions.parquet")) == 20_000
        assert load_file(folder / "model.safetensors")["weight"].shape == (200_000,)


@pytest.mark.parametrize("before", [None, "old"])
def test_failed_write_of_a_file_keeps_the_old_content(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "file"
    if before:
        path.write_text(before)
    with pytest.raises(ZeroDivisionError), atomic_file(path) as draft:
        draft.write_text("half")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == (["file"] if before else [])
    assert not before or path.read_text() == before


@pytest.mark.parametrize("before", [None, "old"])
def test_failed_write_of_a_folder_keeps_the_old_content(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "folder"
    if before:
        path.mkdir()
        (path / "content").write_text(before)
    with pytest.raises(ZeroDivisionError), atomic_folder(path) as draft:
        (draft / "content").write_text("half")
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == (["folder"] if before else [])
    assert not before or (path / "content").read_text() == before


def test_written_folder_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_folder(tmp_path / "folder") as draft:
            (draft / content).write_text(content)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == [
        "folder",
        "folder/second",
    ]


@pytest.mark.parametrize("content", ["", "{", '{"run_id": ', "\x00\x01", "[]", '{"a": 1}'])
def test_broken_record_costs_one_run(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    store.write(a_record())
    folder = store.runs / RUN
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    assert store.record(RUN) is None
    assert [record.run_id for record in store.records()] == [a_job().run_id]
    (broken,) = [found for found in store.read_all() if isinstance(found, Unreadable)]
    assert (broken.run_id, broken.path) == (RUN, folder / "record.json")
    assert broken.reason
    found = store.all_statuses({})[RUN]
    assert found.status is Status.MISSING and broken.reason in found.reason


def test_record_knows_length_and_sha256_of_the_files_beside_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table = pd.DataFrame({"value": range(20)})
    path = store.write(a_record(), table, table, model={"weight": torch.ones(3)})
    record = store.record(a_job().run_id)
    assert record is not None
    assert set(record.files) == {"history.parquet", "predictions.parquet", "model.safetensors"}
    for name, facts in record.files.items():
        content = (path / name).read_bytes()
        assert facts == FileFacts(len(content), hashlib.sha256(content).hexdigest())
    assert "files" not in a_record().to_json()  # where nothing is known, nothing is claimed


@pytest.mark.parametrize(
    ("old", "new"), [('"wga": 10.0', '"wga": 99.0'), ('"seed": 0', '"seed": 1'), ('"avg"', '"abg"')]
)
def test_any_change_of_a_record_is_noticed(tmp_path: Path, old: str, new: str) -> None:
    store = Store(tmp_path)
    file = store.write(a_record()) / "record.json"
    assert isinstance(store.read(a_job().run_id), Record)
    file.write_text(file.read_text().replace(old, new, 1))
    found = store.read(a_job().run_id)
    assert isinstance(found, Unreadable) and "checksum" in found.reason


def test_record_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(a_record())
    os.replace(path, store.runs / RUN)
    found = store.read(RUN)
    assert isinstance(found, Unreadable) and a_job().run_id in found.reason


def test_status_follows_a_run_through_its_life(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.status_of(RUN).status == "missing"
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold_lock, args=(tmp_path, held, release))
    other.start()
    assert held.wait(60)
    assert store.status_of(RUN).status == "running"
    with atomic_file(store.work / RUN / "progress.json") as draft:
        draft.write_text(to_json({"stage": "erm", "epoch": 3}))
    assert store.progress(RUN)["epoch"] == 3
    other.kill()  # as the kernel does when memory runs out: nothing is cleaned up
    other.join()
    assert store.status_of(RUN).status == "preempted"
    store.write(named(a_record(Status.FAILED), RUN))
    assert store.status_of(RUN).status == "failed"
    store.write(named(a_record(Status.DONE), RUN))
    assert store.status_of(RUN).status == "done"
    store.delete_checkpoints(RUN)
    assert store.status_of(RUN).status == "done"
    assert not (store.work / RUN).exists()


def test_find_takes_the_beginning_or_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = ("erm-cmnist-s0-aaaa", "erm-cmnist-s1-bbbb", "erm-cmnist-s1-bbbbcc")
    for name in names:
        store.write(named(a_record(), name))
    (store.runs / "erm-umnist-s0-empty").mkdir()  # what a person left there is no run
    assert store.find("erm-cmnist-s0") == names[0]
    assert store.find("aaaa") == names[0]
    assert store.find("erm-cmnist-s1-bbbb") == names[1]  # a whole id wins over a longer one
    with pytest.raises(UsageError, match="3 runs match 'erm'"):
        store.find("erm")
    with pytest.raises(UsageError, match="no run matches 'erm-umnist'"):
        store.find("erm-umnist")


def test_model_and_tables_come_back(tmp_path: Path) -> None:
    model = {"weight": torch.arange(6.0).reshape(2, 3).t()}  # not contiguous
    history = pd.DataFrame({"epoch": [0, 1], "loss": [0.5, None]})
    path = Store(tmp_path).write(named(a_record(), RUN), history, history, model=model)
    assert torch.equal(load_file(path / "model.safetensors")["weight"], model["weight"])
    pd.testing.assert_frame_equal(pd.read_parquet(path / "history.parquet"), history)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"epoch": 0, "loss": math.nan})
    append_line(path, {"epoch": 1})
    path.write_text(path.read_text() + '{"epoch": 2, "lo')
    assert read_lines(path) == [{"epoch": 0, "loss": None}, {"epoch": 1}]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def without_non_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@settings(max_examples=60, deadline=None)
@given(extra=st.dictionaries(st.text().filter(lambda name: name not in KNOWN), values, max_size=5))
def test_what_a_record_does_not_know_survives(
    tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any]
) -> None:
    record = a_record(details=extra)
    store = Store(tmp_path_factory.mktemp("store"))
    store.write(record)
    (read,) = store.records()
    assert read.details == without_non_finite(extra)
    assert json.loads(to_json(read.to_json())) == json.loads(to_json(record.to_json()))


def test_tidy_puts_a_half_replaced_run_back_and_drops_drafts_of_the_dead(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check_writable()
    # As a writer leaves it that was killed between its two renames.
    old = store.runs / ".erm-umnist-s0-0123456789.deadbeef.old"
    old.mkdir()
    whole = named(a_record(), "erm-umnist-s0-0123456789").to_json()
    (old / "record.json").write_text(to_json(whole))
    drafts = {name: store.runs / f".{name}.11111111.part" for name in ("abandoned", "written")}
    stages = {name: store.stages / f".{name}.11111111.part" for name in drafts}
    for folder in (*drafts.values(), *stages.values()):
        folder.mkdir()
    with (
        store.lock("written").hold(wait=False),
        Lock(store.stages / "written.lock").hold(wait=False),
    ):
        store.check_writable()
    assert store.status_of("erm-umnist-s0-0123456789").status == "done"
    assert not drafts["abandoned"].exists() and not stages["abandoned"].exists()
    assert drafts["written"].exists() and stages["written"].exists()


@pytest.mark.parametrize("state", ["done", "failed", "made again", "locked"])
def test_checkpoints_that_a_killed_worker_left_of_a_finished_run_are_dropped(
    tmp_path: Path, state: str
) -> None:
    """As it leaves them when it dies right after it has stored the run; all others stay."""
    store = Store(tmp_path)
    store.check_writable()
    audit, work, stage = store.audits / f"{RUN}.jsonl", store.work / RUN, store.stages / "erm-1"
    for file in (audit, work / "progress.json", work / "a.checkpoint", stage / "stage.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    half = store.stages / "erm-1.work"
    half.mkdir()
    store.write(named(a_record(status=Status.FAILED if state == "failed" else Status.DONE), RUN))
    for begun in (work / "progress.json", half):
        seconds = time.time() + (60 if state == "made again" else -60)
        os.utime(begun, (seconds, seconds))
    locks = (store.lock(RUN), Lock(store.stages / "erm-1.lock")) if state == "locked" else ()
    with contextlib.ExitStack() as held:
        for lock in locks:
            held.enter_context(lock.hold(wait=False))
        store.check_writable()
    kept = state != "done"
    assert (work.exists(), audit.exists()) == (kept, kept)
    assert half.exists() is (state in ("made again", "locked"))


def test_a_prefix_means_the_run_with_its_presets_settings(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(named(a_record(job=a_job()), "nct-umnist-s0-aa"))
    store.write(named(a_record(job=a_job("nct", z="1.0")), "nct-umnist-s0-bb"))
    assert store.find("nct-umnist-s0") == "nct-umnist-s0-aa"
    assert store.find("nct-umnist-s0-b") == "nct-umnist-s0-bb"
    store.write(named(a_record(job=a_job()), "nct-umnist-s0-cc"))
    with pytest.raises(UsageError, match="3 runs match"):
        store.find("nct-umnist-s0")


def test_of_two_versions_a_prefix_means_the_latest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = a_job()
    store.write(named(a_record(job=replace(job, version=1)), "nct-umnist-s0-bb"))
    store.write(named(a_record(job=replace(job, version=2)), "nct-umnist-s0-aa"))
    store.write(named(a_record(job=a_job("nct", z="1.0")), "nct-umnist-s0-cc"))
    assert store.find("nct-umnist-s0") == "nct-umnist-s0-aa"


def test_a_prefix_never_means_another_seed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(named(a_record(job=a_job("nct", z="1.0")), "nct-umnist-s1-aa"))
    store.write(named(a_record(job=a_job()), "nct-umnist-s100-bb"))
    with pytest.raises(UsageError, match="2 runs match"):
        store.find("nct-umnist-s1")


def some_samples(count: int, scores: str = "float16") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": np.sort(rng.choice(10 * count, count, replace=False)),
            "split": ["val"] * (count // 2) + ["test"] * (count - count // 2),
            "y": rng.integers(2, size=count).astype("int16"),
            "score_0": rng.normal(4, 2, count).astype(scores),
            "score_1": np.where(rng.random(count) < 0.1, np.nan, -np.inf).astype(scores),
        }
    )


@pytest.mark.parametrize("scores", ["float16", "float32"])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_nothing_is_lost(count: int, scores: str, tmp_path: Path) -> None:
    table = some_samples(count, scores)
    write_samples(table, tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_ids_need_not_be_numbers_or_in_order(tmp_path: Path) -> None:
    named = pd.DataFrame({"id": ["b", "a"], "part": [1, 0]})
    numbered = pd.DataFrame({"id": [2**62, -5, 7], "part": [1, 0, 2]})
    for table in (named, numbered):
        write_samples(table, tmp_path / "table.parquet")
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_it_takes_less_room_than_plain_parquet(tmp_path: Path) -> None:
    table = some_samples(20_000)
    write_samples(table, tmp_path / "small.parquet")
    table.to_parquet(tmp_path / "plain.parquet", index=False, compression="zstd")
    sizes = [(tmp_path / f"{name}.parquet").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < 0.7 * sizes[1]
