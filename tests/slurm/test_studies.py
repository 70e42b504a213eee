"""A study whose workers run on a real SLURM."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from desk import PATIENCE, REPOSITORY, Desk, wait_until

pytestmark = pytest.mark.slurm

SLOW = "slow-cmnist-standin-quick"
PACE = "slow.pause=0.5"


def tune(desk: Desk, *settings: str, method: str = "slow", trials: int = 3) -> list[object]:
    """Return the words of a tune command; settings hold in every trial."""
    dataset = "cmnist" if method == "slow" else "umnist"
    words = ["tune", "--method", method, "--dataset", dataset, "--trials", trials, "--quick"]
    words += ["--data-root", desk.digits, "--results", desk.results]
    return [*words, *(["--set", *settings] if settings else [])]


def under_way(desk: Desk) -> list[Path]:
    """Find the trials that have an epoch behind them and are not finished."""
    return list(desk.results.glob("studies/*/work/*/*.checkpoint"))


def ended(desk: Desk, words: list[object], seconds: float = PATIENCE) -> dict[str, Any]:
    """Wait until the study has its preset and SLURM nothing of it; return its summary."""
    wait_until(lambda: list(desk.results.glob("presets/*.toml")), seconds)
    wait_until(lambda: not desk.slurm("squeue", "--noheader"))
    summary: dict[str, Any] = json.loads(desk.bench(*words, "--show", "--json")[0])
    assert desk.status()["studies"] == []
    return summary


def assert_each_trial_once(summary: dict[str, Any], trials: int, study: Path) -> None:
    """Check that a study has the trials it was to have, each with a run of its own."""
    assert summary["trials"]["asked"] == summary["trials"]["finished"] == trials
    assert sorted(trial["draw"] for trial in summary["history"]) == list(range(trials))
    runs = {trial["run_id"] for trial in summary["history"]}
    assert runs == {path.name for path in (study / "runs").iterdir()}
    assert len(runs) == trials


def outcome(summary: dict[str, Any]) -> list[Any]:
    """Return what is the same in every study that means the same, interrupted or not."""
    found = [(t["draw"], t["params"], t["value"], t["run_id"]) for t in summary["history"]]
    return sorted(found, key=lambda trial: trial[0])


@pytest.fixture(scope="module")
def undisturbed(digits: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outcome of the study below, made here by one worker without interruption."""
    paths = os.pathsep.join([str(REPOSITORY), str(site)])
    results = tmp_path_factory.mktemp("undisturbed") / "results"
    desk = Desk(results, digits, {**os.environ, "PYTHONPATH": paths})
    results.mkdir()
    return outcome(json.loads(desk.bench(*tune(desk, PACE), "--json")[0]))


def test_workers_on_a_cluster_make_the_trials_and_the_preset(desk: Desk) -> None:
    words = tune(desk, method="jtt")
    _, told = desk.bench(*words, "--workers", 2, "--cluster", desk.profile())
    assert "submitted array" in told and "2 workers in 2 tasks" in told
    summary = ended(desk, words)
    assert (desk.results / "presets" / "jtt-umnist-standin-quick.toml").is_file()
    trials = summary["trials"]
    assert (trials.pop("asked"), trials.pop("finished")) == (3, 3)
    assert not any(trials.values()), "nothing was pruned, diverged, failed or interrupted"
    assert len({json.dumps(trial["params"]) for trial in summary["history"]}) == 3
    desk.run(
        "--methods", "jtt", "--datasets", "umnist", "--seeds", 1, "--quick", "--preset", "tuned"
    )


def test_a_time_limit_shorter_than_the_study(desk: Desk) -> None:
    # A trial takes some 25 seconds, so the limit of a minute falls into one; on a busy machine a
    # start takes most of that minute, and there have to be several.
    words = tune(desk, "slow.epochs=10", "slow.pause=2.5")
    profile = desk.profile(minutes=1, signal_seconds=5)
    desk.bench(*words, "--cluster", profile)
    summary = ended(desk, words, 3 * PATIENCE)
    study = desk.results / "studies" / SLOW
    (log,) = study.glob("launches/*/tasks/*_log.err")
    assert "this job is timed-out" in log.read_text() + log.with_suffix(".out").read_text()
    assert_each_trial_once(summary, 3, study)
    assert summary["trials"]["interrupted"] >= 1 and summary["trials"]["failed"] == 0
    # The interrupted trial went on where it was: no epoch was paid for twice.
    passes = {
        sum(stage["image_passes"] for stage in json.loads(path.read_text())["stages"])
        for path in study.glob("runs/*/record.json")
    }
    assert len(passes) == 1


@pytest.mark.parametrize("how", ["requeue", "preempt", "kill"])
def test_an_interrupted_study_is_the_same_as_an_undisturbed_one(
    desk: Desk, undisturbed: list[Any], how: str
) -> None:
    words = tune(desk, PACE)
    desk.bench(*words, "--cluster", desk.profile(requeues=3))
    wait_until(lambda: under_way(desk))
    (row,) = desk.status()["studies"]
    assert (row["queued"], row["running"]) == (0, 1)
    if how == "requeue":
        desk.slurm("scontrol", "requeue", row["array"])
    elif how == "preempt":
        whole = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
        desk.slurm("sbatch", *whole, "--wrap", "sleep 2")
    else:
        (lock,) = desk.results.glob("studies/*/launches/*/workers/0.*")
        os.kill(json.loads(lock.read_text())["process"][0], signal.SIGKILL)
    summary = ended(desk, words)
    assert summary["trials"]["interrupted"] >= 1 and summary["trials"]["failed"] == 0
    assert_each_trial_once(summary, 3, desk.results / "studies" / SLOW)
    assert outcome(summary) == undisturbed


def test_status_and_cancel_know_the_workers_and_the_study_goes_on(desk: Desk) -> None:
    words = tune(desk, "slow.pause=0.7", "slow.epochs=30", trials=2)
    submit = [*words, "--workers", 2, "--cluster", desk.profile(parallel=1)]
    with desk.nothing_starts():
        desk.bench(*submit)
        found = desk.status()
        assert found["total"] == 0, "trials are no runs"
        (row,) = found["studies"]
        assert (row["study"], row["method"], row["dataset"]) == (SLOW, "slow", "cmnist")
        assert (row["finished"], row["asked"]) == (0, 2)
        assert (row["queued"], row["running"]) == (2, 0)
        assert row["array"] in desk.slurm("squeue", "--noheader", "--format=%F").split()
        shown, _ = desk.bench("status", "--results", desk.results)
        assert SLOW in shown and row["array"] in shown
        other = ("status", "--methods", "erm", "--results", desk.results, "--json")
        assert json.loads(desk.bench(*other)[0])["studies"] == []
        _, refused = desk.bench("cancel", "erm", "--results", desk.results, code=2)
        assert "no run or study" in refused
        assert "2 workers are queued or running" in desk.bench(*submit)[1]
        assert desk.status()["studies"] == [row], "what the cluster has is not submitted again"

    wait_until(lambda: under_way(desk))
    (row,) = desk.status()["studies"]
    assert (row["queued"], row["running"]) == (1, 1)
    told, _ = desk.bench("cancel", "slow-cmnist", "--results", desk.results, "--json")
    assert json.loads(told)["studies"] == {"cancelled": [SLOW], "still_there": []}
    assert not desk.slurm("squeue", "--noheader")
    _, said = desk.bench("status", "--results", desk.results)
    assert f"study {SLOW} stopped after" in said
    assert desk.status()["studies"] == []

    desk.bench(*words, "--workers", 2, "--cluster", desk.profile())
    summary = ended(desk, words)
    assert summary["trials"]["interrupted"] == 1
    assert_each_trial_once(summary, 2, desk.results / "studies" / SLOW)
    assert desk.bench("cancel", "--results", desk.results)[1].startswith("nothing is queued")
