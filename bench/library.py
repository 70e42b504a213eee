"""Fitting a method on arrays: what `bench.fit` does.

The samples go the way a dataset's do: a task that shows the group labels which the method's tier
grants and no others, the same training loop, the same seeds by name. Only the process is not one of
its own, since the caller has the data anyway, and nothing is kept but the model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.arrays import Samples, to_samples
from bench.context import RunSettings
from bench.features import OnFeatures, features_in_memory
from bench.fitting import FitFailed, FitTask, fit_here
from bench.job import kind_of, resolve_backbone, resolve_input, why_unsuited
from bench.models import FittedModel, ModelCard, label_numbers
from datasets.base import BackboneSpec, Facts, LabelledSplit, Labels, LoadedData
from datasets.config import Values, build_config, require, with_overrides
from datasets.errors import DataMissing, UsageError
from datasets.features import FeatureRows, RowTransform
from datasets.fetch import Log, default_data_root
from datasets.images import Images
from datasets.own import ARRAYS, SHIFT, SMALL_SIDE
from datasets.photos import IMAGENET_MEAN, IMAGENET_STD, photo_transforms
from datasets.transforms import PaddedRandomCrop, ResizedCentreCrop, Transform
from methods.backbones import (
    LENET_SHAPES,
    LENETS,
    SMALL_NETWORKS,
    build_backbone,
    check_frozen,
    check_input,
    check_network,
)
from methods.base import Fitted, Method, Supervision, get_method, load_methods
from methods.network_input import with_input
from methods.presets import KINDS, preset_values

NAME = ARRAYS  # where a dataset's name stands in messages
LENET_SIDE, PHOTO_SIDE = 32, 224  # what a LeNet sees, and the most that other networks do
SMALLEST_SIDE = 8
SHIFTED_SIDE = 24  # pixels: smaller images are not shifted in training
SMALL_BACKBONE, BACKBONE, ROW_BACKBONE = "lenet5", "resnet18", "mlp"
MEASURED = 2000  # images whose mean and spread stand for those of all


def fit(
    method: str,
    train: Any,
    val: Any,
    *,
    seed: int = 0,
    backbone: str | BackboneSpec | None = None,
    resolution: int | None = None,
    preset: str | None = None,
    log: Log | None = None,
    **settings: object,
) -> FittedModel:
    """Fit a method on arrays, tensors or torch datasets, and return the model.

    Args:
        method: its name.
        train: `(x, y)` or `(x, y, groups)`, or a torch dataset of such items. Images are bytes, or
            floats from 0 to 1: (N, C, H, W) or (N, H, W[, C]); rows of features are (N, D). Classes
            and groups are whole numbers or text. Group labels are shown to a method whose tier
            grants them, and to no other.
        val: the same, for the choice of the epoch and for what else a method does with validation.
        seed: of all that is random.
        backbone: `lenet4`, `lenet5` or a timm name, which is trained from scratch; a `BackboneSpec`
            for one that starts from weights, or stays frozen as they are (`frozen=True`); `linear`
            or `mlp` for rows. By default a LeNet for small images, else a ResNet-18; an MLP for
            rows.
        resolution: the side of the square that the network sees; by default a LeNet's, or the
            images' own. From 24 pixels on they are shifted in training, above 64 cropped and
            flipped instead.
        preset: whose hyperparameters: `digits`, `scratch`, `pretrained`, `features` or `small`; by
            default by the kind of data and network, as for a registered dataset.
        log: prints a line an epoch.
        settings: the method's, by name; one of its first stage as `erm__epochs`.
    """
    known = get_method(method)
    samples = {"train": to_samples(train, "train"), "val": to_samples(val, "val")}
    labels, data = load_arrays(samples)
    spec = _backbone(backbone, samples["train"].images)
    facts = _with_network(data.facts, spec, samples["train"].images, resolution)
    network = {name: value for name, value in asdict(spec).items() if value}
    network |= {"pretrained": spec.pretrained}
    facts = with_input(facts, resolve_input(facts, network, spec.input))
    data = replace(data, facts=facts)
    config = _config(known, preset or kind_of(facts, network), settings)
    granted = known.supervision(config)
    _require_groups(known, granted, samples)
    unsuited = why_unsuited(known, config, facts, frozen=spec.frozen)
    if unsuited is not None:
        raise UsageError(unsuited.reason, unsuited.remedy)
    check_network(spec, facts.channels, facts.eval_transform.resolution)
    if spec.frozen:
        body = build_backbone(spec, facts.channels).eval()
        rows = features_in_memory(body, data)
        head = _fit(known, config, granted, rows, BackboneSpec(spec.head), seed, log)
        fitted: Fitted = OnFeatures(body.to(next(head.module.parameters()).device), head)
    else:
        fitted = _fit(known, config, granted, data, spec, seed, log)
    fitted.module.eval()
    card = ModelCard.of(facts, known.name, known.version_of(config), config, spec)
    return FittedModel(fitted, replace(card, labels=labels), facts.eval_transform)


def load_arrays(samples: Mapping[str, Samples]) -> tuple[tuple[Any, ...], LoadedData]:
    """Number the classes and groups of some splits; return the classes as given, and the data."""
    labels = _known([part.y for part in samples.values()])
    names = tuple(str(label) for label in labels)
    if len(names) < 2:
        raise UsageError(f"there is one class: {names[0]}", "a classifier needs two or more")
    for split, part in samples.items():
        missing = [n for n, label in zip(names, labels, strict=True) if label not in part.y]
        if missing:
            raise UsageError(
                f"{split} has no sample of class {missing[0]}",
                "every class has to be in every split; leave it out of the others, or add some",
            )
    grouped = [part.groups for part in samples.values() if part.groups is not None]
    group_splits = tuple(name for name, part in samples.items() if part.groups is not None)
    group_labels = _known(grouped) if grouped else labels
    splits, first = {}, 0
    for split, part in samples.items():
        y = label_numbers(part.y, labels, split)
        groups = y if not grouped else torch.full_like(y, -1)
        if part.groups is not None:
            groups = label_numbers(part.groups, group_labels, split)
        ids = torch.arange(first, first + len(y))
        splits[split] = LabelledSplit(Labels(ids, y, groups), part.images)
        first += len(y)
    image = next(iter(samples.values())).images.batch(torch.tensor([0]))
    plain = Transform(ResizedCentreCrop(1), 1, (0.0,), (1.0,))  # until there is a network
    facts = Facts(
        name=NAME,
        protocol=NAME,
        task="",
        spurious="",
        classes=names,
        groups=tuple(str(label) for label in group_labels) if grouped else names,
        metric="wga" if group_splits else "worst_class",
        counts={},
        group_counts={},
        backbone="",
        channels=image.pixels.shape[1],
        train_transform=plain,
        eval_transform=plain,
        group_splits=group_splits,
        pretrained=False,
    )
    return labels, LoadedData(facts, splits, data_kind="own")


def _known(columns: Sequence[npt.NDArray[Any]]) -> tuple[Any, ...]:
    """Return the different labels of some columns, in order, as plain Python values."""
    kinds = {column.dtype.kind in "US" for column in columns}
    if len(kinds) > 1:
        raise UsageError("labels are numbers in one split and text in the other", "use one of them")
    return tuple(np.unique(np.concatenate(columns)).tolist())


def _backbone(wanted: str | BackboneSpec | None, images: Images) -> BackboneSpec:
    """Return the network: the one that is asked for, or one by the size of the images."""
    rows = isinstance(images, FeatureRows)
    if wanted is None and rows:
        wanted = ROW_BACKBONE
    elif wanted is None:
        wanted = SMALL_BACKBONE if _longer_side(images) <= SMALL_SIDE else BACKBONE
    spec = BackboneSpec(wanted) if isinstance(wanted, str) else wanted
    check_input(spec.name, rows=rows, data="x")
    asked = {"pretrained": str(spec.pretrained).lower()}
    asked |= {"weights": spec.weights} if spec.weights else {}
    if spec.frozen:
        check_frozen(spec.name, rows=rows, data="x")
        asked |= {"frozen": "true", "head": spec.head}
    found = resolve_backbone("", False, {"name": spec.name, **asked}, default_data_root())
    if found["pretrained"] and found["weights"] is None:
        raise DataMissing(
            f"the weights of {spec.name} are not on disk",
            "give BackboneSpec(name, pretrained=True, weights=FILE), or train from scratch with "
            f"backbone='{spec.name}'",
        )
    values = {name: value for name, value in found.items() if name != "weights_sha256"}
    return build_config(BackboneSpec, {**values, "input": spec.input}, "backbone")


def _longer_side(images: Images) -> int:
    return max(images.batch(torch.tensor([0])).pixels.shape[2:])


def _with_network(
    facts: Facts, spec: BackboneSpec, images: Images, resolution: int | None
) -> Facts:
    """Return the facts with a network, and with what brings images to it."""
    if isinstance(images, FeatureRows):
        require(resolution is None, "rows of features have no resolution")
        row = RowTransform(length=images.rows.shape[1])
        return replace(facts, backbone=spec.name, train_transform=row, eval_transform=row)
    lenet = spec.name in LENETS
    side = resolution or (LENET_SIDE if lenet else min(PHOTO_SIDE, _longer_side(images)))
    require(side >= SMALLEST_SIDE, f"resolution must be at least {SMALLEST_SIDE} but got {side}")
    if lenet and (side, side) != (shape := LENET_SHAPES[spec.name]):
        raise UsageError(
            f"{spec.name} takes images of {shape[0]} x {shape[1]}, not {side}",
            "leave resolution out, or choose another backbone, e.g. resnet18",
        )
    look = (IMAGENET_MEAN, IMAGENET_STD) if facts.channels == 3 else _mean_and_std(images)
    if side > SMALL_SIDE:
        train, evaluate = photo_transforms(side, *look)
    else:
        evaluate = Transform(ResizedCentreCrop(side), side, *look)
        # Two pixels of a tiny image are a large part of it.
        shifted = Transform(PaddedRandomCrop(SHIFT), side, *look)
        train = shifted if _longer_side(images) >= SHIFTED_SIDE else evaluate
    return replace(facts, backbone=spec.name, train_transform=train, eval_transform=evaluate)


def _mean_and_std(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure the pixels of training images, by channel, on the scale from 0 to 1."""
    chosen = torch.linspace(0, len(images) - 1, min(MEASURED, len(images))).long()
    pixels = images.batch(chosen).pixels.double() / 255
    std, mean = torch.std_mean(pixels, dim=(0, 2, 3), correction=0)
    std = torch.where(std > 0, std, 1.0)  # a channel that is always the same
    return _rounded(mean), _rounded(std)


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(max(round(float(value), 4), 1e-4) for value in values)


def _config(method: Method, preset: str, settings: Values) -> Any:
    if preset not in KINDS:
        raise UsageError(f"unknown preset '{preset}'", f"choose from {', '.join(KINDS)}")
    values = preset_values(method, NAME, preset)
    named = {name.replace("__", "."): value for name, value in settings.items()}
    return build_config(method.config_type, with_overrides(values, named), method.name)


def _require_groups(method: Method, granted: Supervision, samples: Mapping[str, Samples]) -> None:
    """Raise unless the splits have the group labels that a method's tier needs."""
    needed = {"train": granted.train_groups, "val": granted.val_groups}
    lacking = [split for split, part in samples.items() if needed[split] and part.groups is None]
    if not lacking:
        return
    free = [
        name
        for name, other in load_methods().items()
        if Supervision().covers(other.supervision(other.config_type()))
    ]
    raise UsageError(
        f"{method.name} needs the groups of {' and '.join(lacking)}",
        f"give {lacking[0]}=(x, y, groups), or take a method without: {', '.join(free)}",
    )


def _fit(
    method: Method,
    config: Any,
    granted: Supervision,
    data: LoadedData,
    spec: BackboneSpec,
    seed: int,
    log: Log | None,
) -> Any:
    """Fit in this process, with checkpoints and stages in a folder that is then deleted."""

    def progress(values: Values) -> None:
        if log is not None and "selection" in values:
            done = f"epoch {values['epoch']} of {values['epochs']}"
            log(f"{values['stage']}: {done}, {values['rule']} {values['selection']:.4g}")

    threads = torch.get_num_threads()
    tier = {name: on for name, on in asdict(granted).items() if name.endswith("_groups")}
    with tempfile.TemporaryDirectory(prefix="bench-fit-") as folder:
        settings = RunSettings(
            run_id=f"{method.name}-{NAME}-s{seed}",
            seed=seed,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            scope={"data": NAME},
            stages=Path(folder) / "stages",
            supervision=granted,
            cores=1 if spec.name in SMALL_NETWORKS else threads,
        )
        task = data.task(spec, **tier)
        given = FitTask(method, config, task, settings, Path(folder) / "work")
        torch.set_num_threads(settings.cores)
        try:
            return fit_here(given, progress, None).fitted
        except FitFailed as failed:
            raise failed.error from None
        finally:
            torch.set_num_threads(threads)
