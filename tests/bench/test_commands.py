from __future__ import annotations

from pathlib import Path

import pytest
from records import a_job, a_record

from bench.commands import unfinished_command, unfinished_commands
from bench.store import Store
from datasets.errors import UsageError

RUNS = ["erm-cmnist-s0-aaaaaaaaaa", "erm-cmnist-s1-bbbbbbbbbb"]


def left(store: Store) -> list[tuple[str, tuple[str, ...], bool]]:
    found = unfinished_commands(store, lambda run_id: store.record_mtime(run_id) > 0)
    return [(given.command, given.runs, given.running) for given in found]


def test_a_command_is_known_while_it_runs_and_forgotten_when_it_ends(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with unfinished_command(store, "bench run", RUNS):
        assert left(store) == [("bench run", tuple(RUNS), True)]
    assert left(store) == []
    assert [*tmp_path.iterdir()] == []


def test_an_interrupted_command_is_remembered_until_its_runs_are_there(tmp_path: Path) -> None:
    store, job = Store(tmp_path), a_job()
    runs = [job.run_id, RUNS[1]]
    with pytest.raises(KeyboardInterrupt), unfinished_command(store, "bench run", runs):
        raise KeyboardInterrupt
    assert left(store) == [("bench run", tuple(runs), False)]
    store.write(a_record(job=job))
    assert left(store) == [("bench run", (RUNS[1],), False)]
    with unfinished_command(store, "bench run --seeds 2", [RUNS[1]]):
        assert len(left(store)) == 2, "of another set of runs: it says which command that was"
    with pytest.raises(KeyboardInterrupt), unfinished_command(store, "bench run", runs):
        raise KeyboardInterrupt
    assert left(store) == [("bench run", (RUNS[1],), False)], "the same runs are the same command"


def test_what_others_finished_is_forgotten(tmp_path: Path) -> None:
    store, job = Store(tmp_path), a_job()
    with pytest.raises(KeyboardInterrupt), unfinished_command(store, "first", [job.run_id]):
        raise KeyboardInterrupt
    store.write(a_record(job=job))
    with pytest.raises(KeyboardInterrupt), unfinished_command(store, "second", RUNS):
        raise KeyboardInterrupt
    assert [path.suffix for path in (tmp_path / "commands").glob("*.json")] == [".json"]


def test_a_command_that_was_refused_is_not_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UsageError), unfinished_command(store, "bench run", RUNS):
        raise UsageError("damaged data")
    assert [*tmp_path.iterdir()] == []


def test_the_library_has_no_command(tmp_path: Path) -> None:
    with unfinished_command(Store(tmp_path), "", RUNS):
        assert [*tmp_path.iterdir()] == []


def test_a_damaged_file_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands" / "abc.json").write_text('{"command": ')
    assert left(Store(tmp_path)) == []
    with unfinished_command(Store(tmp_path), "bench run", RUNS):
        pass
