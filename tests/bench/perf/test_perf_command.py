"""`bench perf`: its rows and files, and wrong use."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from bench.perf import arms, workload
from bench.perf.measure import COLUMNS, EAGER_LIMIT, Case, Sample, machine_info
from bench.process import CpuClock

TINY = workload.Effort(split=160, trained=128, evaluated=64, grown=64)
TRAINING = {EAGER_LIMIT, "ours", "DataLoader, 0 workers", "DataLoader, 4 workers"}
EVALUATION = TRAINING | {"ours, first pass"}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    folders = ("--out", str(tmp_path / "perf"), "--results", str(tmp_path / "results"))
    return ["perf", "--datasets", "umnist", "--repeats", "1", *folders]


def test_rows_in_json_and_csv(
    words: list[str], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LENET_EFFORT", TINY)
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    rows = outcome.json["rows"]
    measured: dict[str, set[str]] = {}
    for row in rows:
        measured.setdefault(row["case"], set()).add(row["arm"])
        assert {"images_per_cpu_second", "spread", "ratio"} <= set(row)
        assert row["images_per_cpu_second"] > 0 and row["ratio"] > 0
        assert row["arm"] != EAGER_LIMIT or row["ratio"] == 1
    assert measured == {
        "umnist: training, batch 128": TRAINING,
        "umnist: training, batch 64": TRAINING,
        "umnist: evaluation": EVALUATION,
        "umnist: NCT, batch 64": {EAGER_LIMIT, "ERM", "NCT phase 1", "NCT phase 2"},
    }
    assert outcome.json["machine"]["threads"] == 1
    (path,) = (tmp_path / "perf").iterdir()
    assert path.name == machine_info().file_name
    kept = list(csv.DictReader(path.open()))
    assert tuple(kept[0]) == COLUMNS
    assert [(k["case"], k["arm"]) for k in kept] == [(r["case"], r["arm"]) for r in rows]
    assert float(kept[1]["ratio"]) == pytest.approx(rows[1]["ratio"], abs=1e-3)
    assert kept[0]["commit"] == machine_info().commit


def fake_case(name: str) -> Case:
    def turn() -> dict[str, Sample]:
        fast, slow = CpuClock(1.0, 0.5), CpuClock(1.0, 1.0)
        spent = {
            **{EAGER_LIMIT: fast, "ours": fast},
            **{"ERM": slow, "NCT phase 1": fast, "NCT phase 2": slow},
        }
        return {arm: Sample(10, own) for arm, own in spent.items()}

    return Case(name, lambda: [turn])


def test_table_and_what_is_kept_of_other_cases(
    words: list[str], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "first"):
        monkeypatch.setattr(arms, "cases_of", lambda workload, name=name: [fake_case(name)])
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
    assert "images per CPU-second" in outcome.out and "NCT phase 2" in outcome.out
    assert "phase 1 costs 0.50 of an ERM step, one of phase 2 1.00" in outcome.out
    (path,) = (tmp_path / "perf").iterdir()
    kept = [(row["case"], row["arm"]) for row in csv.DictReader(path.open())]
    assert len(kept) == len(set(kept)) == 10
    assert {case for case, _ in kept} == {"first", "second"}


def test_what_was_measured_survives_an_interruption(
    words: list[str], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    both = [fake_case("first"), Case("second", interrupted)]
    monkeypatch.setattr(arms, "cases_of", lambda workload: both)
    assert cli(*words).code == 130
    (path,) = (tmp_path / "perf").iterdir()
    assert {row["case"] for row in csv.DictReader(path.open())} == {"first"}


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--repeats", "0"], ["--repeats must be at least 1 but got 0", "-> e.g. --repeats 5"]),
        (["--repeats", "two"], ["--repeats: invalid int value: 'two'"]),
        (["--datasets", "umnits"], ["did you mean 'umnist'?", "-> choose from"]),
        (["--datasets", ","], ["an empty list of names", "-> choose from"]),
    ],
)
def test_wrong_use(
    words: list[str], more: list[str], parts: list[str], tmp_path: Path, cli: Any
) -> None:
    outcome = cli(*words, *more)
    assert outcome.code == 2 and outcome.out == ""
    assert all(part in outcome.err for part in parts), outcome.err
    assert not (tmp_path / "perf").exists()


def test_a_file_that_is_something_else_is_left_alone(
    words: list[str], tmp_path: Path, cli: Any
) -> None:
    path = tmp_path / "perf" / machine_info().file_name
    path.parent.mkdir()
    path.write_text("a,b\n1,2\n")
    outcome = cli(*words)
    assert outcome.code == 2 and "-> delete it, or give another folder" in outcome.err
    assert path.read_text() == "a,b\n1,2\n"
