"""Write the tables of README.md from stored runs: one line a run in a CSV, means on the terminal.

python results/checks/waterbirds-rebuilt/summarise.py RESULTS results.csv
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from bench.record import Record
from bench.store import Store
from methods.base import get_method

MINORITIES = ("landbird_water", "waterbird_land")


def row_of(record: Record) -> dict[str, Any]:
    """Return what the tables show of a run."""
    test, cost = record.metrics("test"), record.cost
    stages = {stage.name: stage for stage in cost.stages}
    frozen = stages.get("features")
    own = [s for s in cost.stages if s.name != "features"]
    row: dict[str, Any] = {
        "run_id": record.run_id,
        "method": record.job.method,
        "seed": record.job.seed,
        "commit": record.provenance.git.commit,
        "test_wga": test.wga,
        "test_avg": test.avg,
        "test_avg_train_weighted": test.get("avg_train_weighted"),
        "test_worst_class": test.get("worst_class"),
        "val_wga": record.metrics("val").wga,
        **{f"test_{group}": value for group, value in test.group_accuracy.items()},
        "cpu_seconds": sum(s.cpu_seconds or 0.0 for s in own),
        "features_cpu_seconds": frozen.cpu_seconds if frozen else None,
        "image_passes": sum(s.image_passes for s in own),
        "fit_memory_mb": (cost.peak_memory_bytes or 0) / 1e6,
    }
    if get_method(record.job.method).tree:
        row |= leaves_of(record)
    return row


def leaves_of(record: Record) -> dict[str, Any]:
    """Return what a tree's hard leaves hold: those that are not easy all the way down."""
    tree: Any = record.details["nct"]
    chosen = tree["iterations"][tree["chosen_iteration"] - 1]
    makeup: Mapping[str, Mapping[str, int]] = chosen["makeup"]
    hard = [leaf for leaf in makeup if "H" in leaf.rpartition(":")[2]]
    groups = sorted({group for leaf in makeup.values() for group in leaf})

    def count(leaves: Iterable[str], wanted: Iterable[str]) -> int:
        return sum(makeup[leaf].get(group, 0) for leaf in leaves for group in wanted)

    whole = {group: count(makeup, [group]) for group in groups}
    inside = count(hard, groups)
    found: dict[str, Any] = {"iteration": tree["chosen_iteration"], "hard_samples": inside}
    for group in groups:
        found[f"train_{group}_in_hard"] = 100 * count(hard, [group]) / whole[group]
        captured = chosen["capture"][group].items()
        found[f"test_{group}_in_hard"] = sum(
            share for leaf, share in captured if "H" in leaf.rpartition(":")[2]
        )
    found["minority_share_of_hard"] = 100 * count(hard, MINORITIES) / inside if inside else None
    found["minority_share_of_train"] = 100 * count(makeup, MINORITIES) / sum(whole.values())
    return found


def spread(values: Iterable[Any], digits: int = 1) -> str:
    """Return mean and standard deviation."""
    known = [float(value) for value in values if pd.notna(value)]
    if not known:
        return "-"
    more = f" +- {stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{fmean(known):.{digits}f}{more}"


def show(title: str, table: pd.DataFrame, columns: Mapping[str, str], digits: int = 1) -> None:
    """Print means over seeds, a line a method."""
    print(f"\n{title}\n\n| method | {' | '.join(columns.values())} |")
    print("|---" * (len(columns) + 1) + "|")
    for method in table["method"].drop_duplicates():
        own = table[table["method"] == method]
        cells = (spread(own[name], digits) if name in own else "-" for name in columns)
        print(f"| {get_method(method).title} | {' | '.join(cells)} |")


def main() -> None:
    """Read the store that is named first, and write the CSV that is named second."""
    store = Store(Path(sys.argv[1]))
    records = [record for record in store.records() if record.done]
    rows = sorted(
        (row_of(record) for record in records),
        key=lambda row: (get_method(row["method"]).order, row["seed"]),
    )
    table = pd.DataFrame(rows)
    table.round(3).to_csv(sys.argv[2], index=False)
    groups = [name for name in table if str(name).startswith("test_") and "bird_" in str(name)]
    plain = [name for name in groups if not str(name).endswith("_in_hard")]
    show(
        "Accuracy",
        table,
        {
            "test_wga": "worst group",
            "test_avg": "average",
            "test_avg_train_weighted": "average, train-weighted",
            **{str(name): str(name).removeprefix("test_").replace("_", ", ") for name in plain},
        },
    )
    show(
        "Cost",
        table,
        {
            "cpu_seconds": "CPU-s",
            "image_passes": "passes",
            "fit_memory_mb": "memory of the fit, MB",
        },
        0,
    )
    trees = table[table["method"].isin(["nct", "nct_plus"])]
    hard = [str(name) for name in table if str(name).endswith("_in_hard")]
    show(
        "Hard leaves",
        trees,
        {
            "iteration": "iteration",
            "hard_samples": "samples in hard leaves",
            "minority_share_of_hard": "of these, minority (%)",
            **{name: name.replace("_", " ") for name in hard},
        },
    )


if __name__ == "__main__":
    main()
