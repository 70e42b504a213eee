"""Uncertainty: over seeds, over test samples, between methods, and against a paper.

Four questions, each with one answer, and every table says which it shows: how well seeds fix a mean
(t-interval), how much a worst group moves with the test images at hand (bootstrap, stratified by
group), by how much two methods differ on the same seeds (t-interval of the paired differences), and
whether a mean agrees with one that a paper reports (Welch's interval of the difference).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
LEVEL = 0.95
Verdict = Literal["agrees", "higher", "lower", "cannot tell"]
Numbers = TypeVar("Numbers", float, npt.NDArray[np.float64])


def t_interval(mean: Numbers, std: Numbers, n: int) -> tuple[Numbers, Numbers]:
    """Return the t-interval of a mean by the standard deviation of `n` values, at least two."""
    reach = _quantile(n - 1) / sqrt(n) * std
    return mean - reach, mean + reach


def seed_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the t-interval of the mean over seeds; one seed has none.

    A percentile bootstrap over five seeds, which is often printed instead, holds the true mean in
    84 of 100 cases where it says 95.
    """
    if len(values) < 2:
        return None, None
    return t_interval(statistics.fmean(values), statistics.stdev(values), len(values))


def _quantile(freedom: float) -> float:
    """Return how many standard errors an interval reaches to each side."""
    from scipy.special import stdtrit  # scipy.stats is slow to import

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


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

    The bounds are the t-interval of the mean difference, not corrected for anything.
    """

    first: str
    second: str
    n: int
    difference: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    p_corrected: float | None = None


def compare_with(
    values: Mapping[str, Mapping[int, float]], baselines: Sequence[str]
) -> list[Comparison]:
    """Compare every method, given by seed, with each baseline on the seeds that both have.

    These are the comparisons planned: by a paired t-test each, corrected for their number by Holm.
    Two baselines are compared once.
    """
    tested = []
    for place, second in enumerate(baselines):
        theirs = values.get(second, {})
        for first in (name for name in values if name not in baselines[: place + 1]):
            ours = values[first]
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

    low, high = seed_interval(gaps)
    return replace(plain, low=low, high=high, p_value=float(ttest_1samp(gaps, 0).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979), in the order given."""
    corrected = [0.0] * len(p_values)
    running = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = running
    return corrected


def welch_interval(
    first: tuple[float, float, int], second: tuple[float, float, int]
) -> tuple[float, float]:
    """Return Welch's interval of first minus second, each a mean, a standard deviation and n."""
    gap = first[0] - second[0]
    own, other = (std**2 / n for _, std, n in (first, second))
    if own + other == 0:
        return gap, gap
    freedom = (own + other) ** 2 / (own**2 / (first[2] - 1) + other**2 / (second[2] - 1))
    reach = _quantile(freedom) * sqrt(own + other)
    return gap - reach, gap + reach


def verdict(low: float | None, high: float | None, margin: float) -> Verdict:
    """Return what an interval of a difference says of it.

    Two means agree if the interval contains zero and reaches at most `margin` to each side of the
    measured difference; a wider one cannot tell them apart nor call them equal.
    """
    if low is None or high is None:
        return "cannot tell"
    if low > 0:
        return "higher"
    if high < 0:
        return "lower"
    return "agrees" if (high - low) / 2 <= margin else "cannot tell"
