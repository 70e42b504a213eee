"""A fitted model by itself: it predicts, is saved, and is loaded where its data is not.

A model's file is a safetensors file whose metadata say how to build the network again, how an image
is brought to it, and what its classes are called. `run --keep-models` writes the same, beside the
record of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bench.arrays import find_image_files, read_batches, read_rows, to_images
from bench.features import OnFeatures, split_weights
from bench.record import SCHEMA_VERSION, Record
from bench.resources import published_folder
from bench.store import MODEL, Store
from datasets.base import BackboneSpec, Facts
from datasets.bounded import Bound
from datasets.catalogue import get_dataset
from datasets.config import Values, as_plain, build_config, coerce, field_types, read_stored
from datasets.errors import BenchError, DataCorrupt, DataMissing, UsageError
from datasets.features import RowTransform
from datasets.files import Damaged, atomic_file, read_checked, to_json
from datasets.images import ImageBatch, Images
from datasets.transforms import Cut, Transform
from methods.backbones import build_backbone
from methods.base import Fitted, Method, NetworkSpec, get_method
from methods.prediction import EvalImages

if TYPE_CHECKING:
    import pandas as pd

    from bench.job import Job

METADATA = "nct-bench"  # the key in a model file's metadata
FORMAT = 1
FROZEN_FORMAT = 2  # of models with a frozen network, which earlier versions cannot read
Label = int | str
CUTS = {cut.__name__: cut for cut in get_args(Cut)}


@dataclass(frozen=True)
class ModelCard:
    """What a model's file says of the model, as plain values.

    Attributes:
        labels: the classes in the order of the scores, as predictions name them.
        codes: short class names, of which the names of leaves are made.
        transform: how an image is brought to the network.
        dataset, protocol: what it was trained on.
        bound: what image files are scaled down to before that, as they were for training.
    """

    method: str
    version: int
    config: Values
    backbone: Values
    labels: tuple[object, ...]
    classes: tuple[str, ...]
    codes: tuple[str, ...]
    channels: int
    transform: Values
    dataset: str = ""
    protocol: str = ""
    format: int = FORMAT
    bound: Bound | None = None

    @staticmethod
    def of(
        facts: Facts, method: str, version: int, config: Any, backbone: BackboneSpec
    ) -> ModelCard:
        """Describe a model of a dataset's images (or rows); its labels are the classes' names."""
        frozen = {"frozen": True, "head": backbone.head} if backbone.frozen else {}
        return ModelCard(
            method=method,
            version=version,
            config=as_plain(config),
            # The kept weights are complete: ImageNet's are not needed again.
            backbone={"name": backbone.name, **frozen},
            labels=facts.classes,
            classes=facts.classes,
            codes=facts.codes or facts.classes,
            channels=facts.channels,
            transform=transform_to_json(facts.eval_transform),
            dataset=facts.name,
            protocol=facts.protocol,
            format=FROZEN_FORMAT if frozen else FORMAT,
            bound=facts.bound,
        )

    @staticmethod
    def of_job(job: Job, facts: Facts) -> ModelCard:
        """Describe the model of a run."""
        return ModelCard.of(facts, job.method, job.version, job.method_config(), job.network())

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a model's file."""
        return {METADATA: to_json({**as_plain(self), "format": self.format})}

    @staticmethod
    def from_metadata(text: str) -> ModelCard:
        """Read them back."""
        raw = json.loads(text)
        if not isinstance(raw, dict) or raw.get("format") not in (FORMAT, FROZEN_FORMAT):
            raise Damaged("it was written by a later version: update nct-bench to read it")
        return build_config(ModelCard, raw, "model")

    def load(self, weights: dict[str, Tensor], record: Record | None = None) -> FittedModel:
        """Build the model and fill it."""
        method = get_method(self.method)
        config = read_stored(method.config_type, self.config, self.method)
        network = build_config(BackboneSpec, self.backbone, "backbone")
        if network.frozen:
            fitted: Fitted = self._on_features(method, config, network, weights)
        else:
            spec = NetworkSpec(network, self.channels, self.codes)
            fitted = method.load_fitted(spec, config, weights)
        return FittedModel(fitted, self, transform_from_json(self.transform), record)

    def _on_features(
        self, method: Method, config: Any, network: BackboneSpec, weights: dict[str, Tensor]
    ) -> OnFeatures:
        """Build the frozen network and the head on its features."""
        body = build_backbone(replace(network, pretrained=False), self.channels)
        of_network, of_head = split_weights(weights)
        body.load_state_dict(of_network)
        spec = NetworkSpec(BackboneSpec(network.head), body.dim, self.codes)
        return OnFeatures(body.eval(), method.load_fitted(spec, config, of_head))


def transform_to_json(transform: Transform) -> dict[str, object]:
    """Return a transform as plain values."""
    if isinstance(transform, RowTransform):
        return {"rows": transform.length}
    cut = {"kind": type(transform.cut).__name__, **as_plain(transform.cut)}
    return {**as_plain(transform), "cut": cut}


def transform_from_json(raw: Values) -> Transform:
    """Read a transform back."""
    if "rows" in raw:
        return RowTransform(length=coerce(raw["rows"], int, "rows"))
    cut = raw["cut"]
    assert isinstance(cut, Mapping)
    own = {name: value for name, value in cut.items() if name != "kind"}
    built: Cut = build_config(CUTS[str(cut["kind"])], own, "cut")
    kinds = field_types(Transform)
    named = [name for name in kinds if name != "cut" and name in raw]  # earlier files lack some
    rest = {name: coerce(raw[name], kinds[name], name) for name in named}
    return Transform(built, **rest)


@dataclass(frozen=True)
class FittedModel:
    """A fitted model for arrays: class labels as they were given, and scikit-learn's names.

    Raw images go in: bytes as a dataset or a file has them (or floats from 0 to 1), (N, C, H, W) or
    (N, H, W[, C]), of any one size; or rows of features (N, D) where it was trained on such.

    Attributes:
        fitted: the model as its method returns it, for transformed images.
        card: what it is, and what it was trained on.
        transform: how a raw image is brought to it.
        record: of the run that it is from, if it is from one.
    """

    fitted: Fitted
    card: ModelCard
    transform: Transform
    record: Record | None = None

    @property
    def facts(self) -> Facts:
        """What is known of the data it was trained on: names, channels and transform."""
        card = self.card
        return Facts(
            name=card.dataset,
            protocol=card.protocol,
            task="",
            spurious="",
            classes=card.classes,
            groups=card.classes,
            metric="wga",
            counts={},
            group_counts={},
            backbone=str(card.backbone["name"]),
            channels=card.channels,
            train_transform=self.transform,
            eval_transform=self.transform,
            codes=card.codes,
        )

    @property
    def classes(self) -> npt.NDArray[Any]:
        """The class labels, in the order of the columns of `predict_proba`."""
        return np.array(self.card.labels)

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The class labels, as scikit-learn calls them."""
        return self.classes

    def logits(self, x: Any) -> Tensor:
        """Score the classes of raw images."""
        return self.apply(self._images(x))[0]

    def predict(self, x: Any) -> npt.NDArray[Any]:
        """Return the class label of each raw image."""
        return self.named(self.logits(x))

    def named(self, logits: Tensor) -> npt.NDArray[Any]:
        """Return the label of the class with the highest score."""
        labels: npt.NDArray[Any] = self.classes[logits.argmax(dim=1).numpy()]
        return labels

    def predict_proba(self, x: Any) -> npt.NDArray[np.float32]:
        """Return the softmax of the class scores of each raw image; it is not calibrated."""
        return self.logits(x).softmax(dim=1).numpy()

    def leaf(self, x: Any) -> npt.NDArray[np.int64] | None:
        """Return the latent group of each raw image; none where the method has none."""
        leaf = self.apply(self._images(x))[1]
        return None if leaf is None else leaf.numpy()

    def route(self, x: Any) -> npt.NDArray[Any] | None:
        """Return the name of each image's latent group: of a tree, class and easy/hard route."""
        leaf = self.leaf(x)
        return None if leaf is None else self.route_names(leaf)

    def route_names(self, leaf: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the names of latent groups."""
        names: npt.NDArray[Any] = np.array(self.fitted.leaf_names())[leaf]
        return names

    def score(self, x: Any, y: Any) -> float:
        """Return the share of raw images whose class label is predicted."""
        return float(np.mean(self.predict(x) == np.asarray(y)))

    def _images(self, x: Any) -> Images:
        rows = isinstance(self.transform, RowTransform)
        return to_images(x, self.card.channels, rows=rows)

    def apply(self, images: Images) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a dataset's images, and their latent groups where there are any."""
        return self._outputs(EvalImages(images.to(self.device), self.transform))

    def apply_batch(self, batch: ImageBatch) -> tuple[Tensor, Tensor | None]:
        """Do as `apply`, with one batch of images of any sizes."""
        placed = ImageBatch(batch.pixels.to(self.device), batch.sizes.to(self.device))
        return self._outputs([self.transform(placed).contiguous(memory_format=torch.channels_last)])

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.fitted.module.parameters()).device

    def _outputs(self, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor | None]:
        logits, leaves = [torch.empty(0, len(self.card.classes))], []
        with torch.no_grad():
            for batch in batches:
                logits.append(self.fitted.logits(batch).float().cpu())
                leaf = self.fitted.leaf(batch)
                if leaf is not None:
                    leaves.append(leaf.long().cpu())
        return torch.cat(logits), torch.cat(leaves) if leaves else None

    def save(self, path: Path | str) -> Path:
        """Write the model to one file, which `bench.load_model` reads anywhere; return its path."""
        from safetensors.torch import save

        path = Path(path)
        if path.is_dir():
            raise UsageError(f"{path} is a folder", "give a file, e.g. model.safetensors")
        state = self.fitted.module.state_dict()
        tensors = {name: value.contiguous().cpu() for name, value in state.items()}
        with atomic_file(path) as draft:
            draft.write_bytes(save(tensors, metadata=self.card.metadata()))
        return path


def load_model(run: Path | str, results: Path | str = "results") -> FittedModel:
    """Load a model that was kept.

    Args:
        run: what `FittedModel.save` wrote, the folder of a run that was made with `keep_models`,
            wherever it lies, or the id of such a run (or the beginning or end of one).
        results: where a run is looked for by its id, before the published ones.
    """
    path = Path(run)
    if path.is_file():
        beside = path.with_name("record.json")
        return _read(path, _record(beside) if path.name == MODEL else None)
    if path.is_dir():
        if not (path / "record.json").is_file():
            raise UsageError(f"{path} is no run: it has no record.json", "give the folder of a run")
        return _of_run(path)
    if path.suffix == Path(MODEL).suffix or path.is_absolute():
        raise UsageError(f"there is no {path}", "give a run's id or folder, or a model's file")
    store = Store(Path(results))
    if not store.matches(str(run)) and Store(published_folder()).matches(str(run)):
        store = Store(published_folder())
    return _of_run(store.runs / store.find(str(run)))


def _of_run(folder: Path) -> FittedModel:
    record = _record(folder / "record.json")
    assert record is not None  # only what has one comes here
    if not (folder / MODEL).is_file():
        what = f"{record.run_id} was run without keeping its model"
        raise DataMissing(what, _again(record))
    return _read(folder / MODEL, record)


def _record(path: Path) -> Record | None:
    """Read the record of a run, whose folder may have been given another name."""
    if not path.is_file():
        return None
    try:
        raw = read_checked(path)
        if raw["schema_version"] > SCHEMA_VERSION:
            raise Damaged(f"it has schema version {raw['schema_version']}: update nct-bench")
        return Record.from_json(raw)
    except (BenchError, OSError, LookupError, TypeError, ValueError) as error:
        reason = getattr(error, "message", f"{type(error).__name__}: {error}")
        raise Damaged(f"{path} cannot be read: {reason}", "give another copy of it") from error


def _again(record: Record) -> str:
    return f"{record.provenance.command} --rerun always --keep-models"


def _read(path: Path, record: Record | None) -> FittedModel:
    """Read a model's file, which the record beside it has checksums of."""
    from safetensors.torch import load_file

    named = path.parent.name if record is None else record.run_id
    remedy = "save it again" if record is None else _again(record)
    try:
        if record is not None and MODEL in record.files:
            record.files[MODEL].check(path)
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
        weights = load_file(path)
        card = ModelCard.from_metadata(metadata[METADATA]) if METADATA in metadata else None
    except (Damaged, SafetensorError, ValueError) as error:
        raise Damaged(f"the model of {named} cannot be read: {error}", remedy) from error
    card = card or _card_of(record, path)
    return card.load(weights, record)


def _card_of(record: Record | None, path: Path) -> ModelCard:
    """Describe a model whose file says nothing of it, as those of earlier versions do not."""
    if record is None:
        raise BenchError(
            f"{path} says nothing of the model whose weights it has",
            "give the folder of its run, with the record",
        )
    job = record.job
    facts = get_dataset(job.dataset).facts(job.dataset_config())
    return ModelCard.of_job(job, facts)


def label_files(
    model: FittedModel, path: Path | str, unreadable: Callable[[str], None]
) -> pd.DataFrame:
    """Predict image files, or the rows of a file of features, and return a row for each.

    The columns are the file (or the number of the row), the class, its probability (the softmax of
    the scores, which is not calibrated), and the latent group by number and by name, which are
    empty where the method has none.

    Args:
        model: what predicts.
        path: an image, a folder of images (those below it as well), or a file of rows (`.npy`, or
            `.npz` or `.parquet` as `data add` takes them).
        unreadable: told of each image that cannot be read and is left out.
    """
    import pandas as pd

    path = Path(path)
    if isinstance(model.transform, RowTransform):
        rows = to_images(read_rows(path), model.card.channels, rows=True, what=path.name)
        return _labelled(model, {"row": range(len(rows))}, *model.apply(rows))
    files = find_image_files(path)
    parts = [
        _labelled(model, {"file": [str(name) for name in names]}, *model.apply_batch(batch))
        for names, batch in read_batches(files, model.card.channels, unreadable, model.card.bound)
    ]
    if not parts:
        raise DataCorrupt(f"none of the images in {path} can be read", "give others")
    return pd.concat(parts, ignore_index=True)


def _labelled(
    model: FittedModel, named: Mapping[str, Sequence[object]], logits: Tensor, leaf: Tensor | None
) -> pd.DataFrame:
    import pandas as pd

    numbers = None if leaf is None else leaf.numpy()
    columns = {
        **named,
        "class": model.named(logits),
        "probability": logits.softmax(dim=1).amax(dim=1).numpy(),
        "leaf": numbers,
        "route": None if numbers is None else model.route_names(numbers),
    }
    return pd.DataFrame(columns)


def label_numbers(labels: Iterable[Any], known: Sequence[Any], what: str) -> Tensor:
    """Return the number of each label among the known ones; an unknown one is an error."""
    numbers = {label: number for number, label in enumerate(known)}
    given = [_plain(label) for label in labels]
    found = [numbers.get(label, -1) for label in given]
    if -1 in found:
        first = given[found.index(-1)]
        shown = ", ".join(str(label) for label in list(known)[:8])
        raise UsageError(f"{what} has the class {first!r}, which is unknown", f"known are {shown}")
    return torch.tensor(found, dtype=torch.int64)


def _plain(label: Any) -> Any:
    return label.item() if isinstance(label, np.generic) else label
