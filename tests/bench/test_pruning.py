"""Pruning: which epochs are compared, and what becomes of a trial that is stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.plan import Request, expand
from bench.pruning import LONGEST, Pruned, Watch, watched_rules
from bench.study import Claim, Study
from datasets.errors import UsageError
from methods.base import get_method
from methods.presets import preset_config
from methods.selection import Selection

Cli = Callable[..., Any]
MEANING = {"method": "toy version 1", "pruning": True}
START, EPOCHS = 3, 4  # complete trials before any is pruned; epochs of a toy fit


@pytest.fixture(autouse=True)
def early_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.study.WARM_UP", START)


def epoch(stage: str, number: int, value: float, rule: str, **where: int) -> dict[str, Any]:
    told = {"stage": stage, "epoch": number, "epochs": EPOCHS, "selection": value, "rule": rule}
    return {**told, **where}


def fit(study: Study, claim: Claim, first: int = 1, last: int = EPOCHS) -> float:
    """Fit a toy: its value rises with the epochs towards what was drawn."""
    x: float = claim.trial.suggest_float("x", 0.0, 1.0)
    watch = Watch(study, claim, "toy", ("val_wga",))
    for number in range(first, last + 1):
        watch(epoch("toy", number, x * number / EPOCHS, "val_wga"))
    return x


def tune(folder: Path, trials: int) -> list[tuple[str, dict[str, Any], dict[int, float]]]:
    study = Study(folder, 100, MEANING)
    while claim := study.claim(trials):
        try:
            study.complete(claim, fit(study, claim), {})
        except Pruned as stopped:
            study.pruned(claim, {"pruned": stopped.message})
    return [(t.state.name, t.params, t.intermediate_values) for t in study.finished()]


def die_at_work(folder: Path) -> None:
    study = Study(folder, 100, MEANING)
    claim = study.claim(100)
    assert claim is not None
    fit(study, claim, last=1)
    os._exit(9)


def test_pruned_trials_count_and_the_same_seed_prunes_the_same(tmp_path: Path) -> None:
    first = tune(tmp_path / "first", 12)
    assert first == tune(tmp_path / "second", 12)
    assert len(first) == 12
    states = [state for state, _, _ in first]
    assert states[:START] == ["COMPLETE"] * START and "PRUNED" in states
    for state, _, values in first:
        assert len(values) == EPOCHS if state == "COMPLETE" else 1 < len(values) <= EPOCHS


def test_a_trial_made_again_keeps_the_epochs_of_its_first_attempt(tmp_path: Path) -> None:
    tune(tmp_path, START)
    child = multiprocessing.get_context("fork").Process(target=die_at_work, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 9
    study = Study(tmp_path, 100, MEANING)
    claim = study.claim(START + 1)
    assert claim is not None
    (dead,) = study.trials("FAIL")
    (taken,) = study.trials("RUNNING")
    assert list(dead.intermediate_values) == [1]
    assert taken.intermediate_values == dead.intermediate_values
    try:  # from its last checkpoint, as a fit would
        study.complete(claim, fit(study, claim, first=2), {})
    except Pruned as stopped:
        study.pruned(claim, {"pruned": stopped.message})
    assert len(study.finished()) == START + 1 and study.claim(START + 1) is None


@pytest.mark.parametrize(
    ("method", "told", "step"),
    [
        ("erm", epoch("erm", 3, 90.0, "val_avg"), 3),
        ("jtt", epoch("jtt-identify", 3, 90.0, "last"), None),
        ("jtt", epoch("jtt", 3, 90.0, "val_wga"), 3),
        ("cnc", epoch("erm", 3, 90.0, "val_wga"), None),  # the first model, whatever its rule
        ("george", epoch("erm", 3, 90.0, "val_avg"), None),
        ("george", {"stage": "george-clusters"}, None),
        ("george", epoch("george", 3, 90.0, "worst_cluster"), 3),
        ("nct", epoch("nct-1-2", 3, 0.4, "val_loss", iteration=1, phase=2), None),
        ("nct", epoch("nct-2-1", 3, 0.4, "pwga2", iteration=2, phase=1), 21 * LONGEST + 3),
        ("nct", epoch("nct-3-2", 3, 0.4, "pwga2", iteration=3, phase=2), 32 * LONGEST + 3),
        ("nct_plus", epoch("nct-2-1", 3, 0.4, "cell_pwga", iteration=2, phase=1), 21 * LONGEST + 3),
    ],
)
def test_only_epochs_that_are_alike_are_compared(
    method: str, told: dict[str, Any], step: int | None, tmp_path: Path
) -> None:
    study = Study(tmp_path, 100, MEANING)
    claim = study.claim(1)
    assert claim is not None
    (job,) = expand(Request((method,), ("umnist",), (100,), tmp_path))
    Watch(study, claim, get_method(method).training_name, watched_rules(job))(told)
    (trial,) = study.trials("RUNNING")
    assert list(trial.intermediate_values) == ([] if step is None else [step])


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("dfr", {}),
        ("exmap", {}),
        ("erm", {"erm.selection": "val_loss"}),
        ("jtt", {"jtt.selection": "val_avg"}),  # tuned for the worst group
        ("nct", {"nct.iterations": "1"}),
    ],
)
def test_where_nothing_can_be_compared_pruning_is_refused(
    method: str, overrides: dict[str, str], tmp_path: Path
) -> None:
    (job,) = expand(Request((method,), ("umnist",), (100,), tmp_path, overrides=overrides))
    with pytest.raises(UsageError, match="--prune"):
        watched_rules(job)


class OneHopeless:
    """Trials whose epochs are all scored alike, except for the last of four."""

    score = 0.9

    def search_space(self, method: Any, trial: Any, task: Any) -> Any:
        self.score = 0.9 if trial.number < 3 else 0.1
        lr = trial.suggest_float("lr", 1e-4, 1e-3)
        return replace(preset_config(method, task.name), lr=lr)

    def selection(self, rule: str, task: Any) -> Selection:
        return Selection(rule, lambda logits: self.score)


# ERM is stopped within a stage that others could share, GroupDRO within its own run.
@pytest.mark.parametrize(("method", "prune"), [("erm", True), ("erm", False), ("groupdro", True)])
def test_a_hopeless_trial_is_pruned_only_if_asked(
    method: str,
    prune: bool,
    cli: Cli,
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{method}-umnist-standin-quick"
    toy, kind = OneHopeless(), type(get_method(method))
    monkeypatch.setattr(kind, "search_space", lambda *drawn: toy.search_space(*drawn))
    monkeypatch.setattr("methods.training.selection", toy.selection)
    words = ("tune", "--method", method, "--dataset", "umnist", "--trials", 4, "--quick")
    places = ("--data-root", digits_root, "--results", tmp_path)
    ended = cli(*words, *places, *(["--prune"] if prune else []))
    assert ended.code == 0
    folder = tmp_path / "studies" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["trials"]["finished"] == len(summary["history"]) == 4
    assert summary["trials"]["pruned"] == summary["budget"]["pruned"] == int(prune)
    assert summary["trials"]["diverged"] == 0
    assert summary["budget"]["pruning"] is prune
    assert [trial["value"] is None for trial in summary["history"]] == [False] * 3 + [prune]
    preset = (tmp_path / "presets" / f"{name}.toml").read_text()
    assert ("1 pruned" if prune else "no pruning") in preset
    assert not list((folder / "work").glob("*")) and not list((folder / "stages").glob("*.work"))
    last = summary["history"][-1]
    record = json.loads((folder / "runs" / last["run_id"] / "record.json").read_text())
    assert record["status"] == ("pruned" if prune else "done")
    spent = sum(stage["image_passes"] for stage in record["stages"])
    assert 0 < spent <= summary["budget"]["image_passes"] / 4
    other = cli(*words, *places, *([] if prune else ["--prune"]))
    assert other.code == 2 and "pruning was" in other.err
