"""The page: one file with everything in it, that asks nothing of a network or a server.

Its first screen answers the question: on each dataset that has runs, how the methods compare. All
else is below in sections that open when they are wanted, the tables among them. What is heavy, the
details of runs and the drawings, is compressed inside the file, and the page inflates it when it is
asked for: a page of thousands of runs opens at once.

Text from data is escaped by the template, and what scripts read is JSON in which no character can
end its element. A content security policy states the same to the browser: nothing may be fetched,
and no script but the page's own may run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from bench.job import shown_split
from bench.record import Metrics, Record
from bench.reporting import names
from bench.reporting.collection import Kind, ReportInput, Run, grouped, load_split
from bench.reporting.figure import WrittenFigure, shown_groups
from bench.reporting.latex import TemplateFolder
from bench.reporting.leaderboard import LABELS, Board, Guide, by_topic, datasets_without_runs
from bench.reporting.table import Cell, CellKey, Row, Table
from datasets.base import Facts, LabelledSplit
from datasets.catalogue import load_datasets
from datasets.errors import BenchError
from datasets.files import digest, to_json

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATES = Path(__file__).parent / "templates"
KINDS: tuple[Kind, ...] = ("published", "variant", "smoke", "left out")
IN_SCRIPT = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)
CURVE_POINTS = 40
CURVES = ("loss", "selection", "audit_val_wga", "audit_test_wga")
SHOWN_KEYS = (
    *("run_id", "status", "method", "method_version", "dataset", "protocol", "data_fingerprint"),
    *("standin", "quick", "preset", "overrides", "variant", "seed", "supervision", "selection"),
    *("command", "config", "environment", "git", "stages", "device", "threads", "failure"),
    *("peak_memory_bytes", "partition"),
)
RUNS_A_BLOB = 12  # details that are inflated together: neighbours have much in common
TREE_KEYS = ("argmax_iteration", "stop_reason", "spearman_val", "spearman_test")
IMAGES_PER_LEAF = 6
MAX_TREES = 12  # that get images: a page must not grow with every seed
LARGEST_EXACT = 40  # images up to this side are kept as they are, others become thumbnails
THUMBNAIL = 72
SQUARE, DIAMOND = "M-4.6-4.6H4.6V4.6H-4.6Z", "M0-6.2L6.2 0 0 6.2-6.2 0Z"


def html_page(
    given: ReportInput,
    tables: Sequence[Table],
    figures: Sequence[WrittenFigure],
    guide: Guide | None = None,
) -> str:
    """Return the page; leaves of trees show images where the runs' data lies in the data root."""
    guide = guide or Guide()
    runs = given.runs
    place = {run.run_id: number for number, run in enumerate(runs.runs)}
    environment = TemplateFolder(autoescape=True)
    environment.filters |= {
        **{"sort_value": sort_value, "tip": tip, "dot": dot},
        "run_numbers": lambda cell: run_numbers(cell, place),
    }
    script = (TEMPLATES / "page.js").read_text("utf-8")
    styles = ((TEMPLATES / f"{name}.css").read_text("utf-8") for name in ("page", "report"))
    topics = by_topic([table for table in tables if not table.appendix], guide.topics)
    index, blobs = run_index(runs.runs), run_blobs(given)
    views = {table.label: TableView.of(table) for table in tables}
    labels = views.keys()
    drawn = {figure.name: blob(standalone_svg(figure)) for figure in figures if figure.svg}
    content: dict[str, object] = {
        "script": Markup(script),
        "style": Markup("\n".join(styles)),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "reference": given.reference,
        "guide": guide,
        "tier_words": LABELS,
        "marks": tier_marks(guide.boards),
        "without_runs": [
            title
            for title in datasets_without_runs(given)
            if title not in {board.title for board in guide.boards}  # of runs that are no results
        ],
        "topics": [(topic, [views[t.label] for t in own]) for topic, own in topics],
        "appendix": [view for view in views.values() if view.table.appendix],
        "table_labels": labels,
        "links": [(label, text) for label, text in guide.links.items() if label in labels],
        "all_figures": figures,
        "runs": runs.runs,
        "unreadable": runs.unreadable,
        "kinds": {kind: runs.count(kind) for kind in KINDS},
        "exceptions": names.headline_exceptions(),
        "has_trees": any(row[10] for row in index["runs"]),
        "index": script_json(index),
        "blobs": {**{f"runs-{number}": text for number, text in enumerate(blobs)}, **drawn},
    }
    return environment.get_template("page.html.j2").render(content)


@dataclass(frozen=True)
class TableView:
    """A table as the page shows it: what no run is behind is folded away until it is asked for."""

    table: Table
    folded_columns: tuple[bool, ...]
    folded_rows: frozenset[int]  # by their place in the table
    folded: tuple[str, ...] = ()  # titles of the datasets that have no run in it
    empty: bool = False  # nothing in it was measured, and all is shown

    @staticmethod
    def of(table: Table) -> TableView:
        """Find the datasets that a table names and has no measured number of."""
        of_datasets = [c for c in table.cells() if c.source == "measured" and c.key.dataset]
        counts = any(cell.mean is not None for cell in of_datasets)  # else it is one of words
        full = {
            c.key.dataset for c in of_datasets if c.mean is not None or (c.label and not counts)
        }
        lacking = {cell.key.dataset for cell in of_datasets} - full
        nothing = (False,) * len(table.columns)
        if not lacking or not full:
            return TableView(table, nothing, frozenset(), empty=bool(lacking))

        def folds(cells: Sequence[Cell]) -> bool:
            return bool(cells) and all(cell.key.dataset in lacking for cell in cells)

        columns = tuple(
            folds([row.cells[place] for row in table.rows]) for place in range(len(table.columns))
        )
        rows = frozenset(place for place, row in enumerate(table.rows) if folds(row.cells))
        if all(columns) or len(rows) == len(table.rows):
            return TableView(table, nothing, frozenset(), empty=True)
        order = [name for name in names.dataset_names() if name in lacking]
        order += sorted(lacking - set(order))
        titles = tuple(map(names.dataset_title, order)) if any(columns) or rows else ()
        return TableView(table, columns, rows, titles)

    @property
    def heads(self) -> list[tuple[str, bool, int]]:
        """Return headers above columns: the title, whether it is folded, and how many columns."""
        groups = [column.group for column in self.table.columns]
        heads = groupby(zip(groups, self.folded_columns, strict=True))
        return [(name, folded, len(list(same))) for (name, folded), same in heads]

    @property
    def has_heads(self) -> bool:
        """Return whether columns stand below common headers."""
        return any(column.group for column in self.table.columns)

    @property
    def sections(self) -> list[tuple[str, bool, list[tuple[Row, bool]]]]:
        """Return rows by section; a section is folded if all its rows are."""
        numbered = iter(range(len(self.table.rows)))
        found = []
        for name, rows in self.table.sections():
            own = [(row, next(numbered) in self.folded_rows) for row in rows]
            found.append((name, all(folded for _, folded in own), own))
        return found


def tier_marks(boards: Sequence[Board]) -> list[int]:
    """Return which tiers the boards show."""
    return sorted({entry.labels for board in boards for entry in board.entries}, reverse=True)


def dot(value: float, labels: int) -> Markup:
    """Return the mark of a measured mean, whose shape and colour show what its method sees."""
    x = f"{value:g}%"
    if labels == 2:
        return Markup(f'<circle class="t2" cx="{x}" cy="50%" r="5"/>')
    outline = DIAMOND if labels == 1 else SQUARE
    shape = f'<path class="t{labels}" d="{outline}"/>'
    return Markup(f'<svg x="{x}" y="50%" overflow="visible">{shape}</svg>')


def tip(cell: Cell) -> str:
    """Return what a cell's text leaves out, line by line; its runs are links beside it."""
    return replace(cell, run_ids=()).details().replace("; ", "\n")


def run_numbers(cell: Cell, place: Mapping[str, int]) -> str:
    """Return the numbers of a cell's runs in the page's list, as ranges."""
    numbers = sorted(place[run_id] for run_id in cell.run_ids if run_id in place)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def run_index(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the list of runs, small enough to be read when the page opens.

    Texts that many runs share are written once; a run is a row of numbers and its own id.
    """
    shared: dict[str, dict[str, int]] = {"methods": {}, "datasets": {}, "reasons": {}}

    def number(of: str, text: object) -> int:
        return shared[of].setdefault(str(text), len(shared[of]))

    rows = []
    for place, run in enumerate(runs):
        line = run_row(run)
        values = (line["worst"], line["average"])
        rows.append(
            [
                *(line["id"], number("methods", line["method"])),
                *(number("datasets", line["dataset"]), line["seed"]),
                *(None if v is None else float(f"{v:.6g}") for v in values),
                *(line["digits"], KINDS.index(run.kind), number("reasons", line["reason"])),
                *(place // RUNS_A_BLOB, int(run.record.done and tree_of(run.record) is not None)),
            ]
        )
    return {"kinds": list(KINDS), "runs": rows, **{key: list(own) for key, own in shared.items()}}


def run_blobs(given: ReportInput) -> list[Markup]:
    """Return the details of all runs, compressed a dozen at a time."""
    runs = given.runs.runs
    samples = leaf_samples(runs, given.data_root)
    blobs = []
    for first in range(0, len(runs), RUNS_A_BLOB):
        own = runs[first : first + RUNS_A_BLOB]
        details = [{**run_details(run), "samples": samples.get(run.run_id)} for run in own]
        blobs.append(blob(compact_json(details)))
    return blobs


def blob(text: str) -> Markup:
    """Return text, compressed, in characters that mean nothing to a parser."""
    return Markup(base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode())


def compact_json(value: object) -> str:
    """Return JSON without a needless character."""
    return json.dumps(json.loads(to_json(value)), separators=(",", ":"), ensure_ascii=False)


def script_json(value: object) -> Markup:
    """Return JSON that can stand inside a script element whatever it contains."""
    return Markup(compact_json(value).translate(IN_SCRIPT))


def sort_value(text: str) -> str:
    """Return what a text sorts by: the number it begins with, if it begins with one."""
    number = re.match(r"[+-]?[\d,]*\.?\d+", text)
    return number[0].replace(",", "") if number else text.lower()


def standalone_svg(figure: WrittenFigure) -> str:
    """Return a drawing as the page shows it, as an image: without what only editors read."""
    svg = figure.svg[figure.svg.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def run_row(run: Run) -> dict[str, object]:
    """Return the line of a run; of development seeds it shows no test figure in passing."""
    test = Metrics() if shown_split(run.job.seed) == "val" else run.record.test
    metric = names.headline(run.job.dataset)
    return {
        "id": run.run_id,
        "method": names.method_title(run.job.method),
        "dataset": names.dataset_title(run.job.dataset),
        "seed": run.job.seed,
        "kind": run.kind,
        "reason": run.reason or run.job.variant,
        "worst": test.get(metric),
        "average": test.avg,
        "digits": CellKey(metric=metric).digits,
    }


def run_details(run: Run) -> dict[str, object]:
    """Return everything the page shows of a run, ready for JSON."""
    record = run.record
    written = record.to_json()
    details = {name: written[name] for name in SHOWN_KEYS if written.get(name) is not None}
    details |= {"kind": run.kind, "reason": run.reason}
    if not record.done:
        return details
    dataset = load_datasets().get(run.job.dataset)
    classes = dataset.facts(dataset.config_type()).classes if dataset is not None else ()
    details |= {"metrics": written["metrics"], "classes": list(classes)}
    if (history := run.history()) is not None and len(history):
        details["curves"] = curves(history)
    if (predictions := run.predictions()) is not None:
        details["confusion"] = confusion(predictions, record)
        details["slices"] = slices(predictions)
    if (tree := tree_details(record)) is not None:
        details["tree"] = tree
    return {name: rounded(value) for name, value in details.items()}


def rounded(value: object) -> object:
    """Return numbers cut to five significant digits; exact values are in the record."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict | Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def curves(history: pd.DataFrame) -> dict[str, object]:
    """Return a history thinned to a few dozen epochs, with its last, and where stages begin."""
    step = -(-len(history) // CURVE_POINTS)
    kept = sorted({*range(0, len(history), step), len(history) - 1})
    stage = history["stage"].astype(str).tolist()
    changes = enumerate(zip(stage, [None, *stage], strict=False))
    starts = [(place, name) for place, (name, before) in changes if name != before]
    series = {
        name: [None if pd.isna(value) else float(value) for value in history[name].iloc[kept]]
        for name in CURVES
        if name in history and history[name].notna().any()
    }
    return {"epochs": [place + 1 for place in kept], "stages": starts, "series": series}


def confusion(predictions: pd.DataFrame, record: Record) -> dict[str, list[list[object]]]:
    """Count a split's predictions by true group; groups in the dataset's order."""
    groups = list(record.test.group_accuracy)
    y, pred, group, split = (
        predictions[name].to_numpy() for name in ("y", "pred", "group", "split")
    )
    classes = 1 + int(max(y.max(), pred.max()))
    rows: dict[str, list[list[object]]] = {}
    for name in ("val", "test"):
        own = (split == name) & (group >= 0) & (group < len(groups))
        cells = group[own].astype(int) * classes + pred[own]
        table = np.bincount(cells, minlength=len(groups) * classes).reshape(-1, classes)
        places, first = np.unique(group[own], return_index=True)
        truth = zip(places.tolist(), y[own][first].tolist(), strict=True)
        rows[name] = [[groups[place], label, table[place].tolist()] for place, label in truth]
    return rows


def slices(predictions: pd.DataFrame) -> list[list[object]]:
    """Return each leaf with its size and accuracy on validation and on test; none without leaves.

    The accuracy is none where no sample of the split ends in the leaf.
    """
    leaf = predictions["leaf"].to_numpy() if "leaf" in predictions else np.array([-1])
    if leaf.max() < 0:
        return []
    split = predictions["split"].to_numpy()
    right = predictions["pred"].to_numpy() == predictions["y"].to_numpy()
    sides = []
    for name in ("val", "test"):
        own = (split == name) & (leaf >= 0)
        sides.append([np.bincount(leaf[o], minlength=leaf.max() + 1) for o in (own, own & right)])
    return [
        [place, *(value for n, hits in sides for value in _share(n[place], hits[place]))]
        for place in range(int(leaf.max()) + 1)
        if any(n[place] for n, _ in sides)
    ]


def _share(count: Any, right: Any) -> tuple[int, float | None]:
    return int(count), 100.0 * float(right) / int(count) if count else None


def tree_of(record: Record) -> Any:
    """Return what a method says of its tree: its one detail whose iterations have leaves."""
    for own in record.details.values():
        levels = own.get("iterations") if isinstance(own, Mapping) else None
        first = levels[0] if isinstance(levels, list) and levels else None
        if isinstance(first, Mapping) and "leaves" in first:
            return own
    return None


def tree_details(record: Record) -> dict[str, object] | None:
    """Return what the page shows of a tree: every node's size, make-up and captured samples."""
    own = tree_of(record)
    families = shown_groups(record)
    number = {group: place for place, group in enumerate(families)}
    try:
        levels = [_level(raw, number) for raw in own["iterations"]]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # no tree, or one of another kind than the page can show
    return {
        **{name: own.get(name) for name in TREE_KEYS},
        "chosen_iteration": own.get("chosen_iteration", len(levels)),
        "groups": list(families),
        "families": list(families.values()),
        "levels": levels,
    }


def _level(raw: Any, number: Mapping[str, int]) -> dict[str, object]:
    """Return what the page shows of an iteration: groups by number, and all else leaf by leaf.

    `capture` has the percentage of each group's test samples that end in each leaf, `makeup` the
    training samples of each group in each leaf; a method may leave out all but its nodes' counts.
    """
    leaves, makeup, test = raw["leaves"], raw.get("makeup", {}), raw.get("test", {})
    captured: dict[str, list[tuple[int, float]]] = {leaf: [] for leaf in leaves}
    for group, shares in raw.get("capture", {}).items():
        for leaf, share in shares.items():
            captured[leaf].append((number[group], share))
    spreads = {
        name: [raw.get(f"{name}_{kind}") or [None] * len(leaves) for kind in ("mean", "std")]
        for name in ("logit", "margin")
    }
    return {
        "names": leaves,
        "counts": [count for _, count in zip(leaves, raw["node_counts"], strict=True)],
        "merged": raw.get("merged", []),
        "makeup": [[(number[g], n) for g, n in makeup.get(leaf, {}).items()] for leaf in leaves],
        "captured": list(captured.values()),
        **{name: list(zip(*pair, strict=True)) for name, pair in spreads.items()},
        "wga": test.get("wga"),
        "avg": test.get("avg"),
        "pwga2": raw.get("pwga2"),
    }


LeafSample = tuple[str, int, str]
"""An image of a leaf: as an address that needs no file, its sample id and true group."""


def leaf_samples(
    runs: Sequence[Run], data_root: Path | None
) -> dict[str, dict[int, list[LeafSample]]]:
    """Return, by run id and leaf, test images of the first trees of each dataset."""
    trees = [run for run in runs if run.record.done and tree_of(run.record) is not None]
    trees.sort(key=lambda run: (run.kind != "published", run.job.seed))
    by_data = grouped(trees, lambda run: (run.job.fingerprint, digest(run.job.config.dataset)))
    share = max(1, MAX_TREES // max(1, len(by_data)))
    found: dict[str, dict[int, list[LeafSample]]] = {}
    for own in list(by_data.values())[:MAX_TREES]:
        try:
            facts, split = load_split(own[0].record, data_root, "test")
            if facts.rows:  # there is nothing to look at
                continue
        except BenchError:
            continue
        for run in own[:share]:
            predictions = run.predictions(["id", "split", "group", "leaf"])
            if predictions is not None:
                found[run.run_id] = _samples(predictions, facts, split)
    return found


def _samples(
    predictions: pd.DataFrame, facts: Facts, split: LabelledSplit
) -> dict[int, list[LeafSample]]:
    import torch

    where = {int(sample): place for place, sample in enumerate(split.labels.ids)}
    test = predictions[(predictions["split"] == "test") & predictions["id"].isin(where)]
    images: dict[int, list[LeafSample]] = {}
    for leaf in sorted(set(test["leaf"].tolist())):
        rows = test[test["leaf"] == leaf]
        drawn = rows.sample(min(IMAGES_PER_LEAF, len(rows)), random_state=0)
        batch = split.images.batch(torch.tensor([where[int(sample)] for sample in drawn["id"]]))
        shown = zip(batch.pixels, batch.sizes, drawn["id"], drawn["group"], strict=True)
        images[int(leaf)] = [
            (
                data_url(pixels[:, : int(h), : int(w)]),
                int(sample),
                facts.groups[group] if group >= 0 else "group not known",
            )
            for pixels, (h, w), sample, group in shown
        ]
    return images


def data_url(pixels: Tensor) -> str:
    """Return an image as an address that needs no file: small ones exactly, photos as JPEG."""
    from PIL import Image

    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    content = io.BytesIO()
    exact = max(picture.size) <= LARGEST_EXACT
    if exact:
        picture.save(content, "PNG", optimize=True)
    else:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(content, "JPEG", quality=80)
    encoded = base64.b64encode(content.getvalue()).decode()
    return f"data:image/{'png' if exact else 'jpeg'};base64,{encoded}"
