"""LayerGradCAM by leaf: which part of an image the easy and the hard head of a class look at.

The paper's panel shows different images for the two heads, so a change of map may be a change of
image. The paired panel sends the same images through both siblings and adds the contrast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.models import load_fitted
from bench.report.collection import Run
from bench.report.figures.drawing import (
    LINES,
    Drawn,
    NotDrawn,
    View,
    label_of,
    new_figure,
    palette,
    plain,
)
from bench.report.images import load_split
from bench.store import Store
from datasets.base import Facts, LabelledSplit
from datasets.errors import BenchError
from methods.nct.fitted import FittedTree
from methods.nct.tree import Tree

SHOWN_CLASS = {"waterbirds": "waterbird", "isic": "benign", "celeba": "blond"}
"""The class whose two leaves the paper shows; on digits it shows none, for their cue is global."""

SAMPLES, SEED = 5, 0


@dataclass(frozen=True)
class Subject:
    """A kept tree, the test images it is shown on, and the leaves in question."""

    run: Run
    tree: Tree
    facts: Facts
    split: LabelledSplit
    scores: Tensor
    easy: int

    def name(self, leaf: int) -> str:
        """Name a leaf of iteration 2."""
        names: list[str] = self.run.record["nct"]["iterations"][1]["leaves"]
        return names[leaf]

    def draws(self, leaf: int) -> Tensor:
        """Draw test images whose iteration-2 leaf is this one, uniformly and always the same."""
        inside = (self.scores.argmax(dim=1) == leaf).nonzero()[:, 0]
        order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(SEED))
        return inside[order[:SAMPLES]]

    def images(self, index: Tensor) -> Tensor:
        """Give images as the network sees them."""
        return self.facts.eval_transform(self.split.images.batch(index))


def draw_leaves(view: View) -> Drawn | NotDrawn:
    """Draw the paper's panel: images of the easy leaf on the left, of the hard one on the right."""
    subjects = _subjects(view)
    if isinstance(subjects, NotDrawn):
        return subjects
    figure = new_figure(9.0, 2.35 * len(subjects))
    rows = figure.subplots(2 * len(subjects), 2 * SAMPLES, squeeze=False)
    for place, subject in enumerate(subjects):
        for side, leaf in enumerate((subject.easy, subject.easy + 1)):
            index = subject.draws(leaf)
            slots = slice(side * SAMPLES, (side + 1) * SAMPLES)
            maps = _maps(subject, index, [leaf] * len(index))
            _show(rows[2 * place, slots], subject, index, None, f"in {plain(subject.name(leaf))}")
            _show(rows[2 * place + 1, slots], subject, index, maps, "")
        rows[2 * place, 0].set_ylabel(_short(subject.run), fontsize=6.5)
        rows[2 * place + 1, 0].set_ylabel("map", fontsize=6.5)
    return Drawn(
        figure,
        "Iteration-2 LayerGradCAM attributions (layer4, ReLU, bilinear): test images that end in "
        "the easy leaf (left half) and in the hard leaf (right half) of one class, and below them "
        "what moves that leaf's logit. Numbers above the images are margins over the next leaf; "
        f"frames tell the true group: {_frames(subjects)}.",
        _notes(subjects),
    )


def draw_paired(view: View) -> Drawn | NotDrawn:
    """Draw the same images through the easy head, the hard head, and their difference."""
    subjects = _subjects(view)
    if isinstance(subjects, NotDrawn):
        return subjects
    figure = new_figure(9.0, 4.1 * len(subjects))
    rows = figure.subplots(4 * len(subjects), 2 * SAMPLES, squeeze=False)
    for place, subject in enumerate(subjects):
        easy, hard = subject.easy, subject.easy + 1
        index = torch.cat([subject.draws(easy), subject.draws(hard)])
        own = rows[4 * place : 4 * place + 4]
        _show(own[0], subject, index, None, "")
        names = [f"{plain(subject.name(easy))}", f"{plain(subject.name(hard))}", "easy - hard"]
        for line, name, target in zip(own[1:], names, (easy, hard, None), strict=True):
            maps = _maps(subject, index, [target] * len(index))
            _show(line, subject, index, maps, "")
            line[0].set_ylabel(name, fontsize=7)
        own[0, 0].set_ylabel(_short(subject.run), fontsize=6.5)
    return Drawn(
        figure,
        "The same test images through both siblings: rows show the image, what moves the easy "
        "leaf's logit, what moves the hard leaf's, and what moves the easy one above the hard one. "
        "If the heads look at different things, the second and third rows differ on one image.",
        _notes(subjects),
    )


def _subjects(view: View) -> list[Subject] | NotDrawn:
    """Load the first kept tree of each photo dataset together with its test images."""
    reasons = []
    found = []
    for label, runs in view.trees(2).items():
        wanted = SHOWN_CLASS.get(str(runs[0].record["dataset"]))
        if wanted is None:
            continue
        try:
            found.append(_subject(runs, wanted, view.data_root))
        except BenchError as error:
            reasons.append(f"{label}: {error.message}")
    if found:
        return found
    digits = "the figure needs an NCT run on a photo dataset (Waterbirds, CelebA or ISIC)"
    return NotDrawn("; ".join(reasons) or digits)


def _subject(runs: Sequence[Run], wanted: str, data_root: Path | None) -> Subject:
    kept = [run for run in runs if (run.folder / "model.safetensors").is_file()]
    run = (kept or list(runs))[0]
    fitted, _ = load_fitted(Store(run.folder.parents[1]), run.run_id)
    assert isinstance(fitted, FittedTree)
    tree = fitted.tree.eval()
    if tree.depth < 2 or not hasattr(tree.backbone.body, "layer4"):
        raise BenchError(f"{run.run_id} has no second level, or its backbone has no layer4")
    facts, split = load_split(run.record, data_root, "test")
    scores = []
    with torch.no_grad():
        for index in torch.arange(len(split)).split(100):
            batch = facts.eval_transform(split.images.batch(index))
            scores.append(_level_two(tree, batch))
    table = torch.cat(scores)
    return Subject(run, tree, facts, split, table, _easy_leaf(table, facts.classes.index(wanted)))


def _easy_leaf(scores: Tensor, wanted: int) -> int:
    """Take the paper's class, or if neither of its leaves holds an image the fullest one."""
    counts = torch.bincount(scores.argmax(dim=1), minlength=scores.shape[1]).view(-1, 2)
    return 2 * (wanted if counts[wanted].sum() else int(counts.sum(dim=1).argmax()))


def _level_two(tree: Tree, images: Tensor) -> Tensor:
    """Score the leaves of iteration 2, merged ones ruled out."""
    heads: Any = tree.levels[1]
    scores: Tensor = heads.masked(tree.logits(images)[1])
    return scores


def _maps(subject: Subject, index: Tensor, targets: Sequence[int | None]) -> Tensor:
    """Compute a map for each image; no target means the easy leaf's logit minus the hard one's."""
    from captum.attr import LayerGradCam
    from torch.nn.functional import interpolate

    def scored(images: Tensor) -> Tensor:
        logits = subject.tree.logits(images)[1]
        contrast = logits[:, subject.easy] - logits[:, subject.easy + 1]
        return torch.cat([logits, contrast[:, None]], dim=1)

    if not len(index):
        return torch.zeros(0)
    images = subject.images(index)
    last = len(subject.run.record["nct"]["iterations"][1]["leaves"])
    columns = torch.tensor([last if target is None else target for target in targets])
    explainer = LayerGradCam(scored, subject.tree.backbone.body.layer4)
    maps = explainer.attribute(images, target=columns, relu_attributions=True).detach()
    return interpolate(maps, images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def _show(axes: Any, subject: Subject, index: Tensor, maps: Tensor | None, title: str) -> None:
    """Show images in a row, with maps over them on one common colour scale."""
    for place, panel in enumerate(axes):
        panel.grid(False)
        panel.set(xticks=[], yticks=[])
        if place >= len(index):
            panel.set_frame_on(False)
            continue
        position = int(index[place])
        pixels = subject.images(index[place : place + 1])[0]
        panel.imshow(_picture(pixels, subject.facts), interpolation="bilinear")
        if maps is not None:
            heat = maps[place].numpy() / (float(maps.max()) or 1.0)
            # Cold places stay as they are in the photo; hot ones glow.
            panel.imshow(heat, cmap="inferno", alpha=0.2 + 0.6 * heat, vmin=0, vmax=1)
        else:
            best = subject.scores[position].topk(2).values
            panel.set_title(f"{float(best[0] - best[1]):.1f}", fontsize=6.5, fontweight="normal")
        group = int(subject.split.labels.groups[position])
        for spine in panel.spines.values():
            spine.set(visible=True, color=palette(4)[group], linewidth=1.8, linestyle=LINES[group])
    if title:
        text = title if len(index) else f"no image {title}"
        axes[0].annotate(
            *(text, (0, 1.22)), xycoords="axes fraction", fontsize=7, fontweight="bold"
        )


def _short(run: Run) -> str:
    return label_of(run).replace(" (", "\n(")


def _picture(pixels: Tensor, facts: Facts) -> Any:
    """Undo the normalisation."""
    transform = facts.eval_transform
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
    return (pixels * std + mean).clamp(0, 1).permute(1, 2, 0).numpy()


def _frames(subjects: Sequence[Subject]) -> str:
    kinds = ("solid blue", "dashed orange", "dotted green", "dash-dotted red")
    return "; ".join(
        f"{label_of(subject.run)}: "
        + ", ".join(
            f"{group.replace('_', ' ')} {kind}"
            for group, kind in zip(subject.facts.groups, kinds, strict=False)
        )
        for subject in subjects
    )


def _notes(subjects: Sequence[Subject]) -> tuple[str, ...]:
    trees = ", ".join(f"{subject.run.run_id} (depth {subject.tree.depth})" for subject in subjects)
    standin = [label_of(subject.run) for subject in subjects if subject.run.record["standin"]]
    synthetic = (f"Synthetic stand-in images, not real photos: {', '.join(standin)}.",)
    return (
        f"Iteration-2 heads of {trees}; {SAMPLES} images a leaf, drawn with seed {SEED}; one "
        "colour scale a row of maps. The paper names neither layer nor ReLU: both are our choice.",
        *(synthetic if standin else ()),
    )
