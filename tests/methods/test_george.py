"""GEORGE: what is clustered, the selection by clusters, and the three stages together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import methods.george
from bench.context import RunContext
from datasets.base import BackboneSpec, LoadedData, Task
from datasets.config import build_config
from datasets.errors import UsageError
from methods.base import METHODS, Supervision, load_methods
from methods.erm import ErmConfig
from methods.george import (
    George,
    GeorgeConfig,
    SubclassConfig,
    find_clusters,
    reduce,
    worst_cluster,
)
from methods.groupdro import train_groupdro
from methods.metrics import worst_group_metric
from methods.presets import preset_config

MakeContext = Callable[..., RunContext]
CONFIG = GeorgeConfig(
    epochs=2,
    batch_size=16,
    lr=0.02,
    erm=ErmConfig(epochs=1, lr=0.003),
    reduction="none",
    max_clusters=3,
    size_floor=2,
)
load_methods()


def features(samples: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed)).double()


HEAD = features(2, seed=9)


class TestReduction:
    def test_hardness_is_the_margin_up_to_scale(self) -> None:
        train, val = features(20), features(10, seed=1)
        config = SubclassConfig(reduction="hardness", normalise=False)
        for found, given in zip(
            reduce(train, val, HEAD, 1, config, seed=0), (train, val), strict=True
        ):
            logits = given @ HEAD.T
            margin = (logits[:, 1] - logits[:, 0]) / (HEAD[1] - HEAD[0]).norm()
            assert found.shape == (len(given), 1)
            np.testing.assert_allclose(found[:, 0], margin, rtol=1e-12)

    def test_hardness_of_one_class_among_many(self) -> None:
        head, train = features(5, seed=9), features(20)
        config = SubclassConfig(reduction="hardness", normalise=False)
        found, _ = reduce(train, train[:0], head, 3, config, seed=0)
        logits = train @ head.T
        margin = logits[:, 3] - logits[:, [0, 1, 2, 4]].mean(dim=1)
        np.testing.assert_allclose(
            found[:, 0] / found[0, 0], (margin / margin[0]).numpy(), rtol=1e-9
        )

    def test_vectors_are_brought_to_length_1(self) -> None:
        train, val = features(20), features(10, seed=1)
        train[3] = 0.0
        config = SubclassConfig(reduction="none")
        found, val_found = reduce(train, val, HEAD, 0, config, seed=0)
        np.testing.assert_allclose(np.linalg.norm(val_found, axis=1), np.ones(10))
        np.testing.assert_allclose(found[0], train[0] / train[0].norm())
        np.testing.assert_array_equal(found[3], np.zeros(6))
        plain = reduce(train, val, HEAD, 0, replace(config, normalise=False), seed=0)
        np.testing.assert_array_equal(plain[0], train)


class TestSelection:
    def test_worst_cluster(self, toy_task: Task) -> None:
        clusters = torch.arange(40) % 3
        logits = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        rule = worst_cluster(toy_task, clusters, true_shares=False)
        assert rule.rule == "worst_cluster" and rule.higher_is_better
        right = logits.argmax(dim=1) == toy_task.val.y
        worst = min(float(right[clusters == c].double().mean()) for c in range(3))
        assert rule.score(logits) == pytest.approx(100 * worst)

    def test_worst_pair_where_auroc_counts(self, toy_task: Task) -> None:
        task = replace(toy_task, metric="auroc")
        clusters = torch.where(task.val.y == 0, torch.arange(40) % 3, 3)
        logits = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        found = worst_cluster(task, clusters, true_shares=False).score(logits)
        assert found == worst_group_metric(logits, task.val.y, clusters, "auroc") < 1

    def test_true_shares_weigh_samples(self, granted_task: Task) -> None:
        clusters = torch.arange(40) % 3
        logits = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        groups = granted_task.val.groups.tolist()
        train_groups = granted_task.train.groups.tolist()
        weights = [
            (train_groups.count(g) / len(train_groups)) / (groups.count(g) / len(groups))
            for g in groups
        ]
        right = (logits.argmax(dim=1) == granted_task.val.y).tolist()
        by_cluster = []
        for cluster in range(3):
            own = [i for i in range(40) if i % 3 == cluster]
            hits = sum(weights[i] for i in own if right[i])
            by_cluster.append(100 * hits / sum(weights[i] for i in own))
        rule = worst_cluster(granted_task, clusters, true_shares=True)
        assert rule.score(logits) == pytest.approx(min(by_cluster))
        plain = worst_cluster(granted_task, clusters, true_shares=False)
        assert rule.score(logits) != pytest.approx(plain.score(logits))

    def test_prior_draws_small_clusters_to_the_average(self, toy_task: Task) -> None:
        clusters = torch.zeros(40, dtype=torch.long)
        clusters[:2], clusters[2] = 1, 3  # two samples, none, and one
        y = toy_task.val.y
        pred = y.clone()
        pred[[0, 10]] = 1 - y[[0, 10]]  # one of two, and one of 37, are wrong
        logits = torch.nn.functional.one_hot(pred, 2).float()
        drawn = worst_cluster(toy_task, clusters, true_shares=False, prior=10.0).score(logits)
        assert drawn == pytest.approx(100 * (1 + 10 * 38 / 40) / 12)
        assert worst_cluster(toy_task, clusters, true_shares=False).score(logits) == 50.0

    def test_true_shares_raise_the_tier(self) -> None:
        assert George().supervision(CONFIG) == Supervision()
        known = George().supervision(replace(CONFIG, true_shares=True))
        assert known == Supervision(train_groups=True, val_groups=True)

    def test_no_other_rule_is_taken(self) -> None:
        assert build_config(GeorgeConfig, {"selection": "worst_cluster"}, "george")
        with pytest.raises(UsageError, match=r"george\.selection must be one of worst_cluster"):
            build_config(GeorgeConfig, {"selection": "val_wga"}, "george")


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_clusters_are_groupdros_groups(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a task without any group labels, which raises when they are asked for."""
        seen: list[Any] = []

        def noted(task: Task, groups: Tensor, *rest: Any, **named: Any) -> Any:
            seen.extend([groups, named["select"]])
            return train_groupdro(task, groups, *rest, **named)

        monkeypatch.setattr(methods.george, "train_groupdro", noted)
        ctx = make_context()
        fitted = George().fit(toy_task, CONFIG, ctx)
        assert fitted.partition is not None and torch.equal(fitted.partition, seen[0])
        assert fitted.selection.rule == seen[1].rule == "worst_cluster"
        assert fitted.val_first is not None and set(fitted.val_first.tolist()) <= {0, 1}
        assert fitted.val_first.shape == toy_task.val.y.shape
        assert [stage.name for stage in ctx.stage_costs] == ["erm", "george-clusters"]
        assert ctx.stage_costs[1].image_passes == 100
        facts = fitted.details["george"]
        assert facts["sizes"] == torch.bincount(fitted.partition).tolist()
        assert sum(facts["val_sizes"]) == 40
        assert sum(facts["clusters_per_class"]) == len(facts["sizes"])
        assert all(2 <= count <= 3 for count in facts["before_overclustering"])
        assert all(-1 <= value <= 1 for value in facts["silhouette"])
        assert facts["silhouette_samples"] == [30, 30]

    def test_classes_share_no_cluster(self, toy_task: Task, make_context: MakeContext) -> None:
        found = find_clusters(toy_task, CONFIG, make_context()).tensors
        pairs = [
            {*zip(found[split].tolist(), part.y.tolist(), strict=True)}
            for split, part in (("train", toy_task.train), ("val", toy_task.val))
        ]
        classes = dict(pairs[0] | pairs[1])
        assert len(classes) == len(pairs[0] | pairs[1]) == max(classes) + 1
        assert sorted(classes.values()) == [classes[cluster] for cluster in range(len(classes))]

    @pytest.mark.parametrize("whole", [0, 1])
    def test_unsplit_class(self, toy_task: Task, make_context: MakeContext, whole: int) -> None:
        result = find_clusters(toy_task, replace(CONFIG, unsplit=(whole,)), make_context())
        for split, part in (("train", toy_task.train), ("val", toy_task.val)):
            assert len(result.tensors[split][part.y == whole].unique()) == 1
        assert len(result.tensors["train"][toy_task.train.y != whole].unique()) > 1
        assert result.facts["clusters_per_class"][whole] == 1
        assert result.facts["silhouette"][whole] is None

    def test_class_too_small_to_cluster_stays_whole(
        self, toy_data: LoadedData, make_context: MakeContext
    ) -> None:
        labels = toy_data.splits["train"].labels
        few = torch.cat([(labels.y == 0).nonzero()[:, 0], (labels.y == 1).nonzero()[:11, 0]])
        splits = {**toy_data.splits, "train": toy_data.splits["train"].subset(few)}
        task = LoadedData(toy_data.facts, splits).task(
            BackboneSpec("lenet4"), train_groups=False, val_groups=False
        )
        facts = find_clusters(task, CONFIG, make_context()).facts
        assert facts["clusters_per_class"][0] > 1 == facts["clusters_per_class"][1]

    def test_clusters_are_found_once(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = find_clusters(toy_task, CONFIG, make_context("first"))
        original, calls = methods.george.split_class, []

        def counted(*arguments: Any) -> Any:
            calls.append(None)
            return original(*arguments)

        monkeypatch.setattr(methods.george, "split_class", counted)
        again = find_clusters(toy_task, replace(CONFIG, lr=0.5), make_context("again"))
        assert not calls and torch.equal(first.tensors["train"], again.tensors["train"])
        find_clusters(toy_task, replace(CONFIG, clusterer="kmeans"), make_context("other"))
        assert len(calls) == 2

    @pytest.mark.slow  # with UMAP
    @pytest.mark.xdist_group("umap")
    def test_same_seed_same_clusters_with_umap(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, reduction="umap", umap_epochs=20)
        found = []
        for name in ("first", "again"):
            ctx = make_context(name)
            found.append(find_clusters(toy_task, config, ctx))
            shutil.rmtree(ctx.settings.stages)
        for split in ("train", "val"):
            assert torch.equal(found[0].tensors[split], found[1].tensors[split])
        assert found[0].facts == found[1].facts

    def test_hardness_and_pairs(self, toy_task: Task, make_context: MakeContext) -> None:
        config = replace(CONFIG, reduction="hardness", pairs=True, unsplit=(1,))
        task = replace(toy_task, metric="auroc")
        fitted = George().fit(task, config, make_context())
        assert fitted.selection is not None and 0 <= fitted.selection.value <= 1

    def test_true_shares(self, granted_task: Task, make_context: MakeContext) -> None:
        config = replace(CONFIG, true_shares=True)
        fitted = George().fit(granted_task, config, make_context())
        assert fitted.selection.rule == "worst_cluster"

    @pytest.mark.parametrize(
        ("changes", "task_changes", "message"),
        [
            ({"unsplit": (2,)}, {}, "unsplit must name classes from 0 to 1"),
            ({"true_shares": True}, {"metric": "auroc"}, "true_shares weighs accuracies"),
            ({"prior": 10.0}, {"metric": "auroc"}, "prior is of accuracies"),
        ],
    )
    def test_what_does_not_fit_the_task_is_refused(
        self,
        toy_task: Task,
        make_context: MakeContext,
        changes: dict[str, Any],
        task_changes: dict[str, Any],
        message: str,
    ) -> None:
        with pytest.raises(UsageError, match=message):
            George().fit(
                replace(toy_task, **task_changes), replace(CONFIG, **changes), make_context()
            )


def test_quick_shortens_every_stage() -> None:
    quick = GeorgeConfig(epochs=50, erm=ErmConfig(epochs=9)).quick()
    assert (quick.epochs, quick.erm.epochs) == (2, 2)
    assert (quick.max_clusters, quick.reduction) == (3, "hardness")  # no UMAP to compile
    assert GeorgeConfig(reduction="none").quick().reduction == "none"


@pytest.mark.parametrize("knob", ["umap_epochs", "max_clusters", "eta", "epochs"])
def test_wrong_values_are_refused(knob: str) -> None:
    with pytest.raises(UsageError, match=knob):
        replace(CONFIG, **{knob: 0})


def test_prior_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(UsageError, match="prior cannot be negative"):
        replace(CONFIG, prior=-1.0)
    with pytest.raises(UsageError, match="two ways to weigh"):
        replace(CONFIG, prior=1.0, true_shares=True)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("umnist", ("umap", True, True, 0.0, False, False, ())),
        ("waterbirds", ("hardness", False, False, 2.0, True, False, ())),
        ("celeba", ("hardness", False, False, 3.0, True, False, ())),
        ("isic", ("umap", True, True, 0.0, False, True, (1,))),
        ("cmnist", ("hardness", False, False, 0.0, True, False, ())),
    ],
)
def test_recipes_are_the_authors(dataset: str, expected: tuple[Any, ...]) -> None:
    """The table of their configurations, written out a second time."""
    config = preset_config(METHODS["george"], dataset)
    knobs = "reduction normalise overcluster adjustment balanced pairs unsplit"
    assert tuple(getattr(config, knob) for knob in knobs.split()) == expected
    assert (config.clusterer, config.max_clusters, config.true_shares) == ("gmm", 10, False)
    assert config.erm == preset_config(METHODS["erm"], dataset)
