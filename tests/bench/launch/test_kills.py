"""Whatever is killed on this machine, a grid ends with the results it would have had anyway."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from chaos import LOCAL, SMALL, Chaos

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_kills_at_random_lose_nothing(tmp_path: Path) -> None:
    figures = Chaos(tmp_path, LOCAL, SMALL, seed=1)(8)
    assert figures.kills.total() == 8
    assert figures.resumed > 0
    assert figures.equal == SMALL.size * figures.rounds
