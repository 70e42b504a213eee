"""Splitting samples into clusters, as GEORGE does within a class.

The number of clusters is the one with the best macro silhouette (the mean over clusters of a
cluster's mean silhouette, so that a small cluster counts like a large one). Over-clustering then
tries to split every cluster further, and keeps those sub-clusters that are more compact, harder
and large enough. Fitted on training points; validation points are only assigned.

The silhouette of a point is (b - a) / max(a, b), with a its mean distance to the others of its
cluster and b that to the nearest other cluster; it is 0 for a point that is alone in its cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from datasets.config import require

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

STARTS = 3  # of a fit, of which the best is taken

UNCACHED = {
    "umap.umap_": ("smooth_knn_dist", "compute_membership_strengths", "init_transform"),
    "umap.layouts": ("_nb_optimize_layout_euclidean_single_epoch",),
    "umap.utils": ("tau_rand", "tau_rand_int"),
    "pynndescent.kernels": ("generate_graph_update_array_batched",),
    "pynndescent.utils": (
        *("build_candidates_owner", "generate_graph_update_array", "deheap_sort"),
        *("apply_sorted_graph_update_array", "sort_updates_by_block"),
    ),
    "pynndescent.pynndescent_": (
        *("init_rp_tree", "init_random", "generate_leaf_updates", "process_candidates"),
    ),
}
"""What UMAP compiles in every process, since its authors left it out of Numba's cache on disk."""
DISTANCES = ("squared_euclidean", "euclidean")  # functions that some of these are given


@dataclass(frozen=True)
class ClusterConfig:
    """How the samples of a class are split.

    Attributes:
        clusterer: `gmm` (full covariances) or `kmeans`.
        max_clusters: numbers of clusters from 2 to this one are tried.
        overcluster: try to split every cluster into `overcluster_factor` sub-clusters.
        size_floor: fewest training samples, and fewest validation samples, of a sub-cluster.
        size_share: fewest training samples of a sub-cluster, as a share of its class.
        silhouette_sample: silhouettes cost the square of the samples, so that of more than this
            many a random subset is scored; in one dimension always all, since sorting is cheap.
    """

    clusterer: Literal["gmm", "kmeans"] = "gmm"
    max_clusters: int = 10
    overcluster: bool = True
    overcluster_factor: int = 5
    size_floor: int = 25
    size_share: float = 0.005
    silhouette_sample: int = 10_000

    def __post_init__(self) -> None:
        require(
            self.max_clusters >= 2, f"max_clusters must be at least 2 but got {self.max_clusters}"
        )
        require(
            self.overcluster_factor >= 2,
            f"overcluster_factor must be at least 2 but got {self.overcluster_factor}",
        )
        require(self.size_floor >= 1, f"size_floor must be at least 1 but got {self.size_floor}")
        require(0 <= self.size_share < 1, f"size_share must be in [0, 1) but got {self.size_share}")
        require(
            self.silhouette_sample >= 100,
            f"silhouette_sample must be at least 100 but got {self.silhouette_sample}",
        )


@dataclass(frozen=True)
class Clusters:
    """The clusters of one class, numbered from 0.

    Attributes:
        train, val: the cluster of every sample.
        base: clusters before over-clustering.
        silhouette: their macro silhouette; None for a class that was not split.
        scored: training samples whose silhouettes were computed.
    """

    train: Ints
    val: Ints
    base: int = 1
    silhouette: float | None = None
    scored: int = 0

    @property
    def count(self) -> int:
        """Count the clusters."""
        return int(max(self.train.max(initial=-1), self.val.max(initial=-1))) + 1


def single_cluster(train: int, val: int) -> Clusters:
    """Return all samples of a class, so many of each split, as one cluster."""
    return Clusters(np.zeros(train, dtype=np.int64), np.zeros(val, dtype=np.int64))


def split_class(
    train: Floats, val: Floats, losses: Floats, config: ClusterConfig, seed: int
) -> Clusters:
    """Cluster the training points of a class and assign its validation points.

    Args:
        train: a row a sample.
        val: likewise.
        losses: of the training samples; over-clustering looks for hard ones.
        config: how to split.
        seed: of fits and of the scored subset.
    """
    scored = np.arange(len(train))
    if train.shape[1] > 1 and len(train) > config.silhouette_sample:
        rng = np.random.default_rng(seed)
        scored = np.sort(rng.choice(len(train), config.silhouette_sample, replace=False))
    model, score = best_fit(train, scored, config, seed)
    if model is None:
        return single_cluster(len(train), len(val))
    found = assign(model, train), assign(model, val)
    base = len(np.unique(found[0]))
    if config.overcluster:
        found = split_further(train, val, *found, losses, scored, config, seed)
    # Number the clusters anew, without those that nothing fell into.
    dense = np.unique(np.concatenate(found), return_inverse=True)[1]
    return Clusters(dense[: len(train)], dense[len(train) :], base, score, len(scored))


def best_fit(
    points: Floats, scored: Ints, config: ClusterConfig, seed: int
) -> tuple[Any | None, float]:
    """Fit every number of clusters; return the best, the larger of equals, or None if none is."""
    best, best_score = None, -np.inf
    for k in range(2, min(config.max_clusters, len(points) - 1) + 1):
        model = fit_clusters(points, k, config, seed)
        labels = assign(model, points)[scored]
        score = macro_silhouette(silhouettes(points[scored], labels), labels)
        if score >= best_score:  # never true of the NaN that a single cluster has
            best, best_score = model, score
    return best, best_score


def fit_clusters(points: Floats, k: int, config: ClusterConfig, seed: int) -> Any:
    """Fit one mixture or k-means."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    kind = GaussianMixture if config.clusterer == "gmm" else KMeans
    # k-means, which also starts a mixture, adds up its threads' sums in no fixed order.
    with warnings.catch_warnings(), threadpool_limits(1, user_api="openmp"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return kind(k, n_init=STARTS, random_state=seed).fit(points)


def assign(model: Any, points: Floats) -> Ints:
    """Return the cluster of each point; there may be no points."""
    labels = model.predict(points) if len(points) else []
    return np.asarray(labels, dtype=np.int64)


def split_further(
    train: Floats,
    val: Floats,
    base: Ints,
    val_base: Ints,
    losses: Floats,
    scored: Ints,
    config: ClusterConfig,
    seed: int,
) -> tuple[Ints, Ints]:
    """Split every cluster, and put the sub-clusters not worth keeping back together.

    Kept sub-clusters are numbered after the clusters, whose numbers the others keep.
    """
    factor = config.overcluster_factor
    sub, val_sub = base * factor, val_base * factor
    for cluster in np.unique(base):
        own, val_own = base == cluster, val_base == cluster
        if own.sum() > factor:  # one as small as that stays as it is
            model = fit_clusters(train[own], factor, config, seed)
            sub[own] += assign(model, train[own])
            val_sub[val_own] += assign(model, val[val_own])
    before, after = (silhouettes(train[scored], ids[scored]) for ids in (base, sub))
    count = int(max(base.max(), val_base.max(initial=0))) + 1
    keep = kept_subclusters(sub, val_sub, count * factor, losses, scored, before, after, config)
    return (
        np.where(keep[sub], count + sub, base),
        np.where(keep[val_sub], count + val_sub, val_base),
    )


def kept_subclusters(
    sub: Ints,
    val_sub: Ints,
    count: int,
    losses: Floats,
    scored: Ints,
    before: Floats,
    after: Floats,
    config: ClusterConfig,
) -> Bools:
    """Return which of `count` sub-clusters are more compact, no easier, and large enough.

    Args:
        sub: sub-cluster of each training sample; `overcluster_factor` of them in order make up a
            cluster.
        val_sub: sub-cluster of each validation sample.
        count: how many sub-clusters there may be; some can be empty, in training or validation.
        losses: of the training samples.
        scored: the training samples that have silhouettes.
        before: their silhouettes among the clusters.
        after: their silhouettes among the sub-clusters.
        config: the limits.
    """
    parent = np.arange(count) // config.overcluster_factor
    was, now = (means(values, sub[scored], count) for values in (before, after))
    compact = now > np.maximum(was, 0.0)
    cluster_losses = means(losses, sub // config.overcluster_factor, count)
    hard = means(losses, sub, count) >= cluster_losses[parent]
    size = np.bincount(sub, minlength=count)
    val_size = np.bincount(val_sub, minlength=count)
    large = size >= max(config.size_share * len(sub), config.size_floor)
    kept: Bools = compact & hard & large & (val_size >= config.size_floor)
    return kept


def means(values: Floats, ids: Ints, count: int) -> Floats:
    """Average values by id; NaN where there are none."""
    with np.errstate(invalid="ignore"):
        averages: Floats = np.bincount(ids, values, minlength=count) / np.bincount(
            ids, minlength=count
        )
    return averages


def macro_silhouette(values: Floats, labels: Ints) -> float:
    """Average each cluster's mean silhouette over the clusters that have samples."""
    by_cluster = means(values, labels, int(labels.max()) + 1)
    return float(by_cluster[np.bincount(labels) > 0].mean())


def silhouettes(points: Floats, labels: Ints) -> Floats:
    """Compute every point's silhouette; NaN where all points are in one cluster."""
    clusters = len(np.unique(labels))
    if clusters == 1:
        return np.full(len(points), np.nan)
    if clusters == len(points):  # scikit-learn refuses what is 0 by definition
        return np.zeros(len(points))
    if points.shape[1] == 1:
        return silhouettes_on_a_line(points[:, 0], labels)
    from sklearn import config_context
    from sklearn.metrics import silhouette_samples

    with config_context(working_memory=128):  # in MB; its default of 1024 is not faster
        values: Floats = silhouette_samples(points, labels)
    return values


def silhouettes_on_a_line(x: Floats, labels: Ints) -> Floats:
    """Compute exact silhouettes in one dimension from sorted clusters and their running sums."""
    x = x - x.mean()
    rows, sizes = np.arange(len(x)), np.bincount(labels)
    distance = np.full((len(x), len(sizes)), np.inf)  # mean distance to each cluster
    for cluster in np.flatnonzero(sizes):
        own = np.sort(x[labels == cluster])
        sums = np.concatenate([[0.0], own.cumsum()])
        below = np.searchsorted(own, x)
        left = below * x - sums[below]
        right = sums[-1] - sums[below] - (len(own) - below) * x
        distance[:, cluster] = (left + right) / len(own)
    # Equal points should be at distance 0, but differences of sums are rounded.
    distance[distance < 1e-10 * (np.ptp(x) or 1.0)] = 0.0
    others = sizes[labels] - 1  # a point's distance to itself does not count
    within = distance[rows, labels] * sizes[labels] / np.maximum(others, 1)
    distance[rows, labels] = np.inf
    nearest = distance.min(axis=1)
    larger = np.maximum(within, nearest)
    values: Floats = (nearest - within) / np.where(larger > 0, larger, 1.0)
    values[others == 0] = 0.0
    return values


def umap_embedding(
    points: NDArray[Any],
    others: NDArray[Any],
    seed: int,
    *,
    neighbours: int = 15,
    min_dist: float = 0.1,
    epochs: int | None = None,
) -> tuple[Floats, Floats]:
    """Lay points out in the plane with UMAP, and place others, if there are any, among them."""
    from umap import UMAP

    keep_compiled()
    layout = UMAP(
        n_components=2,
        n_neighbors=neighbours,
        min_dist=min_dist,
        n_epochs=epochs,
        random_state=seed,
        transform_seed=seed,
        n_jobs=1,  # more would make the layout depend on how threads interleave
    )
    plane = layout.fit_transform(points).astype(np.float64)
    return plane, layout.transform(others).astype(np.float64) if len(others) else plane[:0]


@cache
def keep_compiled() -> None:
    """Have what UMAP compiles kept in Numba's cache on disk, from where later processes take it.

    It is the code itself that is kept, so that no bit of a layout depends on it. Of the functions
    that cannot be cached what remains is a few seconds; with all of them it was most of a minute.
    """
    from numba.core.dispatcher import Dispatcher

    def compiled(module: str, names: tuple[str, ...]) -> list[Any]:
        found = (getattr(importlib.import_module(module), name, None) for name in names)
        return [function for function in found if isinstance(function, Dispatcher)]

    # A cache is a convenience: with another version of these libraries there may be none.
    with contextlib.suppress(ImportError, AttributeError, AssertionError, RuntimeError):
        # Code for a function that is given another is found again by that one's name, which is
        # otherwise drawn anew in each process.
        for function in compiled("pynndescent.distances", DISTANCES):
            function._set_uuid(f"{function.py_func.__name__} {version('pynndescent')}")
        for module, names in UNCACHED.items():
            for function in compiled(module, names):
                function.enable_caching()
