"""Scoring what was made elsewhere: what `bench.evaluate` does.

Predictions in a table, a function, a network or a model of ours get the metrics that a run's record
has, by the same code, each with an interval of its own. What comes of it is called external:
nothing is known of how it was trained, so it never stands in a paper's table. A report that is
given it has it in a table of its own (`bench.report(external=...)`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from bench.arrays import to_samples
from bench.evaluation import evaluate as compute_metrics
from bench.library import load_arrays
from bench.models import FittedModel, label_numbers, load_model
from bench.record import Metrics
from bench.reporting.statistics import LEVEL, RESAMPLES, worst_group_interval
from datasets.base import SPLITS, Facts, LabelledSplit, Labels, LoadedData
from datasets.catalogue import get_dataset
from datasets.config import build_config, require
from datasets.errors import UsageError
from datasets.features import FeatureRows
from datasets.fetch import default_data_root, use_data_root
from datasets.images import Images, MemoryImages
from methods.metrics import margin_score
from methods.prediction import EvalImages, evaluation_mode

if TYPE_CHECKING:
    import pandas as pd

EXTERNAL = "external"
UNCERTAINTY = f"{LEVEL:.0%} bootstrap over samples within groups, {RESAMPLES:,} resamples"
CLASS_COLUMNS = ("pred", "class", "prediction")
SCORE_PREFIXES = ("score_", "logit_", "prob_")
TABLES = (".csv", ".parquet")
OF_SCORES = ("auroc", "ece")  # metrics that classes alone do not give
CHUNK = 50  # resamples that are drawn at once, since each takes a number a sample
SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")
Transform = Callable[[Any], Tensor]
Interval = tuple[float, float]
Draws = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of predictions on one split, and how far each moves with the samples at hand.

    Attributes:
        name: what was scored.
        samples: how many there are.
        intervals: by metric, and by group as `group_accuracy/NAME`; see `uncertainty`.
        correct: whether each sample's class was predicted, in the dataset's order.
    """

    name: str
    dataset: str
    protocol: str
    data_kind: str
    split: str
    samples: int
    metrics: Metrics
    intervals: Mapping[str, Interval]
    correct: Tensor
    uncertainty: str = UNCERTAINTY
    source: str = EXTERNAL

    def to_json(self) -> dict[str, object]:
        """Return all but the samples as plain values."""
        values = {name: value for name, value in vars(self).items() if name != "correct"}
        return values | {"metrics": self.metrics.to_json()}

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each metric, as the CSV of a report's table has them."""
        import pandas as pd

        groups = {f"group_accuracy/{n}": v for n, v in self.metrics.group_accuracy.items()}
        rows = []
        for metric, value in {**self.metrics.values, **groups}.items():
            low, high = self.intervals.get(metric, (None, None))
            named = {"method": self.name, "dataset": self.dataset, "metric": metric}
            figures = {"value": value, "ci_low": low, "ci_high": high, "n": self.samples}
            kind = {"split": self.split, "protocol": self.protocol, "data_kind": self.data_kind}
            rows.append(named | figures | kind | {"source": self.source})
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        """Return the metrics as lines of text."""
        lines = [f"{self.name} on {self.dataset} ({self.split}, {self.samples:,} samples)"]
        for metric, value in self.metrics.values.items():
            low, high = self.intervals.get(metric, (None, None))
            reach = "" if low is None or high is None else f"  ({low:.3g} to {high:.3g})"
            lines.append(f"  {metric}: {'undefined' if value is None else f'{value:.4g}'}{reach}")
        return "\n".join([*lines, f"  in brackets: {self.uncertainty}"])


def evaluate(
    predictions: Any,
    dataset: Any,
    *,
    split: str = "test",
    name: str = "",
    transform: Transform | None = None,
    settings: Mapping[str, object] | None = None,
    data_root: Path | str | None = None,
) -> Evaluation:
    """Score predictions, or what makes them, on a split of a dataset.

    Args:
        predictions: a table of predictions (a CSV or parquet file, or a DataFrame), an array of
            classes or of scores in the dataset's order, a function or torch module from a batch of
            images, or of rows (B, D), to scores or classes, a `FittedModel` or the file or run of
            one, or an ONNX file. A table has the columns `id` (else the dataset's order), `split`
            if it is of several, and `class` (a name or number) or a column of scores for each class
            (`score_0` or `score_NAME`).
        dataset: its name; or `(x, y)` or `(x, y, groups)` as `bench.fit` takes them.
        split: which part of it.
        name: what the result is called; by default what the predictions are.
        transform: from one PIL image to a function's or network's input, in the place of the
            dataset's own evaluation transform.
        settings: of the dataset, such as `{"protocol": "cnc"}`.
        data_root: where datasets are; by default $BENCH_DATA or the user's cache.
    """
    if split not in SPLITS:
        raise UsageError(f"there is no split '{split}'", f"choose from {', '.join(SPLITS)}")
    given = _opened(predictions)
    load = partial(_load, dataset, settings or {}, data_root, split)
    if isinstance(given, FittedModel):
        data = load(images=True)
        scores, scored = _by_our_model(given, data, split), True
    elif callable(given):
        data = load(images=True)
        scores, scored = _by_function(given, data, split, transform)
    else:
        data = load(images=False)
        scores, scored = _from_table(given, data, split)
    return _evaluation(name or _name_of(predictions), data, split, scores, scored)


def _name_of(predictions: Any) -> str:
    if isinstance(predictions, FittedModel):
        return predictions.card.method
    if isinstance(predictions, str | Path):
        return Path(predictions).stem
    return str(getattr(predictions, "__name__", type(predictions).__name__))


def _opened(predictions: Any) -> Any:
    """Read what a path or the name of a run stands for."""
    if not isinstance(predictions, str | Path):
        return predictions
    path = Path(predictions)
    if path.suffix in TABLES:
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "give a table of predictions")
        import pandas as pd

        return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    return _onnx(path) if path.suffix == ".onnx" else load_model(path)


def _onnx(path: Path) -> Callable[[Tensor], Any]:
    """Open a network in the ONNX format; its first input takes the batch, its first output counts.

    One that was exported for batches of one size is given such, the last of them filled up.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError("ONNX files need onnxruntime", "pip install onnxruntime") from error
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "give an ONNX file")
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no base class of their own
        remedy = "give a network in the ONNX format with operators that onnxruntime has"
        raise UsageError(f"{path} cannot be opened: {_first_line(error)}", remedy) from error
    first = session.get_inputs()[0]
    fixed = first.shape[0] if first.shape and isinstance(first.shape[0], int) else None

    def run(batch: Tensor) -> Tensor:
        outputs = []
        for part in batch.split(fixed or len(batch)):
            filled = torch.cat(
                [part, part[-1:].expand((fixed or len(part)) - len(part), *part.shape[1:])]
            )
            try:
                scores = session.run(None, {first.name: filled.contiguous().numpy()})[0]
            except Exception as error:
                raise UsageError(
                    f"{path} cannot be run on batches of {tuple(batch.shape)}: "
                    f"{_first_line(error)}",
                    "its first input takes images as 32-bit floats; transform= makes others",
                ) from error
            outputs.append(torch.as_tensor(scores)[: len(part)])
        return torch.cat(outputs)

    return run


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _load(
    dataset: Any,
    settings: Mapping[str, object],
    data_root: Path | str | None,
    split: str,
    *,
    images: bool,
) -> LoadedData:
    """Load the labels of a dataset, and the images of a split if they are asked for."""
    if not isinstance(dataset, str):
        return load_arrays({split: to_samples(dataset, "dataset")})[1]
    root = default_data_root() if data_root is None else Path(data_root)
    use_data_root(root)  # where registered datasets are
    known = get_dataset(dataset)
    config = build_config(known.config_type, settings, dataset)
    facts, found, labels = known.check(root, config)
    opened: Mapping[str, Images] = {}
    if images:
        loaded = known.load(root, config, splits=(split,))
        opened = {split: loaded.splits[split].images}
    nothing = MemoryImages(torch.empty(0, facts.channels, 1, 1, dtype=torch.uint8))
    splits = {n: LabelledSplit(own, opened.get(n, nothing)) for n, own in labels.items()}
    return LoadedData(facts, splits, data_kind=found.data_kind)


def _by_our_model(model: FittedModel, data: LoadedData, split: str) -> Tensor:
    """Score a split by a model of ours, whose classes are put into the dataset's order."""
    own, wanted = model.card.classes, data.facts.classes
    if set(own) != set(wanted):
        raise UsageError(
            f"the model knows the classes {', '.join(own)}, the data has {', '.join(wanted)}",
            "score it on data with the same classes",
        )
    logits, _ = model.apply(data.splits[split].images)
    return logits[:, [own.index(name) for name in wanted]]


def _by_function(
    function: Callable[[Tensor], Any], data: LoadedData, split: str, transform: Transform | None
) -> tuple[Tensor, bool]:
    """Call a function or network with one batch after another."""
    images, facts = data.splits[split].images, data.facts
    rows = isinstance(images, FeatureRows)
    require(not rows or transform is None, "rows of features have no transform: leave it out")
    device = torch.device("cpu")
    if isinstance(function, nn.Module):
        parameter = next(function.parameters(), None)
        device = device if parameter is None else parameter.device
    batches = EvalImages(images, facts.eval_transform) if transform is None else None
    outputs = []
    with torch.no_grad():
        for batch in batches or _by_transform(images, transform):
            outputs.append(_call(function, (batch.flatten(1) if rows else batch).to(device)))
    joined = torch.cat(outputs)
    if len(joined) != len(images):
        raise UsageError(
            f"there are {len(joined)} predictions of {len(images)} images",
            "the function has to return one for each image of its batch",
        )
    return _from_array(joined.numpy(), facts)


def _call(function: Callable[[Tensor], Any], batch: Tensor) -> Tensor:
    if isinstance(function, nn.Module):
        with evaluation_mode(function):
            output = function(batch)
    else:
        output = function(batch)
    return torch.as_tensor(output).detach().cpu()


def _by_transform(images: Images, transform: Transform | None) -> Any:
    """Yield batches of images that the user's own transform made."""
    assert transform is not None
    for index in torch.arange(len(images)).split(64):
        raw = images.batch(index)
        ready = []
        for pixels, (height, width) in zip(raw.pixels, raw.sizes.tolist(), strict=True):
            array = pixels[:, :height, :width].permute(1, 2, 0).cpu().numpy()
            grey = array.shape[2] == 1
            ready.append(transform(Image.fromarray(array[:, :, 0] if grey else array)))
        yield torch.stack(ready)


def _from_array(values: npt.NDArray[Any], facts: Facts) -> tuple[Tensor, bool]:
    """Return scores, and whether they are any: classes alone become ones among zeros."""
    classes = len(facts.classes)
    if values.ndim == 2 and values.shape[1] == classes:
        scores = torch.from_numpy(np.array(values, dtype=np.float64))
        if not bool(torch.isfinite(scores).all()):
            raise UsageError("some scores are not finite", "correct the predictions")
        return scores, True
    if values.ndim == 1:
        return _one_hot(_class_numbers(values, facts), classes), False
    raise UsageError(
        f"predictions have the shape {values.shape}",
        f"give a class for each sample, or {classes} scores ({', '.join(facts.classes[:8])})",
    )


def _one_hot(numbers: Tensor, classes: int) -> Tensor:
    return functional.one_hot(numbers, classes).double()


def _class_numbers(values: npt.NDArray[Any], facts: Facts) -> Tensor:
    """Read classes that are given by name or by number; names are preferred."""
    texts = [str(value.item() if isinstance(value, np.generic) else value) for value in values]
    if set(texts) <= set(facts.classes):
        return label_numbers(texts, facts.classes, "predictions")
    if values.dtype.kind in "iuf" and np.all(values == np.round(values)):
        if values.min() < 0 or values.max() >= len(facts.classes):
            wrong = int(values.min() if values.min() < 0 else values.max())
            last = len(facts.classes) - 1
            raise UsageError(f"predictions have the class {wrong}", f"classes are 0 to {last}")
        return torch.from_numpy(values.astype(np.int64))
    return label_numbers(texts, facts.classes, "predictions")


def _from_table(given: Any, data: LoadedData, split: str) -> tuple[Tensor, bool]:
    """Read predictions from a table or an array, in the order of the samples."""
    import pandas as pd

    labels, facts = data.splits[split].labels, data.facts
    if not isinstance(given, pd.DataFrame):
        values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
        _require_count(len(values), labels, split)
        return _from_array(values, facts)
    table = given
    if "split" in table:
        table = table[table["split"].astype(str) == split]
    table = _in_order(table, labels, split)
    scores = _scores_of(table, facts)
    column = next((name for name in CLASS_COLUMNS if name in table), None)
    if scores is None and column is None:
        raise UsageError(
            f"the table has no predictions: its columns are {', '.join(map(str, table))}",
            "add a column `class`, or one of scores for each class: score_0, score_1, ...",
        )
    numbers = None if column is None else _class_numbers(table[column].to_numpy(), facts)
    if scores is None:
        assert numbers is not None
        return _one_hot(numbers, len(facts.classes)), False
    return _agreeing(scores, numbers), True


def _require_count(count: int, labels: Labels, split: str) -> None:
    if count != len(labels):
        raise UsageError(
            f"there are {count} predictions, but {split} has {len(labels)} samples",
            "give one for each sample, in the dataset's order, or with a column `id`",
        )


def _in_order(table: pd.DataFrame, labels: Labels, split: str) -> pd.DataFrame:
    """Put the rows into the order of the samples; every sample has to have one row."""
    if "id" not in table:
        _require_count(len(table), labels, split)
        return table
    if (twice := table["id"].duplicated()).any():
        first = table.loc[twice, "id"].iloc[0]
        raise UsageError(f"sample {first} is predicted twice", "leave one row a sample")
    wanted = labels.ids.tolist()
    if lacking := sorted(set(wanted) - set(table["id"])):
        raise UsageError(
            f"{len(lacking)} of {len(wanted)} samples of {split} have no prediction, "
            f"{lacking[0]} among them",
            "every sample counts: predict all of them",
        )
    if unknown := sorted(set(table["id"]) - set(wanted)):
        raise UsageError(
            f"{len(unknown)} predictions are of no sample of {split}, {unknown[0]} among them",
            "give the rows of this split alone, or a column `split`",
        )
    return table.set_index("id").loc[wanted]


def _scores_of(table: pd.DataFrame, facts: Facts) -> Tensor | None:
    """Return the columns of scores, by number or by the name of their class; none without any."""
    for prefix in SCORE_PREFIXES:
        for names in (map(str, range(len(facts.classes))), facts.classes):
            columns = [f"{prefix}{name}" for name in names]
            if set(columns) <= set(table):
                values = table[columns].to_numpy(dtype=np.float64)
                return _from_array(values, facts)[0]
    return None


def _agreeing(scores: Tensor, numbers: Tensor | None) -> Tensor:
    """Settle ties of rounded scores by the class that is given beside them."""
    if numbers is None:
        return scores
    rows = torch.arange(len(scores))
    top = scores.max(dim=1).values
    if bool((differ := scores[rows, numbers] != top).any()):
        count = int(differ.sum())
        raise UsageError(
            f"in {count} rows the class is not the one with the highest score",
            "leave out the column of classes, or correct the scores",
        )
    settled = scores.clone()
    settled[rows, numbers] = torch.nextafter(top, torch.full_like(top, torch.inf))
    return settled


def _evaluation(
    name: str, data: LoadedData, split: str, scores: Tensor, scored: bool
) -> Evaluation:
    facts, labels = data.facts, data.splits[split].labels
    metrics = compute_metrics(data, split, scores)
    if not scored:
        known = {n: v for n, v in metrics.values.items() if not n.startswith(OF_SCORES)}
        metrics = replace(metrics, values=known)
    correct = scores.argmax(dim=1) == labels.y
    return Evaluation(
        name=name,
        dataset=facts.name,
        protocol=facts.protocol,
        data_kind=data.data_kind,
        split=split,
        samples=len(labels),
        metrics=metrics,
        intervals=_intervals(data, split, scores, metrics),
        correct=correct,
    )


def _intervals(
    data: LoadedData, split: str, scores: Tensor, metrics: Metrics
) -> dict[str, Interval]:
    """Draw the samples again within each group, and return the interval of each metric.

    A figure of classes, or of another grouping, is drawn within these; an AUROC within each side.
    The calibration error has none: drawn again, it is larger than it is.
    """
    facts, labels = data.facts, data.splits[split].labels
    right = (scores.argmax(dim=1) == labels.y).numpy()

    def worst(groups: Tensor) -> Interval:
        return worst_group_interval(right[None], groups.numpy())

    names, groups = data.grouping(split)
    by_group = _accuracy_draws(right, groups.numpy(), len(names))
    by_class = _accuracy_draws(right, labels.y.numpy(), len(facts.classes))
    sizes = np.bincount(groups.numpy(), minlength=len(names))
    found = {"wga": worst(groups), "worst_class": worst(labels.y)}
    found |= {f"wga_{name}": worst(labels.extra_groupings[name]) for name in facts.extra_groupings}
    found["avg"] = _middle(by_group @ (sizes / sizes.sum()))
    found["balanced"] = _middle(by_class[:, labels.y.unique().numpy()].mean(axis=1))
    if "avg_train_weighted" in metrics.values:
        train = data.splits["train"].labels.groups.numpy()
        shares = np.bincount(train, minlength=len(names)) * (sizes > 0)
        found["avg_train_weighted"] = _middle(by_group @ (shares / shares.sum()))
    for number, name in enumerate(names):
        if sizes[number]:
            found[f"group_accuracy/{name}"] = _middle(by_group[:, number])
    if "auroc" in metrics.values:
        draws = _auroc_draws(data, split, margin_score(scores))
        found |= {name: _middle(own) for name, own in draws.items()}
    return {name: own for name, own in found.items() if name in metrics.values or "/" in name}


def _middle(draws: Draws) -> Interval:
    """Return the interval of a figure by its resamples."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _accuracy_draws(right: npt.NDArray[np.bool_], groups: npt.NDArray[Any], count: int) -> Draws:
    """Return accuracies of groups by resample, in percent; 0 for a group without samples.

    Of a group drawn again with its size only the number of hits matters, which is binomial.
    """
    draws = np.random.default_rng(0)
    found = np.zeros((RESAMPLES, count))
    for group in np.unique(groups):
        own = right[groups == group]
        found[:, group] = 100 * draws.binomial(len(own), own.mean(), RESAMPLES) / len(own)
    return found


def _auroc_draws(data: LoadedData, split: str, score: Tensor) -> dict[str, Draws]:
    """Return AUROCs by resample: overall, and of the pairs that the dataset names.

    Positives are drawn once a resample, whichever negatives they are compared with.
    """
    facts, labels = data.facts, data.splits[split].labels
    values, y = score.numpy(), labels.y.numpy()
    if not 0 < y.sum() < len(y):
        return {}
    sides: dict[str, list[Draws]] = {"auroc": [values[y == 0]]}
    for name, pair in facts.pair_aurocs.items():
        found = labels.extra_groupings[pair.grouping] if pair.grouping else labels.groups
        groups = found.numpy()
        negative = [g for g in np.unique(groups) if not y[groups == g].any()]
        sides[name] = [values[groups == g] for g in negative if pair.group in (None, g)]
    draws, positives = np.random.default_rng(0), values[y == 1]
    rows: dict[str, list[Draws]] = {name: [] for name, own in sides.items() if own}
    for first in range(0, RESAMPLES, CHUNK):
        count = min(CHUNK, RESAMPLES - first)
        chosen = _redrawn(draws, len(positives), count)
        for name, own in rows.items():
            each = [_aurocs(positives, chosen, side, draws) for side in sides[name]]
            own.append(np.min(each, axis=0))
    return {name: np.concatenate(own) for name, own in rows.items()}


def _redrawn(draws: np.random.Generator, size: int, count: int) -> npt.NDArray[np.int64]:
    """Return how often each of some samples appears, in each of `count` resamples."""
    return draws.multinomial(size, np.full(size, 1 / size), count)


def _aurocs(
    positives: Draws, chosen: npt.NDArray[np.int64], negatives: Draws, draws: np.random.Generator
) -> Draws:
    """Return the AUROC of every resample; ties count half."""
    order, count = np.sort(negatives), len(chosen)
    drawn = _redrawn(draws, len(negatives), count)
    below = np.concatenate([np.zeros((count, 1), np.int64), drawn.cumsum(axis=1)], axis=1)
    left, right = (np.searchsorted(order, positives, side) for side in SIDES)
    wins = (below[:, left] + below[:, right]) / 2
    return np.asarray((wins * chosen).sum(axis=1) / (len(positives) * len(negatives)))
