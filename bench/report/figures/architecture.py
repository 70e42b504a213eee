"""Two diagrams drawn from a real tree: how it infers, and how routing grew it."""

from __future__ import annotations

from typing import Any

from bench.report.collection import Run
from bench.report.figures.drawing import (
    INK,
    WIDTH,
    Drawn,
    NotDrawn,
    View,
    label_of,
    new_figure,
    palette,
    plain,
)
from bench.report.figures.trees import paint_tree

NONE = "no finished NCT run to draw"


def draw(view: View) -> Drawn | NotDrawn:
    """Draw inference: backbone, heads level by level, argmax over the leaves."""
    run = _simplest(view)
    if run is None:
        return NotDrawn(NONE)
    record = run.record
    levels = record["nct"]["iterations"][: record["nct"]["chosen_iteration"]]
    leaves = len(levels[-1]["leaves"])
    figure = new_figure(WIDTH, max(2.2, 0.26 * leaves + 0.6))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set(xlim=(-0.1, 4.4 + 1.5 * len(levels)), ylim=(-0.7, leaves + 0.6))
    middle = leaves / 2
    config = record["config"]
    colours = palette(4)
    _box(axes, 0.35, middle, 0.7, 1.0, "image", colours[0])
    _box(axes, 1.7, middle, 1.3, 1.6, f"backbone\n{plain(config['backbone']['name'])}", "0.6")
    _arrow(axes, 0.7, middle, 1.05, middle)
    before = [(2.35, middle)]
    for row, level in enumerate(levels):
        x, width = 3.3 + 1.5 * row, leaves / len(level["leaves"])
        here = []
        for j, name in enumerate(level["leaves"]):
            y = leaves - (j + 0.5) * width
            start = before[0] if row == 0 else before[j // 2]
            active = bool(level["node_counts"][j])
            kind = _kind(config["method"], row, j)
            colour = {"linear": colours[2], "MLP": colours[1]}[kind]
            _arrow(axes, *start, x - 0.55, y, faint=not active)
            text = f"{plain(name)} {kind}" if active else f"{plain(name)} masked"
            _box(axes, x, y, 1.1, min(0.78, 0.8 * width), text, colour, dotted=not active)
            here.append((x + 0.55, y))
        axes.text(x, leaves + 0.15, f"iteration {row + 1}", ha="center", fontsize=7.5)
        before = here
    end = before[0][0] + 0.75
    for (x, y), count in zip(before, levels[-1]["node_counts"], strict=True):
        if count:
            _arrow(axes, x, y, end, middle)
    _box(axes, end + 0.55, middle, 1.0, 1.6, "argmax:\nclass and\npath", colours[3])
    hidden = config["method"]["hidden"]
    return Drawn(
        figure,
        f"NCT inference, drawn from {run.run_id} ({label_of(run)}). Backbone features pass from "
        "parent to child heads; the argmax over the leaves' logits gives the class and the "
        f"easy/hard path. Each head is a representation of {hidden} units and a logit on it.",
        ("Dotted heads were merged or are empty: their logit is masked.",),
    )


def draw_routing(view: View) -> Drawn | NotDrawn:
    """Draw routing: the rule above, what it did to one tree's training samples below."""
    run = _simplest(view)
    if run is None:
        return NotDrawn(NONE)
    depth = int(run.record["nct"]["chosen_iteration"])
    figure = new_figure(WIDTH, 1.5 + 1.05 * depth)
    above, below = figure.subplots(2, 1, height_ratios=[1.3, 1.05 * depth])
    _rule(above)
    paint_tree(below, run.record, edges=True)
    below.set_title(
        f"training samples of {plain(run.run_id)} ({label_of(run)})", fontweight="normal"
    )
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
    colours = palette(4)
    _box(axes, 0.8, 0, 1.4, 0.8, "sample", colours[0])
    _box(axes, 3.6, 0.75, 2.6, 0.8, "backbone, heads,\nargmax", "0.6")
    _box(axes, 6.7, 0.75, 2.2, 0.8, r"predicted $\hat\ell$", colours[1])
    _box(axes, 5.0, -0.75, 3.2, 0.8, r"assigned node $\ell$", colours[0])
    _box(axes, 9.1, 0, 1.5, 0.9, r"$\hat\ell = \ell$ ?", "0.6")
    _box(axes, 12.0, 0.75, 2.2, 0.8, r"easy: $2\ell$", colours[2])
    _box(axes, 12.0, -0.75, 2.2, 0.8, r"hard: $2\ell + 1$", colours[3])
    for start, end in (
        *(((1.5, 0.15), (2.3, 0.75)), ((1.5, -0.15), (3.4, -0.75)), ((4.9, 0.75), (5.6, 0.75))),
        *(((7.8, 0.75), (8.35, 0.2)), ((6.6, -0.75), (8.35, -0.2))),
        *(((9.85, 0.15), (10.9, 0.75)), ((9.85, -0.15), (10.9, -0.75))),
    ):
        _arrow(axes, *start, *end)
    axes.text(10.25, 0.65, "yes", fontsize=7, ha="center")
    axes.text(10.25, -0.72, "no", fontsize=7, ha="center")


def _simplest(view: View) -> Run | None:
    """Take the tree with the fewest leaves, but grown beyond one level if there is one."""
    runs = [run for own in view.trees().values() for run in own]
    if not runs:
        return None

    def size(run: Run) -> tuple[bool, int, int]:
        tree = run.record["nct"]
        leaves = tree["iterations"][tree["chosen_iteration"] - 1]["leaves"]
        return tree["chosen_iteration"] < 2, len(leaves), int(run.record["seed"])

    return min(runs, key=size)


def _kind(config: dict[str, Any], row: int, j: int) -> str:
    """Say whether a head is linear or an MLP, as the config has it."""
    if row == 0:
        return "MLP" if config["first_head"] == "mlp" else "linear"
    easy, hard = {
        "linear": ("linear", "linear"),
        "mlp": ("MLP", "MLP"),
        "asymmetric": ("linear", "MLP"),
        "reversed": ("MLP", "linear"),
    }[config["heads"]]
    return hard if j % 2 else easy


def _box(
    axes: Any, x: float, y: float, w: float, h: float, text: str, colour: Any, dotted: bool = False
) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            *((x - w / 2 + 0.04, y - h / 2 + 0.04), w - 0.08, h - 0.08),
            boxstyle="round,pad=0.04",
            facecolor="white" if dotted else to_rgba(colour, 0.22),
            edgecolor="0.6" if dotted else colour,
            linestyle=":" if dotted else "-",
            linewidth=1.0,
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color="0.5" if dotted else INK)


def _arrow(axes: Any, x0: float, y0: float, x1: float, y1: float, faint: bool = False) -> None:
    axes.annotate(
        "",
        (x1, y1),
        (x0, y0),
        arrowprops={
            "arrowstyle": "-|>",
            "color": "0.8" if faint else "0.45",
            "lw": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 7,
        },
    )
