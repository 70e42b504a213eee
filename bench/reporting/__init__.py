"""Reports from stored runs: tables, figures and a page, with a paper's numbers beside ours.

Nothing here knows a method, a dataset or a paper by name: titles and order come from the
registries, and what a paper adds are arguments of `build`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.reporting.collection import (
    Collection,
    Limits,
    Reference,
    ReportInput,
    TableBuilder,
    VariantSpec,
    clear_cached_tables,
    collect,
)
from bench.reporting.comparisons import paired_tests, training_time, worst_group_uncertainty
from bench.reporting.extended import extended_results
from bench.reporting.external import external_results
from bench.reporting.figure import (
    BOARDS,
    FORMATS,
    PARETO,
    TRAINING_TIME,
    FigureSpec,
    write_figures,
)
from bench.reporting.html import html_page
from bench.reporting.latex import build_pdf, document_source, table_source
from bench.reporting.leaderboard import FindingBuilder, Guide, leaderboard, leaders
from bench.reporting.main_table import left_out, main_results, smoke_runs
from bench.reporting.table import Table
from datasets.errors import UsageError, did_you_mean
from datasets.files import CHOSEN, atomic_file, storage_errors

__all__ = ["Collection", "FigureSpec", "Limits", "Outline", "Reference", "ReportInput"]
__all__ += ["PARETO", "TRAINING_TIME", "TableBuilder", "VariantSpec", "build", "build_pdf"]
__all__ += ["choose_tables", "collect", "external_results", "make_tables"]

# What is in a report without any paper.
GENERIC_TABLES: tuple[TableBuilder, ...] = (
    *(main_results, extended_results, worst_group_uncertainty, paired_tests, training_time),
    *(smoke_runs, left_out),
)
GENERIC_FIGURES = (PARETO, TRAINING_TIME)
PRINTED = ("pdf",)  # the format of what only the document shows


@dataclass(frozen=True)
class Outline:
    """How a report leads its reader: what it finds, and how its tables are ordered.

    Attributes:
        findings: what makes the sentences of the first screen, in order.
        topics: labels of tables by topic; those that none names come last.
        links: labels of the tables that every screen links to, and the words of the links.
    """

    findings: tuple[FindingBuilder, ...] = (leaders,)
    topics: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            "Results": ("main_results", "worst_group_uncertainty", "paired_tests"),
            "Costs": ("training_time",),
        }
    )
    links: Mapping[str, str] = field(
        default_factory=lambda: {"main_results": "Results", "training_time": "Costs"}
    )


def build(
    out: Path,
    given: ReportInput,
    tables: Sequence[TableBuilder] = GENERIC_TABLES,
    figures: Sequence[FigureSpec] = GENERIC_FIGURES,
    formats: Sequence[str] = FORMATS,
    outline: Outline | None = None,
) -> Path:
    """Write a report and return its page, which has everything in it.

    A partial or empty store gives one too, in which empty cells have reasons.

    `formats` are those of the figures' files; the page needs `svg`, and the document has figures
    only with `pdf`.
    """
    page, outline, has_pdf = out / "index.html", outline or Outline(), "pdf" in formats
    written: dict[Path, str] = {}
    shown = given.limited()
    with storage_errors(out, CHOSEN):  # known before anything is drawn
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    try:
        made = make_tables(given, tables)
        boards = leaderboard(shown)
        found = [one for builder in outline.findings for one in builder(shown, boards)]
        drawn = write_figures(shown, figures, out / "figures", formats)
        printed = write_figures(shown, (BOARDS,), out / "figures", PRINTED) if has_pdf else []
        for table in made:
            written[out / "tables" / f"{table.label}.csv"] = table.to_csv()
            written[out / "tables" / f"{table.label}.tex"] = table_source(table)
        guide = Guide(boards, found, outline.topics, outline.links)
        printed += drawn if has_pdf else []
        written[out / "main.tex"] = document_source(made, printed, given.reference, guide)
        written[page] = html_page(shown, made, drawn, guide)
    finally:
        clear_cached_tables()
    for path, text in written.items():
        with atomic_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return page


def make_tables(given: ReportInput, tables: Sequence[TableBuilder]) -> list[Table]:
    """Return the tables, with a note where one shows runs of an earlier version of a method."""
    made = []
    for table in (given.limits.of_table(build_table(given)) for build_table in tables):
        shown = (run_id for row in table.rows for cell in row.cells for run_id in cell.run_ids)
        note = given.runs.outdated_note(shown)
        made.append(replace(table, notes=(*table.notes, note)) if note else table)
    return made


def choose_tables(
    tables: Sequence[TableBuilder], wanted: Sequence[str], reference: Reference
) -> tuple[TableBuilder, ...]:
    """Return the builders of the tables with these labels; an unknown one is an error."""
    if not wanted:
        return tuple(tables)
    nothing = ReportInput(Collection(), Path(), reference)
    by_label = {_label(builder, wanted, nothing): builder for builder in tables}
    for label in wanted:
        if label not in by_label:
            known = [_label(builder, (), nothing) for builder in tables]
            raise UsageError(
                f"unknown table '{label}'{did_you_mean(label, known)}",
                f"choose from {', '.join(known)}",
            )
    return tuple(by_label[label] for label in dict.fromkeys(wanted))


def _label(builder: TableBuilder, wanted: Sequence[str], nothing: ReportInput) -> str:
    """Return the label of what a builder makes: most are named so, others are asked."""
    name = str(getattr(builder, "__name__", ""))
    return name if name in wanted else builder(nothing).label
