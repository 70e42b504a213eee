"""What runs cost, read from records: sums, shares, warm-up, and what cannot be told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.energy import measured_energy
from bench.execute import Machine, execute
from bench.plan import Request, expand
from bench.store import Store
from bench.timing import by_cell, machines, minutes_together, timing_of, timings, warm_up_seconds


def epochs(stage: str, seconds: list[float], iteration: int | None = None) -> pd.DataFrame:
    rows = [
        {"stage": stage, "iteration": iteration, "phase": None, "epoch": i, "seconds": s}
        for i, s in enumerate(seconds)
    ]
    return pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"})


def stage(name: str, seconds: float, *, reused: bool, cpu: float | None = 6.0) -> dict[str, Any]:
    return {
        "name": name,
        "seconds_standalone": seconds,
        "seconds_marginal": 0.0 if reused else seconds,
        "cpu_seconds": cpu,
        "image_passes": 1000,
        "reused": reused,
    }


def record(stages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{"run_id": "r", "method": "jtt", "dataset": "umnist", "seed": 0, "device": "cpu"},
        **{"threads": 1, "peak_memory_bytes": 2_000_000_000, "stages": stages},
        "environment": {"processor": "Some CPU"},
    }


def test_stand_alone_counts_everything_and_marginal_what_was_made() -> None:
    stages = [stage("erm", 120.0, reused=True), stage("fit", 60.0, reused=False)]
    history = pd.concat([epochs("erm", [42.0, 30.0, 30.0]), epochs("jtt", [26.0, 20.0, 20.0])])
    cost = timing_of(record(stages), history)
    assert cost.warm_up_minutes == pytest.approx(18 / 60)
    assert cost.minutes_standalone == pytest.approx((180 - 18) / 60)
    assert cost.minutes_marginal == pytest.approx((60 - 6) / 60)
    assert (cost.image_passes, cost.cpu_minutes, cost.peak_memory_gb) == (2000, 0.2, 2.0)
    assert cost.energy_kwh is None


def test_a_stage_in_common_counts_once_together_with_its_warm_up() -> None:
    def run(key: str, own: float) -> tuple[dict[str, Any], pd.DataFrame]:
        first = {**stage("erm", 120.0, reused=True), "key": key}
        last = {**stage("fit", own, reused=False), "key": f"{key} {own}"}
        trained = pd.concat([epochs("erm", [42.0, 30.0, 30.0]), epochs("x", [8.0, 5.0, 5.0])])
        return record([first, last]), trained

    one, same, other = run("a", 60.0), run("a", 30.0), run("b", 30.0)
    assert minutes_together([one]) == pytest.approx(timing_of(*one).minutes_standalone)
    assert minutes_together([one, same]) == pytest.approx((120 - 12 + 60 - 3 + 30 - 3) / 60)
    assert minutes_together([one, other]) == pytest.approx((240 - 24 + 60 - 3 + 30 - 3) / 60)


def test_warm_up_is_told_training_by_training_and_only_where_it_can_be() -> None:
    assert warm_up_seconds(epochs("erm", [9.0, 1.0])) == 0.0  # one other epoch tells nothing
    assert warm_up_seconds(epochs("erm", [1.0, 2.0, 2.0])) == 0.0  # never negative
    two = pd.concat([epochs("nct", [5.0, 1.0, 1.0], 2), epochs("nct", [4.0, 3.0, 3.0], 3)])
    assert warm_up_seconds(two) == pytest.approx(5.0)


def test_processor_time_of_older_records_is_not_made_up() -> None:
    stages = [stage("erm", 10.0, reused=True, cpu=None), stage("fit", 10.0, reused=False)]
    assert timing_of(record(stages), epochs("jtt", [1.0])).cpu_minutes is None


def test_times_are_read_from_a_real_run(digits_root: Path, tmp_path: Path) -> None:
    jobs = expand(Request(("jtt",), ("umnist",), (0, 1), digits_root, quick=True))
    done = execute(jobs[0], Machine(digits_root, tmp_path), lambda progress: None)
    (cost,) = timings(Store(tmp_path), jobs)  # the other job has not been run
    total = sum(s["seconds_standalone"] for s in done["stages"]) / 60
    assert cost.minutes_standalone + cost.warm_up_minutes == pytest.approx(total)
    assert cost.cpu_minutes is not None and cost.cpu_minutes > 0
    assert cost.image_passes == sum(s["image_passes"] for s in done["stages"]) > 0
    assert list(by_cell([cost])) == [("jtt", "umnist")]
    assert machines([cost]) == [f"{cost.processor}, 1 thread"]


def test_energy_is_measured_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def __init__(self, **_: Any) -> None:
            self.final_emissions_data = type("Data", (), {"energy_consumed": 0.25})

        def start(self) -> None: ...

        def stop(self) -> None: ...

    fake = type(sys)("codecarbon")
    fake.OfflineEmissionsTracker = Tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "codecarbon", fake)
    with measured_energy() as energy:
        assert energy.kwh is None
    assert energy.kwh == 0.25
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    with measured_energy() as energy:
        pass
    assert energy.kwh is None
