"""A picture of a tree: every node with its size and, where groups are known, its make-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.files import storage_errors

LEGEND_AT_MOST = 10  # more groups than this are told apart by colour alone


def draw_tree(record: dict[str, Any], path: Path) -> None:
    """Draw the chosen tree of an NCT run; one row a level, one bar a node."""
    import matplotlib

    matplotlib.use("Agg")
    import seaborn
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    depth = record["nct"]["chosen_iteration"]
    levels = record["nct"]["iterations"][:depth]
    groups = list(record["metrics"]["test"]["group_accuracy"])
    palette = dict(zip(groups, seaborn.color_palette("husl", len(groups)), strict=True))
    if len(groups) <= 8:
        palette = dict(zip(groups, seaborn.color_palette("colorblind", len(groups)), strict=True))
    leaves = len(levels[-1]["leaves"])
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.15 * leaves), 1.6 * depth + 1))
    for row, level in enumerate(levels):
        width = leaves / len(level["leaves"])
        for j, name in enumerate(level["leaves"]):
            centre, y = (j + 0.5) * width, depth - row
            count = level["node_counts"][j]
            if row > 0:
                parent = (j // 2 + 0.5) * width * 2
                axes.plot([parent, centre], [y + 0.7, y + 0.3], color="0.6", lw=1, zorder=0)
            left, full = centre - 0.42, 0.84
            total = max(sum(level["makeup"].get(name, {}).values()), 1)
            for group, n in level["makeup"].get(name, {}).items():
                part = full * n / total
                axes.add_patch(Rectangle((left, y), part, 0.3, color=palette[group], lw=0))
                left += part
            empty = count == 0
            frame = Rectangle((centre - 0.42, y), full, 0.3, fill=False, lw=0.8)
            frame.set(linestyle=":" if empty else "-", edgecolor="0.6" if empty else "0.2")
            axes.add_patch(frame)
            text = f"{name}\nmerged or empty" if empty else f"{name}\n{count:,}"
            axes.text(centre, y - 0.04, text, ha="center", va="top", fontsize=7)
    if len(groups) <= LEGEND_AT_MOST:
        handles = [Rectangle((0, 0), 1, 1, color=palette[group]) for group in groups]
        axes.legend(
            handles,
            groups,
            loc="lower center",
            ncols=4,
            fontsize=7,
            frameon=False,
            bbox_to_anchor=(0.5, -0.1),
        )
    note = " (stand-in data)" if record["standin"] else ""
    axes.set_title(f"{record['run_id']}{note}: training samples in each node", fontsize=9)
    axes.set_xlim(0, leaves)
    axes.set_ylim(0.4, depth + 0.5)
    axes.axis("off")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot.close(figure)
