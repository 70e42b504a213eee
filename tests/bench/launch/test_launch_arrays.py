"""Which jobs share a task, which computes a shared stage, and what a profile asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.job import NO_DATA, Job, Request, expand
from bench.launch.profile import Resources, read_profile
from bench.launch.queue import Array
from bench.launch.slurm import plan_arrays, shared_stage, submitit_parameters
from bench.resources import profiles_folder
from datasets.errors import UsageError


def jobs_of(methods: str, datasets: str, seeds: int) -> list[Job]:
    names = tuple(methods.split(",")), tuple(datasets.split(","))
    return expand(Request(*names, tuple(range(seeds)), NO_DATA, quick=True))


def same(job: Job) -> Resources:
    return Resources()


def erm_of(jobs: list[Job]) -> dict[str, str]:
    """Make all methods need the ERM of their dataset and seed, but JTT a stage of its own."""
    needs = {}
    for job in jobs:
        kind = "jtt-identify" if job.method == "jtt" else "erm"
        needs[job.run_id] = f"{kind}-{job.dataset}{job.seed}"
    return needs


def names(planned: Array) -> list[list[str]]:
    return [[run_id.rsplit("-", 1)[0] for run_id in task] for task in planned.tasks]


def test_one_job_computes_a_stage_and_the_others_wait_for_it() -> None:
    jobs = jobs_of("dfr,erm,jtt", "cmnist", 2)
    producing, waiting = plan_arrays(jobs, same, erm_of(jobs), {}, 100, "x")
    # ERM is nothing but the stage, so it computes it, although DFR comes first in the grid.
    assert names(producing) == [
        ["erm-cmnist-s0"],
        ["erm-cmnist-s1"],
        ["jtt-cmnist-s0"],
        ["jtt-cmnist-s1"],
    ]
    assert producing.produces == {
        **{"erm-cmnist0": 0, "erm-cmnist1": 1},
        **{"jtt-identify-cmnist0": 2, "jtt-identify-cmnist1": 3},
    }
    assert producing.waits_for == ()
    assert names(waiting) == [["dfr-cmnist-s0"], ["dfr-cmnist-s1"]]
    assert waiting.waits_for == ("erm-cmnist0", "erm-cmnist1")
    assert waiting.produces == {}
    assert (producing.name, waiting.name) == ("x-0", "x-1")
    assert producing.describe("run") == "4 runs in 4 tasks"


def test_methods_that_ask_for_the_same_stage_have_the_same_address() -> None:
    stages = {job.run_id: shared_stage(job) for job in jobs_of("erm,dfr,jtt,nct", "cmnist", 2)}
    by_name = {run.rsplit("-", 1)[0]: stage for run, stage in stages.items()}
    assert by_name["erm-cmnist-s0"] == by_name["dfr-cmnist-s0"] != by_name["erm-cmnist-s1"]
    assert str(by_name["erm-cmnist-s0"]).startswith("erm-")
    assert str(by_name["jtt-cmnist-s0"]).startswith("jtt-identify-")
    assert by_name["nct-cmnist-s0"] is None


def test_what_is_on_disk_or_being_computed_needs_no_producer() -> None:
    jobs = jobs_of("dfr", "cmnist", 2)
    (free,) = plan_arrays(jobs, same, {}, {}, 100, "x")
    assert free.waits_for == () and len(free.tasks) == 2
    (waiting,) = plan_arrays(
        jobs, same, erm_of(jobs), {"erm-cmnist0": "7_1", "erm-cmnist1": "7_2"}, 100, "x"
    )
    assert waiting.waits_for == ("erm-cmnist0", "erm-cmnist1")


def test_resource_classes_packs_and_the_largest_array() -> None:
    jobs = jobs_of("jtt", "umnist,cmnist", 5)
    packs = {"umnist": Resources(pack=2), "cmnist": Resources(cpus=3)}
    planned = plan_arrays(jobs, lambda job: packs[job.dataset], {}, {}, 2, "x")
    sizes = [(each.resources.cpus, [len(task) for task in each.tasks]) for each in planned]
    assert sizes == [(1, [2, 2]), (1, [1]), (3, [1, 1]), (3, [1, 1]), (3, [1])]
    found = [run_id for each in planned for task in each.tasks for run_id in task]
    assert sorted(found) == sorted(job.run_id for job in jobs)


def test_what_sbatch_is_asked_for() -> None:
    asked = Resources(partition="gpu", gpus=1, memory_gb=8.0, requeues=3, setup=("module load x",))
    array = Array("bench-x-0", asked, (("a",), ("b",)), depends_on=("7_0", "7_1"))
    found = submitit_parameters(array, "/a folder/code")
    assert found["slurm_partition"] == "gpu" and "slurm_account" not in found
    assert (found["gpus_per_node"], found["mem_gb"]) == (1, 8.0)
    assert found["slurm_dependency"] == "afterany:7_0:7_1"
    assert found["slurm_additional_parameters"] == {"requeue": True, "chdir": "/a folder/code"}
    assert found["slurm_setup"] == [
        "module load x",
        "export PYTHONPATH='/a folder/code'${PYTHONPATH:+:$PYTHONPATH}",
    ]
    assert "-lt 3 ]" in str(found["slurm_teardown"]) and "137" in str(found["slurm_teardown"])
    plain = submitit_parameters(Array("bench-x-0", Resources(), (("a",),)), "")
    assert plain["slurm_setup"] == [] and "slurm_dependency" not in plain
    assert plain["slurm_additional_parameters"] == {"requeue": True}


@pytest.mark.parametrize("path", sorted(profiles_folder().glob("*.toml")), ids=lambda p: p.name)
def test_shipped_profiles_fit_every_job(path: Path) -> None:
    profile = read_profile(path)
    for job in jobs_of("erm,jtt,nct", "umnist,waterbirds,celeba", 1):
        assert profile.resources(job).cpus >= 1


FOLDERS = [Path("/data"), Path("/my results"), Path("/data")]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"python": "/other env/bin/python"}, "'/other env/bin/python'"),
        ({"python": "$ENVS/gpu/bin/python"}, "/envs/gpu/bin/python"),
        ({"container": "b.sif"}, "apptainer exec --bind '/data,/my results' b.sif python3"),
        (
            {"container": "~/b.sif", "gpus": 1, "python": "/opt/bin/python3.12"},
            "apptainer exec --nv --bind '/data,/my results' /home/me/b.sif /opt/bin/python3.12",
        ),
        (
            {"container": "b.sif", "container_command": "singularity -q exec --cleanenv"},
            "singularity -q exec --cleanenv --bind '/data,/my results' b.sif python3",
        ),
    ],
)
def test_another_python_and_a_container(
    keys: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVS", "/envs")
    monkeypatch.setenv("HOME", "/home/me")
    assert Resources(**keys).python_command(FOLDERS) == expected


def test_later_overrides_win(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'cpus = 2\n[[override]]\ndatasets = ["celeba"]\ncpus = 4\nminutes = 90\n'
        '[[override]]\nmethods = ["jtt"]\ncpus = 8\n'
    )
    profile = read_profile(path)
    jobs = jobs_of("erm,jtt", "umnist,celeba", 1)
    asked = {(j.method, j.dataset): profile.resources(j) for j in jobs}
    assert [asked["erm", d].cpus for d in ("umnist", "celeba")] == [2, 4]
    assert [asked["jtt", d].cpus for d in ("umnist", "celeba")] == [8, 8]
    assert asked["jtt", "celeba"].minutes == 90


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partitoin = 'x'", ["partitoin", "did you mean", "partition"]),
        ("cpus = 'many'", ["cpus", "whole number"]),
        ("cpus = 0", ["cpus must be at least 1"]),
        ("gpus = 1\ngres = 'gpu:1'", ["give one"]),
        ("[override]\ncpus = 1", ["[[override]]"]),
        ("[[override]]\nmethods = ['jttt']\ncpus = 1", ["jttt", "jtt"]),
        ("[[override]]\ndatasets = ['celebb']", ["celebb", "celeba"]),
        ("[[override]]\ncpu = 3", ["override.cpu", "cpus"]),
        ("cpus = ", ["mine.toml is not a readable profile"]),
    ],
)
def test_mistakes_in_a_profile_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_profile(path)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no cluster profile"):
        read_profile(tmp_path / "h1000.toml")
