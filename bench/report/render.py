"""One table, three renderings: CSV, LaTeX with booktabs, and a self-contained HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.files import atomic_file
from bench.report.cells import COLUMNS, Cell, Key, measured_cells, paper_cells

FIELDS = (
    *("table", "method", "dataset", "metric", "variant", "mean", "std", "n", "ci_low", "ci_high"),
    *("source", "reason", "run_ids"),
)
TITLES = {
    "wga": "WGA",
    "avg": "Avg",
    "auroc": "Overall",
    "auroc_nonpatch": "Non-Patch",
    "auroc_histopath": "Histopath.",
}
ESCAPES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
)


def write_report(records: Iterable[dict[str, Any]], out: Path) -> list[Path]:
    """Render the main table from stored runs."""
    paper = paper_cells()
    measured, left_out = measured_cells(records)
    metrics = [metric for own in COLUMNS.values() for metric in own]
    rows = []
    for method in dict.fromkeys(key[0] for key in (*measured, *paper)):
        rows.append(_row(method, "measured", measured, "not run"))
        rows.append(_row(method, "paper", paper, "not in the paper"))
    content = {
        "rows": rows,
        "columns": COLUMNS,
        "metrics": metrics,
        "titles": TITLES,
        "left_out": left_out,
    }
    written = {
        out / "tables" / "main_results.csv": _csv(measured, paper),
        out / "tables" / "main_results.tex": _latex().get_template("main.tex.j2").render(content),
        out / "index.html": _html().get_template("index.html.j2").render(content),
    }
    for path, text in written.items():
        with atomic_file(path) as draft:
            draft.write_text(text)
    return list(written)


def _row(
    method: str, source: Literal["measured", "paper"], cells: Mapping[Key, Cell], reason: str
) -> dict[str, Any]:
    empty = Cell(source, reason=reason)
    keys = [(method, dataset, metric) for dataset, own in COLUMNS.items() for metric in own]
    return {
        "method": method,
        "source": source,
        "cells": [(key[2], cells.get(key, empty)) for key in keys],
    }


def _html() -> Environment:
    return Environment(
        loader=PackageLoader("bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=True,
    )


def _latex() -> Environment:
    """Braces mean something in LaTeX, so its templates use other delimiters."""
    environment = Environment(
        loader=PackageLoader("bench.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
    )
    environment.filters["latex"] = lambda text: str(text).translate(ESCAPES)
    return environment


def _csv(measured: Mapping[Key, Cell], paper: Mapping[Key, Cell]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for cells in (measured, paper):
        for (method, dataset, metric), cell in cells.items():
            writer.writerow(
                {
                    "table": "main_results",
                    "method": method,
                    "dataset": dataset,
                    "metric": metric,
                    "mean": cell.mean,
                    "std": cell.std,
                    "n": cell.n,
                    "source": cell.source,
                    "reason": cell.reason,
                    "run_ids": " ".join(cell.run_ids),
                }
            )
    return text.getvalue()
