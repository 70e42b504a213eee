"""The estimated cost of runs that were not made yet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from report_records import record, stage

from bench import estimate
from bench.cost import expected_totals
from bench.estimate import Network, Speed, epochs_of, estimated_seconds, fit_factors
from bench.job import NO_DATA, Job, Request, expand
from bench.record import Cost, Record
from methods.base import get_method, load_methods
from methods.presets import preset_config

MEASURED, KEPT = estimate.measured_speed, estimate.kept_speed  # before a fixture replaces them
SPEED = Speed(train=0.01, evaluate=0.002, features=512)
BIRDS = {"train": 4_795, "val": 1_199, "test": 5_794}


def job_of(method: str, dataset: str = "waterbirds", **overrides: str) -> Job:
    settings = {"backbone.pretrained": "false", **overrides} if dataset == "waterbirds" else {}
    request = Request((method,), (dataset,), (0,), NO_DATA, overrides=settings)
    (job,) = expand(request)
    return job


def seconds(job: Job, records: list[Record] | None = None) -> dict[str, float]:
    found = estimated_seconds([job], records or [], lambda job: 1, lambda network: SPEED)
    return dict(found[job.run_id])


def finished(method: str, dataset: str, passes: int) -> Record:
    job = job_of(method, dataset)
    cost = Cost((stage("fit", "a", 60.0, image_passes=passes),))
    return replace(record(job, 90.0), job=job, cost=cost)


def test_every_epoch_goes_once_through_the_data() -> None:
    epoch = BIRDS["train"] * 0.01 + BIRDS["val"] * 0.002
    assert seconds(job_of("erm")) == pytest.approx({"erm": 300 * epoch, "fit": 0})
    assert seconds(job_of("groupdro")) == pytest.approx({"fit": 300 * epoch})
    assert seconds(job_of("dfr")) == pytest.approx({"erm": 100 * epoch, "fit": epoch})
    found = seconds(job_of("nct", **{"nct.iterations": "4", "nct.epochs": "1,50"}))
    assert found == pytest.approx({"fit": 151 * epoch}), "the last number is for all further ones"
    quick = replace(job_of("groupdro"), quick=True)
    assert seconds(quick)["fit"] == pytest.approx(300 * (1500 * 0.01 + 500 * 0.002))


@pytest.mark.parametrize("dataset", ["umnist", "waterbirds"])
def test_every_method_costs_something(dataset: str) -> None:
    for name in load_methods():
        passes = epochs_of(name, preset_config(get_method(name), dataset))
        assert "fit" in passes and sum(passes.values()) >= 1, name


def test_what_a_method_does_elsewhere_scales_its_fit() -> None:
    rule = 5 * (54_000 + 6_000)
    runs = [finished("jtt", "cmnist", 3 * rule), finished("jtt", "umnist", 1000)]
    assert fit_factors(runs) == pytest.approx({"jtt": 3.0})
    epoch = BIRDS["train"] * 0.01 + BIRDS["val"] * 0.002
    found = seconds(job_of("jtt"), runs)
    own = get_method("jtt").stages(job_of("jtt").method_config())[0].config.epochs
    assert found == pytest.approx({"jtt-identify": own * epoch, "fit": 3 * 300 * epoch})
    assert seconds(job_of("groupdro"), runs)["fit"] == pytest.approx(300 * epoch)


def test_shared_stages_are_counted_once() -> None:
    jobs = [job_of("erm"), job_of("george")]
    known = estimated_seconds(jobs, [], lambda job: 1, lambda network: SPEED)
    totals = expected_totals(jobs, known)
    assert totals.unknown == 0
    assert totals.shared < totals.standalone


def test_a_network_that_cannot_be_measured_leaves_the_cost_unknown() -> None:
    def fails(network: Network) -> Speed:
        raise RuntimeError("no such device")

    assert estimated_seconds([job_of("erm")], [], lambda job: 1, fails) == {}


def test_one_measurement_serves_all_runs_of_a_kind() -> None:
    asked: list[Network] = []
    jobs = [replace(job_of("erm"), seed=seed, identity={"seed": seed}) for seed in range(5)]

    def count(network: Network) -> Speed:
        asked.append(network)
        return SPEED

    assert len(estimated_seconds(jobs, [], lambda job: 3, count)) == 5
    assert asked == [Network("resnet50", 3, 224, "cpu", 3)]


def test_frozen_networks_are_evaluated_once_and_their_head_is_trained() -> None:
    job = job_of("groupdro")
    backbone = {**job.config.backbone, "frozen": True, "head": "linear"}
    job = replace(job, config=replace(job.config, backbone=backbone))
    asked: list[Network] = []

    def speed(network: Network) -> Speed:
        asked.append(network)
        return SPEED if network.resolution else Speed(1e-6, 1e-6, 512)

    found = estimated_seconds([job], [], lambda job: 1, speed)[job.run_id]
    assert asked[0] == Network("resnet50", 3, 224, "cpu", 1)
    assert found["features"] == pytest.approx(sum(BIRDS.values()) * 0.002)
    assert found["fit"] == pytest.approx(300 * (4_795 + 1_199) * 1e-6)
    assert asked[1] == Network("linear", 512, 0, "cpu", 1)


def test_images_that_are_not_square_are_measured_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Network] = []

    def count(network: Network) -> Speed:
        asked.append(network)
        return SPEED

    assert estimated_seconds([job_of("erm", "dominoes")], [], lambda job: 1, count)
    assert asked == [Network("lenet5_tall", 3, 64, "cpu", 1, columns=32)]
    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    assert MEASURED(asked[0]).features == 84


@pytest.mark.parametrize(("name", "channels", "side"), [("lenet5", 3, 32), ("test_resnet", 3, 64)])
def test_a_measurement_is_made_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, channels: int, side: int
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.02)
    monkeypatch.setattr(estimate, "measured_speed", MEASURED)
    monkeypatch.setattr(estimate, "kept_speed", KEPT)
    network = Network(name, channels, side, "cpu", 1)
    first = estimate.kept_speed(network)
    assert 0 < first.evaluate < first.train < 1 and first.features > 10
    monkeypatch.setattr(estimate, "measured_speed", lambda network: pytest.fail("measured again"))
    assert estimate.kept_speed(network) == first
    (kept,) = tmp_path.rglob("speed.json")
    (key,) = json.loads(kept.read_text())
    assert name in key and "torch" in key
    kept.write_text("{")
    monkeypatch.setattr(estimate, "measured_speed", lambda network: SPEED)
    assert estimate.kept_speed(network) == SPEED
    other: Any = estimate.kept_speed(replace(network, threads=2))
    assert other == SPEED and len(json.loads(kept.read_text())) == 2


def test_plan_says_that_it_is_an_estimate(cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(estimate, "kept_speed", lambda network: SPEED)
    folders = ("--data-root", tmp_path, "--results", tmp_path)
    small = ("--set", "backbone.pretrained=false")
    words = ("plan", "--methods", "erm", "--datasets", "waterbirds,umnist", "--seeds", "2")
    told = cli(*words, *folders, *small)
    assert "about 4.2 h" in told.out and "2 of them by an estimate" in told.out
    rows = cli(*words, *folders, *small, "--json").json["runs"]
    assert [row["estimated"] for row in rows] == [row["dataset"] == "waterbirds" for row in rows]
    assert all(row["expected_seconds"] > 60 for row in rows)
    monkeypatch.setattr(estimate, "kept_speed", lambda network: 1 / 0)
    monkeypatch.setattr(estimate, "_seconds", lambda *of: None)
    words = ("plan", "--methods", "erm", "--datasets", "waterbirds", "--seeds", "2")
    told = cli(*words, *folders, *small)
    assert "all of them: unknown" in told.out and " 0 s" not in told.out
