"""The page: one file with everything in it, that asks nothing of a network or a server.

Text from data is escaped by the template, and what scripts read is JSON in which no character can
end its element. A content security policy states the same to the browser: nothing may be fetched,
and no script but the page's own may run. A page of thousands of runs has to open at once, so curves
are thinned and numbers rounded here, and the page reads a run's details when they are asked for.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
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
from bench.reporting.table import CellKey, Table
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
SHARED_KEYS = ("environment", "config")  # what many runs have in common is written once
TREE_KEYS = ("argmax_iteration", "stop_reason", "spearman_val", "spearman_test")
IMAGES_PER_LEAF = 6
MAX_TREES = 12  # that get images: a page must not grow with every seed
LARGEST_EXACT = 40  # images up to this side are kept as they are, others become thumbnails
THUMBNAIL = 72


def html_page(given: ReportInput, tables: Sequence[Table], figures: Sequence[WrittenFigure]) -> str:
    """Return the page; leaves of trees show images where the runs' data lies in the data root."""
    environment = TemplateFolder(autoescape=True)
    environment.filters |= {"inline_svg": inline_svg, "sort_value": sort_value}
    script, style = ((TEMPLATES / f"page.{kind}").read_text("utf-8") for kind in ("js", "css"))
    runs = given.runs
    samples = leaf_samples(runs.runs, given.data_root)
    shared: dict[str, int] = {}  # the number of every value that runs have in common
    details: dict[str, Markup] = {}
    for run in runs.runs:
        own = {**run_details(run), "samples": samples.get(run.run_id)}
        for key in SHARED_KEYS:
            own[key] = shared.setdefault(to_json(own[key]), len(shared))
        details[run.run_id] = script_json(own)
    content: dict[str, object] = {
        "script": Markup(script),
        "style": Markup(style),
        "script_digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "reference": given.reference,
        "all_tables": tables,
        "all_figures": figures,
        "runs": list(map(run_row, runs.runs)),
        "unreadable": runs.unreadable,
        "kinds": {kind: runs.count(kind) for kind in KINDS},
        "exceptions": names.headline_exceptions(),
        "details": details,
        "shared": script_json([json.loads(text) for text in shared]),
    }
    return environment.get_template("page.html.j2").render(content)


def script_json(value: object) -> Markup:
    """Return JSON that can stand inside a script element whatever it contains."""
    compact = json.dumps(json.loads(to_json(value)), separators=(",", ":"), ensure_ascii=False)
    return Markup(compact.translate(IN_SCRIPT))


def sort_value(text: str) -> str:
    """Return what a text sorts by: the number it begins with, if it begins with one."""
    number = re.match(r"[+-]?[\d,]*\.?\d+", text)
    return number[0].replace(",", "") if number else text.lower()


def inline_svg(figure: WrittenFigure) -> Markup:
    """Return a drawing as part of the page: no prolog, no style for others, ids of its own."""
    svg = figure.svg[figure.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{figure.name}-", svg)
    size = re.search(r'width="([\d.]+)pt"', svg)
    width = f"{float(size[1]):.0f}pt" if size else "100%"
    svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 style="width:{width}"', svg, count=1)
    label = f'<svg role="img" aria-label="{Markup.escape(figure.title)}"'
    return Markup(svg.replace("<svg", label, 1))


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
    if (predictions := run.predictions(["split", "y", "group", "pred"])) is not None:
        details["confusion"] = confusion(predictions, record)
    if (tree := tree_details(record)) is not None:
        details["tree"] = tree
    return {name: rounded(value) for name, value in details.items()}


def rounded(value: object) -> object:
    """Return numbers cut to five significant digits; exact values are in the record."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


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
    classes = 1 + int(predictions[["pred", "y"]].to_numpy().max())
    rows: dict[str, list[list[object]]] = {}
    for split in ("val", "test"):
        own = predictions[(predictions["split"] == split) & (predictions["group"] < len(groups))]
        table = np.zeros((len(groups), classes), dtype=int)
        np.add.at(table, (own["group"], own["pred"]), 1)
        truth = dict(zip(own["group"].tolist(), own["y"].tolist(), strict=True))
        rows[split] = [
            [group, truth[place], table[place].tolist()]
            for place, group in enumerate(groups)
            if place in truth
        ]
    return rows


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
