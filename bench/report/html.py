"""The page: one file with everything in it, that asks nothing of a network or a server.

Text from data is escaped by the template, and what scripts read is JSON in which no character can
end its element. A content security policy says the same to the browser: nothing may be fetched,
and no script but the page's own may run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bench.development import shown_split
from bench.files import to_json
from bench.report.collection import Collection, Kind, Run
from bench.report.figures.files import WrittenFigure
from bench.report.leaf_samples import leaf_samples
from bench.report.names import HEADLINE, dataset_name, method_name
from bench.report.run_details import run_details
from bench.report.table import Table

KINDS: tuple[Kind, ...] = ("published", "variant", "trial", "left out")
IN_SCRIPT = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def html_page(
    tables: Sequence[Table],
    figures: Sequence[WrittenFigure],
    runs: Collection,
    data_root: Path | None = None,
) -> str:
    """Render the page; leaves of trees show images where the runs' data lies in `data_root`."""
    loader = PackageLoader("bench.report")
    environment = Environment(
        loader=loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {"inline_svg": inline_svg, "sort_value": sort_value}
    script, style = (loader.get_source(environment, f"page.{kind}")[0] for kind in ("js", "css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    samples = leaf_samples(runs.runs, data_root)
    shared = Shared()
    details = [
        (
            run.run_id,
            script_json(shared.cut({**run_details(run), "samples": samples.get(run.run_id)})),
        )
        for run in runs.runs
    ]
    content: dict[str, Any] = {
        "script": Markup(script),
        "style": Markup(style),
        "script_digest": digest,
        "tables": [table for table in tables if not table.aside],
        "apart": [table for table in tables if table.aside],
        "figures": [figure for figure in figures if not figure.trial],
        "trial_figures": [figure for figure in figures if figure.trial],
        "runs": [run_row(run) for run in runs.runs],
        "kinds": {kind: len(runs.of_kind(kind)) for kind in KINDS},
        "details": details,
        "shared": script_json(shared.values),
    }
    return environment.get_template("page.html.j2").render(content)


class Shared:
    """What many runs have in common, kept once: environments and configurations."""

    KEYS = ("environment", "config")

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def cut(self, details: dict[str, Any]) -> dict[str, Any]:
        """Put the place of a shared value where the value was."""
        return details | {key: self._place(details[key]) for key in self.KEYS if key in details}

    def _place(self, value: Any) -> int:
        text = to_json(value)
        if text not in self._known:
            self._known[text] = len(self.values)
            self.values.append(value)
        return self._known[text]


def run_row(run: Run) -> dict[str, Any]:
    """Give the line of a run in the list of all runs."""
    record = run.record
    developed = shown_split(record["seed"]) == "val"  # no test figure to be seen in passing
    test = {} if developed else record.get("metrics", {}).get("test", {})
    metric = HEADLINE.get(str(record["dataset"]), "wga")
    return {
        "id": run.run_id,
        "method": method_name(str(record["method"])),
        "dataset": dataset_name(str(record["dataset"])),
        "seed": record["seed"],
        "kind": run.kind,
        "reason": run.reason or run.record.get("variant", ""),
        "worst": test.get(metric),
        "average": test.get("avg"),
        "digits": 3 if metric.startswith("auroc") else 1,
        "tree": "nct" in record,
    }


def script_json(value: Any) -> Markup:
    """Write JSON that can stand inside a script element whatever it contains."""
    compact = json.dumps(json.loads(to_json(value)), separators=(",", ":"), ensure_ascii=False)
    return Markup(compact.translate(IN_SCRIPT))


def sort_value(text: str) -> str:
    """Give what a text sorts by: the number it begins with, if it begins with one."""
    number = re.match(r"[+-]?[\d,]*\.?\d+", text)
    return number[0].replace(",", "") if number else text.lower()


def inline_svg(figure: WrittenFigure) -> Markup:
    """Make a drawing part of the page: no prolog, no style for others, and ids of its own."""
    svg = figure.svg[figure.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{figure.name}-", svg)
    size = re.search(r'width="([\d.]+)pt"', svg)
    width = f"{float(size[1]):.0f}pt" if size else "100%"
    svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 style="width:{width}"', svg, count=1)
    return Markup(
        svg.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(figure.title)}"', 1)
    )
