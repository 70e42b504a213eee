"""A tree on axes: one row a level, a bar a node with its size and the make-up of its samples."""

from __future__ import annotations

from typing import Any

from bench.report.figures.drawing import HATCHES, INK, palette, plain, shown_groups
from bench.report.names import group_name

NODE, TALL = 0.86, 0.34  # width and height of a node's bar, in units of a leaf and of a level


def paint_tree(axes: Any, record: dict[str, Any], *, edges: bool = False) -> None:
    """Draw the chosen tree of an NCT record; `edges` writes what routing sent along each edge."""
    from matplotlib.patches import Rectangle

    depth = int(record["nct"]["chosen_iteration"])
    levels = record["nct"]["iterations"][:depth]
    shown = shown_groups(record)
    families = list(dict.fromkeys(shown.values()))
    looks = dict(zip(families, zip(palette(len(families)), HATCHES, strict=False), strict=False))
    leaves = len(levels[-1]["leaves"])
    for row, level in enumerate(levels):
        width = leaves / len(level["leaves"])
        for j, name in enumerate(level["leaves"]):
            centre, y = (j + 0.5) * width, float(depth - row)
            count = level["node_counts"][j]
            if row > 0:
                parent = (j // 2 + 0.5) * width * 2
                _edge(axes, parent, y + 1 - 0.3, centre, y + TALL, count, edges, hard=j % 2 == 1)
            makeup: dict[str, int] = {}
            for group, number in level["makeup"].get(name, {}).items():
                makeup[shown[group]] = makeup.get(shown[group], 0) + number
            left, total = centre - NODE / 2, max(sum(makeup.values()), 1)
            for family, number in makeup.items():
                colour, hatch = looks[family]
                part = NODE * number / total
                look = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "lw": 0}
                axes.add_patch(Rectangle((left, y), part, TALL, **look))
                left += part
            frame = Rectangle((centre - NODE / 2, y), NODE, TALL, fill=False, lw=0.8)
            frame.set(linestyle="-" if count else ":", edgecolor=INK if count else "0.6")
            axes.add_patch(frame)
            state = f"{count:,}" if count else "merged" if j in level["merged"] else "empty"
            text = f"{plain(name)}\n{state}"
            size = 7 if leaves <= 12 else 5.5
            axes.text(centre, y - 0.03, text, ha="center", va="top", fontsize=size, color=INK)
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=looks[f][0], hatch=looks[f][1], edgecolor="white", lw=0)
        for f in families
    ]
    names = [plain(group_name(family)) for family in families]
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
    axes.set_xlim(0, leaves)
    axes.set_ylim(0.6, depth + 0.5)
    axes.set_axis_off()


def _edge(
    axes: Any, x0: float, y0: float, x1: float, y1: float, count: int, named: bool, *, hard: bool
) -> None:
    style = {"color": INK if count else "0.75", "lw": 1.0, "ls": "--" if hard else "-"}
    axes.plot([x0, x1], [y0, y1], zorder=0, **style)
    if named and count:
        at = 0.42
        axes.text(
            *(x0 + at * (x1 - x0), y0 + at * (y1 - y0), "wrong" if hard else "right"),
            fontsize=6,
            ha="left" if hard else "right",
            va="center",
            color="0.3",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
