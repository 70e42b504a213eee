from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
from records import a_job, a_record, named

from bench.record import Record, Status
from bench.store import Store
from datasets import standins
from datasets.catalogue import load_datasets
from datasets.config import field_types
from datasets.lock import LockOwner
from datasets.mnist_source import find_mnist
from methods.base import load_methods

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount small file systems, where this machine lets us."""
    mounted: list[Path] = []

    def add(name: str, options: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a file system is not allowed here")
        mounted.append(place)
        return place

    yield add
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def refused(outcome: Any, *parts: str) -> None:
    """A refusal: exit code 2, one message with a remedy on stderr, and no traceback."""
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert len(re.findall("^bench: |^python -m bench.*: error: ", outcome.err, re.MULTILINE)) == 1
    for part in parts:
        assert part in outcome.err, outcome.err


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def run_words(root: Path, results: Path, *words: str) -> list[str]:
    return ["run", "--methods", "erm", "--data-root", str(root), "--results", str(results), *words]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--methods", "emr"], ["unknown method 'emr'; did you mean 'erm'?", "-> choose from"]),
        (["--datasets", "cmnits"], ["did you mean 'cmnist'?", "-> choose from waterbirds"]),
        (["--datasets", ","], ["an empty list of names", "-> choose from"]),
        (["--set", "emr.lr=1"], ["nothing is called 'emr'; did you mean 'erm'?", "-> set knobs"]),
        (["--set", "erm.epohcs=1"], ["did you mean 'erm.epochs'?", "-> settings of erm: epochs"]),
        (["--set", "cmnist.protocl=cnc"], ["did you mean 'cmnist.protocol'?"]),
        (["--set", "backbone.nam=lenet4"], ["did you mean 'backbone.name'?", "-> settings of"]),
        (["--set", "erm.lr=abc"], ["erm.lr must be a number but got 'abc'"]),
        (["--set", "erm.epochs=1.5"], ["erm.epochs must be a whole number but got '1.5'"]),
        (["--set", "cmnist.protocol=x"], ["must be one of nominal, cnc, biased_val but got 'x'"]),
        (["--set", "erm.lr=-1"], ["lr must be positive but got -1.0", "-> correct the value"]),
        (["--set", "erm.lr=nan"], ["erm.lr must be finite but got 'nan'"]),
        (["--set", "erm.lr=inf"], ["erm.lr must be finite but got 'inf'"]),
        (["--set", "erm.lr=-1e999"], ["erm.lr must be finite but got '-1e999'"]),
        (["--set", "erm.epochs=" + "9" * 30], ["erm.epochs must be a whole number of at most 18"]),
        (["--set", "erm.epochs=" + "9" * 5000], ["erm.epochs must be a whole number but got"]),
        (["--seeds", "²"], ["--seeds must be a count or a list but got '²'", "-> e.g. 5 or 3,7"]),
        (["--seeds", "-1"], ["--seeds must be a count or a list but got '-1'", "-> e.g. 5"]),
        (["--seeds", "1" + "0" * 12], ["asks for so many runs", "-> give at most 10000"]),
        (["--seeds", "1" + "0" * 5000], ["asks for so many runs", "-> give at most 10000"]),
        (["--seeds", f"3,1{'0' * 30}"], ["a seed has at most 18 digits but got 1000", "-> e.g."]),
        (["--seeds", f"1{'0' * 5000},"], ["a seed has at most 18 digits but got 1000", "-> e.g."]),
        (["--workers", "-2"], ["--workers must be at least 1 but got -2", "-> e.g. --workers 2"]),
        (["--retries", "-1"], ["--retries cannot be negative but got -1"]),
        (["--methods", "../erm"], ["unknown method '../erm'"]),
        (["--datasets", "cmnist/.."], ["unknown dataset 'cmnist/..'"]),
        (["--set", "erm.epochs=0"], ["epochs must be at least 1 but got 0", "-> correct"]),
        (["--set", "umnist.hflip=true"], ["umnist takes no part", "-> leave it out, or add it"]),
        (["--set", "lr=1"], ["expected OWNER.KNOB=VALUE", "-> e.g. --set erm.lr=0.01"]),
        (["--set", "erm.lr"], ["expected OWNER.KNOB=VALUE", "-> e.g."]),
        (["--seeds", "0"], ["at least one seed", "-> e.g. --seeds 1"]),
        (["--seeds", "abc"], ["--seeds must be a count or a list but got 'abc'", "-> e.g. 5"]),
        (["--seeds", ""], ["--seeds must be a count or a list but got ''", "-> e.g. 5"]),
        (["--workers", "0"], ["--workers must be at least 1 but got 0", "-> e.g. --workers 2"]),
        (["--preset", "papr"], ["unknown preset 'papr'", "-> choose from paper"]),
        (["--set", "backbone.name=resnet5"], ["unknown backbone 'resnet5'", "-> use lenet4"]),
        (["--set", "backbone.weights=/no/file"], ["there is no file /no/file", "-> give"]),
    ],
)
def test_wrong_use_of_run(
    words: list[str], parts: list[str], digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    results = tmp_path / "results"
    refused(cli(*run_words(digits_root, results, "--datasets", "cmnist", *words)), *parts)
    assert not results.exists()


def test_no_numeric_setting_takes_infinity(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    """Every number of every method and dataset, as `--set` reaches it."""

    def numbers(kind: type[Any]) -> Iterator[str]:
        for name, wanted in field_types(kind).items():
            if is_dataclass(wanted) and isinstance(wanted, type):
                yield from (f"{name}.{inner}" for inner in numbers(wanted))
            elif {int, float} & {wanted, *typing.get_args(wanted)}:
                yield name

    owners = {name: method.config_type for name, method in load_methods().items()}
    owners |= {name: dataset.config_type for name, dataset in load_datasets().items()}
    settings = [f"{owner}.{name}" for owner, kind in owners.items() for name in numbers(kind)]
    assert len(settings) > 50
    common = ("--data-root", digits_root, "--results", tmp_path / "results")
    for setting in settings:
        for value in ("inf", "nan"):
            told = cli("plan", "--seeds", "1", "--set", f"{setting}={value}", *common)
            refused(told, setting.partition(".")[2], f"'{value}'")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["explain", "x", "--limit", "-2"], ["--limit must be at least 1 but got -2", "->"]),
        (["explain", "x", "--index", "²"], ["no run matches"]),
        (["tune", "--trials", "0"], ["--trials must be at least 1 but got 0"]),
        (["tune", "--workers", "0"], ["--workers must be at least 1 but got 0"]),
        (["tune", "--seed", "1" + "0" * 30], ["--seed must be below 10^18"]),
        (["campaign", "ablation-aux", "--workers", "0"], ["--workers must be at least 1"]),
        (["campaign", "ablation-aux", "--seeds", "²"], ["--seeds must be a count or a list"]),
        (["perf", "--repeats", "-1"], ["--repeats must be at least 1 but got -1"]),
    ],
)
def test_numbers_that_make_no_sense(
    words: list[str], parts: list[str], tmp_path: Path, cli: Any
) -> None:
    more = ["--method", "erm", "--dataset", "cmnist"] if words[0] == "tune" else []
    (tmp_path / "results").mkdir()
    refused(cli(*words, *more, "--results", tmp_path / "results"), *parts)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize(
    "number", [("--size", "1" + "0" * 12), ("--seed", "-1"), ("--seed", "1" + "0" * 30)]
)
def test_standins_of_no_sensible_size_or_seed(
    number: tuple[str, str], tmp_path: Path, cli: Any
) -> None:
    refused(cli("data", "standin", "mnist", "--root", tmp_path, *number), "must be at", "->")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["methods", "datasets"])
@pytest.mark.parametrize("name", ["../up", "a/b", "Upper", "", "all", "n" * 41])
def test_plug_ins_whose_names_could_be_no_folder(
    kind: str, name: str, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {
        "methods": "import methods.base as base\n"
        f"@base.register({name!r}, version=1, config=dict)\nclass Theirs(base.Method): ...\n",
        "datasets": "from datasets.dataset import Dataset, register\n"
        f"@register\nclass Theirs(Dataset): name = {name!r}\n",
    }
    (tmp_path / "their_plug_in.py").write_text(source[kind])
    facts = tmp_path / "their_plug_in-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\n")
    (facts / "entry_points.txt").write_text(f"[bench.{kind}]\ntheirs = their_plug_in\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        told = cli("plan", "--methods", "all", "--results", tmp_path / "results")
    finally:
        sys.modules.pop("their_plug_in", None)
    refused(told, f"'{name}' cannot be the name of a {kind[:-1]}", "pip uninstall theirs")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rnu"], ["invalid choice: 'rnu'", "'run'"]),
        (["--quick"], ["required: VERB"]),
        (["data", "gte"], ["invalid choice: 'gte'", "'get'"]),
        (["run", "--workers", "two"], ["--workers: invalid int value: 'two'"]),
        (["run", "--rerun", "sometimes"], ["invalid choice: 'sometimes'", "'failed'"]),
    ],
)
def test_words_the_parser_does_not_know(words: list[str], parts: list[str], cli: Any) -> None:
    outcome = cli(*words)
    refused(outcome, *parts)
    assert "usage: python -m bench" in outcome.err


def test_missing_dataset_names_the_command(tmp_path: Path, cli: Any) -> None:
    root, results = tmp_path / "data", tmp_path / "results"
    root.mkdir()
    refused(
        cli(*run_words(root, results, "--datasets", "waterbirds")),
        f"not on disk: waterbirds (looked in {root})",
        f"-> python -m bench data get waterbirds --data-root {root}",
    )
    assert list(tmp_path.iterdir()) == [root]


@pytest.mark.parametrize("verb", ["run", "plan", "list", "status", "data verify cmnist"])
def test_data_root_that_is_not_there(verb: str, tmp_path: Path, cli: Any) -> None:
    root = tmp_path / "mistyped"
    told = cli(*verb.split(), "--data-root", root)
    refused(told, f"there is no folder {root}", "-> correct --data-root")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("run --methods nct jtt", "several are written with commas: --methods nct,jtt"),
        ("run --datasets umnist, cmnist", "with commas: --datasets umnist,cmnist"),
        ("plan --seeds 1 2 3 --quick", "with commas: --seeds 1,2,3"),
        ("run --method nct", "did you mean '--methods'?"),
        ("run --jobs 2", "here that is --workers"),
        ("run --dry-run", "here that is the verb plan"),
        ("report --output x", "here that is --out"),
        ("run --methods NCT", "did you mean 'nct'?"),
        ("run --methods GroupDRO", "did you mean 'groupdro'?"),
        ("run --datasets CMNIST", "did you mean 'cmnist'?"),
        ("rnu", "did you mean 'run'?"),
        ("run --rerun allways", "did you mean 'always'?"),
        ("run --seed 1 --seeds 2", "not allowed with argument"),
        ("run --seed 1,2", "one number is meant, as in --seed 3, but got '1,2'"),
        ("campaign Main", "did you mean 'main'?"),
    ],
)
def test_nearest_names(words: str, hint: str, tmp_path: Path, cli: Any) -> None:
    refused(cli(*words.split()), hint)


def test_one_seed_and_many(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    words = ("--methods", "erm", "--datasets", "cmnist", "--data-root", digits_root)
    words = ("plan", *words, "--results", tmp_path, "--json")
    one = cli(*words, "--seed", "200")
    assert [run["seed"] for run in one.json["runs"]] == [200]
    assert "--seed" not in one.err
    many = cli(*words, "--seeds", "200")
    assert many.json["total"] == 200
    assert "200 runs of every method and dataset, seeds 0 to 199" in many.err
    assert "seed 200 alone is --seed 200" in many.err


@pytest.mark.usefixtures("no_mnist_source")
def test_nothing_on_disk_at_all(tmp_path: Path, cli: Any) -> None:
    root, results = tmp_path / "data", tmp_path / "results"
    root.mkdir()
    outcome = cli(*run_words(root, results, "--datasets", "all"))
    refused(outcome, "there is nothing to run: no dataset is on disk")
    for name in ("waterbirds", "celeba", "isic", "umnist", "cmnist"):
        assert f"python -m bench data get {name} --data-root {root}" in outcome.err
    assert not results.exists()


def test_data_root_that_is_a_file(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "file").write_text("not a folder")
    results = tmp_path / "results"
    refused(cli(*run_words(tmp_path / "file", results, "--datasets", "cmnist")), "->")
    refused(cli("data", "get", "mnist", "--data-root", tmp_path / "file"), "->")
    refused(cli("data", "standin", "mnist", "--root", tmp_path / "file" / "x"), "->")
    assert not results.exists()


def test_all_goes_on_where_mnist_cannot_be_put(
    mount: Mount, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = mount("data", "size=8m")
    standins.write("waterbirds", root, size=40)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = run_words(root, tmp_path / "results", "--datasets", "all", "--rerun", "never")
    outcome = cli(*words, "--set", "backbone.name=resnet18", "backbone.pretrained=false")
    assert outcome.code == 0, outcome.err
    assert "Read-only file system" in outcome.err
    assert "not on disk: cmnist" in outcome.err
    assert "waterbirds" in outcome.out


def test_missing_weights_name_the_command(tmp_path: Path, cli: Any) -> None:
    root, results = tmp_path / "data", tmp_path / "results"
    standins.write("waterbirds", root, size=40)
    refused(
        cli(*run_words(root, results, "--datasets", "waterbirds")),
        "waterbirds starts from ImageNet weights (resnet50), which are not on disk",
        f"-> python -m bench data get weights --data-root {root}",
        "--set backbone.pretrained=false",
    )
    assert not results.exists()


def test_damaged_mnist(mnist_root: Path, tmp_path: Path, cli: Any) -> None:
    real = find_mnist(mnist_root)
    assert real is not None
    copy = tmp_path / "data" / "mnist"
    shutil.copytree(real, copy, ignore=shutil.ignore_patterns(".*"))
    damaged = next(copy.glob("t10k-images-idx3-ubyte*"))
    content = bytearray(damaged.read_bytes())
    content[5000] ^= 1
    damaged.write_bytes(content)
    before = sorted(path.name for path in copy.iterdir())
    parts = (str(damaged), "SHA-256", "-> delete it and run `python -m bench data get mnist")
    results = tmp_path / "results"
    refused(cli(*run_words(tmp_path / "data", results, "--datasets", "cmnist")), *parts)
    assert files_below(results) == []
    refused(cli("data", "verify", "mnist", "--data-root", tmp_path / "data"), *parts)
    assert sorted(path.name for path in copy.iterdir()) == before


def test_unreadable_images(tmp_path: Path, cli: Any) -> None:
    root, results = tmp_path / "data", tmp_path / "results"
    folder = standins.write("waterbirds", root, size=40)
    pictures = sorted(folder.rglob("*.jpg"))
    truncated, empty, gone = pictures[3], pictures[20], pictures[-1]
    truncated.write_bytes(truncated.read_bytes()[:300])
    empty.write_bytes(b"")
    gone.unlink()
    outcome = cli("data", "verify", "waterbirds", "--data-root", root)
    assert outcome.code == 2
    assert "1 missing image(s)" in outcome.err and "2 unreadable image(s)" in outcome.err
    for file in (truncated, empty, gone):
        assert str(file) in outcome.err
    assert "-> replace them" in outcome.err
    assert "Traceback" not in outcome.err
    settings = ("--set", "backbone.name=resnet18", "backbone.pretrained=false")
    outcome = cli(*run_words(root, results, "--datasets", "waterbirds", *settings))
    assert outcome.code == 2 and str(gone) in outcome.err
    shutil.copyfile(pictures[0], gone)
    outcome = cli(*run_words(root, results, "--datasets", "waterbirds", *settings))
    assert outcome.code == 2
    assert "is not a readable image" in outcome.err
    assert "-> python -m bench data verify lists every bad file" in outcome.err
    assert "Traceback" not in outcome.err
    assert files_below(results) == []


def test_results_below_a_file(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    (tmp_path / "file").write_text("kept")
    for place in (tmp_path / "file", tmp_path / "file" / "results"):
        refused(
            cli(*run_words(digits_root, place, "--datasets", "cmnist")),
            f"cannot write {place}",
            "-> point --results at a folder that can be written to",
        )
    assert (tmp_path / "file").read_text() == "kept"


def test_results_on_a_read_only_disk(
    mount: Mount, digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    place = mount("readonly", "ro,size=1m")
    refused(
        cli(*run_words(digits_root, place, "--datasets", "cmnist")),
        "Read-only file system",
        "-> point --results",
    )
    told = cli("status", "--results", place, "--json")  # reading needs no writing
    assert (told.code, told.json["total"]) == (0, 0)


def test_show_of_no_run_or_of_several(tmp_path: Path, cli: Any) -> None:
    for seed in (0, 1):
        Store(tmp_path).write(named(a_record(job=a_job(seed=seed)), f"erm-cmnist-s{seed}-abc"))
    refused(cli("show", "emr", "--results", tmp_path), "no run matches 'emr'", "-> python -m bench")
    refused(cli("show", "erm", "--results", tmp_path), "2 runs match 'erm'", "-> give more")


@pytest.mark.parametrize("verb", ["show", "explain", "status", "report", "cancel"])
def test_results_folder_to_read_from_has_to_exist(verb: str, tmp_path: Path, cli: Any) -> None:
    words = ["erm"] if verb in ("show", "explain") else []
    more = ["--out", str(tmp_path / "out")] if verb == "report" else []
    told = cli(verb, *words, "--results", tmp_path / "nowhere", *more)
    refused(told, f"there is no results folder {tmp_path / 'nowhere'}", "-> correct --results")
    assert not (tmp_path / "nowhere").exists()


def test_default_results_folder_need_not_exist(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = cli("status", "--json")
    assert (told.code, told.json["total"]) == (0, 0)
    assert not (tmp_path / "results").exists()


def test_two_stores_at_once(tmp_path: Path, cli: Any) -> None:
    for verb in ("status", "report"):
        refused(cli(verb, "--published", "--results", tmp_path), "two stores", "-> give one")


def test_report_shows_published_seeds_alone(tmp_path: Path, cli: Any) -> None:
    told = cli("report", "--results", tmp_path, "--out", tmp_path / "out", "--seeds", "0,100")
    refused(told, "no table shows seed 100", "-> published seeds are 0 to 9")


def test_broken_record_costs_one_line(tmp_path: Path, cli: Any) -> None:
    store = Store(tmp_path)
    good = a_record(job=a_job(seed=1))
    store.write(good)
    folder = store.runs / "erm-cmnist-s0-abc"
    folder.mkdir()
    (folder / "record.json").write_text('{"run_id": ')
    refused(
        cli("show", "erm-cmnist-s0", "--results", tmp_path),
        f"{folder} cannot be read: it is not JSON",
        "-> to make it again: `python -m bench run` with its settings",
    )
    told = cli("status", "--results", tmp_path)
    assert told.code == 0
    (line,) = [line for line in told.out.splitlines() if "erm-cmnist-s0-abc" in line]
    assert "unreadable" in line
    assert "damaged: erm-cmnist-s0-abc: it is not JSON" in told.err
    content = cli("status", "--results", tmp_path, "--json").json
    assert (content["total"], content["done"], content["missing"]) == (2, 1, 1)
    by_id = {run["run_id"]: run for run in content["runs"]}
    assert by_id[good.run_id]["status"] == "done"
    damaged = by_id["erm-cmnist-s0-abc"]
    assert "it cannot be read" in damaged["reason"] and damaged["path"] == str(folder)


def test_record_of_a_newer_version_asks_for_an_update(tmp_path: Path, cli: Any) -> None:
    folder = tmp_path / "runs" / "erm-cmnist-s0-abc"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text('{"run_id": "erm-cmnist-s0-abc", "schema_version": 99}')
    told = cli("status", "--results", tmp_path)
    assert told.code == 0
    assert "update nct-bench" in " ".join(told.out.split())


def test_wrong_use_of_data(tmp_path: Path, cli: Any) -> None:
    root = tmp_path / "data"
    root.mkdir()
    refused(cli("data", "get", "nonsense", "--data-root", root), "no 'nonsense'", "known: mnist")
    refused(cli("data", "get", "waterbird", "--data-root", root), "did you mean 'waterbirds'?")
    refused(cli("data", "verify", "nonsense", "--data-root", root), "unknown dataset", "->")
    refused(cli("data", "verify", "celeba", "--data-root", root), "-> python -m bench data get")
    standin = ("data", "standin", "mnist", "--root", root, "--size")
    refused(cli(*standin, "5"), "size must be at least 40 but got 5", "->")
    assert not [*root.iterdir()]


def test_standin_does_not_touch_real_data(tmp_path: Path, cli: Any) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(b"real")
    refused(
        cli("data", "standin", "mnist", "--root", tmp_path, "--size", "50"),
        "holds data that is not a stand-in",
        "-> give another root",
    )
    assert (folder / "train-images-idx3-ubyte").read_bytes() == b"real"
    assert len(files_below(tmp_path)) == 1


def test_diverging_run_is_one_red_cell(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    words = run_words(digits_root, tmp_path, "--datasets", "cmnist", "--seeds", "1", "--quick")
    outcome = cli(*words, "--set", "erm.lr=1e30", "erm.optimizer=sgd")
    assert outcome.code == 1
    assert "1 failed" in outcome.out
    assert "failed: erm-cmnist-s0-" in outcome.err
    assert "the loss became" in outcome.err
    assert "Traceback" not in outcome.err
    (record,) = Store(tmp_path).records()
    assert record.failure is not None
    assert record.failure.kind == "non_finite_loss"
    assert "lower the learning rate" in record.failure.remedy
    assert "erm.lr=1e30" in record.failure.command
    shown = cli("show", record.run_id, "--results", tmp_path)
    assert shown.code == 0
    assert "lower the learning rate" in shown.out
    # A failed run is not tried again unasked, and the exit code goes on telling.
    again = cli(*words, "--set", "erm.lr=1e30", "erm.optimizer=sgd")
    assert again.code == 1
    assert "start" not in again.err


def test_full_disk_is_a_failed_cell_and_loses_nothing(
    mount: Mount, digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    results = mount("small", "size=1800k")  # room for one run with its model, not for three
    words = run_words(digits_root, results, "--datasets", "cmnist", "--seeds", "3", "--quick")
    words += ["--keep-models", "--workers", "1"]
    outcome = cli(*words, "--json")
    assert outcome.code == 1
    assert "no room left to write" in outcome.err
    assert "Traceback" not in outcome.err
    by_state = {run["seed"]: run["status"] for run in outcome.json["runs"]}
    assert by_state[0] == "done"
    assert "failed" in by_state.values()
    store = Store(results)
    stored = {record.job.seed: record for record in store.records()}
    assert {seed: record.status for seed, record in stored.items()} == by_state
    failed = [record for record in stored.values() if record.status is Status.FAILED]
    for record in failed:
        assert record.failure is not None
        assert record.failure.kind == "storage"
        assert "free disk space" in record.failure.remedy
    assert not [path for path in results.rglob("*") if path.name.endswith(".part")]

    subprocess.run(["mount", "-o", "remount,size=50m", str(results)], check=True)
    before = store.record_mtime(stored[0].run_id)
    outcome = cli(*words, "--rerun", "failed")
    assert outcome.code == 0
    assert outcome.err.count("start ") == len(failed)
    assert all(record.done for record in store.records())
    assert store.record_mtime(stored[0].run_id) == before


def worker_of(run_id: str, store: Store) -> int:
    """The process that holds the lock of a run."""
    (lock,) = (store.work / run_id).glob("lock.*")
    return LockOwner.from_json(lock.read_text()).process[0]


def test_killed_worker_costs_one_run(digits_root: Path, tmp_path: Path, cli: Any) -> None:
    store, killed, over = Store(tmp_path), list[str](), threading.Event()

    def kill_the_first() -> None:
        """Kill the worker of the first run once it has finished an epoch, as the kernel would."""
        while not killed and not over.wait(0.01):
            for path in store.work.glob("*/progress.json"):
                run_id = path.parent.name
                if int(str(store.progress(run_id).get("epoch", 0))) >= 1:
                    with contextlib.suppress(ProcessLookupError, ValueError, OSError):
                        os.kill(worker_of(run_id, store), signal.SIGKILL)
                        killed.append(run_id)
                        return

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    words = run_words(digits_root, tmp_path, "--datasets", "cmnist", "--seeds", "3")
    try:
        outcome = cli(*words, "--workers", "1", "--set", "erm.epochs=10")
    finally:
        over.set()
        killer.join()
    assert outcome.code == 1
    assert "signal 9 (SIGKILL)" in outcome.err
    assert "Traceback" not in outcome.err
    records: dict[str, Record] = {record.run_id: record for record in store.records()}
    assert len(records) == 3
    failed = {run_id: r.failure for run_id, r in records.items() if r.status is Status.FAILED}
    assert [*failed] == killed
    assert all(failure is not None and failure.kind == "worker_died" for failure in failed.values())
