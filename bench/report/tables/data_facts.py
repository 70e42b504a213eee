"""The tables of the data: sizes of splits and of training groups, counted where data is on disk."""

from __future__ import annotations

from collections.abc import Mapping

from bench.report.cells import About, Cell, empty
from bench.report.names import dataset_name
from bench.report.paper import paper_rows
from bench.report.recount import Counted
from bench.report.table import NO_UNCERTAINTY, Column, Row, Table
from datasets.base import SPLITS

NOT_A_CHOICE = "none, no model takes part"
COUNTED = (
    "Recounted: from the labels on disk. Expected: the protocol's constants, asserted when the "
    "data is loaded; it is not on disk here."
)


def dataset_summary(counted: Mapping[str, Counted]) -> Table:
    """Put each dataset's task and sizes above the paper's."""
    rows = []
    for row in paper_rows("dataset_summary"):
        name, own = row["dataset"], counted[row["dataset"]]
        words = [
            Cell("measured", About("", name, key), label=getattr(own.facts, key))
            for key in ("task", "spurious")
        ]
        sizes = [_count(own, name, split, own.splits.get(split), split) for split in SPLITS]
        how = "recounted" if own.source == "measured" else "expected"
        rows.append(Row((dataset_name(name), how), (*words, *sizes), name, "measured"))
        told = [Cell("paper", About("", name, key), label=row[key]) for key in ("task", "spurious")]
        numbers = [
            Cell("paper", About("", name, "samples", split), mean=float(row[split]), digits=0)
            for split in SPLITS
        ]
        rows.append(Row((dataset_name(name), "paper"), (*told, *numbers), name, "paper"))
    return Table(
        label="dataset_summary",
        title="Dataset summary",
        caption="Tasks, spurious attributes and split sizes.",
        stub=("Dataset", "Source"),
        columns=(
            Column("Task", align="l"),
            Column("Spurious attribute", align="l"),
            *(Column(split.title(), align="r") for split in SPLITS),
        ),
        rows=tuple(rows),
        uncertainty=NO_UNCERTAINTY,
        selection=NOT_A_CHOICE,
        notes=(COUNTED,),
    )


def group_distributions(counted: Mapping[str, Counted]) -> Table:
    """Put the training set's groups beside the paper's; many small groups are added up."""
    by_dataset: dict[str, list[dict[str, str]]] = {}
    for row in paper_rows("group_distributions"):
        by_dataset.setdefault(row["dataset"], []).append(row)
    rows = []
    for name, told in by_dataset.items():
        own = counted[name]
        groups = _shown_groups(own)
        for row, (group, size) in zip(told, groups.items(), strict=True):
            share = None if size is None else 100 * size / own.splits["train"]
            title = f"{row['group']} (minority)" if row["minority"] == "1" else row["group"]
            number, percent = About("", name, "samples", group), About("", name, "percent", group)
            cells = (
                _count(own, name, group, size, "train"),
                Cell(own.source, percent, mean=share, reason=own.reason),
                Cell("paper", number, mean=float(row["count"]), digits=0),
                Cell("paper", percent, mean=float(row["percent"])),
            )
            rows.append(Row((dataset_name(name), title), cells, section=name))
    return Table(
        label="group_distributions",
        title="Group distributions",
        caption="Training samples of each group; CMNIST's 25 groups as aligned and conflicting.",
        stub=("Dataset", "Group"),
        columns=(
            Column("Count", "Here", "r"),
            Column("%", "Here", "r"),
            Column("Count", "Paper", "r"),
            Column("%", "Paper", "r"),
        ),
        rows=tuple(rows),
        uncertainty=NO_UNCERTAINTY,
        selection=NOT_A_CHOICE,
        notes=(COUNTED, _counted_here(counted)),
    )


def _shown_groups(own: Counted) -> dict[str, int | None]:
    """Give the training size of each group, or of each named union of groups."""
    named = own.facts.unions or {name: (i,) for i, name in enumerate(own.facts.groups)}
    sizes = own.groups.get("train")
    return {
        name: None if sizes is None else sum(sizes[i] for i in members)
        for name, members in named.items()
    }


def _counted_here(counted: Mapping[str, Counted]) -> str:
    found = [dataset_name(name) for name, own in counted.items() if own.source == "measured"]
    return f"Recounted here: {', '.join(found) or 'none'}."


def _count(own: Counted, dataset: str, variant: str, size: int | None, split: str) -> Cell:
    about = About("", dataset, "samples", variant)
    if size is None:
        return empty(about, f"no published {split} count, and none on disk", "expected")
    return Cell(own.source, about, mean=float(size), reason=own.reason, digits=0)
