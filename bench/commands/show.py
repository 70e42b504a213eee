"""`bench show RUN`: one run in full."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from bench.commands.common import add_json, print_json, print_table
from bench.store import Store


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run id, or the beginning or end of one")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a record."""
    store = Store(arguments.results)
    run_id = store.find(arguments.run)
    record = store.record(run_id)
    assert record is not None
    if arguments.json:
        print_json(record)
        return 0
    git = record["git"]
    rows: list[tuple[str, Any]] = [
        ("status", record["status"]),
        ("command", record["command"]),
        ("data", f"{record['dataset']} ({record['protocol']}), {record['data_fingerprint']}"),
        ("stand-in", "yes" if record["standin"] else "no"),
        ("code", f"{git['commit']}{' with changes' if git['dirty'] else ''}"),
    ]
    for owner, values in record["config"].items():
        rows.append((owner, ", ".join(f"{k} = {v}" for k, v in values.items())))
    if record["status"] == "failed":
        rows += list(record["failure"].items())
        print_table(run_id, ("", ""), rows)
        return 0
    rows.append(("selection", record["selection"]))
    for stage in record["stages"]:
        note = " (reused)" if stage["reused"] else ""
        rows.append((f"stage {stage['name']}", f"{stage['seconds_standalone']:.1f} s{note}"))
    print_table(run_id, ("", ""), rows)
    _print_metrics(record)
    history = pd.read_parquet(store.runs / run_id / "history.parquet").tail(10)
    shown = history.map(lambda value: f"{value:.4g}" if isinstance(value, float) else value)
    print_table("Last epochs", list(shown.columns), shown.to_numpy().tolist())
    return 0


def _print_metrics(record: dict[str, Any]) -> None:
    val, test = record["metrics"]["val"], record["metrics"]["test"]
    names = [name for name, value in test.items() if isinstance(value, float)]
    rows = [(name, _number(val.get(name)), _number(test[name])) for name in names]
    for group, value in test["group_accuracy"].items():
        count = test["group_count"][group]
        rows.append((f"{group} ({count})", _number(val["group_accuracy"][group]), _number(value)))
    print_table("Metrics", ("", "val", "test"), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
