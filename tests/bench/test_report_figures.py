"""Figures: drawn from whatever the store holds, or a reason; and nothing else is touched."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_records import collection, jobs, record

from bench.plan import Request, expand
from bench.report.collection import Collection
from bench.report.figures import FIGURES, attribution, capture, cost, pareto, ranks, theory
from bench.report.figures.drawing import Drawn, NotDrawn, View, house_style, shown_groups
from bench.report.figures.files import WrittenFigure, write_figures
from bench.report.tree_picture import draw_tree
from bench.store import Store
from datasets import standins
from methods.backbones import build_backbone
from methods.nct.theory import approximation_gap, enrichment
from methods.nct.tree import Tree

IMAGES = ("attribution", "attribution_paired")  # these need a model and images


def history(iterations: int = 3) -> pd.DataFrame:
    rows = [
        {"stage": f"nct-{t}-{p}", "iteration": t, "phase": p, "epoch": e, "selection": e / (9 + t)}
        for t in range(1, iterations + 1)
        for p in (1, 2)
        for e in range(4)
    ]
    table = pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"})
    table["loss"] = 1.0
    table["audit_val_wga"] = 10.0 * table["epoch"]
    return table.assign(audit_test_wga=11.0 * table["epoch"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """Two seeds of three methods on three datasets, and a stand-in run of each method."""
    store = Store(tmp_path_factory.mktemp("store"))
    made = []
    for place, method in enumerate(("nct", "erm", "dfr")):
        for dataset in ("umnist", "cmnist", "isic"):
            for job in jobs(method, dataset, 2):
                made.append(record(job, 80.0 + 3 * place + job.seed))
        standin = {"standin": True, "run_id": f"{method}-umnist-s0-standin"}
        made.append(record(jobs(method, "umnist", 1)[0], 50.0, **standin))
    for one in made:
        store.write(one, history() if one["method"] == "nct" else None)
    return collection(*made, folder=store.runs)


@pytest.fixture(scope="module")
def written(
    runs: Collection, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[WrittenFigure]]:
    out = tmp_path_factory.mktemp("figures")
    return out, write_figures(runs, out)


def view_of(runs: Collection, **changes: Any) -> View:
    return View(tuple(runs.of_kind("published")), **changes)


def drawn(result: Drawn | NotDrawn) -> Drawn:
    assert isinstance(result, Drawn), result
    return result


def test_every_figure_is_drawn_as_pdf_and_svg(written: tuple[Path, list[WrittenFigure]]) -> None:
    out, figures = written
    published = {figure.name: figure for figure in figures if not figure.trial}
    assert set(published) == {kind.name for kind in FIGURES}
    for name, figure in published.items():
        if name in IMAGES:
            assert figure.reason and not (out / f"{name}.svg").exists()
            continue
        assert not figure.reason and figure.caption
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert ET.fromstring((out / f"{name}.svg").read_text()).tag.endswith("svg")


def test_trials_are_drawn_apart_and_say_so(written: tuple[Path, list[WrittenFigure]]) -> None:
    trials = [figure for figure in written[1] if figure.trial]
    assert trials and all(figure.name.startswith("trial_") for figure in trials)
    pictures = {figure.name: figure.svg for figure in trials if not figure.reason}
    assert "trial_pareto" in pictures
    for svg in pictures.values():
        assert "not results" in svg
    assert all("stand-in" not in figure.svg for figure in written[1] if not figure.trial)


def test_an_empty_store_gives_reasons(tmp_path: Path) -> None:
    (tmp_path / "pareto.pdf").write_text("of an earlier report")
    figures = {figure.name: figure for figure in write_figures(collection(), tmp_path)}
    assert not figures.pop("theory").reason
    assert all(figure.reason and not figure.svg for figure in figures.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theory.pdf", "theory.svg"]


def test_drawing_changes_nothing_for_others(runs: Collection) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with house_style():
        drawn(pareto.draw(view_of(runs)))
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_capture_bars_are_the_shares_of_the_record() -> None:
    made = []
    for job, share in zip(jobs("nct", "umnist", 2), (60.0, 80.0), strict=True):
        made.append(record(job, 90.0))
        shares = made[-1]["nct"]["iterations"][1]["capture"]
        shares["digit_8"] = {"5-9:H": share, "5-9:E": 100 - share}
    figure = drawn(capture.iteration_2(view_of(collection(*made)))).figure
    heights = sorted(round(patch.get_height(), 6) for patch in figure.axes[0].patches)
    assert heights.count(70.0) == 1 and heights.count(30.0) == 1


def test_cmnist_stacks_conflicting_colours_against_the_aligned() -> None:
    made = record(jobs("nct", "cmnist", 1)[0], 90.0)
    counts = made["metrics"]["test"]["group_count"]
    groups = [group for group in counts if group.startswith("digits_0_1/")]
    shares = (100.0, 80.0, 60.0, 40.0, 20.0)
    for group, share in zip(groups, shares, strict=True):
        made["nct"]["iterations"][1]["capture"][group] = {"0-1:H": share}
    counts[groups[1]] = 300  # a larger group weighs more in the stack
    patches = drawn(capture.iteration_2(view_of(collection(made)))).figure.axes[0].patches
    hard = [p for p in patches if 0.5 < p.get_x() + p.get_width() / 2 < 1.5]
    assert hard[0].get_height() == 100.0
    stack = sum(patch.get_height() for patch in hard[1:])
    assert len(hard) == 5 and stack == pytest.approx((3 * 80 + 60 + 40 + 20) / 6)


def test_many_groups_are_shown_by_their_unions() -> None:
    shown = shown_groups(record(jobs("nct", "cmnist", 1)[0], 90.0))
    assert set(shown.values()) == {"aligned", "conflicting"}
    assert list(shown.values()).count("aligned") == 5


def test_times_are_stand_alone_and_split_by_sharing(runs: Collection) -> None:
    axes = drawn(cost.draw(view_of(runs))).figure.axes[0]
    assert {round(patch.get_width(), 6) for patch in axes.patches} == {1.0, 0.5}


def test_ranks_need_three_methods_and_datasets(runs: Collection) -> None:
    few = View(tuple(run for run in runs.of_kind("published") if run.record["dataset"] != "isic"))
    refused = ranks.draw(few)
    assert isinstance(refused, NotDrawn) and "3 methods on 2" in refused.reason
    result = drawn(ranks.draw(view_of(runs)))
    assert any("little power" in note for note in result.notes)


def test_ranks_are_of_mean_scores(runs: Collection) -> None:
    table = ranks.scores(view_of(runs))
    assert table.loc["UMNIST", "DFR"] == pytest.approx(86.5)
    assert table.loc["ISIC", "NCT"] == pytest.approx(0.805)


def test_names_are_text_not_formulas() -> None:
    made = record(jobs("erm", "umnist", 1)[0], 90.0, method="a$_{b}<script>&$")
    result = drawn(pareto.draw(view_of(collection(made))))
    texts = [text.get_text() for text in result.figure.legends[0].get_texts()]
    assert r"a\$_{b}<script>&\$" in texts
    result.figure.savefig(io.BytesIO(), format="svg")


def test_simulated_points_lie_on_the_curves() -> None:
    draws = np.random.default_rng(5)
    assert theory.simulated_share(0.95, 0.02, draws) == pytest.approx(
        enrichment(0.95, 0.02), abs=0.05
    )
    assert theory.simulated_gap(2.0, 1.0, draws) == pytest.approx(
        approximation_gap(2.0, 1.0), abs=0.015
    )


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Collection, Path]:
    """An untrained tree on a stand-in photo set, kept as a run would keep it."""
    root = tmp_path_factory.mktemp("photos")
    standins.write("waterbirds", root, size=40)
    settings = {
        "backbone.name": "resnet10t",
        "backbone.pretrained": "false",
        "waterbirds.resolution": "32",
    }
    request = Request(("nct",), ("waterbirds",), (0,), root, overrides=settings)
    job = expand(request)[0]
    tree = Tree(build_backbone_of(job.config["backbone"]["name"]), 2)
    for _ in range(2):
        tree.grow(32, 0.0, "asymmetric", first_mlp=True)
    store = Store(tmp_path_factory.mktemp("store"))
    made = record(job, 50.0, standin=True)
    store.write(made, model=dict(tree.state_dict()))
    return collection(made, folder=store.runs), root


def build_backbone_of(name: str) -> Any:
    from datasets.base import BackboneSpec

    return build_backbone(BackboneSpec(name), 3)


def test_attribution_shows_both_leaves_and_says_what_it_is(
    photo_run: tuple[Collection, Path],
) -> None:
    runs, root = photo_run
    view = View(tuple(runs.of_kind("trial")), trial=True, data_root=root)
    leaves, paired = drawn(attribution.draw_leaves(view)), drawn(attribution.draw_paired(view))
    assert (
        sum(len(axes.images) for axes in leaves.figure.axes) >= 3
    )  # an image, and one under a map
    assert any("Synthetic" in note for note in leaves.notes)
    maps = [image for axes in paired.figure.axes for image in axes.images[1:]]
    assert maps and all(np.asarray(image.get_array()).min() >= 0 for image in maps)


def test_maps_follow_the_gradient_of_the_leaf(photo_run: tuple[Collection, Path]) -> None:
    """GradCAM by hand: ReLU of the activations weighted by their mean gradients."""
    import torch
    from torch.nn.functional import interpolate

    runs, root = photo_run
    run = runs.of_kind("trial")[0]
    subject = attribution._subject([run], "waterbird", root)
    index = torch.arange(3)
    seen: list[torch.Tensor] = []
    layer: Any = subject.tree.backbone.body.layer4
    handle = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    scores = subject.tree.logits(subject.images(index))[1][:, 3]
    handle.remove()
    gradient = torch.autograd.grad(scores.sum(), seen[0])[0]
    weighted = (gradient.mean(dim=(2, 3), keepdim=True) * seen[0]).sum(1, keepdim=True).relu()
    expected = interpolate(weighted, (32, 32), mode="bilinear", align_corners=False)[:, 0]
    assert torch.allclose(attribution._maps(subject, index, [3] * 3), expected.detach(), atol=1e-5)


def test_attribution_without_data_or_model_says_what_is_missing(
    photo_run: tuple[Collection, Path], tmp_path: Path
) -> None:
    runs, root = photo_run
    no_data = attribution.draw_leaves(View(runs.runs, trial=True, data_root=tmp_path))
    assert isinstance(no_data, NotDrawn) and "waterbirds is not in" in no_data.reason
    run = runs.runs[0]
    model = run.folder / "model.safetensors"
    kept = model.read_bytes()
    model.unlink()
    try:
        no_model = attribution.draw_leaves(View(runs.runs, trial=True, data_root=root))
    finally:
        model.write_bytes(kept)
    assert isinstance(no_model, NotDrawn) and "without keeping its model" in no_model.reason


def test_the_picture_of_one_tree(tmp_path: Path) -> None:
    made = record(jobs("nct", "cmnist", 1)[0], 90.0)
    draw_tree(made, tmp_path / "new" / "tree.svg")
    svg = (tmp_path / "new" / "tree.svg").read_text()
    assert "0-1:H" in svg and "conflicting" in svg and "merged" in svg
    assert "0-1:EE" not in svg  # iteration 2 was chosen
