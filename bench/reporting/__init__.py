"""Reports from stored runs: tables, figures and a page, with a paper's numbers beside ours.

Nothing here knows a method, a dataset or a paper by name: titles and order come from the
registries, and what a paper adds are arguments of `build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.reporting.collection import (
    Collection,
    Reference,
    ReportInput,
    TableBuilder,
    VariantSpec,
    clear_cached_tables,
    collect,
)
from bench.reporting.comparisons import paired_tests, training_time, worst_group_uncertainty
from bench.reporting.extended import extended_results
from bench.reporting.figure import FORMATS, PARETO, TRAINING_TIME, FigureSpec, write_figures
from bench.reporting.html import html_page
from bench.reporting.latex import build_pdf, document_source, table_source
from bench.reporting.main_table import left_out, main_results, smoke_runs
from bench.reporting.table import Table
from datasets.files import atomic_file

__all__ = ["Collection", "FigureSpec", "Reference", "ReportInput", "TableBuilder", "VariantSpec"]
__all__ += ["PARETO", "TRAINING_TIME", "build", "build_pdf", "collect", "make_tables"]

# What is in a report without any paper.
GENERIC_TABLES: tuple[TableBuilder, ...] = (
    *(main_results, extended_results, worst_group_uncertainty, paired_tests, training_time),
    *(smoke_runs, left_out),
)
GENERIC_FIGURES = (PARETO, TRAINING_TIME)


def build(
    out: Path,
    given: ReportInput,
    tables: Sequence[TableBuilder] = GENERIC_TABLES,
    figures: Sequence[FigureSpec] = GENERIC_FIGURES,
    formats: Sequence[str] = FORMATS,
) -> Path:
    """Write a report and return its page, which has everything in it.

    A partial or empty store gives one too, in which empty cells have reasons.

    `formats` are those of the figures' files; the page needs `svg`, the document `pdf`.
    """
    page = out / "index.html"
    written: dict[Path, str] = {}
    try:
        made = make_tables(given, tables)
        drawn = write_figures(given, figures, out / "figures", formats)
        for table in made:
            written[out / "tables" / f"{table.label}.csv"] = table.to_csv()
            written[out / "tables" / f"{table.label}.tex"] = table_source(table)
        written[out / "main.tex"] = document_source(made, drawn, given.reference)
        written[page] = html_page(given, made, drawn)
    finally:
        clear_cached_tables()
    for path, text in written.items():
        with atomic_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return page


def make_tables(given: ReportInput, tables: Sequence[TableBuilder]) -> list[Table]:
    """Return the tables, with a note where one shows runs of an earlier version of a method."""
    made = []
    for table in (build_table(given) for build_table in tables):
        shown = (run_id for row in table.rows for cell in row.cells for run_id in cell.run_ids)
        note = given.runs.outdated_note(shown)
        made.append(replace(table, notes=(*table.notes, note)) if note else table)
    return made
