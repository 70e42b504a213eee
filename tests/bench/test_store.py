from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bench.files import (
    StorageError,
    append_line,
    atomic_file,
    atomic_folder,
    read_lines,
    to_json,
)
from bench.store import Store
from datasets.errors import UsageError

RUN = "erm-cmnist-s0-0123456789"

# A process of its own, so that forking is safe: nothing in it has started a thread before.
KILLED_WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
import pandas as pd
import torch
from bench.store import Store

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
            record = {"run_id": name, "status": "done", "filler": ["x" * 50] * 2000}
            store.write(record, frame, frame, frame, model)
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
    subprocess.run([sys.executable, "-c", KILLED_WRITERS, str(tmp_path)], check=True, timeout=120)
    store = Store(tmp_path)
    records = list(store.records())
    visible = [p for p in store.runs.iterdir() if not p.name.startswith(".")]
    assert len(records) == len(visible) >= 5
    assert any(p.name.startswith(".") for p in store.runs.iterdir()), "no writer was interrupted"
    for record, folder in zip(records, sorted(visible), strict=True):
        assert record["run_id"] == folder.name
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


@pytest.mark.parametrize("content", ["", "{", '{"run_id": ', "\x00\x01"])
def test_broken_record_says_what_to_delete(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    for read in (lambda: Store(tmp_path).record(RUN), lambda: list(Store(tmp_path).records())):
        with pytest.raises(StorageError) as caught:
            read()
        assert str(folder / "record.json") in caught.value.message
        assert str(folder) in caught.value.remedy


def test_status_follows_a_run_through_its_life(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.status(RUN) == "missing"
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold_lock, args=(tmp_path, held, release))
    other.start()
    assert held.wait(60)
    assert store.status(RUN) == "running"
    with atomic_file(store.work / RUN / "progress.json") as draft:
        draft.write_text(to_json({"stage": "erm", "epoch": 3}))
    assert store.progress(RUN)["epoch"] == 3
    other.kill()  # as the kernel does when memory runs out: nothing is cleaned up
    other.join()
    assert store.status(RUN) == "preempted"
    store.write({"run_id": RUN, "status": "failed"})
    assert store.status(RUN) == "failed"
    store.write({"run_id": RUN, "status": "done"})
    assert store.status(RUN) == "done"
    store.forget_work(RUN)
    assert store.status(RUN) == "done"
    assert not (store.work / RUN).exists()


def test_find_takes_the_beginning_or_the_end(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = ("erm-cmnist-s0-aaaa", "erm-cmnist-s1-bbbb", "erm-cmnist-s1-bbbbcc")
    for name in names:
        store.write({"run_id": name, "status": "done"})
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
    path = Store(tmp_path).write({"run_id": RUN, "status": "done"}, history, history, model=model)
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
@given(extra=st.dictionaries(st.text(), values, max_size=5))
def test_records_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any]
) -> None:
    record = {**extra, "run_id": RUN, "status": "done"}
    store = Store(tmp_path_factory.mktemp("store"))
    store.write(record)
    assert list(store.records()) == [without_non_finite(record)]
    assert json.loads(to_json(record)) == without_non_finite(record)


def test_tidy_puts_a_half_replaced_run_back_and_drops_old_drafts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check_writable()
    # As a writer leaves it that was killed between its two renames.
    old = store.runs / ".erm-umnist-s0-0123456789.deadbeef.old"
    old.mkdir()
    (old / "record.json").write_text('{"run_id": "erm-umnist-s0-0123456789", "status": "done"}')
    abandoned, fresh = store.runs / ".a.11111111.part", store.runs / ".b.22222222.part"
    abandoned.mkdir()
    fresh.mkdir()
    os.utime(abandoned, (0, 0))
    store.check_writable()
    assert store.status("erm-umnist-s0-0123456789") == "done"
    assert not abandoned.exists()
    assert fresh.exists()


def test_a_prefix_means_the_run_with_its_presets_settings(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write({"run_id": "nct-umnist-s0-aa", "status": "done", "overrides": {}})
    store.write({"run_id": "nct-umnist-s0-bb", "status": "done", "overrides": {"nct.z": "1"}})
    assert store.find("nct-umnist-s0") == "nct-umnist-s0-aa"
    assert store.find("nct-umnist-s0-b") == "nct-umnist-s0-bb"
    store.write({"run_id": "nct-umnist-s0-cc", "status": "done", "overrides": {}})
    with pytest.raises(UsageError, match="3 runs match"):
        store.find("nct-umnist-s0")


def test_a_prefix_never_means_another_seed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write({"run_id": "nct-umnist-s1-aa", "status": "done", "overrides": {"nct.z": "1"}})
    store.write({"run_id": "nct-umnist-s100-bb", "status": "done", "overrides": {}})
    with pytest.raises(UsageError, match="2 runs match"):
        store.find("nct-umnist-s1")
