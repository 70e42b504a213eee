"""Whatever stops a task, its runs end with the results they would have had anyway."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos import MARK, SLURM, SMALL, Chaos, Process, by_role, processes
from desk import REPOSITORY, Desk, assert_same_results, assert_same_tables, wait_until

pytestmark = pytest.mark.slurm

ONE = ("--methods", "slow", "--datasets", "cmnist", "--seeds", "1", "--quick")
PACED = ("--set", "slow.epochs=12", "slow.pause=0.5")


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: dict[str, str], digits: Path, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The results of the same runs, carried out here and left alone."""
    results = tmp_path_factory.mktemp("uninterrupted") / "results"
    paths = os.pathsep.join([str(REPOSITORY), str(site)])
    desk = Desk(results, digits, {**os.environ, "PYTHONPATH": paths})
    desk.run("--methods", "slow", "--datasets", "cmnist", "--seeds", "4", "--quick", *PACED)
    return results


def remote(desk: Desk) -> dict[str, list[Process]]:
    """Return the processes of a desk's tasks, by role."""
    known = by_role(processes(f"{MARK}={desk.environment[MARK]}"))
    return {role: found for role, found in known.items() if role != "launcher"}


def test_scontrol_requeue(desk: Desk, uninterrupted: Path) -> None:
    launcher = desk.start(*desk.grid(*ONE, *PACED, "--wait", profile=desk.profile()))
    wait_until(lambda: max(desk.progress().values(), default=0) >= 3)
    (launch,) = desk.launches()
    with desk.nothing_starts():
        desk.slurm("scontrol", "requeue", launch["arrays"][0]["job"])
        wait_until(lambda: not any(remote(desk).values()))
        found = wait_until(lambda: (now := desk.status())["running"] == 0 and now)
    assert [run["status"] for run in found["runs"]] == ["preempted"]
    assert found["queued"] == 1
    _, err = launcher.communicate()
    assert launcher.returncode == 0, err
    (log,) = desk.results.glob("launches/*/tasks/*_log.err")
    assert log.read_text().count("start  slow-cmnist") == 2
    assert_same_results(desk.results, uninterrupted, list(desk.records()))


@pytest.mark.parametrize("victim", ["task", "server", "worker", "fit"])
def test_kill_9(desk: Desk, uninterrupted: Path, victim: str) -> None:
    launcher = desk.start(*desk.grid(*ONE, *PACED, "--wait", profile=desk.profile()))
    wait_until(lambda: max(desk.progress().values(), default=0) >= 3)
    (process,) = remote(desk)[victim]
    assert process.kill()
    _, err = launcher.communicate()
    assert launcher.returncode == 0, err
    assert_same_results(desk.results, uninterrupted, list(desk.records()))


def test_time_limit_shorter_than_the_run(desk: Desk, uninterrupted: Path) -> None:
    # The shortest limit is a minute, and SLURM warns half a minute before it has to, give or take.
    profile = desk.profile(minutes=1, signal_seconds=5)
    slow = ("--set", "slow.epochs=12", "slow.pause=5.5")
    desk.run(*ONE, *slow, "--wait", profile=profile)
    (log,) = desk.results.glob("launches/*/tasks/*_log.err")
    text = log.read_text() + log.with_suffix(".out").read_text()
    assert "this job is timed-out" in text
    (run_id,) = desk.records()
    # The pause is a setting, so the run has another name than the one it is compared with.
    (other,) = (uninterrupted / "runs").glob("slow-cmnist-s0-*")
    assert_same_tables(desk.results / "runs" / run_id, other)


def test_a_time_limit_reached_too_often_is_a_failure(desk: Desk) -> None:
    profile = desk.profile(minutes=1, signal_seconds=5, requeues=0)
    _, err = desk.run(*ONE, "--set", "slow.pause=30", "--wait", profile=profile, code=1)
    (record,) = desk.records().values()
    assert record["failure"]["kind"] == "time_limit"
    assert "minutes or requeues" in record["failure"]["remedy"]
    assert "--rerun failed" in record["failure"]["command"]
    assert record["run_id"] in err


def test_preemption_by_a_partition_with_priority(desk: Desk, uninterrupted: Path) -> None:
    launcher = desk.start(*desk.grid(*ONE, *PACED, "--wait", profile=desk.profile()))
    wait_until(lambda: max(desk.progress().values(), default=0) >= 3)
    whole = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    desk.slurm("sbatch", *whole, "--wrap", "sleep 4")
    _, err = launcher.communicate()
    assert launcher.returncode == 0, err
    (log,) = desk.results.glob("launches/*/tasks/*_log.err")
    assert log.read_text().count("start  slow-cmnist") >= 2
    assert_same_results(desk.results, uninterrupted, list(desk.records()))


def test_kills_at_random_lose_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    """Kill what comes; whatever is done stays done, and the rest goes on to the same end."""
    figures = Chaos(tmp_path, SLURM, SMALL, 1, cluster)(12)
    assert figures.kills.total() == 12
    assert figures.resumed > 0
    assert figures.equal == SMALL.size * figures.rounds
