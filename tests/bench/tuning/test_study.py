"""Studies on disk: the number of trials, dead launchers, torn journals, and seeds."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import Trial

from bench.tuning import WARM_UP
from bench.tuning.study import (
    MAX_FAILURES,
    JournalLock,
    Study,
    StudyFailing,
    count_finished,
    draw_of,
)
from datasets.errors import UsageError
from datasets.lock import LockLost

MEANING = {"method": "toy version 1"}


def draw(running: Trial) -> float:
    x = running.suggest_float("x", 0.0, 1.0)
    kind = running.suggest_categorical("kind", ["a", "b"])
    return float(-((x - 0.3) ** 2) + 0.1 * (kind == "b"))


def tune(folder: Path, trials: int, seed: int = 100) -> list[dict[str, Any]]:
    study = Study(folder, seed, MEANING)
    while running := study.claim(trials):
        study.end(running, "COMPLETE", {}, draw(running))
    return [trial.params for trial in study.finished()]


def die_at_work(folder: Path) -> None:
    running = Study(folder, 100, MEANING).claim(100)
    assert running is not None
    draw(running)
    os._exit(9)


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    count = WARM_UP + 5  # some of them from TPE
    first = tune(tmp_path / "first", count)
    assert first == tune(tmp_path / "second", count)
    assert first != tune(tmp_path / "third", count, seed=101)
    assert len({trial["x"] for trial in first}) == count


@pytest.mark.parametrize("line", [b"\0" * 40, b"{", b"3", b"\xff\xfe"])
def test_a_damaged_journal_is_set_aside_and_the_same_trials_are_drawn(
    tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study"
    whole = tune(folder, 3)
    journal = folder / "journal.log"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([*lines[:4], line, *lines[5:]]))
    assert count_finished(folder) == 0
    assert tune(folder, 3) == whole
    assert "study study starts again: line 5 of journal.log is damaged" in capsys.readouterr().err
    assert len(list((folder / "damaged").glob("journal.log.*"))) == 1
    assert count_finished(folder) == 3


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
    # The one that died is repeated as it was drawn, so nothing shows that a worker was killed.
    assert resumed == whole
    assert [draw_of(trial) for trial in study.finished()] == list(range(WARM_UP + 3))


def test_however_far_a_worker_came_the_same_trial_is_made_again(tmp_path: Path) -> None:
    whole = tune(tmp_path / "whole", WARM_UP + 3)
    tune(tmp_path / "torn", WARM_UP + 1)
    # Dead before it drew, in the middle of it, and when made again before it had drawn anything.
    for parameters in (0, 1, 0):
        study = Study(tmp_path / "torn", 100, MEANING)
        running = study.claim(100)
        assert running is not None
        if parameters:
            running.suggest_float("x", 0.0, 1.0)
        study.release(running)
    assert tune(tmp_path / "torn", WARM_UP + 3) == whole


def test_a_trial_is_made_again_even_if_the_process_that_was_to_queue_it_died(
    tmp_path: Path,
) -> None:
    whole = tune(tmp_path / "whole", 3)
    study = Study(tmp_path / "torn", 100, MEANING)
    running = study.claim(3)
    assert running is not None
    draw(running)
    study.release(running)
    study.study.tell(running.number, state=study.optuna.trial.TrialState.FAIL)
    assert tune(tmp_path / "torn", 3) == whole


def test_the_first_draws_are_random_however_many_workers_there_are(tmp_path: Path) -> None:
    def drawn(folder: Path, at_once: int) -> dict[int, dict[str, Any]]:
        workers = [Study(folder, 100, MEANING) for _ in range(at_once)]
        while len(workers[0].finished()) < WARM_UP + 4:
            claimed = [(study, study.claim(WARM_UP + 4)) for study in workers]
            values = [draw(trial) if trial is not None else 0.0 for _, trial in claimed]
            for (study, trial), value in zip(claimed, values, strict=True):
                if trial is not None:
                    study.end(trial, "COMPLETE", {}, value)
        return {draw_of(trial): trial.params for trial in workers[0].finished()}

    alone, many = drawn(tmp_path / "alone", 1), drawn(tmp_path / "many", 6)
    assert [alone[n] for n in range(WARM_UP)] == [many[n] for n in range(WARM_UP)]
    assert alone[WARM_UP + 1] != many[WARM_UP + 1]


def test_a_trial_that_was_given_away_cannot_be_told_twice(tmp_path: Path) -> None:
    slow, other = Study(tmp_path, 100, MEANING), Study(tmp_path, 100, MEANING)
    mine = slow.claim(1)
    assert mine is not None
    value = draw(mine)
    slow.release(mine)  # as if it had been silent for too long
    again = other.claim(1)
    assert again is not None
    with pytest.raises(LockLost, match="trial 0"):
        slow.end(mine, "COMPLETE", {}, value)
    other.end(again, "COMPLETE", {}, draw(again))
    assert [trial.value for trial in slow.finished()] == [value]


def test_counting_from_outside_does_not_touch_the_study(tmp_path: Path) -> None:
    assert count_finished(tmp_path / "none") == 0
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "journal.log").touch()
    assert count_finished(tmp_path / "begun") == 0
    tune(tmp_path / "study", 3)
    torn = (tmp_path / "study" / "journal.log").read_bytes() + b'{"op_code": 5, "worker'
    (tmp_path / "study" / "journal.log").write_bytes(torn)
    before = sorted(path.name for path in (tmp_path / "study").iterdir())
    assert count_finished(tmp_path / "study") == 3
    assert (tmp_path / "study" / "journal.log").read_bytes() == torn
    assert sorted(path.name for path in (tmp_path / "study").iterdir()) == before


def test_a_living_workers_trial_is_left_alone(tmp_path: Path) -> None:
    study, other = Study(tmp_path, 100, MEANING), Study(tmp_path, 100, MEANING)
    mine, theirs = study.claim(2), other.claim(2)
    assert mine is not None and theirs is not None
    assert mine.number != theirs.number
    assert study.claim(2) is None  # both that are wanted are under way
    other.end(theirs, "COMPLETE", {}, draw(theirs))
    assert study.claim(2) is None
    study.end(mine, "COMPLETE", {}, draw(mine))
    assert len(other.finished()) == 2


def test_a_trial_that_diverged_counts_and_one_that_failed_does_not(tmp_path: Path) -> None:
    study = Study(tmp_path, 100, MEANING)
    first, second = study.claim(2), study.claim(2)
    assert first is not None and second is not None
    study.end(first, "PRUNED", {})
    study.failed(second, "no such file", {})
    assert len(study.finished()) == 1
    third = study.claim(2)
    assert third is not None
    study.end(third, "COMPLETE", {}, draw(third))
    assert study.claim(2) is None


def test_many_failures_end_the_study(tmp_path: Path) -> None:
    study = Study(tmp_path, 100, MEANING)
    with pytest.raises(StudyFailing, match="no such file"):
        for _ in range(MAX_FAILURES):
            running = study.claim(50)
            assert running is not None
            study.failed(running, "no such file", {})


def test_a_journal_with_half_a_line_is_mended(tmp_path: Path) -> None:
    tune(tmp_path, 2)
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code": 5, "worker')
    assert len(tune(tmp_path, 3)) == 3
    assert journal.read_bytes().startswith(whole)
    assert len(Study(tmp_path, 100, MEANING).finished()) == 3


def test_a_journal_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """It has two draws, one that was made again, and one whose worker died in the middle of it."""
    journal = tmp_path / "toy" / "journal.log"
    journal.parent.mkdir()
    shutil.copy(Path(__file__).with_name("assets") / "journal.log", journal)
    assert count_finished(tmp_path / "toy") == 3
    study = Study(tmp_path / "toy", 100, MEANING)
    assert study.asked == 4
    assert [draw_of(trial) for trial in study.trials()] == [0, 1, 2, 2, 3]
    assert tune(tmp_path / "toy", 6) == tune(tmp_path / "new", 6)
    assert [draw_of(trial) for trial in study.finished()] == list(range(6))
    assert [t.user_attrs["again"] for t in study.finished() if "again" in t.user_attrs] == [2, 4]


@pytest.mark.parametrize("content", [b"", b"a\n", b"a\nb\n"])
def test_a_whole_journal_is_not_touched(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    JournalLock(tmp_path / "journal").acquire()
    assert (tmp_path / "journal").read_bytes() == content


def test_a_study_is_not_continued_as_another(tmp_path: Path) -> None:
    tune(tmp_path, 1)
    with pytest.raises(UsageError, match="toy version 1"):
        Study(tmp_path, 100, {"method": "toy version 2"})
