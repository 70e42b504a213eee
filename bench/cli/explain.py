"""`bench explain RUN`: route images through a trained tree and show where they went."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bench.cli.arguments import find_named_run
from bench.cli.output import log, print_json, print_table
from bench.models import FittedModel, load_model
from bench.paper import trees
from bench.paper.trees import ExplainedImage, TreeRecord
from bench.record import Record
from datasets.catalogue import get_dataset
from datasets.errors import UsageError
from methods.base import get_method, load_methods

SHOWN_GROUPS = 3  # of a leaf, in the table
STEPS = {"E": "easy", "H": "hard"}
"""What the letters in the name of a leaf mean: whether the tree was right about such images."""


def run(arguments: Namespace) -> None:
    """Draw the tree, or explain the images asked for."""
    if arguments.limit < 1:
        few = f"--limit must be at least 1 but got {arguments.limit}"
        raise UsageError(few, "e.g. --limit 10")
    found, title = find_named_run(arguments)
    record = found.record
    tree = _tree_of(record)
    if arguments.picture is not None:
        trees.write_tree_picture(record, tree, arguments.picture)
        log(f"tree drawn to {arguments.picture}")
        if not (arguments.images or arguments.index or arguments.json):
            return
    model = load_model(found.store.runs / record.run_id)
    images = _explained(arguments, model, record, tree)
    if arguments.json:
        print_json({"run_id": record.run_id, "images": [image.to_json() for image in images]})
        return
    _print(title, images)


def _print(title: str, images: Sequence[ExplainedImage]) -> None:
    """Print a row an image; what it truly is where that is known."""
    rows: list[dict[str, object]] = []
    for image in images:
        row: dict[str, object] = {"image": image.id}
        if image.true_class is not None:
            right = image.predicted == image.true_class
            row |= {"true class": image.true_class, "group": image.group}
            row |= {"predicted": image.predicted + ("" if right else "  (wrong)")}
        else:
            row |= {"predicted": image.predicted}
        row |= {"leaf": image.path, "route": route_in_words(image.path)}
        row["margin"] = _margin(image)
        most = _highest(image.leaf_makeup, SHOWN_GROUPS)
        row["most of its training images"] = ", ".join(f"{k} {v:,}" for k, v in most)
        rows.append(row)
    print_table(title, [*rows[0]], [[*row.values()] for row in rows])
    log(
        "route: at each split, easy if the tree so far was right about such images, hard if not; "
        "margin: by how much the leaf's score leads that of the next one"
    )


def route_in_words(leaf: str) -> str:
    """Return the route that the name of a leaf stands for."""
    letters = leaf.rpartition(":")[2]
    return ", then ".join(STEPS[one] for one in letters) if {*letters} <= {*STEPS} else ""


def _margin(image: ExplainedImage) -> str:
    if image.margin is None:
        return "-"
    others = {name: value for name, value in image.logits.items() if name != image.path}
    following = _highest(others, 1)
    return f"{image.margin:.2f}" + (f" over {following[0][0]}" if following else "")


def _tree_of(record: Record) -> TreeRecord:
    """Return the tree of a run; a run without one is an error."""
    method = record.job.method
    reason, remedy = f"it is {record.status}", f"give a finished {method} run"
    if not get_method(method).tree:
        growing = ", ".join(name for name, known in load_methods().items() if known.tree)
        reason, remedy = f"{method} grows none", f"give a finished run of {growing}"
    elif (tree := TreeRecord.of(record)) is not None:
        return tree
    raise UsageError(f"{record.run_id} has no tree to explain: {reason}", remedy)


def _explained(
    arguments: Namespace, model: FittedModel, record: Record, tree: TreeRecord
) -> list[ExplainedImage]:
    makeup = tree.chosen.makeup
    if arguments.images:
        names = [str(file) for file in arguments.images]
        batch = trees.batch_from_files(arguments.images, model.facts)
        return trees.explain_images(model.fitted, batch, names, model.facts, makeup)
    job, root = record.job, arguments.data_root
    data = get_dataset(job.dataset).load(
        root,
        job.dataset_config(),
        splits=(arguments.split,),
        allow_subset=job.data_kind == "subset",
    )
    if data.facts.fingerprint() != job.fingerprint:
        other = f"{root} holds other data than the run was made with"
        raise UsageError(other, "give the --data-root of the run")
    split = data.splits[arguments.split]
    if arguments.index:
        positions = trees.positions_of(split, _numbers(arguments.index))
    else:
        positions = torch.arange(min(arguments.limit, len(split)))
    facts = replace(data.facts, eval_transform=model.transform)
    return trees.explain_samples(model.fitted, split, positions, facts, makeup)


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--index must be numbers but got '{text}'", "e.g. 3,17")
    return [int(part) for part in parts]


def _highest(values: Mapping[str, float | None], shown: int) -> list[tuple[str, float]]:
    known = [(name, value) for name, value in values.items() if value is not None]
    return sorted(known, key=lambda entry: -entry[1])[:shown]
