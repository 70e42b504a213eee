"""Depth: performance by iteration, the proxy behind the rule, its choices, and both as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from bench.paper.numbers import PAPER_DATASETS, paper_by, paper_cell
from bench.paper.trees import (
    KEPT_EPOCH,
    LAST_EPOCH,
    METHOD,
    NOT_RECORDED,
    OF_BOTH_EPOCHS,
    WHICH_EPOCH,
    LastEpoch,
    Reader,
    TreeIteration,
    TreeRun,
    Trees,
    grown_trees,
    of_iteration,
    of_last_epoch,
    tree_table,
)
from bench.reporting import figure as plots
from bench.reporting.collection import ReportInput, Run
from bench.reporting.figure import Drawn, FigureInput, SkippedFigure, palette, seeds_text
from bench.reporting.names import dataset_title, metric_title
from bench.reporting.table import Cell, CellKey, Column, Row, Table, columns, mark_best, paired_rows

ITERATIONS = (1, 2, 3)
TABLE_ROWS = (
    *(("waterbirds", "wga", "avg"), ("celeba", "wga", "avg")),
    *(("isic", "auroc_nonpatch", "auroc"), ("isic", "auroc_histopath", "auroc")),
    *(("umnist", "wga", "avg"), ("cmnist", "wga", "avg")),
)
"""The rows of the paper's depth table: dataset, worst-group metric, average metric."""

CURVES = {
    "wga": ("worst group", "o", "-"),
    "avg": ("average", "s", "--"),
    "auroc": ("overall AUROC x 100", "s", "--"),
    "auroc_nonpatch": ("non-patch AUROC x 100", "o", "-"),
}
"""Label, marker and line of each metric in the figure of depth."""

PROXIES = (
    ("pwga2", ""),
    ("pwga2_routed", ", by routed label"),
    ("pwga2_predicted", ", by predicted leaf"),
)
RASTERIZE_FROM = 3000  # points from which a cloud is a picture: as shapes it outweighs the page


def depth_ablation(given: ReportInput) -> Table:
    """Compare worst group and average at each iteration with the paper's."""
    paper = paper_by("depth_ablation", "dataset", "metric", "iteration")
    rows: list[Row] = []
    for name, *metrics in TABLE_ROWS:
        trees = Trees.published(given.runs, name)
        measured_cells, paper_cells = [], []
        for t, metric in product(ITERATIONS, metrics):
            key = CellKey(METHOD, name, metric, f"iteration {t}")
            measured_cells.append(trees.cell(key, _test_metric(t, metric)))
            paper_cells.append(paper_cell(paper[name, metric, str(t)], key))
        worst = f" ({metric_title(name, metrics[0])})" if name == "isic" else ""
        title = dataset_title(name) + worst
        marked, paper_marked = (  # worst group and average apart
            list(chain(*zip(mark_best(cells[::2]), mark_best(cells[1::2]), strict=True)))
            for cells in (measured_cells, paper_cells)
        )
        rows += paired_rows((title,), {"measured": marked}, paper_marked, name)
    return tree_table(
        label="depth_ablation",
        title="Impact of depth",
        caption=(
            "Worst group and average at each iteration, on the test sets (AUROC for ISIC). Bold: "
            "best iteration of a row."
        ),
        columns=columns([f"Iteration {t}" for t in ITERATIONS], ("WGA", "Avg")),
        rows=tuple(rows),
    )


def _test_metric(t: int, metric: str) -> Reader:
    return of_iteration(t, lambda iteration: iteration.test.get(metric))


def depth_diagnostics(given: ReportInput) -> Table:
    """Compare the validation proxy by groups, by routed label and by predicted leaf."""
    paper = paper_by("depth_diagnostics", "dataset", "iteration")
    rows: list[Row] = []
    for name in PAPER_DATASETS:
        trees = Trees.published(given.runs, name)
        title = dataset_title(name) + (" (pseudo-AUROC)" if name == "isic" else "")
        measured: dict[str, list[Cell]] = {}
        # Where AUROC counts, there is one pseudo-AUROC and no choice of groups.
        for proxy, groups in PROXIES[:1] if name == "isic" else PROXIES[1:]:
            keys = {t: CellKey(METHOD, name, proxy, f"iteration {t}") for t in (2, 3)}
            for word, suffix in ((LAST_EPOCH, ", last epoch"), (KEPT_EPOCH, "")):
                last = word == LAST_EPOCH
                missing = NOT_RECORDED if last else "not reached"
                of_epoch = of_last_epoch if last else of_iteration
                measured[f"{word}{groups}"] = [
                    trees.cell(
                        replace(key, variant=key.variant + suffix),
                        of_epoch(t, partial(_proxy, proxy)),
                        3,
                        missing,
                    )
                    for t, key in keys.items()
                ]
        keys = {t: CellKey(METHOD, name, "pwga2", f"iteration {t}") for t in (2, 3)}
        reported = [paper_cell(paper[name, str(t)], key, 3) for t, key in keys.items()]
        rows += paired_rows((title,), measured, reported, name)
    return tree_table(
        label="depth_diagnostics",
        title="Validation proxy by iteration",
        caption=(
            "pWGA2 on validation data, of which the depth rule reads the one by routed label at "
            "the kept epoch: groups by routed label (as two passages of the paper say, and its "
            "values ask for) and by predicted leaf (as it writes the equation)."
        ),
        columns=(Column("Iteration 2"), Column("Iteration 3")),
        rows=tuple(rows),
        selection=OF_BOTH_EPOCHS,
        notes=(WHICH_EPOCH,),
    )


def _proxy(name: str, iteration: TreeIteration | LastEpoch) -> float | None:
    """Return a proxy; runs of version 1 recorded that by predicted leaf as `pwga2` alone."""
    value: float | None = getattr(iteration, name)
    if value is None and name == "pwga2_predicted":
        return iteration.pwga2
    return value


def pwga_corr(given: ReportInput) -> Table:
    """Compare the rank correlation of the proxy with the true metric over epochs."""
    paper = paper_by("pwga_corr", "dataset")
    rows: list[Row] = []
    for name in PAPER_DATASETS:
        trees = Trees.published(given.runs, name)
        test, val = (CellKey(METHOD, name, side) for side in ("spearman_test", "spearman_val"))
        own = [trees.cell(key, attrgetter(key.metric), 2, "not recorded") for key in (test, val)]
        none = val.empty("not in the paper's table", "paper")
        reported = [paper_cell(paper[name,], test, 2), none]
        rows += paired_rows((dataset_title(name),), {"measured": own}, reported, name)
    return tree_table(
        label="pwga_corr",
        title="Quality of the proxy",
        caption=(
            "Spearman correlation, over the epochs of iterations 2 and 3, of validation pWGA2 "
            "with true WGA (non-patch AUROC for ISIC), held out and on validation data."
        ),
        columns=(Column("Test", "Spearman"), Column("Validation", "Spearman")),
        rows=tuple(rows),
        selection="none, every audited epoch counts",
    )


def depth_choice(given: ReportInput) -> Table:
    """Count the seeds for which the rule chose each iteration."""
    paper = paper_by("depth_choice", "dataset", "iteration")
    rows: list[Row] = []
    for name in PAPER_DATASETS:
        trees, header = Trees.published(given.runs, name), dataset_title(name)
        ids = tuple(one.run.run_id for one in trees.runs)
        measured, reported = {}, []
        for choice, word in (("chosen_iteration", "rule"), ("argmax_iteration", "highest")):
            cells = []
            for t in ITERATIONS:
                key = CellKey(METHOD, name, choice, f"iteration {t}")
                count = float(sum(getattr(one.tree, choice) == t for one in trees.runs))
                cell = Cell("measured", key, mean=count, digits=0, run_ids=ids)
                cells.append(cell if ids else key.empty(trees.absence))
                seeds = float(paper.get((name, str(t)), {"seeds": "0"})["seeds"])
                reported.append(Cell("paper", key, mean=seeds, digits=0))
            measured[f"measured, {word}"] = cells
        rows += paired_rows((header,), measured, reported[: len(ITERATIONS)], name)  # by its rule
    return tree_table(
        label="depth_choice",
        title="Depth chosen",
        caption=(
            "Number of seeds for which each iteration was chosen: by the depth rule as written, "
            "by the highest pWGA2 alone, and in the paper."
        ),
        columns=tuple(Column(f"Iteration {t}") for t in ITERATIONS),
        rows=tuple(rows),
        uncertainty="none, these are counts of seeds",
        selection="the method's depth rule, on validation data without group labels",
        in_paper=False,
    )


def draw_depth_curves(given: FigureInput) -> Drawn:
    """Draw one panel a dataset: each metric over iterations, ours and the paper's."""
    datasets = grown_trees(given, 2)
    if not datasets:
        raise SkippedFigure("no NCT run has reached iteration 2")
    figure, panels = plots.grid(len(datasets), 2.4)
    paper = paper_by("depth_ablation", "dataset", "metric", "iteration")
    for axes, (label, found) in zip(panels, datasets.items(), strict=True):
        record = found[0].run.record
        iterations = range(1, max(len(one.tree.iterations) for one in found) + 1)
        ranked = record.test.get("auroc") is not None
        metrics = ("auroc", "auroc_nonpatch") if ranked else ("wga", "avg")
        for metric, colour in zip(metrics, palette(2), strict=True):
            name, marker, style = CURVES[metric]
            scale = 100 if ranked else 1
            values = [scale * np.array(_known(found, _test_metric(t, metric))) for t in iterations]
            means = [own.mean() if len(own) else np.nan for own in values]
            spreads = [own.std(ddof=1) if len(own) > 1 else 0.0 for own in values]
            look = {"color": colour, "marker": marker}
            axes.errorbar(iterations, means, spreads, ls=style, label=name, elinewidth=0.8, **look)
            known = [paper.get((record.job.dataset, metric, str(t))) for t in ITERATIONS]
            reported = [scale * float(row["mean"]) for row in known if row is not None]
            if reported and not given.smoke:
                axes.plot(ITERATIONS, reported, mfc="white", lw=0.5, ms=4, **look)
        proxies = {t: _known(found, of_iteration(t, attrgetter("pwga2"))) for t in iterations}
        marks = {t: float(np.mean(own) * 100) for t, own in proxies.items() if own}
        axes.plot(list(marks), list(marks.values()), "x", color="0.25", ms=5, label="pWGA$_2$")
        axes.set(title=f"{label}\n{seeds_text(found)}", xlabel="iteration")
        axes.set(ylim=(-3, 104), xticks=iterations)
        axes.legend(loc="lower right", fontsize=7)
    panels[0].set_ylabel("%")
    missing = given.missing(list(datasets))
    paper_note = "" if given.smoke else " Hollow markers joined by thin lines are the paper's."
    return Drawn(
        figure,
        "Impact of depth. Test metrics of the tree at the epoch that each iteration kept, mean "
        "over seeds with standard deviation; crosses: the validation proxy pWGA_2 that the depth "
        f"rule sees.{paper_note}",
        ("All iterations are shown, chosen by the depth rule or not.", *missing),
    )


def _known(found: Sequence[TreeRun], read: Reader) -> list[float]:
    """Return a value of every tree that has it."""
    return [value for one in found if (value := read(one.tree)) is not None]


def draw_proxy(given: FigureInput) -> Drawn:
    """Draw a row a dataset: one seed's trajectory, and all seeds' epochs against each other."""
    audited = {
        label: [(one.run, epochs) for one in found if len(epochs := _epochs(one.run))]
        for label, found in grown_trees(given, 2).items()
    }
    datasets = {label: found for label, found in audited.items() if found}
    if not datasets:
        raise SkippedFigure("no NCT run with an audited history of iteration 2")
    figure = plots.new_figure(plots.WIDTH, 0.4 + 2.2 * len(datasets))
    panels = figure.subplots(len(datasets), 2, squeeze=False, width_ratios=[1.9, 1])
    for (line, cloud), (label, found) in zip(panels, datasets.items(), strict=True):
        _trajectory(line, *found[0], label)
        _cloud(cloud, [epochs for _, epochs in found])
        cloud.set_title(f"{seeds_text(found)}, all epochs")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    missing = given.missing(list(datasets))
    return Drawn(
        figure,
        "The proxy pWGA_2, which needs no group label, against true worst-group accuracy (ISIC: "
        "non-patch AUROC), epoch by epoch from iteration 2 on. Left: the run with the lowest "
        "seed; thin lines part phases, thick ones iterations. Right: every epoch of every seed, "
        "by iteration, with the mean rank correlation over seeds.",
        ("True values come from the audit, which the method cannot see.", *missing),
    )


def _epochs(run: Run) -> pd.DataFrame:
    """Return the audited epochs from iteration 2 on: proxy and truths in percent."""
    history = run.history()
    if history is None:
        return pd.DataFrame()
    ranked = "audit_test_auroc_nonpatch" in history
    metric, scale = ("auroc_nonpatch", 100.0) if ranked else ("wga", 1.0)
    rows = history[(history["iteration"] >= 2) & history[f"audit_test_{metric}"].notna()]
    percent = {"proxy": 100 * rows["selection"].astype(float)}
    for split in ("val", "test"):
        percent[split] = scale * rows[f"audit_{split}_{metric}"].astype(float)
    return rows[["iteration", "phase"]].astype(int).assign(**percent).reset_index(drop=True)


def _trajectory(axes: Any, run: Run, rows: pd.DataFrame, label: str) -> None:
    x, (first, second, third) = rows.index + 1, palette(3)
    axes.plot(x, rows["proxy"], color=first, label="pWGA$_2$ (validation, no groups)")
    axes.plot(x, rows["val"], color=second, ls="--", label="true, validation")
    axes.plot(x, rows["test"], color=third, ls=":", lw=1.6, label="true, test")
    for place in range(1, len(rows)):
        before, after = rows.iloc[place - 1], rows.iloc[place]
        if before["iteration"] != after["iteration"]:
            axes.axvline(place + 0.5, color="0.25", lw=1.2)
            text, low = f" iteration {int(after['iteration'])}", axes.get_xaxis_transform()
            axes.text(place + 0.5, 0.03, text, transform=low, fontsize=7)
        elif before["phase"] != after["phase"]:
            axes.axvline(place + 0.5, color="0.6", lw=0.6)
    axes.text(0.01, 0.03, "iteration 2", transform=axes.transAxes, fontsize=7)
    axes.set(ylim=(-3, 103), xlim=(0.5, len(rows) + 0.5), ylabel="%", xlabel="epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"{label}, seed {run.job.seed}")


def _cloud(axes: Any, tables: list[pd.DataFrame]) -> None:
    from scipy.stats import spearmanr  # slow to import

    rows = pd.concat(tables, ignore_index=True)
    for place, (iteration, own) in enumerate(rows.groupby("iteration")):
        look = {"color": palette(3)[place], "ms": 3, "alpha": 0.6, "mew": 0}
        look |= {"label": f"iteration {iteration}", "rasterized": len(rows) > RASTERIZE_FROM}
        axes.plot(own["proxy"], own["test"], plots.MARKERS[place], **look)
    axes.plot([0, 100], [0, 100], color="0.6", lw=0.8, zorder=0)
    varied = [one for one in tables if min(one["proxy"].nunique(), one["test"].nunique()) > 1]
    if varied:
        ranked = [float(spearmanr(one["proxy"], one["test"]).statistic) for one in varied]
        text = f"Spearman {sum(ranked) / len(ranked):.2f}"
        axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", fontsize=7.5)
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel="pWGA$_2$ (%)", ylabel="true, test (%)")
    axes.legend(loc="best", handletextpad=0.1, borderpad=0.1)
