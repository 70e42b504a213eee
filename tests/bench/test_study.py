"""Studies on disk: the number of trials, dead workers, torn journals, and seeds."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from bench.study import FAILURES, WARM_UP, Claim, Study, StudyFailing, drop_torn_line
from datasets.errors import UsageError

MEANING = {"method": "toy version 1"}


def draw(claim: Claim) -> float:
    x = claim.trial.suggest_float("x", 0.0, 1.0)
    kind = claim.trial.suggest_categorical("kind", ["a", "b"])
    return float(-((x - 0.3) ** 2) + 0.1 * (kind == "b"))


def tune(folder: Path, trials: int, seed: int = 100) -> list[dict[str, Any]]:
    study = Study(folder, seed, MEANING)
    while claim := study.claim(trials):
        study.complete(claim, draw(claim), {})
    return [trial.params for trial in study.finished()]


def die_at_work(folder: Path) -> None:
    claim = Study(folder, 100, MEANING).claim(100)
    assert claim is not None
    draw(claim)
    os._exit(9)


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    count = WARM_UP + 5  # some of them from TPE
    first = tune(tmp_path / "first", count)
    assert first == tune(tmp_path / "second", count)
    assert first != tune(tmp_path / "third", count, seed=101)
    assert len({trial["x"] for trial in first}) == count


def test_a_dead_workers_trial_is_made_again_and_none_twice(tmp_path: Path) -> None:
    whole = tune(tmp_path / "whole", WARM_UP + 3)
    tune(tmp_path / "torn", WARM_UP + 1)
    child = multiprocessing.get_context("fork").Process(
        target=die_at_work, args=(tmp_path / "torn",)
    )
    child.start()
    child.join()
    assert child.exitcode == 9
    resumed = tune(tmp_path / "torn", WARM_UP + 3)
    study = Study(tmp_path / "torn", 100, MEANING)
    assert len(study.finished()) == WARM_UP + 3
    assert [t.state.name for t in study.trials("RUNNING", "WAITING")] == []
    assert len({tuple(trial.items()) for trial in resumed}) == len(resumed)
    # The one that died is repeated as it was drawn, so the study is the one that nobody killed.
    assert resumed[: WARM_UP + 2] == whole[: WARM_UP + 2]


def test_a_living_workers_trial_is_left_alone(tmp_path: Path) -> None:
    study, other = Study(tmp_path, 100, MEANING), Study(tmp_path, 100, MEANING)
    mine, theirs = study.claim(2), other.claim(2)
    assert mine is not None and theirs is not None
    assert mine.trial.number != theirs.trial.number
    assert study.claim(2) is None  # both that are wanted are under way
    other.complete(theirs, draw(theirs), {})
    assert study.claim(2) is None
    study.complete(mine, draw(mine), {})
    assert len(other.finished()) == 2


def test_a_trial_that_diverged_counts_and_one_that_failed_does_not(tmp_path: Path) -> None:
    study = Study(tmp_path, 100, MEANING)
    first, second = study.claim(2), study.claim(2)
    assert first is not None and second is not None
    study.diverged(first, {})
    study.failed(second, "no such file", {})
    assert len(study.finished()) == 1
    third = study.claim(2)
    assert third is not None
    study.complete(third, draw(third), {})
    assert study.claim(2) is None


def test_many_failures_end_the_study(tmp_path: Path) -> None:
    study = Study(tmp_path, 100, MEANING)
    with pytest.raises(StudyFailing, match="no such file"):
        for _ in range(FAILURES):
            claim = study.claim(50)
            assert claim is not None
            study.failed(claim, "no such file", {})


def test_a_journal_with_half_a_line_is_mended(tmp_path: Path) -> None:
    tune(tmp_path, 2)
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "worker')
    assert len(tune(tmp_path, 3)) == 3
    assert journal.read_bytes().startswith(whole)
    assert len(Study(tmp_path, 100, MEANING).finished()) == 3


@pytest.mark.parametrize("content", [b"", b"a\n", b"a\nb\n"])
def test_a_whole_journal_is_not_touched(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    drop_torn_line(tmp_path / "journal")
    assert (tmp_path / "journal").read_bytes() == content


def test_a_study_is_not_continued_as_another(tmp_path: Path) -> None:
    tune(tmp_path, 1)
    with pytest.raises(UsageError, match="toy version 1"):
        Study(tmp_path, 100, {"method": "toy version 2"})
