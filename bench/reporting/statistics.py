"""Uncertainty: over seeds, over test samples, and between methods.

Three questions, three answers, and every table says which it shows: how much a mean moves from seed
to seed (standard deviation, bootstrap interval), how much one run's worst group moves with the
test images at hand (stratified bootstrap), and whether two methods differ on the same seeds
(paired test, corrected for the number of comparisons).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
LEVEL = 0.95


def seed_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Bootstrap the mean over seeds: 95%, percentiles, the same resamples every time.

    With five seeds such an interval is narrower than it should be; it is a description of the
    seeds at hand, not a promise about others.
    """
    if len(values) < 2:
        return None, None
    if len(set(values)) == 1:
        return values[0], values[0]
    from scipy.stats import bootstrap  # slow to import

    found = bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def worst_group_interval(
    correct: npt.NDArray[np.bool_], groups: npt.NDArray[Any]
) -> tuple[float, float]:
    """Bootstrap the worst-group accuracy over test samples, in percent, averaged over seeds.

    Samples are drawn again within each group, so that a group keeps its size, and every seed is
    judged on the same draw, since all seeds share one test set. Samples that the same seeds get
    right are alike here, so it is enough to draw how often each such pattern appears. The minimum
    is taken in every resample: which group is worst may change. `correct` has a row for each seed
    and a column for each sample, `groups` the group of each sample.
    """
    draws = np.random.default_rng(0)
    accuracies = []
    for group in np.unique(groups):
        own = correct[:, groups == group]
        patterns, counts = np.unique(own, axis=1, return_counts=True)
        size = own.shape[1]
        drawn = draws.multinomial(size, counts / size, size=RESAMPLES)
        accuracies.append(drawn @ patterns.T / size)
    worst = 100 * np.min(accuracies, axis=0).mean(axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(worst, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """Two methods on the seeds they share; positive differences favour the first.

    The bounds are the 95% t-interval of the mean difference, not corrected for anything.
    """

    first: str
    second: str
    n: int
    difference: float
    p_value: float | None = None
    p_corrected: float | None = None
    low: float | None = None
    high: float | None = None


def compare_pairs(values: Mapping[str, Mapping[int, float]]) -> list[Comparison]:
    """Compare every two methods, given by seed, in a paired t-test over shared seeds, by Holm."""
    tested = []
    for first, second in combinations(values, 2):
        ours, theirs = values[first], values[second]
        gaps = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
        if gaps:
            plain = Comparison(first, second, len(gaps), statistics.fmean(gaps))
            tested.append(_tested(plain, gaps))
    corrected = iter(holm([one.p_value for one in tested if one.p_value is not None]))
    return [
        one if one.p_value is None else replace(one, p_corrected=next(corrected)) for one in tested
    ]


def _tested(plain: Comparison, gaps: Sequence[float]) -> Comparison:
    if len(set(gaps)) == 1:  # no spread: nothing to test against
        return plain
    from scipy.stats import ttest_1samp  # slow to import

    found = ttest_1samp(gaps, 0)
    low, high = found.confidence_interval(LEVEL)
    return replace(plain, p_value=float(found.pvalue), low=float(low), high=float(high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979), in the order given."""
    corrected = [0.0] * len(p_values)
    running = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = running
    return corrected
