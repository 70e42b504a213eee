"""The proxy against the truth: pWGA_2, which NCT selects by, and worst-group accuracy by epoch."""

from __future__ import annotations

from typing import Any

import pandas as pd

from bench.report.collection import Run
from bench.report.figures.drawing import (
    MARKERS,
    WIDTH,
    Drawn,
    NotDrawn,
    View,
    new_figure,
    palette,
    seeds_text,
)

PERCENT = 100.0
MANY = 3000  # points from which a cloud is a picture: as shapes it would outweigh the page


def draw(view: View) -> Drawn | NotDrawn:
    """Draw a row a dataset: one seed's trajectory, and all seeds' epochs against each other."""
    found = {
        label: [(run, epochs) for run in runs if len(epochs := _epochs(run))]
        for label, runs in view.trees(2).items()
    }
    found = {label: runs for label, runs in found.items() if runs}
    if not found:
        return NotDrawn("no NCT run with an audited history of iteration 2")
    figure = new_figure(WIDTH, 0.4 + 2.2 * len(found))
    panels = figure.subplots(len(found), 2, squeeze=False, width_ratios=[1.9, 1])
    for (line, cloud), (label, runs) in zip(panels, found.items(), strict=True):
        _trajectory(line, *runs[0], label)
        _cloud(cloud, [own for _, own in runs])
        cloud.set_title(f"{seeds_text([run for run, _ in runs])}, all epochs")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return Drawn(
        figure,
        "The proxy pWGA_2, which needs no group label, against true worst-group accuracy (ISIC: "
        "non-patch AUROC), epoch by epoch from iteration 2 on. Left: the run with the lowest "
        "seed; thin lines part phases, thick ones iterations. Right: every epoch of every seed, "
        "by iteration, with the mean rank correlation over seeds.",
        (
            "True values come from the audit, which the method cannot see.",
            *view.missing(list(found)),
        ),
    )


def _epochs(run: Run) -> pd.DataFrame:
    """Give the audited epochs from iteration 2 on: proxy and truths in percent."""
    history = run.history()
    if history is None:
        return pd.DataFrame()
    ranked = "audit_test_auroc_nonpatch" in history
    metric, scale = ("auroc_nonpatch", PERCENT) if ranked else ("wga", 1.0)
    rows = history[(history["iteration"] >= 2) & history[f"audit_test_{metric}"].notna()]
    return pd.DataFrame(
        {
            "iteration": rows["iteration"].astype(int),
            "phase": rows["phase"].astype(int),
            "proxy": PERCENT * rows["selection"].astype(float),
            "val": scale * rows[f"audit_val_{metric}"].astype(float),
            "test": scale * rows[f"audit_test_{metric}"].astype(float),
        }
    ).reset_index(drop=True)


def _trajectory(axes: Any, run: Run, rows: pd.DataFrame, label: str) -> None:
    colours = palette(3)
    x = rows.index + 1
    axes.plot(x, rows["proxy"], color=colours[0], label="pWGA$_2$ (validation, no groups)")
    axes.plot(x, rows["val"], color=colours[1], ls="--", label="true, validation")
    axes.plot(x, rows["test"], color=colours[2], ls=":", lw=1.6, label="true, test")
    for place in range(1, len(rows)):
        before, after = rows.iloc[place - 1], rows.iloc[place]
        if before["iteration"] != after["iteration"]:
            axes.axvline(place + 0.5, color="0.25", lw=1.2)
            axes.text(
                *(place + 0.5, 0.03, f" iteration {int(after['iteration'])}"),
                transform=axes.get_xaxis_transform(),
                fontsize=7,
            )
        elif before["phase"] != after["phase"]:
            axes.axvline(place + 0.5, color="0.6", lw=0.6)
    axes.text(0.01, 0.03, "iteration 2", transform=axes.transAxes, fontsize=7)
    axes.set(ylim=(-3, 103), xlim=(0.5, len(rows) + 0.5), ylabel="%", xlabel="epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{label}, seed {run.record['seed']}")


def _cloud(axes: Any, tables: list[pd.DataFrame]) -> None:
    rows = pd.concat(tables, ignore_index=True)
    for place, (iteration, own) in enumerate(rows.groupby("iteration")):
        axes.plot(
            *(own["proxy"], own["test"], MARKERS[place]),
            color=palette(3)[place],
            ms=3,
            alpha=0.6,
            mew=0,
            rasterized=len(rows) > MANY,
            label=f"iteration {iteration}",
        )
    axes.plot([0, 100], [0, 100], color="0.6", lw=0.8, zorder=0)
    ranked = [_rank_correlation(table) for table in tables]
    known = [value for value in ranked if value is not None]
    if known:
        text = f"Spearman {sum(known) / len(known):.2f}"
        axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", fontsize=7.5)
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel="pWGA$_2$ (%)", ylabel="true, test (%)")
    axes.legend(loc="best", handletextpad=0.1, borderpad=0.1)


def _rank_correlation(rows: pd.DataFrame) -> float | None:
    if rows["proxy"].nunique() < 2 or rows["test"].nunique() < 2:
        return None
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(rows["proxy"], rows["test"]).statistic)
