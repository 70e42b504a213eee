"""How many images of each group a stand-in has: the real imbalance in miniature.

The methods differ only where groups are rare, so a stand-in with balanced groups would exercise
nothing. The released counts are scaled down, and every group keeps a few images in every split,
because a worst-group figure over an empty group is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datasets.standins.marker import Counts

SPLITS = ("train", "val", "test")
FEWEST_PER_GROUP = 3
SMALLEST_EVALUATION_SPLIT = 40


@dataclass(frozen=True)
class Skew:
    """The group names of a dataset and their real counts in each split."""

    groups: tuple[str, ...]
    train: tuple[int, ...]
    val: tuple[int, ...]
    test: tuple[int, ...]

    def counts(self, size: int) -> Counts:
        """Return the counts of a stand-in with `size` training images."""
        evaluation = max(SMALLEST_EVALUATION_SPLIT, size // 2)
        parts = zip(
            SPLITS,
            (self.train, self.val, self.test),
            (size, evaluation, evaluation),
            strict=True,
        )
        return {
            split: dict(zip(self.groups, apportion(real, total), strict=True))
            for split, real, total in parts
        }


def apportion(weights: Sequence[int], total: int, fewest: int = FEWEST_PER_GROUP) -> list[int]:
    """Share `total` out in proportion to `weights`, at least `fewest` to each.

    Largest remainder, as for seats in a parliament. A group that is due less than the fewest gets
    just that, and the others share the rest in the same way, so a larger group is never the smaller
    one.
    """
    if total < fewest * len(weights):
        raise ValueError(f"{total} images cannot give {fewest} to each of {len(weights)} groups")
    whole = sum(weights)
    lifted = [index for index, weight in enumerate(weights) if weight * total < fewest * whole]
    if lifted:
        others = [weight for index, weight in enumerate(weights) if index not in lifted]
        rest = iter(apportion(others, total - fewest * len(lifted), fewest))
        return [fewest if index in lifted else next(rest) for index in range(len(weights))]
    shares = [weight * total // whole for weight in weights]
    by_remainder = sorted(
        range(len(weights)), key=lambda index: weights[index] * total % whole, reverse=True
    )
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def shuffled_members(counts: Counts, split: str, rng: np.random.Generator) -> list[int]:
    """Return the group index of every image of a split, in random order.

    Released files do not list one group after the other either, and a loader or a sampler that
    relies on such an order should fail here.
    """
    sizes = list(counts[split].values())
    members = np.repeat(np.arange(len(sizes)), sizes)
    return [int(group) for group in rng.permutation(members)]
