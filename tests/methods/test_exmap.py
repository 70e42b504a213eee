"""ExMap: heatmaps that resume, clusters as pseudo-groups, and the retraining over them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

import methods.exmap
from bench.context import RunContext
from bench.evaluation import describe_partition
from datasets.base import LoadedData, Task
from datasets.errors import UsageError
from methods.backbones import Classifier
from methods.base import METHODS, Supervision, load_methods
from methods.erm import ErmConfig, train_erm
from methods.exmap import (
    ExMap,
    ExMapConfig,
    HeatmapConfig,
    canonical_form,
    cluster,
    explain,
    find_clusters,
    relevance,
)
from methods.presets import preset_config
from methods.retraining import retrain_head

MakeContext = Callable[..., RunContext]
CONFIG = ExMapConfig(
    penalties=(1.0, 0.1),
    splits=2,
    retrains=3,
    min_group=2,
    erm=ErmConfig(epochs=2, lr=0.01),
    max_clusters=4,
)
load_methods()


def first_model(task: Task, ctx: RunContext) -> Classifier:
    network = train_erm(task, CONFIG.erm, ctx).module
    assert isinstance(network, Classifier)
    return network


@pytest.mark.usefixtures("small_networks")
class TestHeatmaps:
    def test_are_those_of_validation_under_the_evaluation_transform(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        ctx = make_context()
        network = first_model(toy_task, ctx)
        rows = explain(network, toy_task, CONFIG, ctx)
        batch = toy_task.eval_transform(toy_task.val.images.batch(torch.arange(40)))
        maps = relevance(canonical_form(network), batch, 4.0).flatten(start_dim=1)
        torch.testing.assert_close(rows, maps / maps.abs().amax(dim=1, keepdim=True))
        assert ctx.account.image_passes == 40

    @pytest.mark.parametrize("saves", [1, 2, 6, 7])
    def test_killed_run_goes_on_where_it_saved(
        self,
        toy_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        saves: int,
    ) -> None:
        """Six images a batch, a checkpoint every batch: seven checkpoints, the last of four."""
        monkeypatch.setattr(methods.exmap, "heatmap_batch_size", lambda network, transform: 6)
        monkeypatch.setattr(methods.exmap, "SAVE_EVERY", 1)
        network = first_model(toy_task, make_context())
        whole = explain(network, toy_task, CONFIG, make_context("whole"))
        explained: list[int] = []
        original = methods.exmap.heatmaps

        class Killed(BaseException):
            pass

        def counted(*arguments: Any) -> Any:
            for batch in original(*arguments):
                explained.append(len(batch))
                yield batch

        def killed(self: RunContext, name: str, state: dict[str, Any]) -> None:
            save(self, name, state)
            if len(explained) == saves:
                raise Killed

        save = RunContext.save
        monkeypatch.setattr(methods.exmap, "heatmaps", counted)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RunContext, "save", killed)
            explain(network, toy_task, CONFIG, make_context("killed"))
        ctx = make_context("killed")
        resumed = explain(network, toy_task, CONFIG, ctx)
        assert torch.equal(resumed, whole)
        assert explained == [6, 6, 6, 6, 6, 6, 4]
        assert ctx.account.image_passes == 40


class TestCluster:
    @staticmethod
    def planted() -> tuple[Any, Any]:
        rng = np.random.default_rng(0)
        truth = rng.permutation(np.repeat(np.arange(3), 40))
        points = 8 * np.eye(3, 12)[truth] + rng.normal(size=(120, 12))
        return points.astype(np.float32), truth

    def test_spectral(self) -> None:
        points, truth = self.planted()
        found = cluster(points, HeatmapConfig(), seed=0)
        assert found.count == 3
        assert adjusted_rand_score(truth, found.labels) == 1.0

    @pytest.mark.slow  # with UMAP
    @pytest.mark.xdist_group("umap")
    def test_kmeans_makes_as_many_as_it_is_told(self) -> None:
        points, truth = self.planted()
        config = HeatmapConfig(clusterer="kmeans", max_clusters=3)
        first, again = (cluster(points, config, seed=0) for _ in range(2))
        assert (first.count, first.eigenvalues) == (3, ())
        assert adjusted_rand_score(truth, first.labels) > 0.9
        np.testing.assert_array_equal(first.labels, again.labels)
        assert len(np.unique(first.labels)) == 3

    @pytest.mark.parametrize(("samples", "most"), [(11, 3), (20, 30)])
    def test_too_few_for_kmeans_are_one_cluster(self, samples: int, most: int) -> None:
        config = HeatmapConfig(clusterer="kmeans", max_clusters=most)
        found = cluster(np.zeros((samples, 5)), config, seed=0)
        assert (found.count, found.labels.tolist()) == (1, [0] * samples)


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_retrains_over_class_and_cluster(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a task without any group labels, which raises when they are asked for."""
        seen: list[Any] = []

        def noted(network: Any, task: Task, groups: Tensor, *rest: Any) -> Any:
            seen.extend([groups, rest[0]])
            return retrain_head(network, task, groups, *rest)

        monkeypatch.setattr(methods.exmap, "retrain_head", noted)
        ctx = make_context()
        fitted = ExMap().fit(toy_task, CONFIG, ctx)
        groups, scale = seen
        assert scale is None  # features are standardised by validation's own mean and spread
        found = find_clusters(first_model(toy_task, ctx), toy_task, CONFIG, ctx)
        clusters = found.tensors["clusters"]
        pairs = {*zip(toy_task.val.y.tolist(), clusters.tolist(), strict=True)}
        triples = {*zip(toy_task.val.y.tolist(), clusters.tolist(), groups.tolist(), strict=True)}
        assert len(pairs) == len(triples) == len(set(groups.tolist()))
        assert fitted.partition is groups and fitted.partition_split == "val"

    def test_facts(self, toy_task: Task, make_context: MakeContext) -> None:
        ctx = make_context()
        fitted = ExMap().fit(toy_task, CONFIG, ctx)
        facts = fitted.details["exmap"]
        assert facts["relevance"] == "propagation"
        assert 2 <= facts["clusters"][0] <= 4
        assert sum(facts["cluster_sizes"][0]) == 40
        assert len(facts["eigenvalues"][0]) == 7
        assert fitted.selection.rule == "held_out_worst_pseudo_group"
        sizes = torch.unique(fitted.partition, return_counts=True)[1].tolist()  # type: ignore[no-untyped-call]
        assert fitted.details["retraining"]["group_sizes"] == sizes
        stages = [(stage.name, stage.image_passes) for stage in ctx.stage_costs]
        assert stages == [("erm", 200), ("exmap-clusters", 40)]

    def test_networks_without_rules_are_explained_and_said_to_be(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(methods.exmap, "has_rules", lambda network: False)
        monkeypatch.delattr(methods.exmap, "canonical_form")
        fitted = ExMap().fit(toy_task, CONFIG, make_context())
        assert fitted.details["exmap"]["relevance"] == "gradient times input"

    def test_only_the_last_layer_changes(self, toy_task: Task, make_context: MakeContext) -> None:
        before = first_model(toy_task, make_context()).state_dict()
        after = ExMap().fit(toy_task, CONFIG, make_context()).module.state_dict()
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {"head.weight", "head.bias"}

    def test_local_variant_clusters_each_class_by_itself(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        def noted(points: Any, *rest: Any) -> Any:
            seen.append(len(points))
            return cluster(points, *rest)

        monkeypatch.setattr(methods.exmap, "cluster", noted)
        fitted = ExMap().fit(toy_task, replace(CONFIG, variant="local"), make_context())
        assert seen == [20, 20]
        facts = fitted.details["exmap"]
        assert [sum(sizes) for sizes in facts["cluster_sizes"]] == [20, 20]
        assert fitted.partition is not None
        assert len(fitted.partition.unique()) == sum(facts["clusters"])

    def test_classes_share_no_pseudo_group_in_either_variant(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        for variant in ("global", "local"):
            config: ExMapConfig = replace(CONFIG, variant=variant)
            groups = ExMap().fit(toy_task, config, make_context(variant)).partition
            assert groups is not None
            shared = set(groups[toy_task.val.y == 0].tolist())
            assert not shared & set(groups[toy_task.val.y == 1].tolist())

    def test_clusters_are_a_stage_that_other_penalties_share(
        self, toy_task: Task, make_context: MakeContext, tmp_path: Path
    ) -> None:
        ExMap().fit(toy_task, CONFIG, make_context("one"))
        ctx = make_context("two")
        ExMap().fit(toy_task, replace(CONFIG, penalties=(0.5,), retrains=1), ctx)
        assert [stage.reused for stage in ctx.stage_costs] == [True, True]
        ctx = make_context("three")
        ExMap().fit(toy_task, replace(CONFIG, gamma=1.0), ctx)
        assert [stage.reused for stage in ctx.stage_costs] == [True, False]
        shutil.rmtree(tmp_path / "stages")

    def test_where_auroc_counts(self, toy_task: Task, make_context: MakeContext) -> None:
        fitted = ExMap().fit(replace(toy_task, metric="auroc"), CONFIG, make_context())
        assert fitted.selection is not None and 0 <= fitted.selection.value <= 1

    def test_partition_is_compared_with_the_groups_of_validation(
        self, toy_task: Task, toy_data: LoadedData, make_context: MakeContext
    ) -> None:
        fitted = ExMap().fit(toy_task, CONFIG, make_context())
        quality, table = describe_partition(fitted, toy_data)
        assert quality.split == "val"
        assert sum(quality.sizes) == len(table) == 40
        labels = toy_data.splits["val"].labels
        np.testing.assert_array_equal(table["id"], labels.ids)
        np.testing.assert_array_equal(table["group"], labels.groups)
        fitted.partition = labels.groups
        assert describe_partition(fitted, toy_data)[0].ami == pytest.approx(1.0)


def test_no_group_labels_are_asked_for() -> None:
    assert ExMap().supervision(CONFIG) == Supervision()


def test_quick_shortens_every_stage() -> None:
    quick = ExMapConfig(erm=ErmConfig(epochs=9)).quick()
    assert (quick.erm.epochs, quick.splits, quick.retrains) == (2, 1, 3)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("gamma", -1.0), ("heatmap_side", -1), ("max_clusters", 1), ("splits", 0), ("penalties", ())],
)
def test_wrong_values_are_refused(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=knob):
        replace(CONFIG, **{knob: value})


@pytest.mark.parametrize(
    ("dataset", "side", "clusterer", "most"),
    [
        ("waterbirds", 112, "spectral", 10),
        ("celeba", 20, "kmeans", 8),
        ("isic", 112, "spectral", 10),
        ("umnist", 0, "spectral", 10),
        ("cmnist", 0, "spectral", 25),
    ],
)
def test_recipes_are_the_authors(dataset: str, side: int, clusterer: str, most: int) -> None:
    """The table of their scripts, written out a second time."""
    config = preset_config(METHODS["exmap"], dataset)
    assert (config.heatmap_side, config.clusterer, config.max_clusters) == (side, clusterer, most)
    assert (config.gamma, config.variant, config.splits, config.retrains) == (4.0, "global", 5, 20)
    assert config.min_group == (20 if dataset == "umnist" else 6)
    assert min(config.penalties) == 0.01
    assert max(config.penalties) == (10.0 if dataset == "cmnist" else 1.0)
    if dataset in ("waterbirds", "celeba"):
        epochs, batch = {"waterbirds": (100, 32), "celeba": (20, 100)}[dataset]
        expected = ErmConfig(epochs, batch, "sgd", 3e-3, 1e-4, 0.9, "cosine", selection="val_avg")
        assert config.erm == expected
    else:
        assert config.erm == preset_config(METHODS["erm"], dataset)
