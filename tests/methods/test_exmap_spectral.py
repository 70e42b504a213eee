"""Spectral clustering: the graph, its eigenvalues, and how many clusters the eigengap finds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import coo_array
from sklearn.metrics import adjusted_rand_score

from methods.exmap import (
    Floats,
    Ints,
    assign_clusters,
    eigengap,
    neighbour_graph,
    neighbours_of,
    smallest_eigenpairs,
    spectral_clusters,
)


def planted(count: int, each: int, apart: float = 3.0, seed: int = 0) -> tuple[Floats, Ints]:
    """Round clusters in ten dimensions, in random order."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(count), each))
    centres = apart * rng.normal(size=(count, 10))
    return centres[truth] + rng.normal(size=(len(truth), 10)), truth


def dense_laplacian(graph: Floats) -> Floats:
    degrees = graph.sum(axis=1) - np.diag(graph)
    graph = graph - np.diag(np.diag(graph))
    laplacian: Floats = np.eye(len(graph)) - graph / np.sqrt(np.outer(degrees, degrees))
    return laplacian


class TestPlanted:
    @pytest.mark.parametrize("count", [3, 4, 5])
    @pytest.mark.parametrize("apart", [2.0, 3.0, 10.0])
    def test_a_few_clusters_are_found(self, count: int, apart: float) -> None:
        points, truth = planted(count, 50, apart)
        found = spectral_clusters(points, 10, np.random.default_rng(0))
        assert found.count == count
        assert adjusted_rand_score(truth, found.labels) > 0.95
        assert len(found.eigenvalues) == 13

    def test_25_are_found_where_the_cap_allows(self) -> None:
        points, truth = planted(25, 24, apart=6.0)
        found = spectral_clusters(points, 25, np.random.default_rng(0))
        assert found.count == 25 == len(np.unique(found.labels))
        assert adjusted_rand_score(truth, found.labels) > 0.95

    def test_25_lie_beyond_a_cap_of_10(self) -> None:
        """The rule cannot see the gap, and takes any of the equal ones before it: the first."""
        points, truth = planted(25, 24, apart=6.0)
        found = spectral_clusters(points, 10, np.random.default_rng(0))
        assert found.count == 2
        assert adjusted_rand_score(truth, found.labels) < 0.5

    def test_same_seed_same_clusters(self) -> None:
        points, _ = planted(6, 30, apart=0.5)
        first, again = (spectral_clusters(points, 10, np.random.default_rng(3)) for _ in range(2))
        np.testing.assert_array_equal(first.labels, again.labels)
        assert first.eigenvalues == again.eigenvalues

    @pytest.mark.parametrize("samples", [0, 1, 3])
    def test_too_few_samples_are_one_cluster(self, samples: int) -> None:
        found = spectral_clusters(np.zeros((samples, 4)), 10, np.random.default_rng(0))
        assert (found.count, found.eigenvalues) == (1, ())
        assert found.labels.tolist() == [0] * samples

    @pytest.mark.parametrize("samples", [4, 7, 12])
    def test_few_samples(self, samples: int) -> None:
        points, _ = planted(2, samples)
        found = spectral_clusters(points[:samples], 10, np.random.default_rng(0))
        assert len(found.labels) == samples
        assert 2 <= found.count <= samples

    def test_equal_points(self) -> None:
        found = spectral_clusters(np.ones((30, 4)), 10, np.random.default_rng(0))
        assert len(found.labels) == 30 and 2 <= found.count <= 10


class TestGraph:
    def test_as_many_neighbours_as_the_logarithm(self) -> None:
        assert [neighbours_of(n) for n in (4, 1199, 6000, 12000)] == [2, 7, 8, 9]

    def test_weights_by_hand(self) -> None:
        """Eight points on a line; each one's nearest is a neighbour, not always the other way."""
        line = np.array([0.0, 1.0, 3.0, 3.5, 10.0, 10.1, 20.0, 20.2])[:, None]
        expected = np.eye(8)
        for one, other, weight in ((0, 1, 1.0), (2, 3, 1.0), (4, 5, 1.0), (6, 7, 1.0)):
            expected[one, other] = expected[other, one] = weight
        np.testing.assert_array_equal(neighbour_graph(line).toarray(), expected)
        line[1] = 2.0  # now nearest to 3.0, which keeps 3.5
        expected[0, 1] = expected[1, 0] = expected[1, 2] = expected[2, 1] = 0.5
        np.testing.assert_array_equal(neighbour_graph(line).toarray(), expected)


class TestEigenpairs:
    @pytest.mark.parametrize(("count", "apart"), [(1, 0.0), (3, 2.0), (4, 20.0)])
    def test_equal_a_dense_solution(self, count: int, apart: float) -> None:
        """In one piece, and where separate parts repeat the eigenvalue 0."""
        graph = neighbour_graph(planted(count, 120 // count, apart)[0])
        values, vectors = smallest_eigenpairs(graph, 9, np.random.default_rng(0))
        laplacian = dense_laplacian(graph.toarray())
        np.testing.assert_allclose(values, np.linalg.eigvalsh(laplacian)[:9], atol=1e-8)
        degrees = graph.toarray().sum(axis=1) - graph.diagonal()
        own = vectors * np.sqrt(degrees)[:, None]  # as eigenvectors of the symmetric matrix
        np.testing.assert_allclose(laplacian @ own, own * values, atol=1e-7)

    def test_more_parts_than_wanted(self) -> None:
        pairs = np.arange(20).reshape(10, 2)
        ends = np.concatenate([pairs, pairs[:, ::-1]])
        graph = coo_array((np.ones(20), (ends[:, 0], ends[:, 1])), shape=(20, 20)).tocsr()
        values, vectors = smallest_eigenpairs(graph, 4, np.random.default_rng(0))
        assert values.tolist() == [0.0] * 4
        np.testing.assert_allclose(vectors[0::2], vectors[1::2])
        assert np.linalg.matrix_rank(vectors) == 4


class TestEigengap:
    @pytest.mark.parametrize("count", [2, 3, 5, 8])
    def test_largest_rise(self, count: int) -> None:
        values = np.concatenate([np.linspace(0, 0.01, count), np.linspace(0.5, 0.6, 13 - count)])
        assert eigengap(values, 10) == count

    def test_a_gap_after_the_first_does_not_count(self) -> None:
        assert eigengap(np.array([0.0, 0.9, 0.91, 0.95, 0.96]), 3) == 3

    def test_a_gap_beyond_the_cap_does_not_count(self) -> None:
        values = np.array([0.0, 0.01, 0.03, 0.04, 0.9, 0.91])
        assert (eigengap(values, 4), eigengap(values, 3)) == (4, 2)


def test_assignment_does_not_depend_on_the_basis() -> None:
    """Eigenvectors of equal eigenvalues are only known up to a rotation."""
    truth = np.random.default_rng(0).integers(0, 4, 50)
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    assert adjusted_rand_score(truth, assign_clusters(np.eye(4)[truth] @ rotation)) == 1.0
