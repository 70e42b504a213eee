"""Turns, medians and ratios."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.perf.measure import EAGER_LIMIT, Case, Sample, measure_interleaved, summarise
from bench.process import CpuClock


def test_turns_alternate_and_the_first_is_dropped() -> None:
    order: list[str] = []
    threads: list[int] = []

    def arm(name: str) -> Callable[[], dict[str, Sample]]:
        def turn() -> dict[str, Sample]:
            order.append(name)
            threads.append(torch.get_num_threads())
            return {name: Sample(len(order), CpuClock(1.0, 1.0))}

        return turn

    before = torch.get_num_threads()
    case = Case("x", lambda: [arm("a"), arm("b")], max_repeats=2)
    turns = measure_interleaved(case, repeats=9)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [sorted(turn) for turn in turns] == [["a", "b"]] * 2
    assert turns[0]["a"].images == 3
    assert set(threads) == {1} and torch.get_num_threads() == before


def test_ratio_is_the_median_of_the_turns_own() -> None:
    """A machine that is half as fast for a while changes neither ratio nor median by that."""
    turns = [
        {EAGER_LIMIT: Sample(100, CpuClock(1, pace)), "ours": Sample(80, CpuClock(1, pace * own))}
        for pace, own in ((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))
    ]
    limit, own = summarise(Case("x", lambda: []), turns)
    assert (limit.arm, limit.ratio, limit.images_per_cpu_second) == (EAGER_LIMIT, 1.0, 50.0)
    assert own.ratio == pytest.approx(0.8) and own.images_per_second == 80
    assert limit.spread == pytest.approx((75 - 37.5) / 50)
