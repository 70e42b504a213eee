"""Spectral clustering that chooses the number of clusters by the largest eigengap.

As in ExMap: a graph of the nearest neighbours, its normalised Laplacian, and the assignment by
pivoted QR of Damle, Minden and Ying (Simple, direct and efficient multi-way spectral clustering).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
MARGIN = 3  # eigenvalues computed beyond the largest number of clusters, of which the gap needs one
FEWEST = 4  # samples that can be told apart: a gap after the second needs three eigenvalues


@dataclass(frozen=True)
class Clustering:
    """What was found: a cluster for each sample, and how many were looked for.

    Attributes:
        eigenvalues: of the graph's Laplacian, the smallest ones; none where there is no graph.
    """

    labels: Ints
    count: int
    eigenvalues: tuple[float, ...] = ()


def spectral_clusters(points: Floats, most: int, rng: np.random.Generator) -> Clustering:
    """Cluster points into 2 to `most` clusters; fewer than four points are one cluster."""
    if len(points) < FEWEST:
        return Clustering(np.zeros(len(points), np.int64), 1)
    graph = neighbour_graph(points)
    wanted = min(most + MARGIN, len(points) - 1)
    values, vectors = smallest_eigenpairs(graph, wanted, rng)
    count = eigengap(values, most)
    labels = assign(vectors[:, :count])
    return Clustering(labels, count, tuple(values.tolist()))


def neighbours_of(samples: int) -> int:
    """Tell how many neighbours a sample has in the graph, itself included."""
    return max(2, int(np.log(samples)))


def neighbour_graph(points: Floats) -> Any:
    """Connect each point to its nearest neighbours: weight 1 where both are each other's, else 1/2.

    Gives a sparse matrix.
    """
    from sklearn.neighbors import kneighbors_graph

    graph = kneighbors_graph(points, neighbours_of(len(points)), include_self=True)
    return 0.5 * (graph + graph.T)


def smallest_eigenpairs(graph: Any, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Find the smallest eigenvalues of a graph's normalised Laplacian, and vectors of them.

    Each part of the graph that is cut off from the rest adds an eigenvalue 0. Iterative solvers
    miss repeated eigenvalues, but these have known eigenvectors, so only the others are searched.
    Vectors are scaled so that they are constant within such a part, as clustering wants them.
    """
    from scipy.sparse.csgraph import connected_components, laplacian
    from scipy.sparse.linalg import LinearOperator, eigsh

    matrix, scale = laplacian(graph, normed=True, return_diag=True)
    parts, part = connected_components(graph, directed=False)
    # One vector a part, mixed: where parts outnumber vectors, each still has to tell all apart.
    mixed = np.linalg.qr(rng.standard_normal((parts, min(parts, count))))[0]
    norms = np.sqrt(np.bincount(part, weights=scale**2))
    vectors = (scale / norms[part])[:, None] * mixed[part]
    values = np.zeros(vectors.shape[1])
    if parts < count:
        known = vectors

        def flipped(x: Floats) -> Floats:
            x = x.reshape(-1)
            turned: Floats = 2 * x - matrix @ x - 2 * known @ (known.T @ x)
            return turned

        operator = LinearOperator(matrix.shape, matvec=flipped, dtype=np.float64)
        start = rng.standard_normal(len(scale))
        others, found = eigsh(operator, count - parts, which="LA", v0=start)
        order = np.argsort(-others)
        values = np.concatenate([values, 2 - others[order]])
        vectors = np.hstack([vectors, found[:, order]])
    return values, vectors / scale[:, None]


def eigengap(values: Floats, most: int) -> int:
    """Choose the number of clusters, from 2 to `most`, after which eigenvalues rise the most."""
    gaps = np.diff(values)[1:most]
    return int(gaps.argmax()) + 2


def assign(vectors: Floats) -> Ints:
    """Assign samples to as many clusters as there are vectors, one row of them a sample.

    The samples whose rows point in the most different directions stand for the clusters; each
    sample goes where the rotation that takes those to the axes puts most of it.
    """
    from scipy.linalg import polar, qr

    pivots = qr(vectors.T, mode="r", pivoting=True)[1][: vectors.shape[1]]
    rotation = polar(vectors[pivots].T)[0]
    clusters: Ints = np.abs(vectors @ rotation).argmax(axis=1)
    return clusters
