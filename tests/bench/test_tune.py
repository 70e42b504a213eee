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

from bench.plan import Request, expand
from bench.store import Store
from bench.study import Study
from bench.tune import Tuning, drawn_overrides
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
    places = ("--data-root", digits_root, "--results", tmp_path)
    tuned = ("run", "--methods", "jtt", "--datasets", "umnist", "--seeds", "7,", "--quick")
    refused = cli(*tuned, "--preset", "tuned", *places)
    assert refused.code == 2
    assert "bench tune --method jtt --dataset umnist --quick" in refused.err

    assert cli(*words("jtt", digits_root, tmp_path, 2)).code == 0
    summary = json.loads((tmp_path / "studies" / NAME / "summary.json").read_text())
    assert summary["trials"]["finished"] == summary["budget"]["trials"] == 2
    assert summary["objective"] == "val_wga"
    assert summary["budget"]["image_passes"] > 0 and summary["budget"]["seconds"] > 0
    text = (tmp_path / "studies" / NAME / "journal.log").read_text()
    assert '"test"' not in text and "group_accuracy" not in text

    preset = (tmp_path / "presets" / f"{NAME}.toml").read_text()
    assert f"study {NAME}, trial" in preset and "2 trials of which 2 random" in preset
    request = Request(("jtt",), ("umnist",), (7,), digits_root, preset="tuned", quick=True)
    (job,) = expand(replace(request, presets=tmp_path / "presets"))
    drawn = summary["best"]["overrides"]
    (same,) = expand(replace(request, preset="paper", overrides=drawn))
    assert job.run_id == same.run_id and not job.overrides
    ran = cli(*tuned, "--preset", "tuned", *places, "--workers", "1", "--json")
    assert ran.code == 0 and ran.json["runs"][0]["run_id"] == job.run_id
    record = Store(tmp_path).record(job.run_id)
    assert record is not None and record["preset"] == "tuned"

    given = words("jtt", digits_root, tmp_path, 2, "--show")
    shown = cli(*(word for word in given if word not in ("--trials", 2)))
    assert "2 of 2 trials" in shown.out, "what was asked for is known without being said again"
    assert shown.code == 0 and "upweight" in shown.out and "best: val_wga" in shown.err
    assert (tmp_path / "studies" / NAME / "history.svg").read_text().lstrip().startswith("<?xml")
    again = cli(*words("jtt", digits_root, tmp_path, 2, "--json"))
    assert again.json["history"] == summary["history"]  # nothing was left to do


def test_only_development_seeds_are_tuned_on(cli: Cli, digits_root: Path, tmp_path: Path) -> None:
    refused = cli(*words("erm", digits_root, tmp_path, 2, "--seed", "4"))
    assert refused.code == 2 and "published" in refused.err
    assert not (tmp_path / "studies").exists()


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
        preset_values(METHODS["erm"], "umnist", "tuned", folder=tmp_path, quick=True, standin=True)


def test_settings_hold_in_every_trial(tmp_path: Path) -> None:
    tuning = Tuning("nct", "umnist", tmp_path, tmp_path, overrides={"nct.iterations": "2"})
    job = tuning.job({"nct.hidden": "20", "nct.iterations": "3"})
    assert (job.config["method"]["iterations"], job.config["method"]["hidden"]) == (2, 20)


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
        record = json.loads((folder / "runs" / trial["run_id"] / "record.json").read_text())
        assert record["config"]["method"]["lr"] == 1e30
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
    assert expand(request)[0].config["method"] == as_plain(changed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["nct", "jtt"])
def test_two_workers_killed_half_way_and_resumed(
    method: str, digits_root: Path, tmp_path: Path, wait_until: Callable[..., Any], cli: Cli
) -> None:
    command = [str(w) for w in words(method, digits_root, tmp_path, TRIALS, "--workers", "2")]
    folder = tmp_path / "studies" / f"{method}-umnist-standin-quick"
    meaning: dict[str, Any] = {}  # whatever it means, it is only read here
    launcher = subprocess.Popen(
        [sys.executable, "-m", "bench", *command], start_new_session=True, stderr=subprocess.DEVNULL
    )

    def half_way() -> bool:
        return (folder / "journal.log").is_file() and len(
            Study(folder, 100, meaning).finished()
        ) > 2

    wait_until(lambda: half_way() or launcher.poll() is not None, 240.0)
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert len(Study(folder, 100, meaning).finished()) < TRIALS
    assert subprocess.run([sys.executable, "-m", "bench", *command]).returncode == 0
    study = Study(folder, 100, meaning)
    assert len(study.finished()) == TRIALS
    assert study.trials("RUNNING", "WAITING") == []
    assert len({json.dumps(trial.params) for trial in study.finished()}) == TRIALS
    assert len({trial.user_attrs["run_id"] for trial in study.finished()}) == TRIALS
    tuned = ("run", "--methods", method, "--datasets", "umnist", "--seeds", "1", "--quick")
    places = ("--data-root", digits_root, "--results", tmp_path, "--workers", "1")
    assert cli(*tuned, "--preset", "tuned", *places).code == 0
