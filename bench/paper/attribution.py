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

from bench.paper.trees import TreeRun, grown_trees
from bench.reporting import figure as plots
from bench.reporting.collection import Run, load_split
from bench.reporting.figure import Drawn, FigureInput, SkippedFigure, dataset_label, escape_mathtext
from datasets.base import Facts, LabelledSplit
from datasets.errors import BenchError
from methods.nct.tree import FittedTree, Tree

SHOWN_CLASS = {"waterbirds": "waterbird", "isic": "benign", "celeba": "blond"}
"""The class whose two leaves the paper shows; on digits it shows none, for their cue is global."""

IMAGES_PER_LEAF, SEED = 5, 0


@dataclass(frozen=True)
class Subject:
    """A kept tree, the test images it is shown on, and the leaves in question."""

    run: Run
    tree: Tree
    leaves: tuple[str, ...]  # names of those of iteration 2, as a figure writes them
    facts: Facts
    split: LabelledSplit
    scores: Tensor  # logits of the leaves for every test image
    easy: int  # number of the easy leaf; the hard one is the next

    def draws(self, leaf: int) -> Tensor:
        """Draw test images whose iteration-2 leaf is this one, uniformly and always the same."""
        inside = (self.scores.argmax(dim=1) == leaf).nonzero()[:, 0]
        order = torch.randperm(len(inside), generator=torch.Generator().manual_seed(SEED))
        return inside[order[:IMAGES_PER_LEAF]]

    def images(self, index: Tensor) -> Tensor:
        """Return images as the network sees them."""
        return self.facts.eval_transform(self.split.images.batch(index))


def draw_leaves(given: FigureInput) -> Drawn:
    """Draw the paper's panel: images of the easy leaf on the left, of the hard one on the right."""
    subjects = _subjects(given)
    figure = plots.new_figure(9.0, 2.35 * len(subjects))
    rows = figure.subplots(2 * len(subjects), 2 * IMAGES_PER_LEAF, squeeze=False)
    for subject, plain, mapped in zip(subjects, rows[::2], rows[1::2], strict=True):
        for side, leaf in enumerate((subject.easy, subject.easy + 1)):
            index = subject.draws(leaf)
            slots = slice(side * IMAGES_PER_LEAF, (side + 1) * IMAGES_PER_LEAF)
            _show(plain[slots], subject, index)
            _show(mapped[slots], subject, index, attribution_maps(subject, index, leaf))
            title = ("" if len(index) else "no image ") + f"in {subject.leaves[leaf]}"
            look = {"xycoords": "axes fraction", "fontsize": 7, "fontweight": "bold"}
            plain[slots][0].annotate(title, (0, 1.22), **look)
        plain[0].set_ylabel(dataset_label(subject.run).replace(" (", "\n("), fontsize=6.5)
        mapped[0].set_ylabel("map", fontsize=6.5)
    kinds = ("solid blue", "dashed orange", "dotted green", "dash-dotted red")
    frames = []
    for subject in subjects:
        groups = [group.replace("_", " ") for group in subject.facts.groups]
        own = [f"{group} {kind}" for group, kind in zip(groups, kinds, strict=False)]
        frames.append(f"{dataset_label(subject.run)}: {', '.join(own)}")
    return Drawn(
        figure,
        "Iteration-2 LayerGradCAM attributions (layer4, ReLU, bilinear): test images that end in "
        "the easy leaf (left half) and in the hard leaf (right half) of one class, and below them "
        "what moves that leaf's logit. Numbers above the images are margins over the next leaf; "
        f"frames tell the true group: {'; '.join(frames)}.",
        _notes(subjects),
    )


def draw_paired(given: FigureInput) -> Drawn:
    """Draw the same images through the easy head, the hard head, and their difference."""
    subjects = _subjects(given)
    figure = plots.new_figure(9.0, 4.1 * len(subjects))
    rows = figure.subplots(4 * len(subjects), 2 * IMAGES_PER_LEAF, squeeze=False)
    for place, subject in enumerate(subjects):
        easy, hard = subject.easy, subject.easy + 1
        index = torch.cat([subject.draws(easy), subject.draws(hard)])
        plain, *mapped = rows[4 * place : 4 * place + 4]
        _show(plain, subject, index)
        plain[0].set_ylabel(dataset_label(subject.run).replace(" (", "\n("), fontsize=6.5)
        for line, leaf in zip(mapped, (easy, hard, None), strict=True):
            _show(line, subject, index, attribution_maps(subject, index, leaf))
            name = "easy - hard" if leaf is None else subject.leaves[leaf]
            line[0].set_ylabel(name, fontsize=7)
    return Drawn(
        figure,
        "The same test images through both siblings: rows show the image, what moves the easy "
        "leaf's logit, what moves the hard leaf's, and what moves the easy one above the hard one. "
        "If the heads look at different things, the second and third rows differ on one image.",
        _notes(subjects),
    )


def _subjects(given: FigureInput) -> list[Subject]:
    """Load the first kept tree of each photo dataset together with its test images."""
    reasons, found = [], []
    for label, trees in grown_trees(given, 2).items():
        wanted = SHOWN_CLASS.get(trees[0].run.job.dataset)
        if wanted is not None:
            try:
                found.append(load_subject(trees, wanted, given.data_root))
            except BenchError as error:
                reasons.append(f"{label}: {error.message}")
    digits = "the figure needs an NCT run on a photo dataset (Waterbirds, CelebA or ISIC)"
    if not found:
        raise SkippedFigure("; ".join(reasons) or digits)
    return found


def load_subject(trees: Sequence[TreeRun], wanted: str, data_root: Path | None) -> Subject:
    """Load the first tree of a dataset whose model was kept, and its test images.

    The leaves shown are those of the wanted class or, if no image ends there, of the fullest one.
    """
    from bench.models import load_model

    kept = [one for one in trees if (one.run.folder / "model.safetensors").is_file()]
    chosen = (kept or trees)[0]
    run = chosen.run
    fitted = load_model(run.run_id, run.folder.parents[1]).fitted
    assert isinstance(fitted, FittedTree)
    tree = fitted.tree.eval()
    if tree.depth < 2 or not hasattr(tree.backbone.body, "layer4"):
        raise BenchError(f"{run.run_id} has no second level, or its backbone has no layer4")
    facts, split = load_split(run.record, data_root, "test")
    heads: Any = tree.levels[1]
    with torch.no_grad():
        batches = map(split.images.batch, torch.arange(len(split)).split(100))
        logits = [tree.logits(facts.eval_transform(batch))[1] for batch in batches]
        scores = heads.masked(torch.cat(logits))  # merged leaves ruled out
    counts = torch.bincount(scores.argmax(dim=1), minlength=scores.shape[1]).view(-1, 2).sum(dim=1)
    place = facts.classes.index(wanted)
    easy = 2 * (place if counts[place] else int(counts.argmax()))
    names = tuple(map(escape_mathtext, chosen.tree.iterations[1].leaves))
    return Subject(run, tree, names, facts, split, scores, easy)


def attribution_maps(subject: Subject, index: Tensor, leaf: int | None) -> Tensor:
    """Return a map for each image of what moves a leaf's logit.

    Without a leaf, it is of what moves the easy leaf's logit above the hard one's.
    """
    from captum.attr import LayerGradCam
    from torch.nn.functional import interpolate

    def scored(images: Tensor) -> Tensor:
        logits = subject.tree.logits(images)[1]
        contrast = logits[:, subject.easy] - logits[:, subject.easy + 1]
        return torch.cat([logits, contrast[:, None]], dim=1)

    if not len(index):
        return torch.zeros(0)
    images = subject.images(index)
    column = len(subject.leaves) if leaf is None else leaf
    explainer = LayerGradCam(scored, subject.tree.backbone.body.layer4)
    maps = explainer.attribute(images, target=column, relu_attributions=True).detach()
    return interpolate(maps, images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def _show(axes: Any, subject: Subject, index: Tensor, maps: Tensor | None = None) -> None:
    """Show images in a row, with maps over them on one common colour scale."""
    transform = subject.facts.eval_transform
    mean, std = (torch.tensor(values)[:, None, None] for values in (transform.mean, transform.std))
    for place, panel in enumerate(axes):
        panel.grid(False)
        panel.set(xticks=[], yticks=[])
        if place >= len(index):
            panel.set_frame_on(False)
            continue
        position = int(index[place])
        pixels = subject.images(index[place : place + 1])[0] * std + mean
        panel.imshow(pixels.clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="bilinear")
        if maps is not None:
            heat = maps[place].numpy() / (float(maps.max()) or 1.0)
            # Cold places stay as they are in the photo; hot ones glow.
            panel.imshow(heat, cmap="inferno", alpha=0.2 + 0.6 * heat, vmin=0, vmax=1)
        else:
            best = subject.scores[position].topk(2).values
            panel.set_title(f"{float(best[0] - best[1]):.1f}", fontsize=6.5, fontweight="normal")
        group = int(subject.split.labels.groups[position])
        colour, line = plots.palette(4)[group], plots.LINES[group]
        for spine in panel.spines.values():
            spine.set(visible=True, color=colour, linewidth=1.8, linestyle=line)


def _notes(subjects: Sequence[Subject]) -> tuple[str, ...]:
    trees = ", ".join(f"{subject.run.run_id} (depth {subject.tree.depth})" for subject in subjects)
    standin = [dataset_label(subject.run) for subject in subjects if subject.run.job.standin]
    synthetic = (f"Synthetic stand-in images, not real photos: {', '.join(standin)}.",)
    return (
        f"Iteration-2 heads of {trees}; {IMAGES_PER_LEAF} images a leaf, drawn with seed {SEED}; "
        "one colour scale a row of maps. The paper names neither layer nor ReLU: both are our "
        "choice.",
        *(synthetic if standin else ()),
    )
