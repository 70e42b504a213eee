"""Pruning: which epochs are compared, and what becomes of a trial that is stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial

from bench.job import Request, expand
from bench.store import Store
from bench.tuning.source import (
    LONGEST_PHASE,
    Tuning,
    comparable_rules,
    reason_to_prune,
    tune,
)
from bench.tuning.study import Study
from datasets.errors import UsageError
from methods.base import get_method
from methods.presets import preset_config
from methods.selection import Selection

MEANING = {"method": "toy version 1", "pruning": True}
START, EPOCHS = 3, 4  # complete trials before any is pruned; epochs of a toy fit


@pytest.fixture(autouse=True)
def early_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.tuning.study.WARM_UP", START)


def epoch(stage: str, number: int, value: float, rule: str, **where: int) -> dict[str, Any]:
    said = {"stage": stage, "epoch": number, "epochs": EPOCHS, "selection": value, "rule": rule}
    return {**said, **where}


def follow(
    progress: dict[str, Any], study: Study, running: Trial, training: str, *rules: str
) -> str | None:
    report = partial(study.report_and_should_prune, running)
    return reason_to_prune(progress, training, rules, report)


def fit(study: Study, running: Trial, first: int = 1, last: int = EPOCHS) -> str | None:
    """Fit a toy, whose value rises with the epochs towards what was drawn; return why it ended."""
    x: float = running.suggest_float("x", 0.0, 1.0)
    for number in range(first, last + 1):
        progress = epoch("toy", number, x * number / EPOCHS, "val_wga")
        if reason := follow(progress, study, running, "toy", "val_wga"):
            return reason
    return None


def make_trial(study: Study, running: Trial, first: int = 1) -> None:
    if reason := fit(study, running, first):
        study.end(running, "PRUNED", {"pruned": reason})
    else:
        study.end(running, "COMPLETE", {}, running.params["x"])


def make_trials(folder: Path, trials: int) -> list[tuple[str, dict[str, Any], dict[int, float]]]:
    study = Study(folder, 100, MEANING)
    while running := study.claim(trials):
        make_trial(study, running)
    return [(t.state.name, t.params, t.intermediate_values) for t in study.finished()]


def die_at_work(folder: Path) -> None:
    study = Study(folder, 100, MEANING)
    running = study.claim(100)
    assert running is not None
    fit(study, running, last=1)
    os._exit(9)


def test_pruned_trials_count_and_the_same_seed_prunes_the_same(tmp_path: Path) -> None:
    first = make_trials(tmp_path / "first", 12)
    assert first == make_trials(tmp_path / "second", 12)
    assert len(first) == 12
    states = [state for state, _, _ in first]
    assert states[:START] == ["COMPLETE"] * START and "PRUNED" in states
    for state, _, values in first:
        assert len(values) == EPOCHS if state == "COMPLETE" else 1 < len(values) <= EPOCHS


def test_a_trial_made_again_keeps_the_epochs_of_its_first_attempt(tmp_path: Path) -> None:
    make_trials(tmp_path, START)
    child = multiprocessing.get_context("fork").Process(target=die_at_work, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 9
    study = Study(tmp_path, 100, MEANING)
    running = study.claim(START + 1)
    assert running is not None
    (dead,) = study.trials("FAIL")
    (taken,) = study.trials("RUNNING")
    assert list(dead.intermediate_values) == [1]
    assert taken.intermediate_values == dead.intermediate_values
    make_trial(study, running, first=2)  # from its last checkpoint, as a fit would
    assert len(study.finished()) == START + 1 and study.claim(START + 1) is None


def test_an_epoch_of_a_trial_that_was_given_away_is_not_kept(tmp_path: Path) -> None:
    study, other = Study(tmp_path, 100, MEANING), Study(tmp_path, 100, MEANING)
    running = study.claim(1)
    assert running is not None
    study.release(running)  # as if it had been silent for too long
    assert other.claim(1) is not None
    assert not study.report_and_should_prune(running, 1, 0.5)
    assert not any(trial.intermediate_values for trial in study.trials())


@pytest.mark.parametrize(
    ("method", "progress", "step"),
    [
        ("erm", epoch("erm", 3, 90.0, "val_avg"), 3),
        ("erm", {"stage": "erm", "epoch": 2, "epochs": 4, "step": 5, "steps": 9}, None),
        ("jtt", epoch("jtt-identify", 3, 90.0, "last"), None),
        ("jtt", epoch("jtt", 3, 90.0, "val_wga"), 3),
        ("cnc", epoch("erm", 3, 90.0, "val_wga"), None),  # the first model, whatever its rule
        ("george", epoch("erm", 3, 90.0, "val_avg"), None),
        ("george", {"stage": "george-clusters"}, None),
        ("george", epoch("george", 3, 90.0, "worst_cluster"), 3),
        ("nct", epoch("nct-1-2", 3, 0.4, "val_loss", iteration=1, phase=2), None),
        ("nct", epoch("nct-2-1", 3, 0.4, "pwga2", iteration=2, phase=1), 21 * LONGEST_PHASE + 3),
        ("nct", epoch("nct-3-2", 3, 0.4, "pwga2", iteration=3, phase=2), 32 * LONGEST_PHASE + 3),
        (
            "nct_plus",
            epoch("nct-2-1", 3, 0.4, "cell_pwga", iteration=2, phase=1),
            21 * LONGEST_PHASE + 3,
        ),
    ],
)
def test_only_epochs_that_are_alike_are_compared(
    method: str, progress: dict[str, Any], step: int | None, tmp_path: Path
) -> None:
    study = Study(tmp_path, 100, MEANING)
    running = study.claim(1)
    assert running is not None
    (job,) = expand(Request((method,), ("umnist",), (100,), tmp_path))
    follow(progress, study, running, get_method(method).training_name, *comparable_rules(job))
    (trial,) = study.trials("RUNNING")
    assert list(trial.intermediate_values) == ([] if step is None else [step])


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("dfr", {}),
        ("exmap", {}),
        ("erm", {"erm.selection": "val_loss"}),
        ("nct", {"nct.iterations": "1"}),
    ],
)
def test_where_nothing_can_be_compared_pruning_is_refused(
    method: str, overrides: dict[str, str], tmp_path: Path
) -> None:
    (job,) = expand(Request((method,), ("umnist",), (100,), tmp_path, overrides=overrides))
    with pytest.raises(UsageError, match="--prune"):
        comparable_rules(job)


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
    method: str, prune: bool, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, kind = OneHopeless(), type(get_method(method))
    monkeypatch.setattr(kind, "search_space", lambda *drawn: toy.search_space(*drawn))
    monkeypatch.setattr("methods.training.selection", toy.selection)
    tuning = Tuning(method, "umnist", digits_root, tmp_path, trials=4, quick=True, prune=prune)
    lines: list[str] = []
    # In this process: no other has the toy.
    summary = tune(tuning, log=lines.append, isolate=False)
    assert summary.trials.finished == len(summary.history) == 4
    assert summary.trials.pruned == summary.budget.pruned == int(prune)
    assert summary.trials.diverged == 0
    assert summary.budget.pruning is prune
    assert [trial.value is None for trial in summary.history] == [False] * 3 + [prune]
    assert lines[-1].startswith("[4/4] trial 3 pruned: " if prune else "[4/4] trial 3: ")
    assert summary.preset is not None
    assert ("1 pruned" if prune else "no pruning") in summary.preset.read_text()
    folder = tuning.folder
    assert not list((folder / "work").glob("*")) and not list((folder / "stages").glob("*.work"))
    last = summary.history[-1]
    record = Store(folder).record(str(last.run_id))
    assert record is not None and record.status.value == ("pruned" if prune else "done")
    assert record.details.get("reason") == last.pruned
    assert 0 < record.cost.image_passes() <= summary.budget.image_passes / 4
    written = json.loads((folder / "summary.json").read_text())
    assert written["history"][-1]["pruned"] == last.pruned
    with pytest.raises(UsageError, match="pruning was"):
        tune(replace(tuning, prune=not prune), log=lines.append, isolate=False)


def test_the_answer_reaches_a_fit_in_a_process_of_its_own(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def second_falls_behind(self: Study, running: Trial, step: int, value: float) -> bool:
        asked.append((running.number, step))
        return running.number == 1

    monkeypatch.setattr(Study, "report_and_should_prune", second_falls_behind)
    tuning = Tuning("erm", "umnist", digits_root, tmp_path, trials=2, quick=True, prune=True)
    summary = tune(tuning, workers=2, log=print)
    assert sorted(asked) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert {t.draw: t.pruned is None for t in summary.history} == {0: True, 1: False}
    statuses = sorted(record.status.value for record in Store(tuning.folder).records())
    assert statuses == ["done", "pruned"]
