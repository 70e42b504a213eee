"""The README's picture: what the shortcut is, and who falls for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.paper.front_page import SHORTCUT, papers_scores, picture_text, scores
from bench.reporting import figure as plots
from bench.reporting.names import method_title
from datasets.cmnist import dyed
from datasets.files import atomic_file
from datasets.standins import digits

COLOURS = {"training": "#8a5fb4", "validation": "#c9781f", "none": "#13786f"}
TIERS = {
    "training": "told the groups of training images",
    "validation": "told the groups of validation images",
    "none": "told no groups",
}
SHOWN_DIGITS = (0, 3, 4, 7, 8, 1, 2, 5, 6, 9)
TEST_COLOURS = (3, 0, 4, 2, 1, 2, 4, 0, 3, 1)
SEED = 7
ROW_HEIGHT = 0.3


def draw(path: Path) -> None:
    """Draw the picture to an SVG file."""
    with plots.house_style():
        figure = plots.new_figure(9.4, max(3.9, ROW_HEIGHT * len(scores(SHORTCUT)) + 0.9))
        panels: Any = figure.subfigures(1, 2, width_ratios=(1.0, 1.45))
        left, right = panels
        _draw_digits(left)
        _draw_scores(right.subplots())
        with atomic_file(path) as draft:
            about = {"Date": None, "Description": picture_text(), "Title": "CMNIST"}
            figure.savefig(draft, format="svg", metadata=about)


def _draw_digits(panel: Any) -> None:
    """Draw digits as they are coloured in training, and as they are on test images."""
    labels = np.array(SHOWN_DIGITS, dtype=np.uint8)
    grey = torch.from_numpy(digits.draw(labels, np.random.default_rng(SEED)))
    own = torch.tensor(SHOWN_DIGITS) // 2
    rows = {
        "Training: the colour gives the class away\n(99.5 % of images)": own,
        "Test: any colour": torch.tensor(TEST_COLOURS),
    }
    top, bottom = panel.subplots(2, 1)
    for axes, (title, colour) in zip((top, bottom), rows.items(), strict=True):
        images = dyed(grey, colour).permute(0, 2, 3, 1).numpy()
        strip = np.concatenate(
            [np.concatenate([*images[:5]], axis=1), np.concatenate([*images[5:]], axis=1)], axis=0
        )
        axes.imshow(strip, interpolation="nearest")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_axis_off()


def _draw_scores(axes: Any) -> None:
    """Draw every method's worst group with its interval, and the paper's number beside it."""
    shown, paper = scores(SHORTCUT), papers_scores()
    names = [*reversed(shown)]
    for y, name in enumerate(names):
        score, colour = shown[name], COLOURS[shown[name].sees]
        low, high = score.interval
        axes.plot([low, high], [y, y], color=colour, lw=4, alpha=0.35, solid_capstyle="round")
        axes.plot(score.mean, y, "o", color=colour, ms=7)
        if name in paper:
            axes.plot(paper[name], y, "D", mfc="none", mec="0.35", ms=7, mew=1.1)
        side = 1 if high < 85 else -1
        edge = max(high, paper.get(name, 0.0)) if side > 0 else min(low, paper.get(name, 100.0))
        words = {"ha": "left" if side > 0 else "right", "va": "center", "fontsize": 8.5}
        axes.text(edge + 2.4 * side, y, f"{score.mean:.1f}", **words)
    axes.set_yticks(range(len(names)), [method_title(name) for name in names])
    axes.set(xlim=(-3, 103), ylim=(-0.7, len(names) - 0.3), xlabel="accuracy in the worst group, %")
    axes.set_title("Who falls for it (CMNIST, real MNIST digits)", fontsize=9, loc="left")
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    for name in ("top", "right", "left"):
        axes.spines[name].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [
        axes.plot([], [], "o", color=COLOURS[sees], label=text)[0] for sees, text in TIERS.items()
    ]
    hollow = {"mfc": "none", "mec": "0.35", "ls": "", "label": "in the NCT paper"}
    handles.append(axes.plot([], [], "D", **hollow)[0])
    place = {"loc": "upper left", "bbox_to_anchor": (0.02, 0.97)}
    axes.legend(handles=handles, fontsize=8, frameon=True, framealpha=0.9, **place)
