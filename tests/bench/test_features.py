"""Frozen features: made once, shared, resumed, checked; and the models that are trained on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import bench
from bench import features
from bench.cost import expected_totals, stage_seconds
from bench.features import on_features
from bench.job import Job, Request, expand, input_notes, why_unsuited
from bench.launch import prepare_features
from bench.models import load_model
from bench.runner import RunOptions, fit_task, load_data, run_job
from bench.store import Store
from bench.tuning.source import Tuning
from datasets import standins
from datasets.base import BackboneSpec, LoadedData
from datasets.dataset import silent
from datasets.errors import UsageError
from datasets.features import FeatureRows
from datasets.files import Damaged
from datasets.lock import Lock, LockLost
from methods.backbones import build_backbone
from methods.base import get_method
from methods.prediction import EvalImages, predict

NETWORK, LENGTH, SIDE = "resnet10t", 512, 32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with small photographs, and weights of a small network beside it."""
    root = tmp_path_factory.mktemp("photos")
    standins.write("waterbirds", root, size=120)
    torch.manual_seed(0)
    state = build_backbone(BackboneSpec(NETWORK), 3).body.state_dict()
    save_file(state, root / "weights.safetensors")
    return root


def settings(root: Path, **more: object) -> dict[str, object]:
    return {
        "backbone.name": NETWORK,
        "backbone.weights": str(root / "weights.safetensors"),
        "backbone.frozen": "true",
        "waterbirds.resolution": SIDE,
        **more,
    }


def jobs_of(root: Path, methods: str = "erm", **more: object) -> list[Job]:
    overrides = {key: str(value) for key, value in settings(root, **more).items()}
    names = tuple(methods.split(","))
    return expand(Request(names, ("waterbirds",), (0,), root, overrides=overrides, quick=True))


@pytest.fixture(scope="module")
def store(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Quick runs of three methods on the same features, with their models."""
    grid = bench.run(
        "erm,dfr,nct",
        "waterbirds",
        1,
        quick=True,
        keep_models=True,
        isolate=False,
        settings=settings(root),
        data_root=root,
        results=tmp_path_factory.mktemp("results"),
    )
    assert grid.counts()["done"] == 3, [found.reason for found in grid.statuses.values()]
    return grid.store


@pytest.fixture(scope="module")
def images(root: Path) -> LoadedData:
    return load_data(jobs_of(root)[0], root)


def test_features_are_made_once_for_all_methods(store: Store, images: LoadedData) -> None:
    made = [path for path in store.features.iterdir() if path.is_dir()]
    assert {path.name.rsplit("-", 1)[0] for path in made} == {
        f"waterbirds-{split}" for split in ("train", "val", "test")
    }
    costs = [record.cost.stages[0] for record in store.records()]
    assert {cost.name for cost in costs} == {"features"}
    assert len({cost.key for cost in costs}) == 1
    assert sorted(cost.reused for cost in costs) == [False, True, True]
    for cost in costs:
        assert cost.image_passes == sum(map(len, images.splits.values()))
        assert cost.seconds_standalone > 0
        assert (cost.seconds_marginal > 0) == (not cost.reused)


def test_features_are_what_the_network_makes_of_evaluation_images(
    store: Store, root: Path, images: LoadedData
) -> None:
    (job,) = jobs_of(root)
    data, _ = on_features(job, images, store, device=CPU, progress=silent)
    assert data.facts.rows and data.facts.channels == LENGTH
    network = build_backbone(job.network(), 3).eval()
    for split, part in images.splits.items():
        rows = data.splits[split].images
        assert isinstance(rows, FeatureRows)
        expected = predict(network, EvalImages(part.images, images.facts.eval_transform))
        assert torch.allclose(rows.rows, expected, atol=1e-4)
        assert torch.equal(data.splits[split].labels.ids, part.labels.ids)


def test_a_record_says_what_the_features_are_of(store: Store) -> None:
    for record in store.records():
        backbone = record.job.config.backbone
        assert (backbone["name"], backbone["frozen"], backbone["head"]) == (NETWORK, True, "linear")
        assert record.job.preset == "kind-features"
        assert "--set" in record.job.command() and "backbone.frozen=true" in record.job.command()
        identity = record.job.identity["config"]["backbone"]  # type: ignore[index]
        assert identity["weights_sha256"] == backbone["weights_sha256"]
        assert "weights" not in identity and "input_ignored" not in identity


def test_a_fit_is_given_rows_and_no_test_split(root: Path, images: LoadedData) -> None:
    (job,) = jobs_of(root, "erm", **{"backbone.head": "mlp"})
    assert job.backbone() == BackboneSpec("mlp")
    options = RunOptions(root, root / "unused")
    rows = features.features_in_memory(build_backbone(job.network(), 3).eval(), images)
    task = fit_task(job, rows, options, Store(root / "unused")).task
    assert (task.channels, task.backbone.name) == (LENGTH, "mlp")
    assert isinstance(task.train.images, FeatureRows)
    assert options.threads_for(job) == 1


@pytest.mark.parametrize("method", ["erm", "dfr", "nct"])
def test_kept_models_take_images(
    method: str, store: Store, root: Path, images: LoadedData, tmp_path: Path
) -> None:
    """The network and the head, together in one file that needs no other."""
    run_id = store.find(f"{method}-waterbirds")
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes((store.runs / run_id / "model.safetensors").read_bytes())
    table = store.predictions(run_id)
    assert table is not None
    expected = table[table["split"] == "test"]
    for model in (load_model(run_id, store.root), load_model(alone)):
        logits, leaf = model.apply(images.splits["test"].images)
        assert logits.argmax(1).tolist() == expected["pred"].tolist()
        scores = expected[["score_0", "score_1"]].to_numpy("float32")
        assert np.allclose(logits.numpy(), scores, atol=0.02)
        assert (leaf is None) == (method != "nct")
        if leaf is not None:
            assert leaf.tolist() == expected["leaf"].tolist()
    again = model.save(tmp_path / "again.safetensors")
    assert torch.equal(load_model(again).apply(images.splits["test"].images)[0], logits)


def test_predict_and_explain_and_slices_show_images(
    store: Store, root: Path, images: LoadedData, tmp_path: Path, cli: Any
) -> None:
    part = images.splits["test"]
    pixels = part.images.batch(torch.tensor([0]))
    height, width = pixels.sizes[0].tolist()
    picture = pixels.pixels[0, :, :height, :width].permute(1, 2, 0).numpy()
    Image.fromarray(picture).save(tmp_path / "one.png")
    named = ("nct-waterbirds", "--results", store.root)
    row = cli("predict", named[0], tmp_path / "one.png", *named[1:], "--json").json["predictions"]
    sample = int(part.labels.ids[0])
    told = cli("explain", *named, "--index", sample, "--data-root", root, "--json").json["images"]
    assert told[0]["class"] == row[0]["class"] and told[0]["path"] == row[0]["route"]
    shown = cli("slices", *named, "--data-root", root, "--out", tmp_path / "slices")
    assert shown.code == 0, shown.err
    assert "data:image" in (tmp_path / "slices" / "index.html").read_text()


class Killed(Exception):
    """A process that is killed."""


def test_a_killed_extraction_goes_on_where_it_was(
    root: Path, images: LoadedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs_of(root)
    monkeypatch.setattr(features, "TOGETHER", 8)
    monkeypatch.setattr(features, "NOTED_EVERY", 2)
    whole, _ = on_features(job, images, Store(tmp_path / "whole"), device=CPU, progress=silent)
    seen: list[int] = []

    class Watched(nn.Module):
        dim = LENGTH

        def __init__(self) -> None:
            super().__init__()
            self.network = build_backbone(job.network(), 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if sum(seen) >= 40 and len(seen) < 100:
                seen.extend([0] * 100)
                raise Killed
            seen.append(len(batch))
            rows: torch.Tensor = self.network(batch)
            return rows

    monkeypatch.setattr(features, "build_backbone", lambda *_: Watched())
    store = Store(tmp_path / "killed")
    with pytest.raises(Killed):
        on_features(job, images, store, device=CPU, progress=silent)
    (work,) = store.features.glob("*.work")
    with (work / features.ROWS).open("ab") as torn:  # half a batch that was never noted
        torn.write(b"\x01" * 1000)
    again, cost = on_features(job, images, store, device=CPU, progress=silent)
    total = sum(map(len, images.splits.values()))
    assert cost.image_passes == total
    assert total <= sum(seen) <= total + 16  # no more than what was not noted is made twice
    for split, part in again.splits.items():
        one, other = part.images, whole.splits[split].images
        assert isinstance(one, FeatureRows) and isinstance(other, FeatureRows)
        assert torch.equal(one.rows, other.rows)
    assert not list(store.features.glob("*.work"))


def test_an_extraction_that_lost_its_lock_stops(
    root: Path, images: LoadedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,), store = jobs_of(root), Store(tmp_path)

    def lost(lock: Lock) -> None:
        raise LockLost("taken over")

    with monkeypatch.context() as patch, pytest.raises(LockLost):
        patch.setattr(Lock, "check", lost)
        on_features(job, images, store, device=CPU, progress=silent)
    assert not [path for path in store.features.iterdir() if (path / features.DESCRIPTION).exists()]


def test_rows_that_another_process_wrote_to_are_not_kept(
    root: Path, images: LoadedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,), store = jobs_of(root), Store(tmp_path)

    def intrude(lock: Lock) -> None:
        with next(store.features.glob("*.work/rows.f32")).open("ab") as other:
            other.write(b"\0" * 4)

    with monkeypatch.context() as patch, pytest.raises(Damaged, match="another process"):
        patch.setattr(Lock, "check", intrude)
        on_features(job, images, store, device=CPU, progress=silent)
    data, _ = on_features(job, images, store, device=CPU, progress=silent)
    assert all(len(data.splits[name]) == len(part) for name, part in images.splits.items())


def test_features_are_prepared_on_the_threads_asked_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, used = torch.get_num_threads(), []
    monkeypatch.setattr(
        features, "on_features", lambda *of, **how: used.append(torch.get_num_threads())
    )
    prepare_features(jobs_of(root), RunOptions(root, tmp_path, threads=before + 1))
    assert used == [before + 1] and torch.get_num_threads() == before


def test_damaged_features_are_set_aside_and_made_again(
    root: Path, images: LoadedData, tmp_path: Path
) -> None:
    (job,), store = jobs_of(root), Store(tmp_path)
    before, _ = on_features(job, images, store, device=CPU, progress=silent)
    expected = before.splits["val"].images.batch(torch.arange(5)).pixels.clone()
    (path,) = (p for p in store.features.glob("waterbirds-val-*") if p.is_dir())
    content = bytearray((path / features.ROWS).read_bytes())
    content[7] ^= 255
    del before  # it maps the file
    (path / features.ROWS).write_bytes(content)
    told: list[str] = []
    after, _ = on_features(
        job, images, store, device=CPU, progress=lambda what, *_: told.append(what)
    )
    assert torch.equal(after.splits["val"].images.batch(torch.arange(5)).pixels, expected)
    assert any("damaged" in what and "checksum" in what for what in told)
    assert len(list(store.damaged.glob("waterbirds-val-*"))) == 1


def test_features_that_are_not_numbers_are_refused(
    root: Path, images: LoadedData, tmp_path: Path
) -> None:
    state = build_backbone(BackboneSpec(NETWORK), 3).body.state_dict()
    state["bn1.weight"].fill_(float("inf"))
    save_file(state, tmp_path / "broken.safetensors")
    (job,) = jobs_of(root, **{"backbone.weights": tmp_path / "broken.safetensors"})
    record = run_job(job, RunOptions(root, tmp_path / "r", isolate=False), lambda _: None)
    assert record.failure is not None
    assert "are not all finite" in record.failure.message


def test_what_features_depend_on_is_their_address(root: Path, images: LoadedData) -> None:
    (job,) = jobs_of(root)
    first = features.identity_of(job, images, "val")
    (mlp,) = jobs_of(root, "dfr", **{"backbone.head": "mlp"})
    assert features.identity_of(mlp, images, "val") == first  # neither head nor method
    assert features.identity_of(job, images, "test") != first
    look = replace(images.facts.eval_transform, mean=(0.5, 0.5, 0.5))
    other = replace(images, facts=replace(images.facts, eval_transform=look))
    assert features.identity_of(job, other, "val") != first
    part = images.splits["val"].subset(torch.arange(10))
    fewer = replace(images, splits={"val": part})
    assert features.identity_of(job, fewer, "val") != first
    assert not {"labels", "groups"} & set(first)


def test_heads_and_frozen_networks_are_runs_of_their_own(root: Path) -> None:
    (frozen,), (mlp,) = jobs_of(root), jobs_of(root, **{"backbone.head": "mlp"})
    (tuned,) = jobs_of(root, **{"backbone.frozen": "false"})
    assert len({frozen.run_id, mlp.run_id, tuned.run_id}) == 3
    assert "frozen" not in tuned.config.backbone and "head" not in tuned.config.backbone
    assert frozen.overrides.keys() >= {"backbone.frozen", "backbone.weights"}


def test_a_method_for_images_alone_is_refused_or_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(get_method("exmap")), "takes_rows", False)
    with pytest.raises(UsageError, match="exmap works on images, and frozen features are rows"):
        jobs_of(root, "exmap")
    config = get_method("exmap").config_type()
    rows = features.row_facts(load_data(jobs_of(root)[0], root).facts, LENGTH)
    unsuited = why_unsuited(get_method("exmap"), config, rows)
    assert unsuited is not None and "waterbirds has rows of features" in unsuited.reason


WRONG: dict[str, tuple[tuple[str, ...], str, str]] = {
    "lenet": (
        ("umnist", "--features"),
        "lenet4 has no pretrained weights",
        "backbone.weights=FILE",
    ),
    "scratch": (
        ("waterbirds", "--features", "--set", "backbone.pretrained=false"),
        "backbone.pretrained=false asks for a network without any",
        "leave backbone.pretrained out",
    ),
    "head": (
        ("waterbirds", "--set", "backbone.head=mlp"),
        "backbone.head is the network on frozen features",
        "--features",
    ),
    "no weights": (
        ("waterbirds", "--features", "--backbone", "resnet18"),
        "waterbirds starts from ImageNet weights (resnet18), which are not on disk",
        "--set backbone.weights=FILE",
    ),
    "small": (
        ("umnist", "--set", "backbone.weights={root}/weights.safetensors"),
        "lenet4 takes no weights file",
        "--backbone",
    ),
    "another's": (
        (
            *("waterbirds", "--features", "--backbone", "resnet18"),
            *("--set", "backbone.weights={root}/weights.safetensors"),
        ),
        "does not fit resnet18: it lacks conv1.weight (64, 3, 7, 7)",
        "this very architecture",
    ),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_cannot_be_frozen_is_refused_before_any_work(
    what: str, root: Path, digits_root: Path, tmp_path: Path, cli: Any
) -> None:
    words, problem, remedy = WRONG[what]
    data_root = digits_root if "umnist" in words else root
    told = cli(
        *("run", "--methods", "erm", "--seeds", 1, "--datasets"),
        *(word.format(root=root) for word in words),
        *("--data-root", data_root, "--results", tmp_path / "results"),
    )
    assert told.code == 2
    assert problem in told.err and remedy in told.err
    assert not (tmp_path / "results" / "runs").exists()


def test_expected_cost_counts_shared_features_once(store: Store, root: Path) -> None:
    jobs = jobs_of(root, "erm,dfr,nct")
    known = stage_seconds(jobs, store.records())
    total = expected_totals(jobs, known)
    made = max(stages["features"] for stages in known.values())
    assert total.unknown == 0 and made > 0
    assert total.standalone - total.shared == pytest.approx(2 * made, rel=0.5)
    unfrozen = jobs_of(root, "erm", **{"backbone.frozen": "false"})
    assert stage_seconds(unfrozen, store.records()) == {}


def test_studies_of_heads_are_called_so_and_share_features(root: Path, tmp_path: Path) -> None:
    overrides = {key: str(value) for key, value in settings(root).items()}
    tuning = Tuning("erm", "waterbirds", root, tmp_path, overrides=overrides)
    assert tuning.name == "erm-waterbirds-standin-features"
    assert Store(tuning.folder).features == Store(tmp_path).features


def test_protocols_fix_the_input_and_own_data_takes_the_networks(root: Path, cli: Any) -> None:
    """The stand-in is under the release's protocol, which has ImageNet's mean and std."""
    other = {"backbone.name": "tf_efficientnet_lite0"}  # weights are only looked at when it runs
    (job,) = jobs_of(root, **other)
    assert "input" not in job.config.backbone
    (note,) = input_notes([job, job])
    assert "expect mean 0.5 instead of 0.485 0.456 0.406" in note
    assert "as the data says" in note
    (changed,) = jobs_of(root, **other, **{"backbone.input": "network"})
    assert changed.config.backbone["input"]["mean"] == [0.5, 0.5, 0.5]  # type: ignore[index]
    assert changed.run_id != job.run_id and "backbone.input" in changed.overrides
    seen = load_data(changed, root).facts
    assert seen.eval_transform.mean == (0.5, 0.5, 0.5)
    assert seen.eval_transform.interpolation == "bicubic"
    (note,) = input_notes([changed])
    assert "images are brought to it so" in note
    words = [f"{key}={value}" for key, value in {**settings(root), **other}.items()]
    told = cli("plan", "--methods", "erm,dfr", "--datasets", "waterbirds", "--data-root", root)
    assert "note:" not in told.err  # the paper's network, for which the protocol is made
    options = ("--datasets", "waterbirds", "--data-root", root, "--set", *words)
    told = cli("plan", "--methods", "erm,dfr", *options)
    assert told.err.count("note:") == 1


def own_photos(folder: Path) -> Path:
    """A hundred and twenty small photographs of two classes and two places."""
    rng, rows = np.random.default_rng(0), []
    (folder / "images").mkdir(parents=True)
    for number in range(120):
        label, place = number % 2, (number // 2) % 2
        pixels = rng.integers(0, 120, (70, 70, 3), dtype=np.uint8)
        pixels[20:50, 20:50, label] += 130
        pixels[:, :10, 2] += 100 * place
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        rows.append({"file": f"images/{number}.png", "label": f"c{label}", "place": f"p{place}"})
    pd.DataFrame(rows).to_csv(folder / "metadata.csv", index=False)
    return folder


def test_registered_photos_go_through_the_networks_own_input(
    root: Path, tmp_path: Path, cli: Any
) -> None:
    data = tmp_path / "data"
    own_photos(tmp_path / "mine")
    network = ("--backbone", "tf_efficientnet_lite0", "--resolution", 72)
    told = cli(
        *("data", "add", "mine", tmp_path / "mine", "--groups", "place", "--data-root", data),
        *network,
    )
    assert told.code == 0, told.err
    weights = tmp_path / "lite0.safetensors"
    state = build_backbone(BackboneSpec("tf_efficientnet_lite0"), 3).body.state_dict()
    save_file(state, weights)
    grid = bench.run(
        "erm",
        "mine",
        1,
        settings={"backbone.frozen": True, "backbone.weights": weights, "erm.epochs": 2},
        isolate=False,
        data_root=data,
        results=tmp_path / "results",
    )
    (record,) = grid.records()
    assert record.job.config.backbone["input"] == {
        **{"mean": [0.5] * 3, "std": [0.5] * 3},
        **{"interpolation": "bicubic", "crop": 0.875},
    }
    (path,) = (p for p in grid.store.features.glob("mine-val-*") if p.is_dir())
    identity = json.loads((path / features.DESCRIPTION).read_text())["identity"]
    assert identity["transform"]["interpolation"] == "bicubic"
    (plain,) = bench.plan(
        *("erm", "mine", 1),
        settings={"backbone.frozen": True, "backbone.weights": weights, "backbone.input": "data"},
        data_root=data,
        results=tmp_path / "results",
    ).jobs
    assert "input" not in plain.config.backbone and "backbone.input" in plain.overrides


def test_fit_on_arrays_with_a_frozen_network(root: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.integers(0, 100, (60, 40, 40, 3), dtype=np.uint8)
    x[y == 1, 10:30, 10:30] += 120
    weights = str(root / "weights.safetensors")
    spec = BackboneSpec(NETWORK, pretrained=True, weights=weights, frozen=True)
    model = bench.fit("erm", (x, y), (x, y), backbone=spec, epochs=5)
    assert model.score(x, y) > 0.9
    assert model.card.backbone == {"name": NETWORK, "frozen": True, "head": "linear"}
    again = load_model(model.save(tmp_path / "model.safetensors"))
    assert np.array_equal(again.predict_proba(x), model.predict_proba(x))
    with pytest.raises(UsageError, match="does not take rows of features"):
        bench.fit("erm", (x.reshape(60, -1) / 255, y), (x.reshape(60, -1) / 255, y), backbone=spec)
