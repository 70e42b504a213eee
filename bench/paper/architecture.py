"""Two diagrams drawn from a real tree: how it infers, and how routing grew it."""

from __future__ import annotations

from typing import Any

from bench.paper.trees import TreeRun, draw_tree, grown_trees
from bench.reporting import figure as plots
from bench.reporting.figure import Drawn, FigureInput, SkippedFigure, dataset_label, escape_mathtext
from methods.nct.config import NctConfig

MIXED_HEADS = {"asymmetric": ("linear", "mlp"), "reversed": ("mlp", "linear")}
"""What the easy and the hard child's head is, by the config's `heads` where they differ."""

ARROW = {"arrowstyle": "-|>", "lw": 0.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}


def draw_architecture(given: FigureInput) -> Drawn:
    """Draw inference: backbone, heads level by level, argmax over the leaves."""
    found = _simplest(given)
    run, levels = found.run, found.tree.levels
    config: NctConfig = run.job.method_config()
    backbone = escape_mathtext(run.job.backbone().name)
    leaves = len(levels[-1].leaves)
    middle = leaves / 2
    figure = plots.new_figure(plots.WIDTH, max(2.2, 0.26 * leaves + 0.6))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.1, 4.4 + 1.5 * len(levels)), ylim=(-0.7, leaves + 0.6))
    blue, orange, green, red = plots.palette(4)
    _box(axes, 0.35, middle, 0.7, 1.0, "image", blue)
    _box(axes, 1.7, middle, 1.3, 1.6, f"backbone\n{backbone}", "0.6")
    _arrow(axes, 0.7, middle, 1.05, middle)
    before = [(2.35, middle)]
    for row, level in enumerate(levels):
        x, width = 3.3 + 1.5 * row, leaves / len(level.leaves)
        children = MIXED_HEADS.get(config.heads, (config.heads, config.heads))
        here = []
        for j, (leaf, count) in enumerate(zip(level.leaves, level.node_counts, strict=True)):
            y = leaves - (j + 0.5) * width
            head = children[j % 2] if row else config.first_head
            kind, colour = ("MLP", orange) if head == "mlp" else ("linear", green)
            _arrow(axes, *before[j // 2 if row else 0], x - 0.55, y, faint=not count)
            text = f"{escape_mathtext(leaf)} {kind if count else 'masked'}"
            _box(axes, x, y, 1.1, min(0.78, 0.8 * width), text, colour, dotted=not count)
            here.append((x + 0.55, y))
        axes.text(x, leaves + 0.15, f"iteration {row + 1}", ha="center", fontsize=7.5)
        before = here
    end = before[0][0] + 0.75
    for (x, y), count in zip(before, levels[-1].node_counts, strict=True):
        if count:
            _arrow(axes, x, y, end, middle)
    _box(axes, end + 0.55, middle, 1.0, 1.6, "argmax:\nclass and\npath", red)
    return Drawn(
        figure,
        f"NCT inference, drawn from {run.run_id} ({dataset_label(run)}). Backbone features pass "
        "from parent to child heads; the argmax over the leaves' logits gives the class and the "
        f"easy/hard path. Each head is a representation of {config.hidden} units and a logit on "
        "it.",
        ("Dotted heads were merged or are empty: their logit is masked.",),
    )


def draw_routing(given: FigureInput) -> Drawn:
    """Draw routing: the rule above, what it did to one tree's training samples below."""
    found = _simplest(given)
    run, depth = found.run, found.tree.chosen_iteration
    figure = plots.new_figure(plots.WIDTH, 1.5 + 1.05 * depth)
    above, below = figure.subplots(2, 1, height_ratios=[1.3, 1.05 * depth])
    _rule(above)
    draw_tree(below, run.record, found.tree, edges=True)
    title = f"training samples of {escape_mathtext(run.run_id)} ({dataset_label(run)})"
    below.set_title(title, fontweight="normal")
    return Drawn(
        figure,
        "Routing. Above: a sample whose predicted node matches its assigned node moves to the easy "
        "child, any other to the hard child. Below: what this did to the training samples of "
        f"{run.run_id}; bars show each node's true groups, which routing never sees.",
        ("Dotted nodes were merged into their easy sibling or are empty.",),
    )


def _rule(axes: Any) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 13.2), ylim=(-1.35, 1.35))
    blue, orange, green, red = plots.palette(4)
    _box(axes, 0.8, 0, 1.4, 0.8, "sample", blue)
    _box(axes, 3.6, 0.75, 2.6, 0.8, "backbone, heads,\nargmax", "0.6")
    _box(axes, 6.7, 0.75, 2.2, 0.8, r"predicted $\hat\ell$", orange)
    _box(axes, 5.0, -0.75, 3.2, 0.8, r"assigned node $\ell$", blue)
    _box(axes, 9.1, 0, 1.5, 0.9, r"$\hat\ell = \ell$ ?", "0.6")
    _box(axes, 12.0, 0.75, 2.2, 0.8, r"easy: $2\ell$", green)
    _box(axes, 12.0, -0.75, 2.2, 0.8, r"hard: $2\ell + 1$", red)
    for ends in (
        *((1.5, 0.15, 2.3, 0.75), (1.5, -0.15, 3.4, -0.75), (4.9, 0.75, 5.6, 0.75)),
        *((7.8, 0.75, 8.35, 0.2), (6.6, -0.75, 8.35, -0.2)),
        *((9.85, 0.15, 10.9, 0.75), (9.85, -0.15, 10.9, -0.75)),
    ):
        _arrow(axes, *ends)
    axes.text(10.25, 0.65, "yes", fontsize=7, ha="center")
    axes.text(10.25, -0.72, "no", fontsize=7, ha="center")


def _simplest(given: FigureInput) -> TreeRun:
    """Return the tree with the fewest leaves, but grown beyond one level if there is one."""
    found = [one for own in grown_trees(given).values() for one in own]
    if not found:
        raise SkippedFigure("no finished NCT run to draw")
    grown = [one for one in found if one.tree.chosen_iteration > 1]
    return min(grown or found, key=lambda one: (len(one.tree.chosen.leaves), one.run.job.seed))


def _box(
    axes: Any, x: float, y: float, w: float, h: float, text: str, colour: Any, dotted: bool = False
) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch

    corner = (x - w / 2 + 0.04, y - h / 2 + 0.04)
    box = FancyBboxPatch(corner, w - 0.08, h - 0.08, boxstyle="round,pad=0.04", linewidth=1.0)
    face, edge, line = ("white", "0.6", ":") if dotted else (to_rgba(colour, 0.22), colour, "-")
    box.set(facecolor=face, edgecolor=edge, linestyle=line)
    axes.add_patch(box)
    ink = "0.5" if dotted else plots.INK
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)


def _arrow(axes: Any, x0: float, y0: float, x1: float, y1: float, faint: bool = False) -> None:
    look = {**ARROW, "color": "0.8" if faint else "0.45"}
    axes.annotate("", (x1, y1), (x0, y0), arrowprops=look)
