"""From names to jobs: what makes two runs the same run, and what a command line means."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.job import (
    MOST_SEEDS,
    Job,
    Request,
    expand,
    identity_changes,
    parse_names,
    parse_overrides,
    parse_seeds,
    shown_split,
)
from bench.runner import load_data
from datasets.base import SPLITS
from datasets.catalogue import load_datasets
from datasets.errors import BenchError, UsageError

NOWHERE = Path("/nonexistent")


def one_job(**changes: Any) -> Job:
    request = Request(methods=("erm",), datasets=("cmnist",), seeds=(0,), data_root=NOWHERE)
    (job,) = expand(replace(request, **changes))
    return job


def test_every_part_of_the_identity_changes_the_run() -> None:
    job = one_job(seeds=(3,))
    others = [
        one_job(seeds=(4,)),
        one_job(seeds=(3,), quick=True),
        one_job(seeds=(3,), datasets=("umnist",)),
        one_job(seeds=(3,), overrides={"backbone.name": "lenet4"}),
        one_job(seeds=(3,), overrides={"backbone.name": "resnet18"}),
        one_job(seeds=(3,), overrides={"backbone.name": "resnet18", "backbone.pretrained": "0"}),
        replace(job, identity={**job.identity, "version": job.version + 1}),
        replace(job, identity={**job.identity, "fingerprint": "another"}),
    ]
    assert len({job.run_id, *(other.run_id for other in others)}) == len(others) + 1


def test_standin_is_another_run_than_the_real_data(digits_root: Path) -> None:
    assert one_job(data_root=digits_root).run_id != one_job().run_id


def test_place_of_data_and_weights_does_not_change_the_run(tmp_path: Path) -> None:
    assert one_job(data_root=tmp_path).run_id == one_job().run_id
    ids = set()
    for name in ("here.pth", "there.pth"):
        (tmp_path / name).write_bytes(b"the same weights")
        weights = {"backbone.name": "resnet18", "backbone.weights": str(tmp_path / name)}
        ids.add(one_job(overrides=weights).run_id)
    assert len(ids) == 1
    (tmp_path / "other.pth").write_bytes(b"other weights")
    weights["backbone.weights"] = str(tmp_path / "other.pth")
    assert one_job(overrides=weights).run_id not in ids


def test_ids_are_the_same_in_another_process_and_in_any_order() -> None:
    overrides = {"erm.lr": "0.5", "cmnist.protocol": "cnc", "erm.epochs": "7"}
    script = (
        "import json, sys; from pathlib import Path; from bench.job import Request, expand\n"
        "r = Request(('erm',), ('umnist', 'cmnist'), (0, 5), Path('/elsewhere'),\n"
        f"            overrides=dict(reversed({list(overrides.items())})))\n"
        "print(json.dumps([job.run_id for job in expand(r)]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"PYTHONHASHSEED": "12345", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    request = Request(("erm",), ("umnist", "cmnist"), (0, 5), NOWHERE, overrides=overrides)
    assert json.loads(found.stdout) == [job.run_id for job in expand(request)]


def test_dict_order_of_an_identity_does_not_matter() -> None:
    job = one_job()
    turned = {name: value for name, value in reversed(job.identity.items())}
    assert replace(job, identity=turned).run_id == job.run_id


def test_splits_do_not_depend_on_the_seed(digits_root: Path) -> None:
    for name in ("umnist", "cmnist"):
        loaded = [
            load_data(one_job(datasets=(name,), seeds=(s,), data_root=digits_root), digits_root)
            for s in (0, 1)
        ]
        for split in SPLITS:
            first, second = (data.splits[split] for data in loaded)
            assert torch.equal(first.labels.ids, second.labels.ids)
            assert torch.equal(first.labels.y, second.labels.y)
            assert torch.equal(first.labels.groups, second.labels.groups)


def test_plan_needs_no_data(mnist_root: Path, tmp_path: Path) -> None:
    def ids(root: Path) -> list[str]:
        request = Request(("erm",), ("umnist", "cmnist"), (0, 1), root)
        return [job.run_id for job in expand(request)]

    assert ids(tmp_path) == ids(mnist_root)
    everything = Request(("erm",), tuple(load_datasets()), (0,), tmp_path)
    assert [job.dataset for job in expand(everything)] == list(load_datasets())
    assert list(tmp_path.iterdir()) == []


def test_data_is_checked_against_the_plan(digits_root: Path) -> None:
    planned_for_real_data = one_job()
    with pytest.raises(BenchError, match="not the data this job was planned for"):
        load_data(planned_for_real_data, digits_root)


def test_preset_then_overrides() -> None:
    job = one_job(overrides={"erm.lr": "0.5"})
    assert job.config.method["lr"] == 0.5
    assert job.config.method["epochs"] == 5  # cmnist's preset, not the default of 100
    assert job.overrides == {"erm.lr": "0.5"}


def test_a_first_stage_has_knobs_of_its_own() -> None:
    """The rest of the nested config stays the preset's, and an override of it is another run."""
    plain, changed = (
        one_job(methods=("eiil",), overrides=overrides)
        for overrides in ({}, {"eiil.erm.lr": "0.5"})
    )
    before, after = plain.config.method["erm"], changed.config.method["erm"]
    assert isinstance(before, dict)
    assert after == {**before, "lr": 0.5}
    assert before["epochs"] == 5  # like CMNIST's ERM
    assert changed.overrides == {"eiil.erm.lr": "0.5"}
    assert changed.run_id != plain.run_id
    assert identity_changes(plain.identity, changed.identity) == {
        "config.method.erm.lr": (before["lr"], 0.5)
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("eiil.erm.lrr", "unknown setting 'eiil.erm.lrr'; did you mean 'eiil.erm.lr'"),
        ("eiil.erm", "eiil.erm must be given knob by knob"),
        ("eiil.eta.lr", "eiil.eta must be a number"),
    ],
)
def test_wrong_knobs_of_a_first_stage(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        one_job(methods=("eiil",), overrides={setting: "1"})
    assert message in str(caught.value)


def test_a_job_carries_only_the_overrides_that_concern_it() -> None:
    overrides = {"umnist.hflip": "true", "erm.lr": "0.5"}
    request = Request(("erm",), ("umnist", "cmnist"), (0,), NOWHERE, overrides=overrides)
    by_dataset = {job.dataset: job for job in expand(request)}
    assert by_dataset["umnist"].overrides == overrides
    assert by_dataset["cmnist"].overrides == {"erm.lr": "0.5"}
    assert by_dataset["cmnist"].run_id == one_job(overrides={"erm.lr": "0.5"}).run_id


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("1", (0,)),
        ("3", (0, 1, 2)),
        ("3,7", (3, 7)),
        ("3,", (3,)),
        ("7, 3,7", (7, 3)),
        ("0,", (0,)),
    ],
)
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    "text", ["", "0", "abc", "-1", "1.5", ",", "1,b", "1,-2", "²", str(MOST_SEEDS + 1)]
)
def test_wrong_seeds(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_seeds(text)
    assert caught.value.remedy


def test_names() -> None:
    assert parse_names("b,a,b", ("a", "b", "c")) == ("b", "a")
    assert parse_names("c,all", ("a", "b", "c")) == ("c", "a", "b")
    with pytest.raises(UsageError):
        parse_names(" , ", ("a",))


def test_overrides() -> None:
    assert parse_overrides(["erm.lr=1", "erm.milestones=1,2", "backbone.weights=a=b"]) == {
        "erm.lr": "1",
        "erm.milestones": "1,2",
        "backbone.weights": "a=b",
    }


def test_jobs_are_plain_values() -> None:
    job = one_job(seeds=(2,), overrides={"erm.lr": "0.5"})
    again = Job.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert again.run_id == job.run_id


def test_figures_of_development_seeds_are_those_of_validation() -> None:
    assert [shown_split(seed) for seed in (0, 99, 100, 101)] == ["test", "test", "val", "val"]
