"""How a part of some samples fares beside the rest: accuracies, intervals, and what chance does.

Wilson's interval for a share, Newcombe's for the difference of two, Fisher's exact test for whether
chance would make one as large, and Holm's correction for how many were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

LEVEL = 0.95
ALPHA = 0.05
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return Wilson's interval of a share; all there is where nothing was counted."""
    if of == 0:
        return 0.0, 1.0
    share, z2 = count / of, Z * Z / of
    centre = (share + z2 / 2) / (1 + z2)
    reach = Z / (1 + z2) * math.sqrt(share * (1 - share) / of + z2 / (4 * of))
    low = 0.0 if count == 0 else centre - reach  # exact, but for the last digit
    return low, 1.0 if count == of else centre + reach


def newcombe(inside: tuple[int, int], outside: tuple[int, int]) -> tuple[float, float]:
    """Return Newcombe's interval of the difference of two shares, by their Wilson intervals."""
    (one, other), bounds = (pair[0] / pair[1] for pair in (inside, outside)), (inside, outside)
    (low_1, high_1), (low_2, high_2) = (wilson(*pair) for pair in bounds)
    low = one - other - math.hypot(one - low_1, high_2 - other)
    return low, one - other + math.hypot(high_1 - one, other - low_2)


def fisher(inside: tuple[int, int], outside: tuple[int, int]) -> float:
    """Return the two-sided p of Fisher's exact test on right and wrong, inside and outside."""
    from scipy.stats import fisher_exact  # slow to import

    table = [[count, of - count] for count, of in (inside, outside)]
    return float(fisher_exact(table).pvalue)


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the given order."""
    adjusted, highest = [0.0] * len(p), 0.0
    for place, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        highest = max(highest, min(1.0, (len(p) - place) * p[index]))
        adjusted[index] = highest
    return adjusted


@dataclass(frozen=True)
class Accuracy:
    """How a slice fares on one split beside all other samples of it; shares are of 1.

    Attributes:
        correct, size: of the slice.
        rest_correct, rest_size: of every other sample, in another slice or in none.
        p: of Fisher's test; none where there is nothing to compare.
        p_holm: the same, corrected for how many slices were looked at.
    """

    correct: int
    size: int
    rest_correct: int
    rest_size: int
    p: float | None = None
    p_holm: float | None = None

    @property
    def share(self) -> float:
        """Accuracy in the slice."""
        return self.correct / self.size

    @property
    def interval(self) -> tuple[float, float]:
        """Its Wilson interval."""
        return wilson(self.correct, self.size)

    @property
    def rest(self) -> float | None:
        """Accuracy of all others."""
        return self.rest_correct / self.rest_size if self.rest_size else None

    @property
    def difference(self) -> float | None:
        """By how much the slice is better than the rest; negative where it is worse."""
        return None if self.rest is None else self.share - self.rest

    @property
    def difference_interval(self) -> tuple[float, float] | None:
        """Newcombe's interval of the difference."""
        if not self.rest_size:
            return None
        return newcombe((self.correct, self.size), (self.rest_correct, self.rest_size))

    @property
    def extra_errors(self) -> float | None:
        """How many errors more there are than at the rest's rate."""
        return None if self.rest is None else self.rest * self.size - self.correct

    @property
    def worse(self) -> bool:
        """Whether it is worse than the rest by more than chance."""
        return self._significant and (self.difference or 0.0) < 0

    @property
    def better(self) -> bool:
        """Whether it is better than the rest by more than chance."""
        return self._significant and (self.difference or 0.0) > 0

    @property
    def _significant(self) -> bool:
        return self.p_holm is not None and self.p_holm < ALPHA

    def to_json(self) -> dict[str, object]:
        """Return the figures with accuracies in percent."""
        return {
            "n": self.size,
            "correct": self.correct,
            "accuracy": 100 * self.share,
            "interval": _percent(self.interval),
            "rest_n": self.rest_size,
            "rest_accuracy": None if self.rest is None else 100 * self.rest,
            "difference": None if self.difference is None else 100 * self.difference,
            "difference_interval": _percent(self.difference_interval),
            "extra_errors": self.extra_errors,
            "p": self.p,
            "p_holm": self.p_holm,
        }


def _percent(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [100 * bound for bound in interval]
