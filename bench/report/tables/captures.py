"""The capture rates that the paper gives in its text, measured beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from bench.report.cells import About
from bench.report.collection import Collection
from bench.report.names import dataset_name
from bench.report.paper import paper_cell, paper_rows
from bench.report.table import EACH_ITERATION, SEEDS_SPREAD, Column, Row, Table
from bench.report.tables.trees import Read, Tree, iteration, tree_cell
from datasets.base import Facts
from datasets.catalogue import DATASETS


def capture_rates(runs: Collection) -> Table:
    """Give the share of a group's test samples that reaches a leaf, where the paper names one."""
    rows = []
    for row in paper_rows("capture_rates"):
        name, t = row["dataset"], int(row["iteration"])
        dataset = DATASETS[name]
        facts = dataset.facts(dataset.config_type())
        about = About("nct", name, "capture", f"iteration {t} {row['group']} in {row['leaf']}")
        measured = tree_cell(runs, about, share(facts, t, row["group"], row["leaf"]), 1)
        header = (dataset_name(name), row["group"], row["leaf"])
        cells = (measured, paper_cell(row, about))
        rows.append(Row(header, cells, section=f"Iteration {t}"))
    return Table(
        label="capture_rates",
        title="Capture rates",
        caption=(
            "Share of a group's test samples (percent) that a leaf captures, for the groups and "
            "leaves that the paper's text names. E: easy, H: hard, by iteration; a star stands for "
            "all leaves that begin so; `own' is the leaf of the sample's own class."
        ),
        stub=("Dataset", "Group", "Leaf"),
        columns=(Column("Measured"), Column("Paper")),
        rows=tuple(rows),
        uncertainty=SEEDS_SPREAD,
        selection=EACH_ITERATION,
        notes=(
            "The paper calls two of its figures approximate: 79 (malignant) and 85 (digit 8).",
            "CMNIST: mean over the 5 aligned and over the 20 conflicting groups.",
        ),
        in_paper=False,
        section_titles=True,
    )


def share(facts: Facts, t: int, group: str, leaf: str) -> Read:
    """Make a reader of a group's share in the leaves that a pattern names.

    A union of groups is averaged over its groups; `own` is the class a group belongs to, which
    only a dataset with unions needs.
    """
    members = facts.unions.get(group)
    names = [facts.groups[i] for i in members] if members else [group]

    def read(tree: Tree) -> float | None:
        entry: Mapping[str, Any] | None = iteration(tree, t)
        if entry is None:
            return None
        return statistics.fmean(_captured(entry["capture"], facts, name, leaf) for name in names)

    return read


def _captured(
    capture: Mapping[str, Mapping[str, float]], facts: Facts, name: str, leaf: str
) -> float:
    pattern = leaf
    if leaf.startswith("own:"):
        of_class = facts.groups.index(name) // (len(facts.groups) // len(facts.classes))
        pattern = leaf.replace("own", facts.codes[of_class])
    reached = capture.get(name, {})
    return sum(part for found, part in reached.items() if fnmatchcase(found, pattern))
