"""Whatever stops a task, its runs end with the results they would have had anyway."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
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


def processes() -> dict[int, tuple[int, list[str]]]:
    """List every process: its parent and its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_text().split("\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            found[int(folder.name)] = int(parent), words
    return found


@dataclass(frozen=True)
class Tree:
    """The processes of a desk's tasks: each task has a fork server, that its workers, each a fit.

    Attributes:
        fits: of each worker that has started one, by the worker.
    """

    tasks: tuple[int, ...]
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    fits: Mapping[int, int]

    @staticmethod
    def of(desk: Desk) -> Tree:
        """Look at what runs now."""
        known, folder = processes(), f"{desk.results}/launches"
        tasks = tuple(
            number
            for number, (_, words) in known.items()
            if "submitit.core._submit" in words
            and not words[0].endswith("srun")
            and any(word.startswith(folder) for word in words)
        )
        forked = {n: parent for n, (parent, words) in known.items() if is_forked(words)}
        servers = tuple(number for number, parent in forked.items() if parent in tasks)
        workers = tuple(number for number, parent in forked.items() if parent in servers)
        fits = {parent: number for number, parent in forked.items() if parent in workers}
        return Tree(tasks, servers, workers, fits)

    def victims(self, rng: random.Random) -> list[int]:
        """Return every task, and of every run the worker or its fit."""
        each = [rng.choice([worker, self.fits.get(worker, worker)]) for worker in self.workers]
        return [*self.tasks, *each]


def is_forked(words: list[str]) -> bool:
    """Return whether a process is a fork server or comes from one: they all look like it."""
    return any("multiprocessing.forkserver" in word for word in words)


def test_scontrol_requeue(desk: Desk, uninterrupted: Path) -> None:
    launcher = desk.start(*desk.grid(*ONE, *PACED, "--wait", profile=desk.profile()))
    wait_until(lambda: max(desk.progress().values(), default=0) >= 3)
    (launch,) = desk.launches()
    with desk.nothing_starts():
        desk.slurm("scontrol", "requeue", launch["arrays"][0]["job"])
        wait_until(lambda: Tree.of(desk) == Tree((), (), (), {}))
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
    tree = Tree.of(desk)
    ((task,), (server,), (worker,)), fit = (tree.tasks, tree.servers, tree.workers), tree.fits
    victims = {"task": task, "server": server, "worker": worker, "fit": fit[worker]}
    os.kill(victims[victim], signal.SIGKILL)
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


def test_twenty_random_kills_lose_nothing(desk: Desk, uninterrupted: Path) -> None:
    """Kill tasks or workers at random; whatever is done stays done, and the rest goes on."""
    rng = random.Random(7)
    grid = ("--methods", "slow", "--datasets", "cmnist", "--seeds", "4", "--quick", *PACED)
    profile = desk.profile(pack=2, requeues=50)
    desk.run(*grid, profile=profile)
    done: dict[str, int] = {}
    kills = 0
    while kills < 20:
        time.sleep(rng.uniform(0.0, 1.0))
        for path in desk.results.glob("runs/[!.]*/record.json"):
            written = path.stat().st_mtime_ns
            assert done.setdefault(path.parent.name, written) == written
        if len(done) == 4:  # start over, as the kills are what this is about
            done.clear()
            desk.run(*grid, "--rerun", "always", profile=profile)
        if alive := Tree.of(desk).victims(rng):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(alive), signal.SIGKILL)
                kills += 1
    desk.run(*grid, "--wait", profile=profile)
    assert len(desk.records()) == 4
    assert_same_results(desk.results, uninterrupted, list(desk.records()))
