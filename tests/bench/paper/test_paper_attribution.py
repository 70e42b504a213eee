"""Attribution maps: of the leaves that a kept tree has, on the images it was evaluated on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_records import collection, record
from torch.nn.functional import interpolate

from bench.job import Request, expand
from bench.paper.attribution import attribution_maps, draw_leaves, draw_paired, load_subject
from bench.paper.trees import with_trees
from bench.reporting.figure import FigureInput, SkippedFigure
from bench.store import Store
from datasets import standins
from methods.backbones import build_backbone
from methods.nct.tree import Tree


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> FigureInput:
    """An untrained tree on a stand-in photo set, kept as a run would keep it."""
    root = tmp_path_factory.mktemp("photos")
    standins.write("waterbirds", root, size=40)
    settings = {
        "backbone.name": "resnet10t",
        "backbone.pretrained": "false",
        "waterbirds.resolution": "32",
    }
    (job,) = expand(Request(("nct",), ("waterbirds",), (0,), root, overrides=settings))
    tree = Tree(build_backbone(job.backbone(), 3), 2)
    for _ in range(2):
        tree.grow(32, 0.0, "asymmetric", first_mlp=True)
    store = Store(tmp_path_factory.mktemp("store"))
    made = record(job, 50.0)
    store.write(made, model=dict(tree.state_dict()))
    smoke = collection(made, folder=store.runs).of_kind("smoke")
    return FigureInput(tuple(smoke), smoke=True, data_root=root)


def test_both_leaves_are_shown_and_named_for_what_they_are(photo_run: FigureInput) -> None:
    leaves, paired = draw_leaves(photo_run), draw_paired(photo_run)
    # An image, and one under a map.
    assert sum(len(axes.images) for axes in leaves.figure.axes) >= 3
    assert any("Synthetic" in note for note in leaves.notes)
    maps = [image for axes in paired.figure.axes for image in axes.images[1:]]
    assert maps and all(np.asarray(image.get_array()).min() >= 0 for image in maps)


def test_maps_follow_the_gradient_of_the_leaf(photo_run: FigureInput) -> None:
    """GradCAM by hand: ReLU of the activations weighted by their mean gradients."""
    subject = load_subject(with_trees(photo_run.runs), "waterbird", photo_run.data_root)
    index = torch.arange(3)
    seen: list[torch.Tensor] = []
    layer: Any = subject.tree.backbone.body.layer4
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    scores = subject.tree.logits(subject.images(index))[1][:, 3]
    handle.remove()
    gradient = torch.autograd.grad(scores.sum(), seen[0])[0]
    weighted = (gradient.mean(dim=(2, 3), keepdim=True) * seen[0]).sum(1, keepdim=True).relu()
    expected = interpolate(weighted, (32, 32), mode="bilinear", align_corners=False)[:, 0]
    assert torch.allclose(attribution_maps(subject, index, 3), expected.detach(), atol=1e-5)


def test_without_data_or_model_the_reason_says_what_is_missing(
    photo_run: FigureInput, tmp_path: Path
) -> None:
    with pytest.raises(SkippedFigure, match="waterbirds is not in"):
        draw_leaves(replace(photo_run, data_root=tmp_path))
    run, store = photo_run.runs[0], Store(tmp_path / "results")
    store.write(run.record)
    without = collection(run.record, folder=store.runs).of_kind("smoke")
    with pytest.raises(SkippedFigure, match="without keeping its model"):
        draw_leaves(replace(photo_run, runs=tuple(without)))
