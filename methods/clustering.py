"""Splitting the samples of one class into clusters, as GEORGE does.

The number of clusters is the one with the best macro silhouette (the mean over clusters of a
cluster's mean silhouette, so that a small cluster counts like a large one). Over-clustering then
tries to split every cluster further, and keeps those sub-clusters that are more compact, harder
and large enough. Fitted on training points; validation points are only assigned.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from methods.optimisation import demand
from methods.silhouette import Floats, Ints, macro_silhouette, means, silhouettes

Bools = NDArray[np.bool_]

STARTS = 3  # of a fit, of which the best is taken


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
            many a random subset is judged; in one dimension always all, since sorting is cheap.
    """

    clusterer: Literal["gmm", "kmeans"] = "gmm"
    max_clusters: int = 10
    overcluster: bool = True
    overcluster_factor: int = 5
    size_floor: int = 25
    size_share: float = 0.005
    silhouette_sample: int = 10_000

    def __post_init__(self) -> None:
        demand(
            self.max_clusters >= 2, f"max_clusters must be at least 2 but got {self.max_clusters}"
        )
        demand(
            self.overcluster_factor >= 2,
            f"overcluster_factor must be at least 2 but got {self.overcluster_factor}",
        )
        demand(self.size_floor >= 1, f"size_floor must be at least 1 but got {self.size_floor}")
        demand(0 <= self.size_share < 1, f"size_share must be in [0, 1) but got {self.size_share}")
        demand(
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
        judged: training samples whose silhouettes were computed.
    """

    train: Ints
    val: Ints
    base: int = 1
    silhouette: float | None = None
    judged: int = 0

    @property
    def count(self) -> int:
        """Count the clusters."""
        return int(max(self.train.max(initial=-1), self.val.max(initial=-1))) + 1


def whole(train: int, val: int) -> Clusters:
    """Leave a class of so many samples in one piece."""
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
        seed: of fits and of the judged subset.
    """
    judged = np.arange(len(train))
    if train.shape[1] > 1 and len(train) > config.silhouette_sample:
        rng = np.random.default_rng(seed)
        judged = np.sort(rng.choice(len(train), config.silhouette_sample, replace=False))
    model, score = best_fit(train, judged, config, seed)
    if model is None:
        return whole(len(train), len(val))
    found = assign(model, train), assign(model, val)
    base = len(np.unique(found[0]))
    if config.overcluster:
        found = split_further(train, val, *found, losses, judged, config, seed)
    # Number the clusters anew, without those that nothing fell into.
    dense = np.unique(np.concatenate(found), return_inverse=True)[1]
    return Clusters(dense[: len(train)], dense[len(train) :], base, score, len(judged))


def best_fit(
    points: Floats, judged: Ints, config: ClusterConfig, seed: int
) -> tuple[Any | None, float]:
    """Fit every number of clusters; give the best, the larger of equals, or None if none is."""
    best, best_score = None, -np.inf
    for k in range(2, min(config.max_clusters, len(points) - 1) + 1):
        model = fit_clusters(points, k, config, seed)
        labels = assign(model, points)[judged]
        score = macro_silhouette(silhouettes(points[judged], labels), labels)
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
    """Name the cluster of each point; there may be none to name."""
    labels = model.predict(points) if len(points) else []
    return np.asarray(labels, dtype=np.int64)


def split_further(
    train: Floats,
    val: Floats,
    base: Ints,
    val_base: Ints,
    losses: Floats,
    judged: Ints,
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
    before, after = (silhouettes(train[judged], ids[judged]) for ids in (base, sub))
    count = int(max(base.max(), val_base.max(initial=0))) + 1
    keep = worth_keeping(sub, val_sub, count * factor, losses, judged, before, after, config)
    return (
        np.where(keep[sub], count + sub, base),
        np.where(keep[val_sub], count + val_sub, val_base),
    )


def worth_keeping(
    sub: Ints,
    val_sub: Ints,
    count: int,
    losses: Floats,
    judged: Ints,
    before: Floats,
    after: Floats,
    config: ClusterConfig,
) -> Bools:
    """Tell which of `count` sub-clusters are more compact, no easier, and large enough.

    Args:
        sub: sub-cluster of each training sample; `overcluster_factor` of them in order make up a
            cluster.
        val_sub: sub-cluster of each validation sample.
        count: how many sub-clusters there may be; some can be empty, in training or validation.
        losses: of the training samples.
        judged: the training samples that have silhouettes.
        before: their silhouettes among the clusters.
        after: their silhouettes among the sub-clusters.
        config: the limits.
    """
    parent = np.arange(count) // config.overcluster_factor
    was, now = (means(values, sub[judged], count) for values in (before, after))
    compact = now > np.maximum(was, 0.0)
    cluster_losses = means(losses, sub // config.overcluster_factor, count)
    hard = means(losses, sub, count) >= cluster_losses[parent]
    size = np.bincount(sub, minlength=count)
    val_size = np.bincount(val_sub, minlength=count)
    large = size >= max(config.size_share * len(sub), config.size_floor)
    kept: Bools = compact & hard & large & (val_size >= config.size_floor)
    return kept
