"""The same jobs on a cluster as here, and what can go wrong with some of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from desk import REPOSITORY, Desk, assert_same_results, wait_until

pytestmark = pytest.mark.slurm

SLOW = ("--methods", "slow", "--datasets", "cmnist", "--quick")


def submitted(desk: Desk) -> Counter[str]:
    """Count how often each run was submitted, over all launches."""
    arrays = [array for launch in desk.launches() for array in launch["arrays"]]
    return Counter(run for array in arrays for task in array["tasks"] for run in task)


def test_records_equal_those_of_the_same_local_run(desk: Desk, tmp_path: Path) -> None:
    grid = ("--methods", "erm,jtt,nct", "--datasets", "umnist,cmnist", "--seeds", "2", "--quick")
    here = Desk(tmp_path / "local", desk.digits, desk.environment)
    here.run(*grid)
    out, _ = desk.run(*grid, "--wait", profile=REPOSITORY / "slurm" / "dev.toml")
    records = desk.records()
    assert len(records) == 12
    assert set(records) == set(here.records())
    assert_same_results(desk.results, here.results, list(records))
    assert "2 of 2" in out
    for run_id, record in here.records().items():
        assert records[run_id]["git"] == record["git"]
    # From disk alone, and again with nothing to do.
    assert desk.status()["done"] == 12
    _, err = desk.run(*grid, profile=REPOSITORY / "slurm" / "dev.toml")
    assert "12 not to be run, 0 to run" in err
    assert len(desk.launches()) == 1
    assert set(submitted(desk).values()) == {1}


def test_some_fail_and_the_others_do_not_notice(desk: Desk) -> None:
    trouble = {1: "error", 2: "diverge", 3: "memory", 4: "die", 5: "once"}
    settings = "slow.trouble=" + ",".join(f"{seed}:{kind}" for seed, kind in trouble.items())
    words = (*SLOW, "--seeds", "6", "--set", settings)
    profile = desk.profile(pack=3)
    out, err = desk.run(*words, "--retries", "1", "--wait", "--json", profile=profile, code=1)
    content = json.loads(out)
    assert (content["done"], content["failed"]) == (2, 4)
    records = {record["seed"]: record for record in desk.records().values()}
    assert [records[seed]["status"] for seed in (0, 5)] == ["done", "done"]
    kinds = {seed: records[seed]["failure"]["kind"] for seed in (1, 2, 3, 4)}
    assert kinds == {1: "error", 2: "non_finite_loss", 3: "out_of_memory", 4: "worker_died"}
    for seed in (1, 2, 3, 4):
        failure = records[seed]["failure"]
        assert failure["message"] in err
        assert f"--seeds {seed}," in failure["command"]
        assert "--rerun failed" in failure["command"]
    assert "made to fail" in records[1]["failure"]["stderr_tail"]
    # Repeated are those that failed, and only those.
    before = {seed: records[seed]["run_id"] for seed in (1, 2, 3, 4)}
    desk.run(*words, "--rerun", "failed", profile=profile)
    again = desk.launches()[-1]
    runs = {run for array in again["arrays"] for task in array["tasks"] for run in task}
    assert runs == set(before.values())


def test_two_launchers_do_not_run_a_job_twice(desk: Desk) -> None:
    words = desk.grid(*SLOW, "--seeds", "4", "--wait", profile=desk.profile(pack=2))
    first, second = desk.start(*words), desk.start(*words)
    for launcher in (first, second):
        _, err = launcher.communicate()
        assert launcher.returncode == 0, err
    assert len(desk.records()) == 4
    assert set(submitted(desk).values()) == {1}
    logs = "".join(p.read_text() for p in desk.results.glob("launches/*/tasks/*_log.err"))
    assert logs.count("start  slow-cmnist") == 4


def test_packed_runs_share_a_task_and_a_shared_stage_is_made_once(desk: Desk) -> None:
    grid = ("--methods", "erm,dfr", "--datasets", "cmnist", "--seeds", "2", "--quick")
    desk.run(*grid, "--wait", profile=desk.profile(pack=2))
    (launch,) = desk.launches()
    producing, waiting = launch["arrays"]
    assert [len(task) for task in producing["tasks"]] == [2]
    assert sorted(producing["produces"].values()) == [0, 0]
    assert waiting["depends_on"] == [producing["job"]]
    assert [len(task) for task in waiting["tasks"]] == [2]
    for record in desk.records().values():
        erm = next(stage for stage in record["stages"] if stage["name"] == "erm")
        assert erm["reused"] is (record["method"] == "dfr")


def test_queued_jobs_run_the_code_that_was_submitted(desk: Desk, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    subprocess.run(["git", "clone", "-q", REPOSITORY, tree], check=True)
    for name in ("bench", "methods", "datasets"):
        shutil.copytree(REPOSITORY / name, tree / name, dirs_exist_ok=True)
    edited, new = tree / "methods" / "erm.py", tree / "methods" / "brand_new.py"
    edited.write_text(edited.read_text() + "\n# an edit that is not committed\n")
    new.write_text("# a file that git does not know yet\n")
    desk.environment["PYTHONPATH"] = os.pathsep.join([str(tree), desk.environment["PYTHONPATH"]])
    commit = subprocess.run(
        ["git", "-C", tree, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    grid = ("--methods", "erm", "--datasets", "cmnist", "--seeds", "1", "--quick")
    with desk.nothing_starts():
        desk.run(*grid, profile=desk.profile())
        edited.write_text("raise SystemExit('the code was changed after it was submitted')\n")
    wait_until(lambda: desk.status()["done"] == 1)
    (record,) = desk.records().values()
    assert record["git"] == {"commit": commit.stdout.strip(), "dirty": True}
    code = Path(desk.launches()[0]["code"])
    assert "not committed" in (code / "methods" / "erm.py").read_text()
    assert (code / "methods" / "brand_new.py").is_file()


def test_cancel_and_lost_tasks(desk: Desk) -> None:
    words = (*SLOW, "--seeds", "3", "--set", "slow.pause=0.3", "slow.epochs=300")
    desk.run(*words, profile=desk.profile())
    wait_until(lambda: len([e for e in desk.progress().values() if e]) == 2)
    found = desk.status()
    states = {run["seed"]: run["status"] for run in found["runs"]}
    assert states == {0: "running", 1: "running", 2: "queued"}
    assert (found["running"], found["queued"]) == (2, 1)
    first = next(run["run_id"] for run in found["runs"] if run["seed"] == 0)
    desk.bench("cancel", first, "--results", desk.results)
    failure = desk.records()[first]["failure"]
    assert failure["kind"] == "cancelled"
    # One that SLURM drops without our doing is found by the next look.
    desk.slurm("scancel", "--user", "root")
    wait_until(lambda: not desk.slurm("squeue", "--noheader"))
    assert desk.status()["failed"] == 3
    assert {r["failure"]["kind"] for r in desk.records().values()} == {"cancelled"}
    # All of them can simply go on, and keep the epochs they have.
    _, err = desk.run(*words, profile=desk.profile())
    assert "3 to run" in err
    out, _ = desk.bench("cancel", "--json", "--results", desk.results)
    assert len(json.loads(out)["cancelled"]) == 3
    assert desk.bench("cancel", "--results", desk.results)[1].startswith("nothing is queued")


def test_a_job_that_finds_its_data_missing_fails_at_once(desk: Desk, tmp_path: Path) -> None:
    root = shutil.copytree(desk.digits, tmp_path / "digits")
    desk.digits = root
    grid = ("--methods", "erm", "--datasets", "cmnist", "--seeds", "1", "--quick")
    with desk.nothing_starts():
        desk.run(*grid, profile=desk.profile())
        shutil.rmtree(root)
    wait_until(lambda: desk.records())
    (record,) = desk.records().values()
    assert record["failure"]["kind"] == "data_missing"
    assert "bench data get" in record["failure"]["remedy"]


def test_what_slurm_refuses_is_said_and_claims_nothing(desk: Desk) -> None:
    profile = desk.profile(partition="nowhere")
    _, err = desk.run(*SLOW, "--seeds", "2", profile=profile, code=2)
    assert "SLURM refused 2 runs" in err
    assert "nvalid partition" in err
    found = desk.status()
    assert (found["queued"], found["failed"]) == (0, 0)
