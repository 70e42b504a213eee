"""A picture of a tree: every node with its size and, where groups are known, its make-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.files import storage_errors
from bench.report.figures.drawing import house_style, new_figure, plain
from bench.report.figures.trees import paint_tree


def draw_tree(record: dict[str, Any], path: Path) -> None:
    """Draw the chosen tree of an NCT run to a file; one row a level, one bar a node."""
    depth = record["nct"]["chosen_iteration"]
    leaves = len(record["nct"]["iterations"][depth - 1]["leaves"])
    with house_style(), storage_errors(path):
        figure = new_figure(max(6.0, 0.7 * leaves), 1.2 * depth + 0.8)
        axes = figure.subplots()
        paint_tree(axes, record)
        note = " (stand-in data)" if record["standin"] else ""
        axes.set_title(f"{plain(record['run_id'])}{note}: training samples in each node")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
