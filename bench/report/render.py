"""Writing the report: tables as CSV and LaTeX, figures, the document and the page around them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.files import atomic_file
from bench.report.collection import Collection
from bench.report.figures.files import WrittenFigure, write_figures
from bench.report.html import html_page
from bench.report.latex import document_source, table_source
from bench.report.tables import all_tables


def write_report(runs: Collection, out: Path, data_root: Path) -> list[Path]:
    """Render everything from stored runs; a partial or empty store renders too."""
    tables = all_tables(runs, data_root)
    figures = write_figures(runs, out / "figures", data_root)
    written: dict[Path, str] = {}
    for table in tables:
        written[out / "tables" / f"{table.label}.csv"] = table.to_csv()
        written[out / "tables" / f"{table.label}.tex"] = table_source(table)
    written[out / "main.tex"] = document_source(tables, figure_captions(figures))
    written[out / "index.html"] = html_page(tables, figures, runs, data_root)
    for path, text in written.items():
        with atomic_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    drawn = [out / "figures" / f"{figure.name}.pdf" for figure in figures if not figure.reason]
    return [*written, *drawn]


def figure_captions(figures: Iterable[WrittenFigure]) -> dict[str, str]:
    """Give the caption of every drawn figure by its file; trials say first that they are."""
    warning = "Stand-in data or quick runs, not results. "
    return {
        f"{figure.name}.pdf": " ".join((warning * figure.trial + figure.caption, *figure.notes))
        for figure in figures
        if not figure.reason
    }
