"""What runs cost, read from records, and what jobs are expected to cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_records import jobs, record, stage

from bench import estimate
from bench.api import known_stages, survey
from bench.cost import (
    ExpectedCost,
    by_cell,
    describe_expected,
    divided_cpu,
    expected_totals,
    format_seconds,
    mean_costs,
    stage_seconds,
    timing_of,
    timings,
    warm_up_seconds,
)
from bench.estimate import Network, Speed
from bench.job import NO_DATA, Job, Request, expand
from bench.record import Cost, Record, StageCost, Status
from bench.runner import RunOptions
from bench.store import Store

METHODS = ("erm", "dfr", "exmap", "nct")
FIRST, OWN = 60.0, {"erm": 0.0, "dfr": 3.0, "exmap": 7.0, "nct": 90.0}


def epochs(name: str, seconds: list[float], iteration: int | None = None) -> pd.DataFrame:
    rows = [
        {"stage": name, "iteration": iteration, "phase": None, "epoch": i, "seconds": s}
        for i, s in enumerate(seconds)
    ]
    return pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"})


def run_of(*stages: StageCost, job: Job | None = None) -> Record:
    """A run with these stages."""
    made = record(job or jobs("jtt", "umnist")[0], 90.0)
    return replace(made, cost=Cost(stages, 2_000_000_000))


def test_stand_alone_counts_everything_and_marginal_what_was_made() -> None:
    made = run_of(
        stage("erm", "a", 120.0, reused=True, cpu_seconds=6.0, image_passes=1000),
        stage("fit", "b", 60.0, cpu_seconds=6.0, image_passes=1000),
    )
    history = pd.concat([epochs("erm", [42.0, 30.0, 30.0]), epochs("jtt", [26.0, 20.0, 20.0])])
    cost = timing_of(made, history)
    assert cost.minutes_standalone == pytest.approx((180 - 18) / 60)
    assert cost.minutes_marginal == pytest.approx((60 - 6) / 60)
    assert (cost.image_passes, cost.cpu_minutes, cost.peak_memory_gb) == (2000, 0.2, 2.0)
    assert cost.energy_kwh is None
    assert cost.hardware == "made up, 1 thread"


def test_without_a_history_no_warm_up_is_known() -> None:
    made = run_of(stage("erm", "a", 120.0, reused=True), stage("fit", "b", 60.0))
    cost = timing_of(made, None)
    assert (cost.minutes_standalone, cost.minutes_marginal) == (3.0, 1.0)


def test_a_stage_in_common_is_divided_among_those_that_share_it() -> None:
    def run(key: str, own: float) -> Record:
        first = stage("erm", key, 0.0, reused=True, cpu_seconds=60.0)
        return run_of(first, stage("fit", f"{key} {own}", 0.0, cpu_seconds=own))

    one, same, other = run("a", 30.0), run("a", 10.0), run("b", 30.0)
    assert divided_cpu([one]) == [90.0]
    assert divided_cpu([one, same, other]) == [60.0, 40.0, 90.0]
    unknown = run_of(stage("erm", "a", 0.0, cpu_seconds=None))
    assert divided_cpu([unknown, one]) == [None, 60.0]


def test_warm_up_is_seen_training_by_training_and_only_where_it_can_be() -> None:
    assert warm_up_seconds(epochs("erm", [9.0, 1.0])) == 0.0  # one other epoch shows nothing
    assert warm_up_seconds(epochs("erm", [1.0, 2.0, 2.0])) == 0.0  # never negative
    assert warm_up_seconds(epochs("erm", [9.0, 1.0, 1.0]).drop(columns="seconds")) == 0.0
    two = pd.concat([epochs("nct", [5.0, 1.0, 1.0], 2), epochs("nct", [4.0, 3.0, 3.0], 3)])
    assert warm_up_seconds(two) == pytest.approx(5.0)


def test_processor_time_of_older_records_is_not_made_up() -> None:
    made = run_of(
        stage("erm", "a", 10.0, reused=True, cpu_seconds=None),
        stage("fit", "b", 10.0, cpu_seconds=6.0),
    )
    assert timing_of(made, epochs("jtt", [1.0])).cpu_minutes is None


def test_timings_are_of_finished_runs(tmp_path: Path) -> None:
    store, (first, second) = Store(tmp_path), jobs("jtt", "umnist", 2)
    done = record(first, 90.0)
    store.write(done, epochs("jtt", [1.0]))
    (cost,) = timings(store, [done, replace(record(second, 90.0), status=Status.RUNNING)])
    assert (cost.method, cost.minutes_standalone) == ("jtt", 1.5)
    assert list(by_cell([cost])) == [("jtt", "umnist")]


def test_means_are_of_runs_with_the_papers_settings_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second, third, fourth = jobs("jtt", "umnist", 4)
    own = [stage("fit", "x", 60.0, cpu_seconds=30.0, image_passes=600)]
    store.write(record(first, 90.0, stages=own), epochs("jtt", [1.0]))
    longer = [stage("fit", "x", 120.0, cpu_seconds=30.0, image_passes=600)]
    store.write(record(second, 90.0, stages=longer), epochs("jtt", [1.0]))
    store.write(record(third, 90.0, quick=True), epochs("jtt", [1.0]))
    store.write(record(fourth, 90.0, overrides={"jtt.lr": "1"}), epochs("jtt", [1.0]))
    (mean,) = mean_costs(store)
    assert (mean.method, mean.runs, mean.seconds, mean.cpu_seconds) == ("jtt", 2, 90.0, 30.0)
    assert mean.images_per_cpu_second == 20.0


def stages_of(method: str) -> list[StageCost]:
    """What one run made; NCT shares nothing."""
    named = {} if method == "nct" else {"erm": FIRST}
    return [stage(name, "", seconds) for name, seconds in {**named, "fit": OWN[method]}.items()]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A finished run of seed 100 of each method, from which others are estimated."""
    found = Store(tmp_path)
    for job in expand(Request(METHODS, ("umnist",), (100,), NO_DATA)):
        found.write(record(job, 50.0, stages=stages_of(job.method)))
    return found


def test_a_stage_is_counted_once_for_every_seed(store: Store) -> None:
    wanted = expand(Request(METHODS, ("umnist",), (100, 101), NO_DATA))
    totals = expected_totals(wanted, stage_seconds(wanted, store.records()))
    assert totals.standalone == pytest.approx(2 * (3 * FIRST + sum(OWN.values())))
    assert totals.shared == pytest.approx(2 * (FIRST + sum(OWN.values())))
    assert totals.unknown == 0


def test_only_the_same_stage_is_shared(store: Store) -> None:
    """Another rate in DFR's first stage makes it another stage."""
    changed = {"dfr.erm.lr": "0.123"}
    wanted = expand(Request(("erm", "dfr"), ("umnist",), (100,), NO_DATA, overrides=changed))
    totals = expected_totals(wanted, stage_seconds(wanted, store.records()))
    assert totals.shared == totals.standalone == pytest.approx(2 * FIRST + OWN["dfr"])


def test_what_no_run_shows_is_counted_apart(store: Store) -> None:
    wanted = expand(Request(("erm", "jtt"), ("umnist", "cmnist"), (100,), NO_DATA))
    totals = expected_totals(wanted, stage_seconds(wanted, store.records()))
    assert (totals.shared, totals.standalone, totals.unknown) == (FIRST, FIRST, 3)


def test_what_is_expected_is_told_with_workers_and_what_is_not_known() -> None:
    known = {"a": {"fit": 300.0}, "b": {"fit": 100.0}}
    told = describe_expected(ExpectedCost(400.0, 400.0, 0), known, 1)
    assert told.startswith("expected to take 7 min, until about ")
    told = describe_expected(ExpectedCost(400.0, 400.0, 2), known, 4)
    assert told.startswith("expected to take 5 min with 4 workers"), "the longest run is waited for"
    assert "and 2 more of unknown cost" in told
    assert "not known" in describe_expected(ExpectedCost(0.0, 0.0, 2), {}, 2)
    told = describe_expected(ExpectedCost(0.2, 0.2, 0), {"a": {"fit": 0.2}}, 1)
    assert told.startswith("expected to take some seconds (")


def test_what_is_an_estimate_is_called_so() -> None:
    known = {"a": {"fit": 300.0}, "b": {"fit": 100.0}}
    told = describe_expected(ExpectedCost(400.0, 400.0, 0), known, 1)
    assert told.endswith("(by runs finished here and published ones)")
    told = describe_expected(ExpectedCost(400.0, 400.0, 0, estimated=1), known, 1)
    assert "published ones; 1 of them by an estimate" in told
    told = describe_expected(ExpectedCost(400.0, 400.0, 0, estimated=2), known, 1)
    assert "(by an estimate: image passes" in told and "finished" not in told


@pytest.mark.parametrize(
    ("seconds", "text"), [(89.4, "89 s"), (90.0, "2 min"), (5399.0, "90 min"), (5400.0, "1.5 h")]
)
def test_durations_as_one_reads_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_standins_do_not_tell_what_real_data_cost(tmp_path: Path) -> None:
    job = jobs("erm", "umnist")[0]
    small = replace(job, standin=True)
    Store(tmp_path).write(run_of(stage("fit", "own", 5.0), job=small))
    other = replace(small, seed=7, identity={**job.identity, "seed": 7})
    known, guessed = known_stages([job, other], Store(tmp_path))
    assert known[other.run_id] == {"fit": 5.0} and not guessed
    assert sum(known[job.run_id].values()) > 60, "a published run tells that"
    planned = survey([job, other], Store(tmp_path), expected=True)
    assert planned.seconds == {run_id: sum(own.values()) for run_id, own in known.items()}


def test_runs_are_estimated_for_their_own_threads_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Network] = []

    def speed(network: Network) -> Speed:
        asked.append(network)
        return Speed(0.01, 0.002, 512)

    monkeypatch.setattr(estimate, "kept_speed", speed)
    overrides = {"backbone.pretrained": "false"}
    (job,) = expand(Request(("erm",), ("waterbirds",), (0,), NO_DATA, overrides=overrides))
    frozen = {**job.config.backbone, "frozen": True, "head": "linear"}
    head = replace(
        job, config=replace(job.config, backbone=frozen), identity={**job.identity, "frozen": True}
    )
    how = RunOptions(tmp_path, tmp_path, device="cuda:1", threads=3)
    known, guessed = known_stages([job, head], Store(tmp_path), how)
    assert guessed == {job.run_id, head.run_id} == {*known}
    network = Network("resnet50", 3, 224, "cuda", 3)
    assert asked == [network, network, Network("linear", 512, 0, "cuda", 1)]


def test_another_version_does_not_tell_what_a_run_costs(store: Store) -> None:
    (job,) = expand(Request(("erm",), ("umnist",), (100,), NO_DATA))
    assert job.run_id in stage_seconds([job], store.records())
    changed = replace(job, version=job.version + 1)
    assert stage_seconds([changed], store.records()) == {}
