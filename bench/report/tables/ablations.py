"""The ablation tables, one column a campaign's variant; default columns are the main runs.

The paper takes, for each seed, the better of iterations 2 and 3 on test. That figure is shown as
it was published, labelled for what it is, with the depth rule's own choice in a row beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from bench.ablation import at_iteration, selected_by_rule, selected_on_test
from bench.campaigns import CAMPAIGNS, Campaign
from bench.report.cells import DIGITS, About, Cell, averaged, empty
from bench.report.collection import Collection
from bench.report.names import HEADLINE, dataset_name
from bench.report.paper import paper_cell, paper_rows, verdict
from bench.report.table import EACH_ITERATION, SEEDS_SPREAD, Column, Row, Side, Table

Read = Callable[[Mapping[str, Any]], float | None]
"""Takes a value from a record."""

ORDER = ("waterbirds", "celeba", "cmnist", "umnist", "isic")
"""The paper's order of datasets in these tables."""

TEST_SELECTED = (
    "better of 2 and 3 is test-selected, as published; depth rule is what the method itself chose "
    "on validation data"
)
SELECTORS: dict[str, Read] = {
    "better of 2 and 3 (test-selected)": selected_on_test,
    "depth rule": selected_by_rule,
}
JUDGED = "Within, above, below: our mean against the paper's, by the paper's spread."
NOTES = ("A default column holds the main runs; other columns are a sweep of three seeds.",)


def ablation_trainable(runs: Collection) -> Table:
    """Compare what is trained: heads then all, heads only, all at once."""
    return _by_variant(
        runs,
        "ablation-scope",
        "Trainable scope",
        "Standard two-phase training, heads only, and full fine-tuning.",
    )


def abl_split(runs: Collection) -> Table:
    """Compare kinds of heads for easy and hard children."""
    return _by_variant(
        runs,
        "ablation-heads",
        "Head architecture",
        "Both children linear, both MLP, linear easy with MLP hard (default), and reversed.",
    )


def aux_sweep(runs: Collection) -> Table:
    """Sweep the weight of the auxiliary loss."""
    return _by_variant(
        runs,
        "ablation-aux",
        "Auxiliary loss",
        "The weight of the parents' loss; the default differs from dataset to dataset.",
    )


def abl_sampling(runs: Collection) -> Table:
    """Compare sampling strategies, which the paper announces without a table."""
    return _by_variant(
        runs,
        "ablation-sampling",
        "Node sampling",
        "Three ways to balance nodes; the default differs from dataset to dataset.",
        in_paper=False,
    )


def abl_minsamples(runs: Collection) -> Table:
    """Compare merging of sparse nodes with none, at iterations 2 and 3."""
    campaign = CAMPAIGNS["ablation-merging"]
    paper = {
        (row["dataset"], row["iteration"], row["variant"]): row
        for row in paper_rows("abl_minsamples")
    }
    rows = []
    for name in ORDER:
        own, told = [], []
        for t in (2, 3):
            for variant in campaign.variants:
                metric = HEADLINE[name]
                about = About("nct", name, metric, f"{variant.name} iteration {t}")
                read = partial(at_iteration, iteration=t)
                own.append(_cell(runs, campaign, variant.name, about, read))
                key = (name, str(t), variant.title.lower())
                told.append(paper_cell(paper[key], about))
        for source, cells in (("measured", _judged(own, told)), ("paper", told)):
            marked = [*_best_marked(cells[:2]), *_best_marked(cells[2:])]
            rows.append(_row(name, source, marked))
    return Table(
        label="abl_minsamples",
        title="Sparse-node merging",
        caption="No merging (threshold 0) against the default threshold, at each iteration.",
        stub=("Dataset", "Source"),
        columns=tuple(
            Column(variant.title, f"Iteration {t}") for t in (2, 3) for variant in campaign.variants
        ),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=EACH_ITERATION,
        notes=("Three seeds in both columns, as in the paper.", JUDGED),
    )


def _by_variant(
    runs: Collection, name: str, title: str, caption: str, *, in_paper: bool = True
) -> Table:
    """Build a table with a column for each variant; the paper's file names them by their value."""
    campaign = CAMPAIGNS[name]
    (method,) = campaign.methods
    rows_of = paper_rows(campaign.table) if in_paper else ()
    paper = {(row["dataset"], row["variant"]): row for row in rows_of}
    rows = []
    for dataset in ORDER:
        metric = HEADLINE[dataset]
        abouts = [About(method, dataset, metric, variant.name) for variant in campaign.variants]
        told = [
            paper_cell(paper[dataset, next(iter(variant.overrides.values()))], about)
            for variant, about in zip(campaign.variants, abouts, strict=True)
            if in_paper
        ]
        for selector, read in SELECTORS.items():
            labelled = [replace(about, variant=f"{about.variant}; {selector}") for about in abouts]
            own = [
                _cell(runs, campaign, variant.name, about, read)
                for variant, about in zip(campaign.variants, labelled, strict=True)
            ]
            if told and read is selected_on_test:  # as the paper selects
                own = _judged(own, told)
            rows.append(_row(dataset, f"measured, {selector}", _best_marked(own)))
        if told:
            rows.append(_row(dataset, "paper", _best_marked(told)))
    return Table(
        label=campaign.table,
        title=title,
        caption=caption,
        stub=("Dataset", "Source"),
        columns=tuple(Column(variant.title) for variant in campaign.variants),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=TEST_SELECTED,
        notes=(*NOTES, JUDGED) if in_paper else NOTES,
        in_paper=in_paper,
    )


def _cell(runs: Collection, campaign: Campaign, variant: str, about: About, read: Read) -> Cell:
    found = runs.variant(campaign.name, variant, about.dataset)
    values = [
        (value, run.run_id)
        for run in found
        if "nct" in run.record and (value := read(run.record)) is not None
    ]
    if not values:
        return empty(about, "not reached" if found else "not run")
    return averaged(values, about, DIGITS[about.metric])


def _judged(own: list[Cell], told: list[Cell]) -> list[Cell]:
    """Note beside each of our cells how it compares with the paper's."""
    return [replace(cell, note=verdict(cell, paper)) for cell, paper in zip(own, told, strict=True)]


def _best_marked(cells: list[Cell]) -> list[Cell]:
    """Mark the best of some cells, unless they all read the same."""
    known = {round(cell.mean, cell.digits) for cell in cells if cell.mean is not None}
    return [
        replace(cell, best=len(known) > 1 and round(cell.mean, cell.digits) == max(known))
        if cell.mean is not None
        else cell
        for cell in cells
    ]


def _row(dataset: str, source: str, cells: list[Cell]) -> Row:
    side: Side = "paper" if source == "paper" else "measured"
    name = dataset_name(dataset, HEADLINE[dataset])
    return Row((name, source), tuple(cells), name, side)
