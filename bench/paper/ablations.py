"""The ablation tables of the paper, and of NCT+, a variant made here; a column or row a variant.

The paper's ablations take, for each seed, the better of iterations 2 and 3 on test. That is a
choice made on test data, and is labelled so wherever it is shown; the depth rule's own choice,
which is what the method would return, stands beside it. Default columns are the main runs. In the
paper they are the main table's, which the depth rule chose: some are below what iteration 2 alone
has there, as no better of two can be. So each cell is compared with the paper's by the selection
that the paper's has.

NCT+ has three tables on what its gain owes to what. Parts: whole and with one part changed.
Controls: NCT and NCT+ on other draws of CMNIST; where validation is dyed like training, its class
labels say nothing that training does not, so that calibration has nothing of that to gain.
Calibrated classes: what the code that calibrates the leaves of NCT+ gives to every other method,
with a bias a class and a common scale, fitted to stored validation scores and applied to stored
test scores; nothing is trained again. What leaves add beyond this is not owed to labels alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.paper.campaigns import CAMPAIGNS, MAIN_SEEDS, Variant
from bench.paper.numbers import paper_by, paper_cell, with_verdict
from bench.paper.trees import METHOD, Reader, TreeRecord, Trees, tree_table, with_trees
from bench.reporting.collection import Collection, ReportInput, Run, metric_by_seed, metric_values
from bench.reporting.main_table import VERDICTS, by_method, method_table
from bench.reporting.names import (
    dataset_columns,
    dataset_names,
    dataset_title,
    headline,
    method_title,
)
from bench.reporting.statistics import compare_with
from bench.reporting.table import Cell, CellKey, Column, Row, Table, columns, mark_best, paired_rows
from methods.base import get_method
from methods.metrics import worst_group_metric
from methods.nct.plus import PlusConfig, fit_calibration
from methods.presets import preset_config

DATASETS = ("waterbirds", "celeba", "cmnist", "umnist", "isic")
"""The paper's order of datasets in these tables."""

TEST_SELECTED = (
    "better of 2 and 3 is test-selected, as the paper's columns but the default one are; depth "
    "rule is what the method itself chose on validation data, as in the paper's default column"
)
LIKE_WITH_LIKE = (
    "The paper's default column is compared in the row of the depth rule, the others in that of "
    "the better of two. Its differences from the default are therefore too small where the default "
    "is best; compare columns within one measured row."
)
SEEDS_NOTE = (
    "A default column holds the main runs of the paper's five seeds, 0 to 4; other columns are a "
    "sweep of three, here as there."
)


def metric_at(tree: TreeRecord, t: int) -> float | None:
    """Return the test metric of the ablations: overall AUROC where there is one, else WGA."""
    iteration = tree.at(t)
    metrics = iteration.test.values if iteration is not None else {}
    return metrics.get("auroc", metrics.get("wga"))


def selected_on_test(tree: TreeRecord) -> float | None:
    """Return the better of iterations 2 and 3, chosen on test as the paper does."""
    return max((value for t in (2, 3) if (value := metric_at(tree, t)) is not None), default=None)


def selected_by_rule(tree: TreeRecord) -> float | None:
    """Return the metric of the iteration that the method chose, without looking at test."""
    return metric_at(tree, tree.chosen_iteration)


SELECTORS: Mapping[str, Reader] = {
    "better of 2 and 3 (test-selected)": selected_on_test,
    "depth rule": selected_by_rule,
}
TERMINAL_COLUMNS: Mapping[str, Reader] = {
    "iteration 2": partial(metric_at, t=2),
    "iteration 3": partial(metric_at, t=3),
    "iteration chosen by the depth rule": selected_by_rule,
    "better of iterations 2 and 3 (test-selected, as published)": selected_on_test,
}
"""What `bench campaign` prints of an ablation, by the title of the column."""


def abl_minsamples(given: ReportInput) -> Table:
    """Compare merging of sparse nodes with none, at iterations 2 and 3."""
    campaign = CAMPAIGNS["ablation-merging"]
    settings = [(variant, t) for t in (2, 3) for variant in campaign.variants]
    paper = paper_by("abl_minsamples", "dataset", "iteration", "variant")
    rows: list[Row] = []
    for name in DATASETS:
        measured_cells, paper_cells = [], []
        for variant, t in settings:
            key = CellKey(METHOD, name, headline(name), f"{variant.name} iteration {t}")
            trees = Trees(with_trees(given.runs.variant(campaign.name, variant.name, name)))
            measured_cells.append(trees.cell(key, partial(metric_at, t=t)))
            row = paper[name, str(t), variant.title.lower()]
            paper_cells.append(paper_cell(row, key, n=len(campaign.default_seeds)))
        title = dataset_title(name, headline(name))
        marked, paper_marked = (
            (*mark_best(cells[:2], mark_ties=False), *mark_best(cells[2:], mark_ties=False))
            for cells in (with_verdict(measured_cells, paper_cells), paper_cells)
        )
        rows += paired_rows((title,), {"measured": marked}, paper_marked, title)
    return tree_table(
        label="abl_minsamples",
        title="Sparse-node merging",
        caption="No merging (threshold 0) against the default threshold, at each iteration.",
        columns=tuple(Column(variant.title, f"Iteration {t}") for variant, t in settings),
        rows=tuple(rows),
        notes=("Three seeds in both columns, as in the paper.", VERDICTS),
    )


def _by_variant(
    given: ReportInput, name: str, title: str, caption: str, *, in_paper: bool = True
) -> Table:
    """Return a table with a column a variant; the paper's file names them by their values."""
    campaign = CAMPAIGNS[name]
    paper = paper_by(campaign.table, "dataset", "variant") if in_paper else {}
    rows: list[Row] = []
    for dataset in DATASETS:
        metric = headline(dataset)
        header = dataset_title(dataset, metric)
        is_default = [repeats_preset(variant, dataset) for variant in campaign.variants]
        keys = [CellKey(METHOD, dataset, metric, variant.name) for variant in campaign.variants]
        found = (given.runs.variant(name, key.variant, dataset) for key in keys)
        by_column = [Trees(with_trees(runs)) for runs in found]
        paper_cells = [
            paper_cell(paper[dataset, value], key, n=len(MAIN_SEEDS if default else variant.seeds))
            for variant, key, default in zip(campaign.variants, keys, is_default, strict=True)
            for value in variant.overrides.values()
            if in_paper
        ]
        measured = {}
        for selector, read in SELECTORS.items():
            cells = [
                trees.cell(replace(key, variant=f"{key.variant}; {selector}"), read)
                for trees, key in zip(by_column, keys, strict=True)
            ]
            if paper_cells:
                judged = with_verdict(cells, paper_cells)
                # Selected as the paper's cell is.
                alike = [default == (read is selected_by_rule) for default in is_default]
                both = zip(alike, judged, cells, strict=True)
                cells = [verdict if same else cell for same, verdict, cell in both]
            measured[f"measured, {selector}"] = mark_best(cells, mark_ties=False)
        paper_marked = mark_best(paper_cells, mark_ties=False)
        rows += paired_rows((header,), measured, paper_marked, header)
    return tree_table(
        label=campaign.table,
        title=title,
        caption=caption,
        columns=tuple(Column(variant.title) for variant in campaign.variants),
        rows=tuple(rows),
        selection=TEST_SELECTED,
        notes=(SEEDS_NOTE, LIKE_WITH_LIKE, VERDICTS) if in_paper else (SEEDS_NOTE,),
        in_paper=in_paper,
    )


def repeats_preset(variant: Variant, dataset: str) -> bool:
    """Return whether a column is a dataset's default one."""
    preset = preset_config(get_method(METHOD), dataset)
    settings = variant.overrides.items()
    return all(str(getattr(preset, name.partition(".")[2])) == value for name, value in settings)


ablation_trainable = partial(
    _by_variant,
    name="ablation-scope",
    title="Trainable scope",
    caption="Standard two-phase training, heads only, and full fine-tuning.",
)
abl_split = partial(
    _by_variant,
    name="ablation-heads",
    title="Head architecture",
    caption="Both children linear, both MLP, linear easy with MLP hard (default), and reversed.",
)
aux_sweep = partial(
    _by_variant,
    name="ablation-aux",
    title="Auxiliary loss",
    caption="The weight of the parents' loss; the default differs from dataset to dataset.",
)
abl_sampling = partial(  # which the paper announces without a table
    _by_variant,
    name="ablation-sampling",
    title="Node sampling",
    caption="Three ways to balance nodes; the default differs from dataset to dataset.",
    in_paper=False,
)

abl_checkpoint = partial(  # a reading of ours, like the next
    _by_variant,
    name="ablation-checkpoint",
    title="Epoch kept by an iteration",
    caption="The best epoch of phase 2, or of both phases.",
    in_paper=False,
)
abl_pwga = partial(
    _by_variant,
    name="ablation-pwga",
    title="Groups of pWGA2",
    caption="Validation samples grouped by the label they are routed to, or by predicted leaf.",
    in_paper=False,
)

PARTS = CAMPAIGNS["plus-parts"]
CONTROLS = CAMPAIGNS["plus-controls"]
UNCERTAINTY = f"{Table.uncertainty}; differences: the 95% t-interval over the shared seeds"


def plus_parts(given: ReportInput) -> Table:
    """Take the parts of NCT+ away one by one, and fit its calibration elsewhere."""
    (method,), (dataset,), whole = PARTS.methods, PARTS.datasets, PARTS.variants[0]
    all_parts = given.runs.variant(PARTS.name, whole.name, dataset)
    rows = []
    for variant in PARTS.variants:
        changed = given.runs.variant(PARTS.name, variant.name, dataset)
        key = CellKey(method, dataset, headline(dataset), variant.name)
        gain = replace(key, variant=f"{variant.name}; minus all parts")
        itself = gain.empty("this is the whole")
        lead = itself if variant is whole else _difference(changed, all_parts, gain)
        rows.append(Row((variant.title,), (_mean(changed, key), lead)))
    return Table(
        label=PARTS.table,
        title="Parts of NCT+",
        caption=(
            "NCT+, a variant made here, whole and with one part changed, and the difference to the "
            "whole on the same seeds. Calibration uses validation class labels: all of them, half "
            "(the other half then chooses checkpoint and depth), or those of as many training "
            "images instead."
        ),
        row_headers=("Variant",),
        columns=columns([dataset_title(dataset, headline(dataset))], ("Mean", "Difference")),
        rows=tuple(rows),
        notes=(
            "Three seeds where a part is changed, as in the paper's sweeps; five of the whole, and "
            "without calibration.",
        ),
        uncertainty=UNCERTAINTY,
        in_paper=False,
    )


def plus_controls(given: ReportInput) -> Table:
    """Compare NCT+ with NCT on other draws of the data."""
    (plain, plus), (dataset,) = CONTROLS.methods, CONTROLS.datasets
    rows = []
    for variant in CONTROLS.variants:
        found = given.runs.variant(CONTROLS.name, variant.name, dataset)
        own = {name: [run for run in found if run.job.method == name] for name in CONTROLS.methods}
        means = [_mean(own[m], CellKey(m, dataset, "wga", variant.name)) for m in own]
        gain = CellKey(plus, dataset, "wga", f"{variant.name}; minus {plain}")
        cells = (*means, _difference(own[plus], own[plain], gain))
        rows.append(Row((dataset_title(dataset), variant.title), cells))
    return Table(
        label=CONTROLS.table,
        title="Controls of NCT+",
        caption=(
            "Test worst-group accuracy on the data of the main table, with the training colours of "
            "CnC's generator, and with validation dyed by the rule of training (30 conflicting "
            "images), and the gain of NCT+ over NCT on the same seeds with its 95% t-interval."
        ),
        row_headers=("Dataset", "Data"),
        columns=(Column(method_title(plain)), Column(method_title(plus)), Column("Gain")),
        rows=tuple(rows),
        notes=(
            "Biased validation takes more away than the calibration's labels: conflicting cells "
            "have one or two images, too few to count in the cell-pWGA that chooses the checkpoint "
            "of NCT+, and NCT's pWGA2 counts only leaves that some image reaches, so that neither "
            "need notice a tree that tells no conflicting image apart.",
        ),
        uncertainty=UNCERTAINTY,
        in_paper=False,
    )


def _mean(runs: Sequence[Run], key: CellKey) -> Cell:
    values = metric_values(runs, key.metric)
    return key.averaged(values) if values else key.empty("not run")


def _difference(ours: Sequence[Run], theirs: Sequence[Run], key: CellKey) -> Cell:
    """Return our mean lead over theirs on the seeds that both have, with its 95% interval."""
    mine, yours = (metric_by_seed(runs, key.metric) for runs in (ours, theirs))
    seeds = mine.keys() & yours.keys()
    if not seeds:
        return key.empty("no shared seeds")
    (gain,) = compare_with({"ours": mine, "theirs": yours}, ["theirs"])
    note = "one seed" if gain.n == 1 else "the same on every seed"
    if gain.low is not None and gain.high is not None:
        note = f"95%: {gain.low:+.{key.digits}f} to {gain.high:+.{key.digits}f}"
    run_ids = sorted(run.run_id for run in (*ours, *theirs) if run.job.seed in seeds)
    return key.difference(gain, note, tuple(run_ids))


def class_calibration(given: ReportInput) -> Table:
    """Compare worst-group accuracy with calibrated classes with that of the main table."""
    names = [name for name in dataset_names() if headline(name) == "wga"]
    return method_table(
        label="class_calibration",
        title="Calibrated classes",
        caption=(
            "Test worst-group accuracy of the main runs after a bias for each class and a common "
            "scale were fitted to the run's validation scores on class labels alone, and its "
            "difference from the main table. A control for NCT+, which calibrates leaves."
        ),
        columns=dataset_columns(names, "Calibrated", "Gain"),
        rows=by_method(given, names, _calibrated),
        notes=("Scores are kept in half precision. DFR and ExMap were fitted on validation too.",),
    )


def _calibrated(runs: Collection, method: str, dataset: str) -> list[Cell]:
    """Return the calibrated worst group, and how much more that is."""
    keys = [CellKey(method, dataset, "wga", kind) for kind in ("calibrated", "gain")]
    found = runs.published(method, dataset)
    after, gain = [], []
    for run in found:
        value, before = calibrated_wga(run), run.record.test.wga
        if value is not None and before is not None:
            after.append((value, run.run_id))
            gain.append((value - before, run.run_id))
    if not after:
        reason = "no scores kept" if found else runs.absence(method, dataset)
        return [key.empty(reason) for key in keys]
    return [key.averaged(own) for key, own in zip(keys, (after, gain), strict=True)]


def calibrated_wga(run: Run) -> float | None:
    """Calibrate a run's classes on its validation scores and return the test worst group."""
    table = run.predictions()
    if table is None or "score_0" not in table:
        return None
    names = [name for name in table if str(name).startswith("score_")]
    val, test = (table[table["split"] == split] for split in ("val", "test"))
    if val.empty or test.empty:
        return None
    scores, test_scores = (torch.tensor(own[names].to_numpy("float32")) for own in (val, test))
    y, test_y, groups = (
        torch.tensor(column.to_numpy("int64")) for column in (val["y"], test["y"], test["group"])
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a few thousand scores: others would only wait, at full load
    try:
        calibration = fit_calibration(scores, y, len(names), PlusConfig.penalty)
        return worst_group_metric(calibration(test_scores), test_y, groups, "wga")
    finally:
        torch.set_num_threads(threads)
