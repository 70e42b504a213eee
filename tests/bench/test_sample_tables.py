"""Tables of samples come back as they were written, and take less room than plain parquet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.sample_tables import write_samples


def some_samples(count: int, scores: str = "float16") -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": np.sort(rng.choice(10 * count, count, replace=False)),
            "split": ["val"] * (count // 2) + ["test"] * (count - count // 2),
            "y": rng.integers(2, size=count).astype("int16"),
            "score_0": rng.normal(4, 2, count).astype(scores),
            "score_1": np.where(rng.random(count) < 0.1, np.nan, -np.inf).astype(scores),
        }
    )


@pytest.mark.parametrize("scores", ["float16", "float32"])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_nothing_is_lost(count: int, scores: str, tmp_path: Path) -> None:
    table = some_samples(count, scores)
    write_samples(table, tmp_path / "table.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_ids_need_not_be_numbers_or_in_order(tmp_path: Path) -> None:
    named = pd.DataFrame({"id": ["b", "a"], "part": [1, 0]})
    numbered = pd.DataFrame({"id": [2**62, -5, 7], "part": [1, 0, 2]})
    for table in (named, numbered):
        write_samples(table, tmp_path / "table.parquet")
        pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "table.parquet"), table)


def test_it_takes_less_room_than_plain_parquet(tmp_path: Path) -> None:
    table = some_samples(20_000)
    write_samples(table, tmp_path / "small.parquet")
    table.to_parquet(tmp_path / "plain.parquet", index=False, compression="zstd")
    sizes = [(tmp_path / f"{name}.parquet").stat().st_size for name in ("small", "plain")]
    assert sizes[0] < 0.7 * sizes[1]
