"""What the page shows of one run: its record in brief, its curves, its confusion by group.

A report of thousands of runs has to stay one file that a browser opens at once, so a run's details
are thinned (curves) and rounded here, and the page reads them only when somebody asks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from bench.report.collection import Run
from bench.report.figures.drawing import shown_groups
from datasets.catalogue import DATASETS

POINTS = 40  # of a curve
SERIES = ("loss", "selection", "audit_val_wga", "audit_test_wga")
PLAIN = (
    *("run_id", "status", "method", "method_version", "dataset", "protocol", "data_fingerprint"),
    *("standin", "quick", "preset", "overrides", "variant", "seed", "supervision", "selection"),
    *("command", "config", "environment", "git", "stages", "device", "threads", "failure"),
    *("peak_memory_bytes", "partition"),
)


def run_details(run: Run) -> dict[str, Any]:
    """Gather everything the page shows of a run, ready for JSON."""
    record = run.record
    details: dict[str, Any] = {name: record[name] for name in PLAIN if record.get(name) is not None}
    details |= {"kind": run.kind, "reason": run.reason}
    if record["status"] != "done":
        return details
    details["metrics"] = record["metrics"]
    details["classes"] = class_names(record)
    history = run.history()
    if history is not None and len(history):
        details["curves"] = curves(history)
    predictions = run.predictions(["split", "y", "group", "pred"])
    if predictions is not None:
        details["confusion"] = confusion(predictions, record)
    if "nct" in record:
        details["tree"] = tree(record)
    return {name: rounded(value) for name, value in details.items()}


def class_names(record: dict[str, Any]) -> list[str]:
    """Name the classes of a run's dataset, if it is still in the catalogue."""
    dataset = DATASETS.get(str(record["dataset"]))
    return list(dataset.facts(dataset.config_type()).classes) if dataset is not None else []


def curves(history: pd.DataFrame) -> dict[str, Any]:
    """Thin a history to a few dozen epochs, keeping its last, and say where stages begin."""
    step = -(-len(history) // POINTS)
    kept = sorted({*range(0, len(history), step), len(history) - 1})
    stage = history["stage"].astype(str).tolist()
    starts = [
        (place, name) for place, name in enumerate(stage) if place == 0 or name != stage[place - 1]
    ]
    series = {
        name: [None if pd.isna(value) else float(value) for value in history[name].iloc[kept]]
        for name in SERIES
        if name in history and history[name].notna().any()
    }
    return {"epochs": [place + 1 for place in kept], "stages": starts, "series": series}


def confusion(predictions: pd.DataFrame, record: dict[str, Any]) -> dict[str, Any]:
    """Count a split's predictions by true group; groups in the dataset's order."""
    groups = list(record["metrics"]["test"]["group_accuracy"])
    classes = 1 + max(int(predictions[name].max()) for name in ("pred", "y"))
    rows: dict[str, Any] = {}
    for split in ("val", "test"):
        own = predictions[(predictions["split"] == split) & (predictions["group"] < len(groups))]
        table = np.zeros((len(groups), classes), dtype=int)
        np.add.at(table, (own["group"], own["pred"]), 1)
        truth = dict(zip(own["group"].tolist(), own["y"].tolist(), strict=True))
        rows[split] = [
            [group, truth[place], table[place].tolist()]
            for place, group in enumerate(groups)
            if place in truth
        ]
    return rows


def tree(record: dict[str, Any]) -> dict[str, Any]:
    """Keep what the page shows of a tree: every node's size, make-up and captured test samples."""
    facts = record["nct"]
    groups = list(record["metrics"]["test"]["group_accuracy"])
    number = {group: place for place, group in enumerate(groups)}
    levels = []
    for iteration in facts["iterations"]:
        leaves = iteration["leaves"]
        captured: list[list[Any]] = [[] for _ in leaves]
        place = {name: j for j, name in enumerate(leaves)}
        for group, shares in iteration["capture"].items():
            for leaf, share in shares.items():
                captured[place[leaf]].append((number[group], share))
        levels.append(
            {
                "names": leaves,
                "counts": iteration["node_counts"],
                "merged": iteration["merged"],
                "makeup": [
                    [(number[g], n) for g, n in iteration["makeup"].get(name, {}).items()]
                    for name in leaves
                ],
                "captured": captured,
                "logit": list(zip(iteration["logit_mean"], iteration["logit_std"], strict=True)),
                "margin": list(zip(iteration["margin_mean"], iteration["margin_std"], strict=True)),
                "wga": iteration["test"]["wga"],
                "avg": iteration["test"]["avg"],
                "pwga2": iteration["pwga2"],
            }
        )
    kept = ("chosen_iteration", "argmax_iteration", "stop_reason", "spearman_val", "spearman_test")
    shown = shown_groups(record)
    return {
        **{name: facts.get(name) for name in kept},
        "groups": groups,
        "families": [shown[group] for group in groups],
        "levels": levels,
    }


def rounded(value: Any) -> Any:
    """Cut numbers to five significant digits; the page links exact values to the record."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value
