"""What a grid is expected to cost: with shared stages counted once, and each run by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_records import record

from bench.files import to_json
from bench.plan import NOWHERE, Request, expand
from bench.sharing import expected_totals, stage_seconds
from bench.store import Store

METHODS = ("erm", "dfr", "exmap", "nct")
FIRST, OWN = 60.0, {"erm": 0.0, "dfr": 3.0, "exmap": 7.0, "nct": 90.0}


def stages(method: str, first: float = FIRST) -> list[dict[str, Any]]:
    """What one run made; NCT shares nothing."""
    named = {} if method == "nct" else {"erm": first}
    return [
        {"name": name, "key": "", "seconds_standalone": seconds, "reused": False}
        for name, seconds in {**named, "fit": OWN[method]}.items()
    ]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A finished run of seed 100 of each method, from which others are estimated."""
    found = Store(tmp_path)
    for job in expand(Request(METHODS, ("umnist",), (100,), NOWHERE)):
        folder = found.runs / job.run_id
        folder.mkdir(parents=True)
        content = record(job, 50.0, stages=stages(job.method))
        (folder / "record.json").write_text(to_json(content))
    return found


def test_a_stage_is_counted_once_for_every_seed(store: Store) -> None:
    jobs = expand(Request(METHODS, ("umnist",), (100, 101), NOWHERE))
    totals = expected_totals(jobs, stage_seconds(jobs, store))
    assert totals.standalone == pytest.approx(2 * (3 * FIRST + sum(OWN.values())))
    assert totals.shared == pytest.approx(2 * (FIRST + sum(OWN.values())))
    assert totals.unknown == 0


def test_only_the_same_stage_is_shared(store: Store) -> None:
    """Another rate in DFR's first stage makes it another stage."""
    changed = {"dfr.erm.lr": "0.123"}
    jobs = expand(Request(("erm", "dfr"), ("umnist",), (100,), NOWHERE, overrides=changed))
    totals = expected_totals(jobs, stage_seconds(jobs, store))
    assert totals.shared == totals.standalone == pytest.approx(2 * FIRST + OWN["dfr"])


def test_what_no_run_tells_is_counted_apart(store: Store) -> None:
    jobs = expand(Request(("erm", "jtt"), ("umnist", "cmnist"), (100,), NOWHERE))
    totals = expected_totals(jobs, stage_seconds(jobs, store))
    assert (totals.shared, totals.standalone, totals.unknown) == (FIRST, FIRST, 3)


def test_plan_prints_both_totals(store: Store, tmp_path: Path, cli: Any) -> None:
    words = ["plan", "--methods", ",".join(METHODS), "--datasets", "umnist", "--seeds", "100,101"]
    words += ["--results", str(store.root), "--data-root", str(tmp_path / "none")]
    told = cli(*words, "--json").json["expected_seconds"]
    assert told == {"shared": pytest.approx(320.0), "standalone": pytest.approx(560.0)}
    plain = cli(*words)
    assert "5.3 min of one worker with shared stages counted once" in plain.out
    assert "9.3 min with each run by itself" in plain.out
    # To be run is the second seed alone.
    assert "to run: 4, expected 2.7 min" in plain.err and "4.7 min with each" in plain.err
