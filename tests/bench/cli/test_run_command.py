from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.cli import main
from bench.job import Request, expand
from bench.record import Status
from bench.store import Store
from datasets import standins
from datasets.files import read_lines

WaitUntil = Callable[[Callable[[], Any]], Any]
RECORD_FIELDS = {
    *("schema_version", "run_id", "status", "method", "method_version", "supervision", "dataset"),
    *("protocol", "data_fingerprint", "standin", "quick", "preset", "overrides", "variant"),
    *("config", "seed", "seed_tree", "selection", "stages", "peak_memory_bytes", "device"),
    *("threads", "environment", "git", "metrics", "identity", "data_kind", "code", "plugin"),
    *("label_digest", "pixel_digest"),
}
RUN_FIELDS = {"run_id", "method", "dataset", "seed", "variant", "status", "reason", "path"}
GRID_FIELDS = {
    *("total", "done", "failed", "running", "queued", "missing", "runs", "skipped_datasets"),
}


def grid(root: Path, results: Path, *words: str, datasets: str = "cmnist") -> list[str]:
    return [
        *("run", "--methods", "erm", "--datasets", datasets),
        *("--data-root", str(root), "--results", str(results), *words),
    ]


def launcher(words: list[str]) -> subprocess.Popen[str]:
    """Start a real launcher in a session of its own, as a terminal would."""
    return subprocess.Popen(
        [sys.executable, "-m", "bench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run_ids(root: Path, seeds: tuple[int, ...], **overrides: str) -> list[str]:
    settings = {f"erm.{knob}": value for knob, value in overrides.items()}
    request = Request(("erm",), ("cmnist",), seeds, root, overrides=settings)
    return [job.run_id for job in expand(request)]


def statuses(store: Store, ids: list[str]) -> list[Status]:
    return [store.status_of(run_id).status for run_id in ids]


def epochs_of(store: Store, run_id: str) -> int:
    return int(str(store.progress(run_id).get("epoch", 0)))


def descendants(process: int) -> list[int]:
    own = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [d for child in map(int, own) for d in (child, *descendants(child))]


def files_with_times(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")}


def predictions(results: Path, run_id: str) -> pd.DataFrame:
    return pd.read_parquet(results / "runs" / run_id / "predictions.parquet")


class Finished:
    """A grid of two quick runs by two workers, and what the command said."""

    def __init__(self, root: Path, results: Path) -> None:
        self.root, self.results = root, results
        self.options = ("--seeds", "2", "--quick", "--keep-models")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.code = main(grid(root, results, *self.options, "--workers", "2"))
        self.out, self.err = out.getvalue(), err.getvalue()
        self.ids = sorted(p.name for p in (results / "runs").iterdir())

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.results, to / "results"))


@pytest.fixture(scope="module")
def finished(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(digits_root, tmp_path_factory.mktemp("finished") / "results")


def test_table_on_stdout_and_progress_on_stderr(finished: Finished) -> None:
    assert finished.code == 0
    assert "cmnist (quick, stand-in)" in finished.out
    assert "2 of 2" in finished.out
    assert "WGA" in finished.out
    assert len(finished.ids) == 2
    for run_id in finished.ids:
        assert f"start  {run_id}" in finished.err
        assert f"done   {run_id}" in finished.err
        assert run_id not in finished.out
    assert not any((finished.results / "work").iterdir())


def test_second_run_does_nothing(finished: Finished, tmp_path: Path, cli: Any) -> None:
    results = finished.copy(tmp_path)
    before = files_with_times(results / "runs")
    again = cli(*grid(finished.root, results, *finished.options))
    assert again.code == 0
    assert "2 runs: 2 not to be run, 0 to run" in again.err
    assert "start" not in again.err
    assert again.out == finished.out
    assert files_with_times(results / "runs") == before


@pytest.mark.parametrize("rerun", ["never", "failed"])
def test_rerun_that_wants_nothing(rerun: str, digits_root: Path, tmp_path: Path, cli: Any) -> None:
    told = cli(*grid(digits_root, tmp_path / "r", "--seeds", "2", "--rerun", rerun))
    assert told.code == 0
    assert "0 of 2" in told.out
    assert "2 missing" in told.out
    assert not list((tmp_path / "r" / "runs").iterdir())


def test_rerun_always_by_one_worker_gives_the_same_predictions(
    finished: Finished, tmp_path: Path, cli: Any
) -> None:
    results = finished.copy(tmp_path)
    shutil.rmtree(results / "stages")  # or the first grid's training would be used again
    before = files_with_times(results / "runs")
    words = ("--rerun", "always", "--workers", "1")
    assert cli(*grid(finished.root, results, *finished.options, *words)).code == 0
    after = files_with_times(results / "runs")
    assert before.keys() == after.keys()
    for run_id in finished.ids:
        assert before[f"{run_id}/record.json"] != after[f"{run_id}/record.json"]
        pd.testing.assert_frame_equal(
            predictions(results, run_id), predictions(finished.results, run_id), check_exact=True
        )
        record = Store(results).record(run_id)
        assert record is not None
        assert not any(stage.reused for stage in record.cost.stages)


def test_seeds_differ(finished: Finished) -> None:
    scores = [predictions(finished.results, run_id)["score_0"] for run_id in finished.ids]
    assert not scores[0].equals(scores[1])


@pytest.mark.parametrize("verb", ["run", "plan", "status"])
def test_json_of_a_grid(finished: Finished, tmp_path: Path, cli: Any, verb: str) -> None:
    results = finished.copy(tmp_path)
    words = [verb, *grid(finished.root, results)[1:], "--seeds", "3", "--quick", "--json"]
    told = cli(*words, *(["--rerun", "never"] if verb == "run" else []))
    assert told.code == 0
    content = told.json
    assert content.keys() >= GRID_FIELDS
    assert (content["total"], content["done"], content["missing"]) == (3, 2, 1)
    assert all(run.keys() >= RUN_FIELDS for run in content["runs"])
    assert [run["seed"] for run in content["runs"]] == [0, 1, 2]
    assert [run["status"] for run in content["runs"]] == ["done", "done", "missing"]
    assert [run["run_id"] for run in content["runs"][:2]] == finished.ids
    assert Path(content["runs"][0]["path"], "record.json").is_file()
    if verb == "plan":
        assert all(run["expected_seconds"] > 0 for run in content["runs"])


def test_status_of_everything(finished: Finished, cli: Any) -> None:
    told = cli("status", "--results", finished.results, "--json")
    assert told.json.keys() >= GRID_FIELDS
    assert (told.json["total"], told.json["done"]) == (2, 2)
    assert sorted(run["run_id"] for run in told.json["runs"]) == finished.ids
    plain = cli("status", "--results", finished.results)
    assert all(run_id in plain.out for run_id in finished.ids)


def test_json_of_list(digits_root: Path, cli: Any) -> None:
    content = cli("list", "--data-root", digits_root, "--json").json
    by_name = {method["name"]: method for method in content["methods"]}
    assert by_name["erm"].keys() >= {"version", "train_groups", "val_groups", "interpretable"}
    datasets = {dataset["name"]: dataset for dataset in content["datasets"]}
    paper = {"waterbirds", "celeba", "isic", "umnist", "cmnist"}
    assert set(datasets) == paper | {"dominoes", "cmnist_irm"}
    for dataset in datasets.values():
        fields = {"protocol", "metric", "groups", "counts", "group_counts", "get_command"}
        assert fields | {"on_disk", "standin"} <= dataset.keys()
    assert datasets["cmnist"]["on_disk"]
    assert datasets["cmnist"]["standin"]
    assert not datasets["waterbirds"]["on_disk"]
    assert datasets["waterbirds"]["counts"] == {"train": 4795, "val": 1199, "test": 5794}


def test_record_has_the_fields_of_the_contract(finished: Finished, cli: Any) -> None:
    run_id = finished.ids[0]
    record = cli("show", run_id[:-3], "--results", finished.results, "--json").json
    assert record.keys() >= RECORD_FIELDS
    assert record["run_id"] == run_id
    assert record["standin"] is True
    assert record["quick"] is True
    assert record["selection"].keys() >= {"rule", "value", "epoch"}
    assert record["git"].keys() == {"commit", "dirty"}
    for stage in record["stages"]:
        fields = {"name", "key", "seconds_standalone", "seconds_marginal", "image_passes"}
        assert fields | {"reused"} <= stage.keys()
    table = predictions(finished.results, run_id)
    columns = {"id", "split", "y", "group", "pred", "leaf", *(f"score_{c}" for c in range(5))}
    assert columns <= set(table)
    assert set(table["split"]) == {"val", "test"}
    for split in ("val", "test"):
        metrics, part = record["metrics"][split], table[table["split"] == split]
        assert metrics["avg"] == pytest.approx(100 * (part["pred"] == part["y"]).mean())
        right = (part["pred"] == part["y"]).groupby(part["group"]).mean()
        assert metrics["wga"] == pytest.approx(100 * right.min())
        assert sum(metrics["group_count"].values()) == len(part)
        assert metrics.keys() >= {"avg_train_weighted", "group_accuracy"}
    history = pd.read_parquet(finished.results / "runs" / run_id / "history.parquet")
    columns = {"stage", "iteration", "phase", "epoch", "loss", "selection"}
    assert columns | {"audit_val_wga", "audit_test_wga"} <= set(history)
    assert history["epoch"].tolist() == [0, 1]
    readable = cli("show", run_id, "--results", finished.results)
    assert readable.code == 0
    assert record["command"] in " ".join(readable.out.split())


def test_all_runs_what_is_there_and_says_what_is_not(
    digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    words = ("--seeds", "3,", "--quick", "--workers", "1", "--json")
    told = cli(*grid(digits_root, tmp_path / "results", *words, datasets="all"))
    assert told.code == 0
    assert [(r["dataset"], r["seed"]) for r in told.json["runs"]] == [
        *(("umnist", 3), ("cmnist", 3), ("cmnist_irm", 3))
    ]
    assert told.json["done"] == 3
    skipped = {entry["name"]: entry["command"] for entry in told.json["skipped_datasets"]}
    assert set(skipped) == {"waterbirds", "celeba", "isic", "dominoes"}
    lines = told.err.splitlines()
    first, last = (
        min(i for i, line in enumerate(lines) if "start" in line),
        max(i for i, line in enumerate(lines) if "done " in line),
    )
    for name, command in skipped.items():
        assert command == f"python -m bench data get {name} --data-root {digits_root}"
        said = [i for i, line in enumerate(lines) if command in line]
        assert len(said) == 2
        assert said[0] < first < last < said[1]


def test_interrupted_grid_goes_on_where_it_stopped(
    digits_root: Path, tmp_path: Path, cli: Any, wait_until: WaitUntil
) -> None:
    store = Store(tmp_path / "results")
    words = grid(digits_root, store.root, "--seeds", "2", "--set", "erm.epochs=20")
    ids = run_ids(digits_root, (0, 1), epochs="20")
    process = launcher([*words, "--workers", "2"])
    wait_until(lambda: all(epochs_of(store, run_id) >= 2 for run_id in ids))
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the workers too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "the same command goes on" in err
    assert "Traceback" not in err + out
    assert statuses(store, ids) == [Status.PREEMPTED, Status.PREEMPTED]
    assert not list(store.runs.iterdir())
    status = cli("status", "--results", store.root, "--json").json
    assert [run["status"] for run in status["runs"]] == ["preempted", "preempted"]
    assert status["missing"] == 2
    kept = [row for path in store.stages.glob("*.work/history.jsonl") for row in read_lines(path)]
    assert len(kept) >= 4

    assert cli(*words, "--workers", "1").code == 0
    assert statuses(store, ids) == [Status.DONE, Status.DONE]
    tables = [pd.read_parquet(store.runs / run_id / "history.parquet") for run_id in ids]
    assert all(table["epoch"].tolist() == list(range(20)) for table in tables)
    # Measured times never repeat: equal ones are the interrupted run's own epochs. The last epoch
    # of each run may have been cut off between its history row and its checkpoint.
    seconds = {value for table in tables for value in table["seconds"]}
    assert sum(row["seconds"] in seconds for row in kept) >= len(kept) - 2


@pytest.mark.slow
def test_killed_launcher_takes_its_workers_along_and_loses_no_finished_run(
    digits_root: Path, tmp_path: Path, cli: Any, wait_until: WaitUntil
) -> None:
    store = Store(tmp_path / "results")
    words = grid(digits_root, store.root, "--seeds", "3", "--set", "erm.epochs=20")
    ids = run_ids(digits_root, (0, 1, 2), epochs="20")
    process = launcher([*words, "--workers", "1"])
    wait_until(lambda: epochs_of(store, ids[1]) >= 2)
    children = descendants(process.pid)
    assert children
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    assert statuses(store, ids) == [Status.DONE, Status.PREEMPTED, Status.MISSING]
    before = files_with_times(store.runs / ids[0])

    told = cli(*words, "--workers", "1")
    assert told.code == 0
    assert "3 runs: 1 not to be run, 2 to run" in told.err
    assert files_with_times(store.runs / ids[0]) == before
    assert statuses(store, ids) == [Status.DONE] * 3
    for run_id in ids:
        history = pd.read_parquet(store.runs / run_id / "history.parquet")
        assert history["epoch"].tolist() == list(range(20))


def test_two_launchers_share_a_grid(
    digits_root: Path, tmp_path: Path, cli: Any, wait_until: WaitUntil
) -> None:
    store = Store(tmp_path / "results")
    words = grid(digits_root, store.root, "--seeds", "3", "--workers", "1")
    words += ["--set", "erm.epochs=6"]
    ids = run_ids(digits_root, (0, 1, 2), epochs="6")
    seen: dict[str, set[int]] = {run_id: set() for run_id in ids}
    over = threading.Event()

    def look() -> None:
        """Note each incarnation of a run's folder; a job run twice would show two."""
        while not over.wait(0.005):
            for run_id in ids:
                with contextlib.suppress(FileNotFoundError):
                    seen[run_id].add((store.runs / run_id).stat().st_mtime_ns)

    other = launcher(words)
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        # The worker of a launcher in this process needs about as long to start as the other does.
        ours = cli(*words)
        _, err = other.communicate(timeout=120)
    finally:
        over.set()
        watcher.join()
    assert (ours.code, other.returncode) == (0, 0), err
    assert {run_id: len(times) for run_id, times in seen.items()} == dict.fromkeys(ids, 1)
    for run_id in ids:
        record = store.record(run_id)
        assert record is not None
        assert record.done
        assert not any(stage.reused for stage in record.cost.stages)
        for text in (ours.err, err):
            assert text.count(f"start  {run_id}") <= 1


@pytest.mark.slow
def test_network_from_timm_learns_from_jpeg_files(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One thread: on a busy machine two of them mostly wait for each other.
    monkeypatch.setattr("bench.launch.pool.available_cores", lambda: 1)
    folder = standins.write("waterbirds", tmp_path / "data", size=120)
    settings = (
        *("backbone.name=resnet18", "backbone.pretrained=false", "waterbirds.resolution=64"),
        *("erm.optimizer=adam", "erm.lr=0.001", "erm.weight_decay=0", "erm.batch_size=16"),
        *("erm.epochs=3", "erm.selection=last"),
    )
    words = grid(tmp_path / "data", tmp_path / "results", "--seeds", "1", datasets="waterbirds")
    told = cli(*words, "--set", *settings)
    assert told.code == 0, told.err
    assert len(list((folder / ".decoded").glob("waterbirds-*.u8"))) == 3
    (run,) = Store(tmp_path / "results").records()
    table = predictions(tmp_path / "results", run.run_id)
    test = table[table["split"] == "test"]
    balanced = (test["pred"] == test["y"]).groupby(test["y"]).mean().mean()
    assert balanced > 0.55


def test_verify_prints_the_counts_of_the_protocols(mnist_root: Path, cli: Any) -> None:
    told = cli("data", "verify", "umnist", "cmnist", "--data-root", str(mnist_root))
    assert told.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.out.splitlines()]
    assert ["digit_8", "234", "1,159", "974"] in rows
    assert ["all", "43,542", "12,000", "10,000"] in rows
    assert ["aligned", "53,730"] in [row[:2] for row in rows]
    assert ["conflicting", "270"] in [row[:2] for row in rows]
    assert ["all", "54,000", "6,000", "10,000"] in rows
