"""Measuring arms in turns, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.allocation import keep_freed_memory
from bench.context import Spent

LIMIT = "eager limit"
THREADS = 1  # a second one waits for the first more than it works, on networks of this size


@dataclass(frozen=True)
class Sample:
    """What one turn of an arm did, and what it took, worker processes included."""

    images: int
    spent: Spent

    @property
    def per_cpu_second(self) -> float:
        """Images per second of processor time."""
        return self.images / self.spent.cpu

    @property
    def per_second(self) -> float:
        """Images per second by the wall."""
        return self.images / self.spent.wall


Samples = Mapping[str, Sample]
Contender = Callable[[], Samples]
"""Takes one turn and gives a sample for each of its arms; a fit of NCT has one for each phase."""


@dataclass(frozen=True)
class Case:
    """Arms that do the same work in different ways.

    Attributes:
        name: of the dataset, the work and the batch.
        build: makes the arms; only called when their turn comes, for they hold data and workers.
        most_repeats: turns that are enough, where one takes long.
    """

    name: str
    build: Callable[[], Sequence[Contender]]
    most_repeats: int = 1000


@dataclass(frozen=True)
class Row:
    """One arm of one case over all turns.

    Attributes:
        images_per_cpu_second, images_per_second: medians.
        spread: distance of the quartiles of images per CPU-second, as a share of the median.
        ratio: median over the turns of this arm's images per CPU-second against the eager limit's
            in the same turn.
    """

    case: str
    arm: str
    images_per_cpu_second: float
    images_per_second: float
    spread: float
    ratio: float


def timed(work: Callable[[], int], times: int = 1) -> Sample:
    """Time work that returns how many images it did."""
    began = Spent.now()
    images = sum(work() for _ in range(times))
    return Sample(images, Spent.now() - began)


def take_turns(case: Case, repeats: int) -> list[dict[str, Sample]]:
    """Let every arm do its work once a turn, in alternating order; the first turn warms up."""
    with one_thread():
        contenders = list(case.build())
        turns = []
        for turn in range(1 + min(repeats, case.most_repeats)):
            seen: dict[str, Sample] = {}
            for contender in contenders if turn % 2 else reversed(contenders):
                seen.update(contender())
            turns.append(seen)
    return turns[1:]


def summarise(case: Case, turns: Sequence[Samples]) -> list[Row]:
    """Give medians, spreads and ratios, the eager limit first."""
    arms = sorted(turns[0], key=lambda arm: arm != LIMIT)
    return [
        Row(
            case.name,
            arm,
            statistics.median(turn[arm].per_cpu_second for turn in turns),
            statistics.median(turn[arm].per_second for turn in turns),
            _spread([turn[arm].per_cpu_second for turn in turns]),
            speed_ratio(turns, arm, LIMIT),
        )
        for arm in arms
    ]


def speed_ratio(turns: Sequence[Samples], arm: str, against: str) -> float:
    """Say how many times as many images per CPU-second one arm does as another; the median turn."""
    return statistics.median(
        turn[arm].per_cpu_second / turn[against].per_cpu_second for turn in turns
    )


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, and give back what it had."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    keep_freed_memory()  # as runs do
    try:
        yield
    finally:
        torch.set_num_threads(before)
