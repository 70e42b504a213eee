"""Tables with a row for each sample, written small: a run's are most of what it keeps on disk.

Sorted ids are written as differences, and the two bytes of a half-precision score apart, since the
first varies little and the second is noise. Nothing is lost. Readers need parquet's format 2.11:
pyarrow has it from version 17 on, other readers may not know it for half precision yet.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from pandas.api.types import is_float_dtype, is_integer_dtype


def write_samples(table: pd.DataFrame, path: Path) -> None:
    """Write a table of samples as parquet."""
    encodings = {
        str(name): "BYTE_STREAM_SPLIT" for name in table if is_float_dtype(table[name].dtype)
    }
    if "id" in table and is_integer_dtype(table["id"].dtype):
        encodings["id"] = "DELTA_BINARY_PACKED"
    table.to_parquet(
        path,
        index=False,
        compression="zstd",
        use_dictionary=[str(name) for name in table if name not in encodings],
        column_encoding=encodings,
    )
