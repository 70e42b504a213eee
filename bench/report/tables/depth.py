"""The tables of depth: performance by iteration, the proxy behind the rule, and its choices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bench.report.cells import DIGITS, About, Cell, empty
from bench.report.collection import Collection
from bench.report.names import DATASETS, METRICS, dataset_name
from bench.report.paper import paper_cell, paper_rows
from bench.report.table import DEPTH_RULE, EACH_ITERATION, SEEDS_SPREAD, Column, Row, Side, Table
from bench.report.tables.trees import NO_PAPER, Read, at_iteration, tree_cell

ITERATIONS = (1, 2, 3)
LINES = (
    *(("waterbirds", "wga", "avg"), ("celeba", "wga", "avg")),
    *(("isic", "auroc_nonpatch", "auroc"), ("isic", "auroc_histopath", "auroc")),
    *(("umnist", "wga", "avg"), ("cmnist", "wga", "avg")),
)
"""The rows of the paper's depth table: dataset, worst-group metric, average metric."""


def depth_ablation(runs: Collection) -> Table:
    """Give the worst group's and the average performance at each iteration."""
    paper = {
        (r["dataset"], r["metric"], int(r["iteration"])): r for r in paper_rows("depth_ablation")
    }
    rows = []
    for name, worst, average in LINES:
        keys = [(metric, t) for t in ITERATIONS for metric in (worst, average)]
        abouts = [About("nct", name, metric, f"iteration {t}") for metric, t in keys]
        own = [
            tree_cell(runs, about, at_iteration(t, "test", metric), DIGITS[metric])
            for about, (metric, t) in zip(abouts, keys, strict=True)
        ]
        told = [
            paper_cell(paper[name, metric, t], about)
            for about, (metric, t) in zip(abouts, keys, strict=True)
        ]
        title = dataset_name(name)
        if name == "isic":
            title = f"{title} ({METRICS[worst]})"
        rows.append(Row((title, "measured"), _best(own), name, "measured"))
        rows.append(Row((title, "paper"), _best(told), name, "paper"))
    return Table(
        label="depth_ablation",
        title="Impact of depth",
        caption=(
            "Worst group and average at each iteration, on the test sets (AUROC for ISIC). Bold: "
            "best iteration of a row."
        ),
        stub=("Dataset", "Source"),
        columns=tuple(
            Column(title, f"Iteration {t}") for t in ITERATIONS for title in ("WGA", "Avg")
        ),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=EACH_ITERATION,
    )


def _best(cells: list[Cell]) -> tuple[Cell, ...]:
    """Mark the best iteration, of the worst group and of the average apart."""
    marked = list(cells)
    for first in (0, 1):
        known = [round(cell.mean, cell.digits) for cell in cells[first::2] if cell.mean is not None]
        for place in range(first, len(cells), 2):
            mean = cells[place].mean
            best = mean is not None and round(mean, cells[place].digits) == max(known)
            marked[place] = replace(cells[place], best=best and len(known) > 1)
    return tuple(marked)


def depth_diagnostics(runs: Collection) -> Table:
    """Give the validation proxy that the rule reads, in both readings of its groups."""
    paper = {(r["dataset"], int(r["iteration"])): r for r in paper_rows("depth_diagnostics")}
    rows = []
    for name in DATASETS:
        title = dataset_name(name) + (" (pseudo-AUROC)" if name == "isic" else "")
        for how, key in (("predicted leaf", "pwga2"), ("routed label", "pwga2_routed")):
            abouts = [About("nct", name, key, f"iteration {t}") for t in (2, 3)]
            cells = tuple(
                tree_cell(runs, about, at_iteration(t, key), 3)
                for about, t in zip(abouts, (2, 3), strict=True)
            )
            rows.append(Row((title, f"measured, by {how}"), cells, name, "measured"))
        told = tuple(
            paper_cell(paper[name, t], About("nct", name, "pwga2", f"iteration {t}"), 3)
            for t in (2, 3)
        )
        rows.append(Row((title, "paper"), told, name, "paper"))
    return Table(
        label="depth_diagnostics",
        title="Validation proxy by iteration",
        caption=(
            "pWGA2 on validation data, the value the depth rule reads: groups by predicted leaf "
            "(as the paper writes it, and what runs use) and by routed label."
        ),
        stub=("Dataset", "Source"),
        columns=(Column("Iteration 2"), Column("Iteration 3")),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=EACH_ITERATION,
    )


def pwga_corr(runs: Collection) -> Table:
    """Give the rank correlation of the proxy with the true metric over epochs."""
    paper = {row["dataset"]: row for row in paper_rows("pwga_corr")}
    columns = {"spearman_test": "Test", "spearman_val": "Validation"}
    rows = []
    for name in DATASETS:
        own = tuple(
            tree_cell(runs, About("nct", name, key), _plain(key), 2, "not recorded")
            for key in columns
        )
        told = (
            paper_cell(paper[name], About("nct", name, "spearman_test"), 2),
            empty(About("nct", name, "spearman_val"), NO_PAPER, "paper"),
        )
        rows.append(Row((dataset_name(name), "measured"), own, name, "measured"))
        rows.append(Row((dataset_name(name), "paper"), told, name, "paper"))
    return Table(
        label="pwga_corr",
        title="Quality of the proxy",
        caption=(
            "Spearman correlation, over the epochs of iterations 2 and 3, of validation pWGA2 "
            "with true WGA (non-patch AUROC for ISIC), held out and on validation data."
        ),
        stub=("Dataset", "Source"),
        columns=tuple(Column(title, "Spearman") for title in columns.values()),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection="none, every audited epoch counts",
    )


def _plain(key: str) -> Read:
    return lambda tree: tree.get(key)


def depth_choice(runs: Collection) -> Table:
    """Count the seeds for which the rule chose each iteration."""
    paper: dict[str, dict[int, int]] = {}
    for row in paper_rows("depth_choice"):
        paper.setdefault(row["dataset"], {})[int(row["iteration"])] = int(row["seeds"])
    rows = []
    for name in DATASETS:
        found = [run for run in runs.published("nct", name) if "nct" in run.record]
        ids = tuple(run.run_id for run in found)
        title = dataset_name(name)
        rules = (("measured, rule", "chosen_iteration"), ("measured, highest", "argmax_iteration"))
        for how, key in rules:
            chosen = Counter(int(run.record["nct"][key]) for run in found)
            reason = "" if found else runs.absence("nct", name)
            rows.append(_choices((title, how), name, key, chosen, "measured", ids, reason))
        told = Counter(paper[name])
        rows.append(_choices((title, "paper"), name, "chosen_iteration", told, "paper", (), ""))
    return Table(
        label="depth_choice",
        title="Depth chosen",
        caption=(
            "Number of seeds for which each iteration was chosen: by the depth rule as written, "
            "by the highest pWGA2 alone, and in the paper."
        ),
        stub=("Dataset", "Source"),
        columns=tuple(Column(f"Iteration {t}") for t in ITERATIONS),
        rows=tuple(rows),
        uncertainty="none, these are counts of seeds",
        selection=DEPTH_RULE,
        in_paper=False,
    )


def _choices(
    header: tuple[str, str],
    dataset: str,
    metric: str,
    chosen: Counter[int],
    source: Side,
    ids: tuple[str, ...],
    reason: str,
) -> Row:
    cells = []
    for t in ITERATIONS:
        about = About("nct", dataset, metric, f"iteration {t}")
        count = Cell(source, about, mean=float(chosen[t]), digits=0, run_ids=ids)
        cells.append(empty(about, reason) if reason else count)
    return Row(header, tuple(cells), section=dataset, source=source)
