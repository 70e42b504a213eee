"""Trees: what a record keeps of one is read whole, drawn, and explained image by image."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from report_records import facts_of, jobs, record

from bench.paper.trees import (
    TreeRecord,
    batch_from_files,
    explain_images,
    explain_samples,
    positions_of,
    write_tree_picture,
)
from bench.resources import published_folder
from bench.store import Store
from datasets.base import BackboneSpec, LabelledSplit, Labels
from datasets.errors import BenchError, UsageError
from datasets.images import MemoryImages
from methods.backbones import build_backbone
from methods.nct.tree import FittedTree, Tree


def plain(value: Any) -> Any:
    """Tuples as the lists that JSON has."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


ONLY_PLUS = ("cell_pwga", "calibration")
FROM_VERSION_2 = ("phase", "pwga2_predicted", "end")
READ_BY_CLAIMS = ("greedy", "group_logits")  # of each iteration; bench/paper/evidence.py


def only_where_kept(shown: dict[str, Any], kept: dict[str, Any], *names: str) -> None:
    """Take out what a record does not have; what it has is not none, but at iteration 1."""
    for name in names:
        if name in kept:
            assert (shown[name] is None) == (kept[name] is None)
        else:
            assert shown.pop(name) is None


def test_the_last_epoch_is_read_beside_the_kept_one() -> None:
    tree = TreeRecord.of(record(jobs("nct", "umnist", 1)[0], 90.0))
    assert tree is not None
    kept, last = tree.iterations[1], tree.iterations[1].end
    assert last is not None
    assert (kept.logit_mean[0], last.logit_mean[0]) == (0.5, 10.5)
    assert (kept.pwga2_routed, last.pwga2_routed) == pytest.approx((0.68, 0.48))
    assert last.test.wga == 90.0 and (last.phase, last.epoch) == (2, 3)


def test_every_published_tree_is_read_without_loss() -> None:
    trees = 0
    for stored in Store(published_folder()).records():
        tree = TreeRecord.of(stored)
        if tree is None:
            continue
        trees += 1
        raw: Any = stored.details["nct"]
        found = plain(asdict(tree))
        for level, shown, kept in zip(
            tree.iterations, found["iterations"], raw["iterations"], strict=True
        ):
            shown["test"] = level.test.to_json()
            shown |= {name: kept[name] for name in READ_BY_CLAIMS if name in kept}
            if level.end is not None:
                shown["end"]["test"] = level.end.test.to_json()
                optional = ("pwga2", "pwga2_predicted", "pwga2_routed")  # none at iteration 1
                only_where_kept(shown["end"], kept["end"], *ONLY_PLUS, *optional)
            only_where_kept(shown, kept, *ONLY_PLUS, *FROM_VERSION_2)
        assert found == raw, stored.run_id
    assert trees >= 134


def test_iterations_are_found_by_their_number() -> None:
    tree = TreeRecord.of(record(jobs("nct", "umnist", 1)[0], 90.0))
    assert tree is not None
    assert len(tree.iterations) == 3 and tree.at(4) is None
    assert tree.at(2) is tree.chosen is tree.levels[-1]
    assert tree.chosen.test.wga == 90.0
    assert TreeRecord.of(record(jobs("erm", "umnist", 1)[0], 90.0)) is None


def test_something_else_under_the_trees_key_is_an_error() -> None:
    made = record(jobs("nct", "umnist", 1)[0], 90.0, details={"nct": {"iterations": "three"}})
    with pytest.raises(BenchError, match=f"record of {made.run_id} is not a tree"):
        TreeRecord.of(made)


def test_the_picture_of_one_tree(tmp_path: Path) -> None:
    made = record(jobs("nct", "cmnist", 1)[0], 90.0)
    tree = TreeRecord.of(made)
    assert tree is not None
    write_tree_picture(made, tree, tmp_path / "new" / "tree.svg")
    svg = (tmp_path / "new" / "tree.svg").read_text()
    assert "0-1:H" in svg and "conflicting" in svg and "merged" in svg
    assert "0-1:EE" not in svg  # iteration 2 was chosen


@pytest.fixture(scope="module")
def fitted() -> FittedTree:
    """An untrained tree of two levels whose last leaf was merged."""
    facts = facts_of("umnist")
    torch.manual_seed(0)
    tree = Tree(build_backbone(BackboneSpec(facts.backbone), facts.channels), len(facts.classes))
    for _ in range(2):
        tree.grow(8, 0.0, "asymmetric", first_mlp=True)
    tree.leaves.active[-1] = False
    return FittedTree(tree.eval(), facts.codes)


def test_images_are_explained_by_the_leaf_they_reach(fitted: FittedTree) -> None:
    facts = facts_of("umnist")
    pixels = torch.randint(0, 256, (6, 1, 28, 28), dtype=torch.uint8)
    images = MemoryImages(pixels)
    batch = images.batch(torch.arange(6))
    makeup = {name: {"digit_8": place} for place, name in enumerate(fitted.leaf_names())}
    explained = explain_images(fitted, batch, list("abcdef"), facts, makeup)
    logits = fitted.leaf_logits(facts.eval_transform(batch)).detach()
    classes = fitted.logits(facts.eval_transform(batch)).argmax(dim=1)
    for row, image in enumerate(explained):
        best = logits[row].topk(2)
        assert image.leaf == int(best.indices[0])
        assert image.predicted == facts.classes[int(classes[row])]
        assert image.path == fitted.leaf_names()[image.leaf]
        assert image.margin == pytest.approx(float(best.values[0] - best.values[1]))
        assert image.leaf_makeup == {"digit_8": image.leaf}
        assert image.logits[fitted.leaf_names()[-1]] is None  # merged
    written = explained[0].to_json()
    assert written["class"] == explained[0].predicted and "group" not in written


def test_samples_are_explained_with_their_labels(fitted: FittedTree) -> None:
    facts = facts_of("umnist")
    ids, y, groups = torch.tensor([10, 20, 30]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    images = MemoryImages(torch.zeros(3, 1, 28, 28, dtype=torch.uint8))
    split = LabelledSplit(Labels(ids, y, groups), images)
    where = positions_of(split, [30, 10])
    assert where.tolist() == [2, 0]
    first, second = (one.to_json() for one in explain_samples(fitted, split, where, facts, {}))
    assert (first["id"], first["true_class"], first["group"]) == (
        30,
        facts.classes[1],
        facts.groups[2],
    )
    assert (second["id"], second["true_class"]) == (10, facts.classes[0])
    with pytest.raises(UsageError, match="no sample 11") as raised:
        positions_of(split, [11])
    assert "begin with 10, 20, 30" in raised.value.remedy


def test_files_are_read_at_their_own_sizes_and_in_the_datasets_colours(tmp_path: Path) -> None:
    Image.new("RGB", (4, 6), (30, 60, 90)).save(tmp_path / "tall.png")
    Image.new("RGB", (8, 2), (255, 255, 255)).save(tmp_path / "wide.png")
    files = [tmp_path / "tall.png", tmp_path / "wide.png"]
    grey = batch_from_files(files, facts_of("umnist"))
    assert grey.pixels.shape == (2, 1, 6, 8) and grey.sizes.tolist() == [[6, 4], [2, 8]]
    assert int(grey.pixels[0, 0, 0, 0]) == 60
    assert batch_from_files(files, facts_of("cmnist")).pixels.shape == (2, 3, 6, 8)
