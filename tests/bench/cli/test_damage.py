"""Damaged files and full disks: each costs one run, every verb goes on, and the remedy helps."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_cli_errors import refused

import bench
import bench.cli.arguments
from bench.api import LaunchOptions
from bench.cli import main
from bench.store import Store
from datasets.files import Damaged, atomic_folder, read_lines, to_json

DIGITS = ("--methods", "erm", "--datasets", "cmnist", "--quick")


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def one_bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def another_runs(file: Path) -> None:
    other = next(path for path in file.parents[1].iterdir() if path != file.parent)
    shutil.copy(other / file.name, file)


@pytest.fixture(scope="module")
def finished(digits_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs with their models; nothing may change them."""
    results = tmp_path_factory.mktemp("finished") / "results"
    words = (*DIGITS, "--seeds", "2", "--data-root", digits_root, "--results", results)
    assert main(["run", *map(str, words), "--keep-models"]) == 0
    return results


@pytest.fixture
def results(finished: Path, tmp_path: Path) -> Path:
    """A copy of the two runs."""
    return Path(shutil.copytree(finished, tmp_path / "results"))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `run` fit in this process, where writes can be made to fail."""
    inline = partial(LaunchOptions, isolate=False)
    monkeypatch.setattr(bench.cli.arguments, "LaunchOptions", inline)


@pytest.mark.parametrize("damage", [torn, emptied, zeroed, one_bit_flipped, another_runs])
@pytest.mark.parametrize("name", ["record.json", "history.parquet", "predictions.parquet"])
def test_damage_of_any_file_is_noticed(
    name: str, damage: Callable[[Path], None], results: Path, cli: Any
) -> None:
    store = Store(results)
    broken, whole = store.run_ids()
    damage(store.runs / broken / name)
    content = cli("status", "--results", results, "--json").json
    assert (content["done"], content["missing"]) == (1, 1)
    (row,) = [row for row in content["runs"] if row["run_id"] == broken]
    assert row["status"] == "missing" and "it cannot be read" in row["reason"]
    assert store.record(whole) is not None


def test_every_verb_goes_on_and_names_a_damaged_run(
    results: Path, digits_root: Path, tmp_path: Path, cli: Any, in_process: None
) -> None:
    store = Store(results)
    broken, whole = store.run_ids()
    before = (store.runs / broken / "predictions.parquet").read_bytes()
    zeroed(store.runs / broken / "predictions.parquet")
    named = f"damaged: {broken}: the checksum of predictions.parquet does not fit"
    grid = (*DIGITS, "--seeds", "2", "--data-root", digits_root, "--results", results)

    told = cli("status", "--results", results)
    assert (told.code, named in told.err) == (0, True)
    assert "unreadable" in told.out
    (command,) = re.findall("-> to make it again: (.*);", told.err)
    assert "--keep-models" in command and f"--results {results}" in command
    told = cli("plan", *grid)
    assert (told.code, named in told.err) == (0, True)
    told = cli("report", "--results", results, "--out", tmp_path / "report")
    assert (told.code, named in told.err) == (0, True)
    left_out = (tmp_path / "report" / "tables" / "left_out.csv").read_text()
    assert broken in left_out and whole not in left_out
    refused(cli("show", broken, "--results", results), "predictions.parquet", command)
    assert cli("show", whole, "--results", results).code == 0
    assert list(bench.load_results(results).run_id) == [whole]

    kept = store.record_mtime(whole)
    told = cli(*shlex.split(command)[3:], "--data-root", digits_root)
    assert (told.code, named in told.err) == (0, True), told.err
    assert (store.runs / broken / "predictions.parquet").read_bytes() == before
    assert (store.runs / broken / "model.safetensors").is_file()
    assert store.record_mtime(whole) == kept
    (note,) = read_lines(store.damaged / "notes.jsonl")
    assert note["was"].endswith(broken) and "predictions.parquet" in note["reason"]
    assert (store.damaged / note["name"] / "record.json").is_file()
    assert cli("status", "--results", results, "--json").json["done"] == 2


@pytest.mark.parametrize("damage", [torn, emptied, zeroed, one_bit_flipped])
def test_damaged_model_is_not_loaded(
    damage: Callable[[Path], None], results: Path, digits_root: Path
) -> None:
    store = Store(results)
    broken, whole = store.run_ids()
    bench.load_model(whole, results)
    damage(store.runs / broken / "model.safetensors")
    with pytest.raises(Damaged, match="model") as error:
        bench.load_model(broken, results)
    assert "--keep-models" in error.value.remedy


@pytest.mark.parametrize("damage", [torn, emptied, zeroed])
def test_damaged_table_of_an_earlier_version(
    damage: Callable[[Path], None], results: Path, cli: Any
) -> None:
    """Its record has no checksums: parquet's own marks show it."""
    store = Store(results)
    for run_id in store.run_ids():
        record = store.record(run_id)
        assert record is not None
        content = to_json(record.to_json() | {"files": {}})
        (store.runs / run_id / "record.json").write_text(content)
    broken = store.run_ids()[0]
    damage(store.runs / broken / "history.parquet")
    told = cli("status", "--results", results)
    assert told.code == 0
    assert f"damaged: {broken}: history.parquet is damaged" in told.err


def full(wanted: str, lasting: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the disk be full whenever a file whose path fits the pattern is written; or only once.

    Returns the paths that could not be written.
    """
    refused_paths: list[str] = []

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        opens = function.__name__ == "open"

        def write(*arguments: Any, **options: Any) -> Any:
            path = str(arguments[1] if isinstance(arguments[0], pd.DataFrame) else arguments[0])
            mode = str([*arguments, options.get("mode", "r")][1]) if opens else "w"
            reading = not set(mode) & set("wax+")
            if re.search(wanted, path) and not reading and (lasting or not refused_paths):
                refused_paths.append(path)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return function(*arguments, **options)

        return write

    for owner, name in (
        *((Path, name) for name in ("write_text", "write_bytes", "open")),
        (pd.DataFrame, "to_parquet"),
    ):
        monkeypatch.setattr(owner, name, checked(getattr(owner, name)))
    return refused_paths


KINDS = {
    "record": r"runs/.*\.part/record\.json$",
    "table": r"predictions\.parquet$",
    "history": r"work/.*history\.jsonl$",
    "model": r"model\.safetensors$",
    "stage": r"tensors\.safetensors$",
    "stage facts": r"stage\.json$",
    "checkpoint": r"\.checkpoint\.",
    "progress": r"progress\.json",
    "audit": r"audits/.*\.jsonl$",
    "lock": r"work/[^/]*/\.lock\.",
}


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Undone by itself once there is room again."""
    with monkeypatch.context() as patch:
        yield patch


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_loses_nothing_and_its_remedy_helps(
    kind: str,
    lasting: bool,
    results: Path,
    digits_root: Path,
    cli: Any,
    in_process: None,
    space: pytest.MonkeyPatch,
) -> None:
    store = Store(results)
    before = {path: path.read_bytes() for path in store.runs.rglob("*") if path.is_file()}
    method, count = ("jtt", 1) if kind.startswith("stage") else ("erm", 3)
    grid = ("--methods", method, "--datasets", "cmnist", "--quick", "--seeds", count)
    words = ("run", *grid, "--keep-models", "--data-root", digits_root, "--results", results)
    failing = full(KINDS[kind], lasting, space)
    outcome = cli(*words, "--json")
    assert failing, "nothing of this kind was written"
    assert outcome.code == 1, outcome.err
    assert "no room left to write" in outcome.err and "Traceback" not in outcome.err
    assert "-> free disk space or point --results at a larger disk" in outcome.err
    failed = [run["run_id"] for run in outcome.json["runs"] if run["status"] == "failed"]
    assert failed
    assert {path: path.read_bytes() for path in before} == before
    assert not list(results.rglob("*.part"))

    space.undo()
    stored = store.record(failed[0])
    if stored is not None:  # what the record says helps as well as what was printed
        assert stored.failure is not None and stored.failure.kind == "storage"
        shutil.copytree(results, results.with_name("other"))
        told = cli(
            *shlex.split(stored.failure.command.replace(str(results), f"{results}/../other"))[3:]
        )
        assert told.code == 0, told.err
        again = Store(results.with_name("other")).record(failed[0])
        assert again is not None and again.done
    told = cli(*words)  # "then run the command again"
    assert told.code == 0, told.err
    statuses = cli("status", *grid, "--data-root", digits_root, "--results", results, "--json").json
    assert (statuses["total"], statuses["done"]) == (count, count)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO])
def test_a_run_that_cannot_be_put_in_place_does_not_cost_the_old_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atomic_folder(tmp_path / "run") as draft:
        (draft / "record.json").write_text("old")
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if str(source).endswith(".part"):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(Exception, match="run"), atomic_folder(tmp_path / "run") as draft:
        (draft / "record.json").write_text("new")
    assert (tmp_path / "run" / "record.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
