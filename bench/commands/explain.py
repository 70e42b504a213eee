"""`bench explain RUN`: route images through a trained tree and say where they went."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from bench.commands.common import add_places, print_json, print_table, say
from bench.explain import batch_from_files, explain_batch, positions_of
from bench.models import load_fitted
from bench.report.tree_picture import draw_tree
from bench.store import Store
from datasets.base import SPLITS
from datasets.catalogue import get_dataset
from datasets.config import build_config
from datasets.errors import UsageError
from methods.nct.fitted import FittedTree


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", metavar="RUN", help="a run made with --keep-models")
    parser.add_argument("--images", nargs="+", type=Path, metavar="FILE", help="image files")
    parser.add_argument("--index", metavar="I,J", help="sample ids of the split")
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: test")
    parser.add_argument("--limit", type=int, default=10, metavar="N", help="without --index")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the tree (png, svg, pdf)"
    )
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Draw the tree, or explain the images asked for."""
    store = Store(arguments.results)
    run_id = store.find(arguments.run)
    record = store.record(run_id)
    assert record is not None
    if "nct" not in record:
        raise UsageError(f"{run_id} has no tree to explain", "give a finished nct run")
    if arguments.picture is not None:
        draw_tree(record, arguments.picture)
        say(f"tree drawn to {arguments.picture}")
        if not (arguments.images or arguments.index or arguments.json):
            return 0
    fitted, _ = load_fitted(store, run_id)
    assert isinstance(fitted, FittedTree)
    images = _explained(arguments, fitted, record)
    if arguments.json:
        print_json({"run_id": run_id, "images": images})
        return 0
    rows = [
        (
            image["id"],
            image["class"],
            image["path"],
            f"{image['margin']:.2f}" if image["margin"] is not None else "-",
            ", ".join(f"{name} {value:.1f}" for name, value in _best(image["logits"])),
            ", ".join(f"{name} {count:,}" for name, count in _most(image["leaf_makeup"])),
        )
        for image in images
    ]
    columns = ("image", "class", "leaf", "margin", "best leaf logits", "trained in that leaf")
    print_table(run_id, columns, rows)
    return 0


def _explained(
    arguments: argparse.Namespace, fitted: FittedTree, record: dict[str, Any]
) -> list[dict[str, Any]]:
    dataset = get_dataset(record["dataset"])
    settings = build_config(dataset.config_type, record["config"]["dataset"], dataset.name)
    iteration = record["nct"]["iterations"][fitted.tree.depth - 1]
    if arguments.images:
        facts = dataset.facts(settings)
        batch = batch_from_files(arguments.images, facts)
        names: list[Any] = [str(file) for file in arguments.images]
        return explain_batch(fitted, batch, names, facts, iteration["makeup"])
    data = dataset.load(arguments.data_root, settings)
    if data.facts.fingerprint() != record["data_fingerprint"]:
        raise UsageError(
            f"{arguments.data_root} holds other data than the run was made with",
            "give the --data-root of the run",
        )
    split = data.splits[arguments.split]
    if arguments.index:
        parts = [part.strip() for part in arguments.index.split(",") if part.strip()]
        if not parts or not all(part.isdigit() for part in parts):
            raise UsageError(f"--index must be numbers but got '{arguments.index}'", "e.g. 3,17")
        where = positions_of(split, [int(part) for part in parts])
    else:
        where = torch.arange(min(max(arguments.limit, 1), len(split)))
    ids = split.labels.ids[where].tolist()
    explained = explain_batch(
        fitted, split.images.batch(where), ids, data.facts, iteration["makeup"]
    )
    for image, position in zip(explained, where.tolist(), strict=True):
        image["true_class"] = data.facts.classes[int(split.labels.y[position])]
        image["group"] = data.facts.groups[int(split.labels.groups[position])]
    return explained


def _best(logits: dict[str, float | None]) -> list[tuple[str, float]]:
    known = [(name, value) for name, value in logits.items() if value is not None]
    return sorted(known, key=lambda entry: -entry[1])[:4]


def _most(makeup: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(makeup.items(), key=lambda entry: -entry[1])[:3]
