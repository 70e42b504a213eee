"""Silhouettes: how much closer points are to their own cluster than to the next one.

The silhouette of a point is (b - a) / max(a, b), with a its mean distance to the others of its
cluster and b that to the nearest other cluster; it is 0 for a point that is alone in its cluster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
