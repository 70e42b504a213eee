"""`bench tune` from end to end, on stand-in digits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli.parser import DEVELOPMENT_SEED
from bench.job import FIRST_DEVELOPMENT_SEED, Request, expand
from bench.store import Store
from bench.tuning.source import Tuning, drawn_overrides
from bench.tuning.study import Study, count_finished
from bench.tuning.summary import run_command
from datasets.config import as_plain
from datasets.errors import UsageError
from methods.base import METHODS
from methods.presets import preset_config, preset_values

Cli = Callable[..., Any]
NAME = "jtt-umnist-standin-quick"
TRIALS = 12  # so many that a study is not over before its half is noticed


def words(method: str, data: Path, results: Path, trials: int, *more: str) -> tuple[object, ...]:
    given = ("tune", "--method", method, "--dataset", "umnist", "--trials", trials, "--quick")
    return (*given, "--data-root", data, "--results", results, *more)


def test_tuning_ends_in_a_preset_that_run_uses(cli: Cli, digits_root: Path, tmp_path: Path) -> None:
    paths = ("--data-root", digits_root, "--results", tmp_path)
    tuned = ("run", "--methods", "jtt", "--datasets", "umnist", "--seeds", "7,", "--quick")
    refused = cli(*tuned, "--preset", "tuned", *paths)
    assert refused.code == 2
    assert "bench tune --method jtt --dataset umnist --quick" in refused.err

    ended = cli(*words("jtt", digits_root, tmp_path, 2))
    assert ended.code == 0
    assert "[2/2] trial 1: val_wga" in ended.err
    summary = json.loads((tmp_path / "studies" / NAME / "summary.json").read_text())
    assert summary["trials"]["finished"] == summary["budget"]["trials"] == 2
    assert summary["objective"] == "val_wga"
    assert summary["budget"]["image_passes"] > 0 and summary["budget"]["seconds"] > 0
    text = (tmp_path / "studies" / NAME / "journal.log").read_text()
    assert '"test"' not in text and "group_accuracy" not in text
    for record in Store(tmp_path / "studies" / NAME).records():
        assert record.job.variant == f"trial {record.job.variant.split()[1]} of study {NAME}"
        assert record.outcome is not None and set(record.outcome.metrics) == {"val"}

    preset = (tmp_path / "presets" / f"{NAME}.toml").read_text()
    assert f"study {NAME}, trial" in preset and "2 trials of which 2 random" in preset
    request = Request(("jtt",), ("umnist",), (7,), digits_root, preset="tuned", quick=True)
    (job,) = expand(replace(request, presets=tmp_path / "presets"))
    drawn = summary["best"]["overrides"]
    (same,) = expand(replace(request, preset="paper", overrides=drawn))
    assert job.run_id == same.run_id and not job.overrides
    command = ended.err.strip().splitlines()[-1].partition("to run it: python -m bench ")[2]
    ran = cli(*command.split(), "--seeds", "7,", "--workers", "1", "--json")
    assert ran.code == 0 and ran.json["runs"][0]["run_id"] == job.run_id
    record = Store(tmp_path).record(job.run_id)
    assert record is not None and record.job.preset == "tuned"

    given = words("jtt", digits_root, tmp_path, 2, "--show")
    shown = cli(*(word for word in given if word not in ("--trials", 2)))
    assert "2 of 2 trials" in shown.out, "what was asked for is known without being said again"
    assert shown.code == 0 and "upweight" in shown.out and "best: val_wga" in shown.err
    assert (tmp_path / "studies" / NAME / "history.svg").read_text().lstrip().startswith("<?xml")
    again = cli(*words("jtt", digits_root, tmp_path, 2, "--json"))
    assert again.json["history"] == summary["history"]  # nothing was left to do


def test_the_printed_command_repeats_what_is_not_in_the_preset(tmp_path: Path) -> None:
    overrides = {"nct.iterations": "2", "umnist.hflip": "true"}
    tuning = Tuning("nct", "umnist", tmp_path, tmp_path / "r", overrides=overrides)
    command = run_command(tuning)
    assert command.startswith("python -m bench run --methods nct --datasets umnist --preset tuned ")
    assert "--set umnist.hflip=true" in command and "iterations" not in command
    assert "--quick" not in command and "--quick" in run_command(replace(tuning, quick=True))
    assert f"--data-root {tmp_path} --results {tmp_path / 'r'}" in command


def test_only_development_seeds_are_tuned_on(cli: Cli, digits_root: Path, tmp_path: Path) -> None:
    assert DEVELOPMENT_SEED == FIRST_DEVELOPMENT_SEED
    refused = cli(*words("erm", digits_root, tmp_path, 2, "--seed", "4"))
    assert refused.code == 2 and "published" in refused.err
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "0"], "--workers must be at least 1"),
        (["--trials", "0"], "--trials must be at least 1"),
        (["--set", "erm.lrr=1"], "did you mean 'erm.lr'"),
        (["--set", "erm.selection=val_loss", "--prune"], "leave --prune out"),
        (["--cluster", "nowhere.toml"], "there is no cluster profile"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    more: list[str], message: str, cli: Cli, digits_root: Path, tmp_path: Path
) -> None:
    refused = cli(*words("erm", digits_root, tmp_path, 2, *more))
    assert refused.code == 2 and message in refused.err
    assert not (tmp_path / "studies").exists()


def test_missing_data_is_an_error_with_the_command_that_gets_it(cli: Cli, tmp_path: Path) -> None:
    given = ("tune", "--method", "erm", "--dataset", "celeba", "--data-root", tmp_path)
    refused = cli(*given, "--results", tmp_path / "results")
    assert refused.code == 2 and "not on disk: celeba" in refused.err
    assert f"python -m bench data get celeba --data-root {tmp_path}" in refused.err
    assert not (tmp_path / "results").exists()


def test_there_is_nothing_to_show_of_a_study_that_was_not_made(
    cli: Cli, digits_root: Path, tmp_path: Path
) -> None:
    shown = cli(*words("erm", digits_root, tmp_path, 2, "--show"))
    assert shown.code == 2 and "no study erm-umnist-standin-quick" in shown.err


def test_quick_and_stand_in_presets_are_not_taken_for_real_ones(tmp_path: Path) -> None:
    (tmp_path / "erm-umnist-quick.toml").write_text('[erm]\nlr = { value = 1.0, source = "x" }\n')
    quick = preset_values(METHODS["erm"], "umnist", "tuned", folder=tmp_path, quick=True)
    assert quick == {"lr": 1.0}
    with pytest.raises(UsageError, match="erm-umnist'"):
        preset_values(METHODS["erm"], "umnist", "tuned", folder=tmp_path)
    with pytest.raises(UsageError, match="erm-umnist-standin-quick"):
        preset_values(
            METHODS["erm"], "umnist", "tuned", folder=tmp_path, quick=True, data_kind="standin"
        )


def test_settings_hold_in_every_trial(tmp_path: Path) -> None:
    tuning = Tuning("nct", "umnist", tmp_path, tmp_path, overrides={"nct.iterations": "2"})
    job = tuning.job({"nct.hidden": "20", "nct.iterations": "3"})
    assert (job.config.method["iterations"], job.config.method["hidden"]) == (2, 20)


def test_a_setting_wins_over_the_search_and_what_diverges_has_its_cost(
    cli: Cli, digits_root: Path, tmp_path: Path
) -> None:
    ended = cli(*words("erm", digits_root, tmp_path, 2, "--set", "erm.lr=1e30"))
    assert ended.code == 2 and "no trial of erm-umnist-standin-quick has a value" in ended.err
    folder = tmp_path / "studies" / "erm-umnist-standin-quick"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trials"]["diverged"] == summary["trials"]["finished"] == 2
    assert [set(trial["params"]) for trial in summary["history"]] == [
        {"weight_decay", "batch_size"}
    ] * 2
    for trial in summary["history"]:
        assert "erm.lr" not in trial["overrides"]
        record = Store(folder).record(trial["run_id"])
        assert record is not None and record.job.config.method["lr"] == 1e30
    budget = summary["budget"]
    assert budget["image_passes"] > 0
    assert 0 < budget["seconds"] <= sum(trial["seconds"] for trial in summary["history"]) + 1e-6


def test_a_configuration_is_written_as_what_it_changes() -> None:
    method = METHODS["eiil"]
    preset = preset_config(method, "umnist")
    changed = replace(preset, lr=0.5, erm=replace(preset.erm, epochs=4, milestones=(1, 2)))
    drawn = drawn_overrides(method, "umnist", changed)
    assert drawn == {"eiil.lr": "0.5", "eiil.erm.epochs": "4", "eiil.erm.milestones": "1,2"}
    request = Request(("eiil",), ("umnist",), (0,), Path("/nonexistent"), overrides=drawn)
    assert expand(request)[0].config.method == as_plain(changed)


def kill_half_way(
    command: list[str], folder: Path, wait_until: Callable[..., Any], trials: int
) -> None:
    """Start a study, and kill every process of it when some of its trials are finished."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "bench", *command], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: count_finished(folder) > 2 or launcher.poll() is not None, 240.0)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert 2 < count_finished(folder) < trials


def reopened(folder: Path) -> Study:
    """The study of a folder, by what it says itself of its meaning."""
    lines = (folder / "journal.log").read_text(encoding="utf-8").splitlines()
    told = [entry["user_attr"] for entry in map(json.loads, lines) if "user_attr" in entry]
    return Study(folder, 100, next(one["meaning"] for one in told if "meaning" in one))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nct", "jtt"])
def test_two_workers_killed_half_way_and_resumed(
    method: str, digits_root: Path, tmp_path: Path, wait_until: Callable[..., Any], cli: Cli
) -> None:
    command = [str(w) for w in words(method, digits_root, tmp_path, TRIALS, "--workers", "2")]
    folder = tmp_path / "studies" / f"{method}-umnist-standin-quick"
    kill_half_way(command, folder, wait_until, TRIALS)
    assert subprocess.run([sys.executable, "-m", "bench", *command]).returncode == 0
    study = reopened(folder)
    assert len(study.finished()) == TRIALS
    assert study.trials("RUNNING", "WAITING") == []
    assert len({json.dumps(trial.params) for trial in study.finished()}) == TRIALS
    assert len({trial.user_attrs["run_id"] for trial in study.finished()}) == TRIALS
    tuned = ("run", "--methods", method, "--datasets", "umnist", "--seeds", "1", "--quick")
    paths = ("--data-root", digits_root, "--results", tmp_path, "--workers", "1")
    assert cli(*tuned, "--preset", "tuned", *paths).code == 0


@pytest.mark.slow
def test_one_worker_makes_the_same_trials_killed_or_not(
    digits_root: Path, tmp_path: Path, wait_until: Callable[..., Any], cli: Cli
) -> None:
    name, trials = "erm-umnist-standin-quick", 6

    def made(results: Path) -> list[Any]:
        again = cli(*words("erm", digits_root, results, trials, "--json"))
        assert again.code == 0
        keys = ("draw", "params", "value", "run_id")
        return [[trial[key] for key in keys] for trial in again.json["history"]]

    command = [str(word) for word in words("erm", digits_root, tmp_path / "killed", trials)]
    kill_half_way(command, tmp_path / "killed" / "studies" / name, wait_until, trials)
    assert made(tmp_path / "killed") == made(tmp_path / "whole")
