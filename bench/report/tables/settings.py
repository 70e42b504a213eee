"""The tables of settings: preprocessing and NCT's hyperparameters, read from code and presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.report.cells import About, Cell
from bench.report.names import DATASETS as SPELT
from bench.report.names import dataset_name
from bench.report.paper import paper_rows
from bench.report.table import NO_UNCERTAINTY, Column, Row, Side, Table
from bench.report.tables.data_facts import NOT_A_CHOICE
from datasets.catalogue import DATASETS
from datasets.photos import IMAGENET_MEAN, IMAGENET_STD
from datasets.transforms import (
    PaddedRandomCrop,
    RandomResizedCrop,
    ResizedCentreCrop,
    ResizedRandomCrop,
    Transform,
)
from methods.base import get_method
from methods.nct.config import NctConfig
from methods.presets import preset_config

Show = Callable[[NctConfig], str]


def preprocessing() -> Table:
    """Describe each dataset's transforms as the code has them, above the paper's words."""
    rows = []
    for row in paper_rows("preprocessing"):
        name = row["dataset"]
        dataset = DATASETS[name]
        facts = dataset.facts(dataset.config_type())
        here = {
            "resolution": str(facts.train_transform.resolution),
            "train": describe(facts.train_transform, training=True),
            "eval": describe(facts.eval_transform, training=False),
            "normalization": _normalisation(facts.train_transform),
        }
        rows.append(_words(name, here, "here"))
        rows.append(_words(name, {key: row[key] for key in here}, "paper"))
    return Table(
        label="preprocessing",
        title="Preprocessing",
        caption=(
            "Transforms as the code applies them, above the paper's. RRC: random resized crop; "
            "RC(s, p): random crop of size s with padding p; CC: central crop; HFlip, VFlip: "
            "mirrored with probability one half."
        ),
        stub=("Dataset", "Source"),
        columns=(
            Column("Res."),
            Column("Training", align="l"),
            Column("Evaluation", align="l"),
            Column("Normalisation", align="l"),
        ),
        rows=tuple(rows),
        uncertainty=NO_UNCERTAINTY,
        selection=NOT_A_CHOICE,
        notes=(
            "UMNIST is not mirrored by default: the paper's own first-iteration figures are only "
            "reached without; umnist.hflip=true switches it on.",
        ),
    )


def describe(transform: Transform, *, training: bool) -> str:
    """Write a transform in the paper's shorthand."""
    cut, side = transform.cut, transform.resolution
    if isinstance(cut, RandomResizedCrop):
        scale, ratio = (f"[{low:.3g}, {high:.3g}]" for low, high in (cut.scale, cut.ratio))
        text = f"RRC({side}), scale {scale}, ratio {ratio}"
    elif isinstance(cut, PaddedRandomCrop):
        text = f"RC(own size, {cut.padding}) -> Resize {side}"
    elif isinstance(cut, ResizedRandomCrop):
        text = f"Resize {cut.resize} -> RC({side}, 0)"
    else:
        assert isinstance(cut, ResizedCentreCrop)
        text = f"Resize {cut.resize}" + (f" -> CC {side}" if cut.resize != side else "")
    flips = [name for name, on in (("HFlip", transform.hflip), ("VFlip", transform.vflip)) if on]
    if not training:
        return text
    return f"{text}; {', '.join(flips) or 'no flip'}"


def _normalisation(transform: Transform) -> str:
    if (transform.mean, transform.std) == (IMAGENET_MEAN, IMAGENET_STD):
        return "ImageNet"
    mean, std = (
        ", ".join(f"{value:g}" for value in dict.fromkeys(values))
        for values in (transform.mean, transform.std)
    )
    return f"mean ({mean}), std ({std})"


def _words(dataset: str, texts: Mapping[str, str], source: str) -> Row:
    kind: Side = "paper" if source == "paper" else "measured"
    cells = tuple(Cell(kind, About("", dataset, key), label=text) for key, text in texts.items())
    return Row((dataset_name(dataset), source), cells, section=dataset, source=kind)


def _per_iteration(values: tuple[Any, ...]) -> str:
    return "/".join(str(value) for value in values)


SHOWN: dict[str, Show] = {
    "Head hidden dim": lambda c: str(c.hidden),
    "Head dropout": lambda c: f"{c.dropout:g}",
    "Backbone LR": lambda c: _power(c.backbone_lr),
    "Head LR": lambda c: _power(c.head_lr),
    "LR decay factor": lambda c: f"{c.lr_decay_factor:.1f}",
    "Weight decay": lambda c: _power(c.weight_decay),
    "Batch size": lambda c: str(c.batch_size),
    "Epochs (iter 1/2/3)": lambda c: _per_iteration(c.epochs),
    "Phase 1 ratio (iter 1/2/3)": lambda c: _per_iteration(c.phase1_ratio),
    "Scheduler": lambda c: c.scheduler.capitalize(),
    "Early stop patience": lambda c: str(c.patience),
    "Sampling strategy": lambda c: c.sampling.replace("_", " ").capitalize(),
    "Aux loss weight": lambda c: f"{c.aux_weight:.1f}",
    "Class weight cap": lambda c: f"{c.weight_cap:g}",
}
"""The paper's rows, and how a preset's value is written there."""

READINGS: dict[str, Show] = {
    "Optimiser": lambda c: c.optimizer,
    "Head of iteration 1": lambda c: c.first_head,
    "Children's heads": lambda c: c.heads,
    "Patience in phase 2 (0: none)": lambda c: str(c.phase2_patience),
    "Schedule's factor": lambda c: f"{c.decay:g}" if c.scheduler != "none" else "none",
    "Plateau patience": lambda c: str(c.plateau_patience) if c.scheduler == "plateau" else "none",
    "Best checkpoint of each": lambda c: c.checkpoint,
    "Routing images": lambda c: c.routing_images,
    "Groups of pWGA2": lambda c: c.pwga,
    "Merging threshold": lambda c: str(c.min_samples),
    "z of the depth rule": lambda c: f"{c.z:g}",
}
"""What the paper says in its text or leaves open."""


def hyperparams() -> Table:
    """Put NCT's presets above the paper's table, and below it what had to be read or chosen."""
    nct = get_method("nct")
    presets = {name: preset_config(nct, name) for name in SPELT}
    told: dict[str, dict[str, str]] = {}
    for row in paper_rows("hyperparams"):
        told.setdefault(row["parameter"], {})[row["dataset"]] = row["value"]
    rows = []
    for parameter, values in told.items():
        here = {name: SHOWN[parameter](presets[name]) for name in SPELT}
        differ = {name: "differs" for name in SPELT if not same(here[name], values[name])}
        rows.append(_values(parameter, here, "here", parameter, differ))
        rows.append(_values(parameter, values, "paper", parameter, {}))
    for parameter, show in READINGS.items():
        here = {name: show(config) for name, config in presets.items()}
        rows.append(_values(parameter, here, "here", "In the paper's text, or left open", {}))
    return Table(
        label="hyperparams",
        title="Hyperparameters of NCT",
        caption=(
            "The presets that runs use, above the paper's table; the lower part is what the paper "
            "says in its text or leaves open. Presets name the source of every value."
        ),
        stub=("Parameter", "Source"),
        columns=tuple(Column(dataset_name(name)) for name in SPELT),
        rows=tuple(rows),
        uncertainty=NO_UNCERTAINTY,
        selection="tuned in the paper against pWGA2 on validation data; taken over here",
    )


def same(here: str, paper: str) -> bool:
    """Tell whether two texts say the same, numbers by value."""
    try:
        return float(here) == float(paper)
    except ValueError:
        return here.lower() == paper.lower()


def _values(
    parameter: str, texts: Mapping[str, str], source: str, section: str, notes: Mapping[str, str]
) -> Row:
    kind: Side = "paper" if source == "paper" else "measured"
    cells = tuple(
        Cell(kind, About("nct", name, "setting", parameter), label=text, note=notes.get(name, ""))
        for name, text in texts.items()
    )
    return Row((parameter, source), cells, section=section, source=kind)


def _power(value: float) -> str:
    """Write a rate as the paper does: 2.7e-5, but 0.1."""
    if value >= 0.05 or value == 0:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
