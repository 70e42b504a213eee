"""Clusters within a class: silhouettes, the number of clusters, and what over-clustering keeps."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.caching import NullCache
from sklearn.metrics import silhouette_samples

import methods.clustering
from datasets.errors import UsageError
from methods.clustering import (
    UNCACHED,
    ClusterConfig,
    Floats,
    Ints,
    best_fit,
    keep_compiled,
    kept_subclusters,
    macro_silhouette,
    silhouettes,
    split_class,
    split_further,
    umap_embedding,
)

PLAIN = ClusterConfig(overcluster=False)


def blobs(*centres: tuple[float, ...], sizes: tuple[int, ...], seed: int = 0) -> Floats:
    """Round clusters of spread 0.3, one after the other."""
    rng = np.random.default_rng(seed)
    parts = zip(centres, sizes, strict=True)
    return np.concatenate([rng.normal(c, 0.3, (size, len(c))) for c, size in parts])


def expected_macro(points: Floats, labels: Ints) -> float:
    values = silhouette_samples(points, labels)
    return float(np.mean([values[labels == label].mean() for label in np.unique(labels)]))


class TestSilhouette:
    @pytest.mark.parametrize("dimensions", [1, 2])
    @pytest.mark.parametrize("seed", range(5))
    def test_equals_scikit_learns(self, dimensions: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        points = rng.normal(3.0, 2.0, (200, dimensions))
        labels = rng.integers(0, 5, 200)
        labels[0] = 7  # alone; and nothing is called 5 or 6
        found = silhouettes(points, labels)
        np.testing.assert_allclose(found, silhouette_samples(points, labels), atol=1e-9)
        assert macro_silhouette(found, labels) == pytest.approx(expected_macro(points, labels))

    def test_equal_points_on_a_line(self) -> None:
        rng = np.random.default_rng(0)
        points = rng.integers(-3, 4, (300, 1)) / 7
        labels = rng.integers(0, 4, 300)
        np.testing.assert_allclose(
            silhouettes(points, labels), silhouette_samples(points, labels), atol=1e-7
        )

    def test_clusters_of_one_point_each_and_the_same_everywhere(self) -> None:
        labels = np.array([0, 0, 0, 1, 1])
        by_cluster = np.array([[0.1], [0.1], [0.1], [0.7], [0.7]])
        np.testing.assert_array_equal(silhouettes(by_cluster, labels), np.ones(5))
        everywhere = np.full((5, 1), 0.1)
        np.testing.assert_array_equal(silhouettes(everywhere, labels), np.zeros(5))
        np.testing.assert_array_equal(silhouettes(by_cluster, np.arange(5)), np.zeros(5))

    def test_far_from_zero(self) -> None:
        points = blobs((0.0,), (5.0,), sizes=(50, 50))
        labels = np.repeat([0, 1], 50)
        near, far = silhouettes(points, labels), silhouettes(points + 1e6, labels)
        np.testing.assert_allclose(far, near, atol=1e-6)

    @pytest.mark.parametrize("dimensions", [1, 2])
    def test_one_cluster_has_none(self, dimensions: int) -> None:
        labels = np.zeros(10, dtype=np.int64)
        assert np.isnan(macro_silhouette(silhouettes(np.ones((10, dimensions)), labels), labels))

    def test_small_clusters_count_like_large_ones(self) -> None:
        values, labels = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 2])
        assert macro_silhouette(values, labels) == 0.5


class TestNumberOfClusters:
    @pytest.mark.parametrize("clusterer", ["gmm", "kmeans"])
    def test_planted_ones_are_found(self, clusterer: Any) -> None:
        points = blobs((0, 0), (8, 0), (0, 8), (8, 8), sizes=(90, 60, 30, 20))
        config = replace(PLAIN, clusterer=clusterer, max_clusters=6)
        found = split_class(points, points[:0], np.zeros(200), config, seed=0)
        assert (found.base, found.count, found.scored) == (4, 4, 200)
        truth = np.repeat(np.arange(4), (90, 60, 30, 20))
        assert len({*zip(truth, found.train, strict=True)}) == 4
        assert found.silhouette == pytest.approx(expected_macro(points, found.train))

    def test_on_a_line(self) -> None:
        points = blobs((0,), (8,), (20,), sizes=(90, 60, 30))
        assert split_class(points, points[:0], np.zeros(180), PLAIN, seed=0).count == 3

    def test_larger_of_equals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scores = iter([0.3, 0.5, 0.5, 0.2])
        monkeypatch.setattr(methods.clustering, "macro_silhouette", lambda *_: next(scores))
        points = blobs((0, 0), sizes=(40,))
        model, score = best_fit(points, np.arange(40), replace(PLAIN, max_clusters=5), seed=0)
        assert model is not None and (model.n_components, score) == (4, 0.5)

    def test_no_more_clusters_than_points(self) -> None:
        points = blobs((0,), (5,), sizes=(2, 2))
        found = split_class(points, points, np.zeros(4), PLAIN, seed=0)
        assert found.train.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])

    @pytest.mark.parametrize("clusterer", ["gmm", "kmeans"])
    @pytest.mark.parametrize("dimensions", [1, 3])
    def test_equal_points_stay_together(self, clusterer: Any, dimensions: int) -> None:
        points = np.full((30, dimensions), 0.1)
        config = ClusterConfig(clusterer, max_clusters=3)
        found = split_class(points, points[:7], np.zeros(30), config, seed=0)
        assert (found.count, found.silhouette) == (1, None)
        assert (len(found.train), len(found.val)) == (30, 7)

    @pytest.mark.parametrize("clusterer", ["gmm", "kmeans"])
    def test_validation_is_assigned_by_the_fit_on_training(self, clusterer: Any) -> None:
        points = blobs((0, 0), (8, 0), (0, 8), sizes=(60, 60, 60))
        config = ClusterConfig(clusterer=clusterer, max_clusters=4, size_floor=5)
        order = np.random.default_rng(0).permutation(180)[:50]
        losses = np.random.default_rng(1).random(180)
        found = split_class(points, points[order], losses, config, seed=0)
        np.testing.assert_array_equal(found.val, found.train[order])
        alone = split_class(points, points[:1], losses, replace(config, overcluster=False), seed=0)
        assert alone.val[0] == alone.train[0]

    @pytest.mark.parametrize(("dimensions", "scored"), [(1, 400), (2, 100)])
    def test_silhouettes_of_many_are_those_of_some(self, dimensions: int, scored: int) -> None:
        points = blobs((0,) * dimensions, (9,) * dimensions, sizes=(300, 100))
        config = ClusterConfig(silhouette_sample=100, max_clusters=4)
        found = split_class(points, points, np.zeros(400), config, seed=0)
        assert (found.scored, found.base, len(found.train)) == (scored, 2, 400)
        assert found.silhouette == pytest.approx(expected_macro(points, found.train), abs=0.02)

    @pytest.mark.parametrize("clusterer", ["gmm", "kmeans"])
    def test_same_seed_same_clusters(self, clusterer: Any) -> None:
        points = np.random.default_rng(0).normal(size=(600, 2))
        config = ClusterConfig(clusterer, 4, size_floor=5, silhouette_sample=200)
        losses = points[:, 0] ** 2
        first, again = (split_class(points, points, losses, config, seed=4) for _ in range(2))
        np.testing.assert_array_equal(first.train, again.train)
        np.testing.assert_array_equal(first.val, again.val)


class TestKeeping:
    """Two clusters of two sub-clusters each; all four pass until one is spoilt."""

    config = ClusterConfig(overcluster_factor=2, size_floor=10, size_share=0.05)
    sub = np.repeat(np.arange(4), 20)
    val = np.repeat(np.arange(4), 10)

    def kept(self, **spoilt: Any) -> list[int]:
        given: dict[str, Any] = {
            "sub": self.sub,
            "val_sub": self.val,
            "losses": np.ones(80),
            "scored": np.arange(80),
            "before": np.full(80, 0.3),
            "after": np.full(80, 0.4),
            "config": self.config,
        }
        given |= spoilt
        keep = kept_subclusters(count=4, **given)
        assert keep.shape == (4,)
        found: list[int] = np.flatnonzero(keep).tolist()
        return found

    def test_all_pass(self) -> None:
        assert self.kept() == [0, 1, 2, 3]

    def test_silhouette_has_to_rise(self) -> None:
        assert self.kept(after=np.where(self.sub == 1, 0.3, 0.4)) == [0, 2, 3]
        assert self.kept(before=np.where(self.sub == 2, 0.5, 0.3)) == [0, 1, 3]

    def test_silhouette_has_to_be_positive(self) -> None:
        before = np.full(80, -0.5)
        assert self.kept(before=before, after=np.where(self.sub == 1, -0.1, 0.1)) == [0, 2, 3]

    def test_easier_than_its_cluster(self) -> None:
        assert self.kept(losses=np.where(self.sub == 1, 0.9, 1.0)) == [0, 2, 3]
        harder_cluster = np.where(self.sub < 2, 5.0, 1.0)
        assert self.kept(losses=harder_cluster) == [0, 1, 2, 3]

    def test_too_few_in_training(self) -> None:
        sub = np.repeat(np.arange(4), (20, 9, 20, 31))
        assert self.kept(sub=sub) == [0, 2, 3]
        assert self.kept(sub=sub, config=replace(self.config, size_floor=9)) == [0, 1, 2, 3]

    def test_too_small_a_share_of_the_class(self) -> None:
        sub = np.repeat(np.arange(4), (20, 15, 20, 25))
        share = replace(self.config, size_share=0.2)  # 16 of 80
        assert self.kept(sub=sub, config=share) == [0, 2, 3]

    def test_too_few_in_validation(self) -> None:
        assert self.kept(val_sub=np.repeat(np.arange(4), (10, 9, 10, 10))) == [0, 2, 3]

    def test_none_in_validation(self) -> None:
        assert self.kept(val_sub=self.val[:30]) == [0, 1, 2]
        assert self.kept(val_sub=self.val[:0]) == []

    def test_none_in_training(self) -> None:
        sub = np.repeat([0, 1, 2], (30, 30, 20))
        assert self.kept(sub=sub) == [0, 1, 2]

    def test_none_judged(self) -> None:
        some = np.flatnonzero(self.sub != 3)
        silhouette = {"before": np.full(60, 0.3), "after": np.full(60, 0.4)}
        assert self.kept(scored=some, **silhouette) == [0, 1, 2]


class TestOverClustering:
    config = ClusterConfig("kmeans", max_clusters=2, overcluster_factor=2, size_floor=10)
    points = blobs((0, 0), (4, 0), (10, 0), sizes=(200, 40, 200))
    truth = np.repeat([0, 1, 2], (200, 40, 200))
    losses = np.where(truth == 1, 2.0, 1.0)

    def test_hard_part_of_a_cluster_becomes_one(self) -> None:
        found = split_class(self.points, self.points[::2], self.losses, self.config, seed=0)
        assert (found.base, found.count) == (2, 3)
        assert len({*zip(self.truth, found.train, strict=True)}) == 3
        np.testing.assert_array_equal(found.val, found.train[::2])

    def test_easy_part_does_not(self) -> None:
        losses = 2.0 - self.losses / 2
        found = split_class(self.points, self.points, losses, self.config, seed=0)
        hard = self.truth == 1
        assert set(found.train[hard]) == set(found.train[self.truth == 0])  # merged again

    def test_not_without_validation(self) -> None:
        few = self.points[self.truth != 1]
        found = split_class(self.points, few, self.losses, self.config, seed=0)
        assert found.count == 2
        found = split_class(self.points, few[:0], self.losses, self.config, seed=0)
        assert (found.count, len(found.val)) == (2, 0)

    def test_cluster_too_small_to_split_stays(self) -> None:
        points = blobs((0, 0), (9, 0), sizes=(30, 2))
        base = np.repeat([0, 1], (30, 2))
        losses, scored = np.ones(32), np.arange(32)
        config = replace(self.config, size_floor=1, size_share=0.0)
        train, val = split_further(points, points, base, base, losses, scored, config, seed=0)
        assert (train[30:] == 1).all()
        np.testing.assert_array_equal(train, val)

    def test_validation_cluster_that_training_lacks(self) -> None:
        base = np.repeat([0, 1], 220)
        val_base = np.array([0, 1, 4])
        given = self.losses, np.arange(440), self.config
        _, val = split_further(self.points, self.points[:3], base, val_base, *given, seed=0)
        assert val[2] == 4


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("max_clusters", 1),
        ("overcluster_factor", 1),
        ("size_floor", 0),
        ("size_share", 1.0),
        ("silhouette_sample", 99),
    ],
)
def test_wrong_values_are_refused(knob: str, value: Any) -> None:
    with pytest.raises(UsageError, match=knob):
        replace(PLAIN, **{knob: value})


@pytest.mark.xdist_group("umap")
def test_embedding_is_repeatable_and_finite() -> None:
    """The one test with UMAP that is not slow: compiling it takes half a minute."""
    points = np.random.default_rng(0).normal(size=(40, 6))
    points[20:] += 6
    points[5:15] = points[5]  # equal samples are nothing unusual to a small network
    knobs: dict[str, Any] = {"neighbours": 10, "min_dist": 0.0, "epochs": 30}
    first, again = (umap_embedding(points, points[::2], 3, **knobs) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one.shape[1] == 2 and one.dtype == np.float64
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
    other_seed = umap_embedding(points, points[:0], 4, **knobs)
    assert not np.array_equal(first[0], other_seed[0])
    assert other_seed[1].shape == (0, 2)


@pytest.mark.xdist_group("umap")
def test_what_umap_compiles_in_every_process_is_cached() -> None:
    """A name that another version of the library lacks would be compiled anew, without a word."""
    keep_compiled()
    for module, names in UNCACHED.items():
        for name in names:
            function = getattr(importlib.import_module(module), name)
            assert not isinstance(function._cache, NullCache), f"{module}.{name}"


@pytest.mark.slow
@pytest.mark.xdist_group("umap")
def test_a_second_process_compiles_little_and_lays_out_the_same(tmp_path: Path) -> None:
    layout = """
import sys
import time
import numpy as np
from methods.clustering import umap_embedding
points = np.random.default_rng(0).normal(size=(4500, 8))
plane, others = umap_embedding(points[:4200], points[4200:], 3, epochs=5)
np.save(sys.argv[1], np.concatenate([plane, others]))
print(time.process_time())
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    seconds = []
    for name in ("first", "second"):
        words = [sys.executable, "-c", layout, str(tmp_path / name)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert "NumbaWarning" not in done.stderr
        seconds.append(float(done.stdout))
    first, second = (np.load(tmp_path / f"{name}.npy") for name in ("first", "second"))
    np.testing.assert_array_equal(first, second)
    assert seconds[1] < seconds[0] / 2, seconds
