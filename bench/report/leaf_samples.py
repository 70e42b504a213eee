"""Sample images of each leaf of a tree, for runs whose data is on disk."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import Image

from bench.report.collection import Run
from bench.report.images import load_split
from datasets.base import Facts, LabelledSplit
from datasets.errors import BenchError

EACH = 6  # images a leaf
RUNS = 12  # trees that get images: a page must not grow with every seed
SMALL = 40  # images up to this side are kept as they are, others become thumbnails
THUMBNAIL = 72


def leaf_samples(runs: Sequence[Run], data_root: Path | None) -> dict[str, dict[int, list[Any]]]:
    """Draw test images of every leaf, for the first trees of each dataset.

    Returns:
        For each run id, for each leaf, images as (data address, sample id, group).
    """
    trees = [run for run in runs if run.record["status"] == "done" and "nct" in run.record]
    by_data: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(trees, key=lambda run: (run.kind != "published", run.record["seed"])):
        key = (run.record["data_fingerprint"], str(run.record["config"]["dataset"]))
        by_data.setdefault(key, []).append(run)
    share = max(1, RUNS // max(1, len(by_data)))
    found: dict[str, dict[int, list[Any]]] = {}
    for own in list(by_data.values())[:RUNS]:
        try:
            facts, split = load_split(own[0].record, data_root, "test")
        except BenchError:
            continue
        for run in own[:share]:
            predictions = run.predictions(["id", "split", "group", "leaf"])
            if predictions is not None:
                found[run.run_id] = _of_run(predictions, facts, split)
    return found


def _of_run(predictions: pd.DataFrame, facts: Facts, split: LabelledSplit) -> dict[int, list[Any]]:
    where = {int(sample): place for place, sample in enumerate(split.labels.ids)}
    test = predictions[(predictions["split"] == "test") & predictions["id"].isin(where)]
    images: dict[int, list[Any]] = {}
    for leaf in sorted(set(test["leaf"].tolist())):
        rows = test[test["leaf"] == leaf]
        drawn = rows.sample(min(EACH, len(rows)), random_state=0)
        index = torch.tensor([where[int(sample)] for sample in drawn["id"]])
        batch = split.images.batch(index)
        images[int(leaf)] = [
            (_address(pixels[:, : int(size[0]), : int(size[1])]), int(sample), facts.groups[group])
            for pixels, size, sample, group in zip(
                batch.pixels, batch.sizes, drawn["id"], drawn["group"], strict=True
            )
        ]
    return images


def _address(pixels: torch.Tensor) -> str:
    """Write an image into an address that needs no file: small ones exactly, photos as JPEG."""
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    content = io.BytesIO()
    if max(picture.size) <= SMALL:
        picture.save(content, "PNG", optimize=True)
        kind = "png"
    else:
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        picture.save(content, "JPEG", quality=80)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
