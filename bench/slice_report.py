"""The slices of a stored run: its tables, what the data on disk adds to them, and what is missing.

Everything but pictures, further columns and training labels is in the store, so that a run can be
looked at where its data is not. What could not be shown, and why, is said in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from bench.job import shown_split
from bench.record import Record
from bench.reporting.collection import load_split
from bench.reporting.html import data_url, tree_of
from bench.slices import UNKNOWN, Analysis, Names, Slice, analyse
from bench.store import MODEL, Store
from datasets.base import LabelledSplit
from datasets.catalogue import get_dataset
from datasets.errors import BenchError, UsageError
from datasets.photos import PhotoDataset
from methods.base import get_method, load_methods

MAX_PICTURED = 24  # slices with pictures, the worst first: a page must not grow without bound
TOGETHER = 32  # pictures read at a time: photographs are padded to the largest among them
RANKED_ON = ("val", "test", "train")  # the first of them in which slices have predictions
FILE, FIRST = "file", "first"  # columns
SPLIT_WORDS = {"train": "training", "val": "validation", "test": "test"}

Judge = Literal["first", "own"]


@dataclass(frozen=True)
class SliceReport:
    """The slices of a run, and what a page shows beside them.

    Attributes:
        samples: a row a sample that is in a slice.
        owner: the run whose method found the slices, where it is another one.
        how: what a slice of its method is, and how samples it was not trained on get into one.
        again: the split on which what was found is looked at once more, if there is one.
        no_accuracy: why there are no accuracies, where there are none.
        pictures: addresses that need no file, by sample id.
        files: where samples lie, by id, where the dataset says.
        notes: what is left out here, and why.
    """

    record: Record
    analysis: Analysis
    samples: pd.DataFrame
    how: str
    owner: Record | None = None
    again: str | None = None
    no_accuracy: str = ""
    pictures: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def find(self, name: str) -> Slice:
        """Return a slice by name or number, or the worst one."""
        slices = self.analysis.slices
        found = slices[0] if name == "worst" else self.analysis.named(name)
        if found is None:
            known = ", ".join(one.name for one in slices)
            raise UsageError(f"{self.record.run_id} has no slice '{name}'", f"choose from {known}")
        return found

    def members(self, one: Slice) -> pd.DataFrame:
        """Return the samples of a slice: id, file where it is known, split, labels, prediction."""
        mine = self.samples[self.samples["slice"] == one.number]
        table = mine[["id", "split", "y", "pred", "confidence"]].reset_index(drop=True)
        if self.files:
            table.insert(1, FILE, [self.files.get(int(sample), "") for sample in table["id"]])
        return table

    def to_json(self) -> dict[str, object]:
        """Return everything but the pictures."""
        found, job = self.analysis, self.record.job
        return {
            "run_id": self.record.run_id,
            **{name: getattr(job, name) for name in ("method", "dataset", "seed")},
            "slices_of": (self.owner or self.record).run_id,
            "split": found.split,
            "again": self.again,
            "assigned": list(found.assigned),
            "accuracy": None if found.accuracy is None else 100 * found.accuracy,
            "worst": found.worst.name if found.worst else None,
            "how": self.how,
            "no_accuracy": self.no_accuracy,
            "notes": list(self.notes),
            "slices": [one.to_json() for one in found.slices],
        }


def slice_report(
    record: Record,
    store: Store,
    data_root: Path | None,
    split: str | None = None,
    by: tuple[Record, Store] | None = None,
    judge: Judge | None = None,
) -> SliceReport:
    """Analyse the slices of a finished run.

    Args:
        record: the run's.
        store: where it is.
        data_root: where its data may be.
        split: the one to rank slices on; by default validation, where slices reach it.
        by: another run on the same data, with its store, whose slices are taken instead.
        judge: the `first` model, by default where slices were found from one, or the run's `own`.

    Raises:
        UsageError: there are no slices, or none in that split, or they are of other data.
    """
    owner = record if by is None else by[0]
    samples = _samples(record, store) if by is None else _of_other(record, store, *by)
    job, notes = record.job, []
    facts = get_dataset(job.dataset).facts(job.dataset_config())
    developed = [r.job.seed for r in (record, owner) if shown_split(r.job.seed) == "val"]
    if developed:
        samples = samples[samples["split"] != "test"]
        notes.append(f"Seed {developed[0]} is a development seed: test samples are left out.")
        if not job.supervision.val_groups:
            samples = samples.assign(group=UNKNOWN)
            notes.append("True groups are left out too: its method was not given them.")
    split, training = _chosen_split(record, samples, split), ""
    try:
        facts_there, data = load_split(record, data_root, split)
        facts = facts_there
    except BenchError as error:
        data = None
        remedy = f" To have them: {error.remedy}" if error.remedy else ""
        notes.append(f"There are no pictures: {error.message}.{remedy}")
    if split == "train":
        samples = _with_training_labels(samples, data)
        samples, training = _with_training_predictions(samples, data, record, store)
    samples = _judged(samples, split, judge, record)
    again = "test" if split == "val" and _reaches(samples, "test") else None
    files, columns = ({}, None) if data is None else _of_dataset(record, data_root)
    groups = () if facts.groups == facts.classes else facts.groups
    names = Names(facts.classes, groups, leaf_names(owner))
    found = analyse(samples, names, split, again=again, columns=columns, seed=job.seed)
    notes += [training] if found.accuracy is not None and training else []
    notes += [f"Column {name} is not compared: {why}." for name, why in found.left_out.items()]
    if facts.metric == "auroc":
        notes.append(
            "This dataset is judged by AUROC; a slice has an accuracy, which depends on how many "
            "samples of each class it holds."
        )
    shown = [s.id for one in found.slices[:MAX_PICTURED] for s in (*one.wrong, *one.typical)]
    pictures = {} if data is None else _pictures(data, shown)
    if data is not None and not pictures:
        notes.append("There are no pictures, because the data are rows of features.")
    how = (
        get_method(owner.job.method).slices
        or "Its method does not say how samples get into slices."
    )
    members = samples[samples["slice"] != UNKNOWN].reset_index(drop=True)
    return SliceReport(
        record=record,
        analysis=found,
        samples=members,
        how=how,
        owner=None if by is None else owner,
        again=again,
        no_accuracy=training if found.accuracy is None else "",
        pictures=pictures,
        files=files,
        notes=tuple(notes),
    )


def leaf_names(record: Record) -> tuple[str, ...]:
    """Return the names of the leaves of a run's tree, by number; none where it has no tree."""
    tree = tree_of(record)
    if tree is None:
        return ()
    levels = tree["iterations"]
    return tuple(map(str, levels[int(tree.get("chosen_iteration", len(levels))) - 1]["leaves"]))


def _samples(record: Record, store: Store) -> pd.DataFrame:
    """Return a row for each sample that has a prediction or is in the stored partition."""
    predictions, partition = _predictions(record, store), store.partition(record.run_id)
    if "part" in predictions:  # of runs whose method assigns validation samples as well
        assigned = predictions["leaf"].where(predictions["leaf"] != UNKNOWN, predictions["part"])
    else:
        assigned = predictions["leaf"]
    named = ["id", "split", "y", "group", "pred", "confidence"]
    named += [FIRST] if FIRST in predictions else []
    frame = predictions[named].astype({"split": str}).assign(slice=assigned)
    # A record has no word on a partition where groups are not known: its samples tell the split.
    known = frame["id"].isin([] if partition is None else partition["id"])
    own = next(iter(frame["split"][known]), "train")
    if partition is not None and own == "train":
        rows = partition.rename(columns={"part": "slice"})
        rows = rows.assign(split=own, y=UNKNOWN, pred=UNKNOWN, confidence=np.nan, first=UNKNOWN)
        frame = pd.concat([rows[list(frame.columns)], frame], ignore_index=True)
    elif partition is not None:
        parts = partition.set_index("id")["part"]
        here = (frame["split"] == own) & (frame["slice"] == UNKNOWN)
        mapped = frame["id"].map(parts).fillna(UNKNOWN).astype(int)
        frame["slice"] = frame["slice"].where(~here, mapped)
    if (frame["slice"] == UNKNOWN).all():
        having = [name for name, method in load_methods().items() if method.slices]
        raise UsageError(
            f"{record.run_id} has no slices: its method finds no partition of the data",
            f"give a run of {', '.join(having)}; or, by the slices of one, --by THAT_RUN",
        )
    whole = frame.columns.intersection(["id", "y", "group", "pred", "slice", FIRST])
    return frame.astype(dict.fromkeys(whole, "int64"))


def _of_other(record: Record, store: Store, owner: Record, its: Store) -> pd.DataFrame:
    """Return the samples in the slices of another run, with the predictions of this one."""
    if owner.job.fingerprint != record.job.fingerprint or owner.job.quick != record.job.quick:
        raise UsageError(
            f"{owner.run_id} has slices of other data than {record.run_id} predicts",
            "give two runs on the same data",
        )
    samples = _samples(owner, its).drop(columns=FIRST, errors="ignore")
    own = _predictions(record, store).set_index("id")
    same = own[["pred", "confidence"]].reindex(samples["id"])
    pred = same["pred"].fillna(UNKNOWN).astype("int64").to_numpy()
    return samples.assign(pred=pred, confidence=same["confidence"].to_numpy())


def _predictions(record: Record, store: Store) -> pd.DataFrame:
    """Return the stored predictions, with the confidence of each."""
    predictions = store.predictions(record.run_id)
    if predictions is None or not record.done:
        raise UsageError(
            f"{record.run_id} has no predictions: it is {record.status}", "give a finished run"
        )
    scores = predictions[[name for name in predictions if str(name).startswith("score_")]]
    return predictions.assign(confidence=confidence(scores.to_numpy()))


def confidence(scores: np.ndarray) -> np.ndarray:
    """Return the share of the softmax that the highest of each row's scores has."""
    given = scores.astype(np.float64)
    return np.asarray(1.0 / np.exp(given - given.max(axis=1, keepdims=True)).sum(axis=1))


def _reaches(samples: pd.DataFrame, split: str) -> bool:
    return bool(((samples["split"] == split) & (samples["slice"] != UNKNOWN)).any())


def _chosen_split(record: Record, samples: pd.DataFrame, wanted: str | None) -> str:
    """Return the split to rank on: the wanted one, or the first that slices reach."""
    possible = [split for split in RANKED_ON if _reaches(samples, split)]
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise UsageError(
            f"no {SPLIT_WORDS[wanted]} sample of {record.run_id} is in a slice",
            "give --split " + " or ".join(possible),
        )
    return wanted


def _judged(samples: pd.DataFrame, split: str, judge: Judge | None, record: Record) -> pd.DataFrame:
    """Leave the predictions of a first model in where they are to be judged."""
    there = split == "val" and FIRST in samples
    if judge == "first" and not there:
        raise UsageError(
            f"{record.run_id} has no predictions of a first model for these samples",
            "leave out --judge; runs of GEORGE keep them, for validation samples",
        )
    return samples if there and judge != "own" else samples.drop(columns=FIRST, errors="ignore")


def _with_training_labels(samples: pd.DataFrame, data: LabelledSplit | None) -> pd.DataFrame:
    if data is None:
        return samples
    known = pd.Series(data.labels.y.numpy(), index=data.labels.ids.numpy())
    training = samples["split"] == "train"
    y = samples["id"].map(known).fillna(UNKNOWN).astype("int64")
    return samples.assign(y=samples["y"].where(~training, y))


def _with_training_predictions(
    samples: pd.DataFrame,
    data: LabelledSplit | None,
    record: Record,
    store: Store,
) -> tuple[pd.DataFrame, str]:
    """Predict training samples by the kept model, which stored predictions do not hold.

    Returns the samples, and what is to be said of it.
    """
    from bench.models import load_model
    from methods.prediction import EvalImages, predict

    again = f"{record.provenance.command} --rerun always --keep-models"
    if not (store.runs / record.run_id / MODEL).is_file():
        return samples, (
            "Only training samples are in slices. Runs store no predictions of them, and this one "
            f"did not keep its model, which could make them. To keep it: {again}"
        )
    if data is None:
        return samples, (
            "Only training samples are in slices. Runs store no predictions of them, and the data "
            "for which the kept model could make them is not here."
        )
    model = load_model(record.run_id, store.root)
    logits = predict(model.fitted.logits, EvalImages(data.images, model.transform))
    ids = data.labels.ids.numpy()
    found = pd.DataFrame(
        {"pred": logits.argmax(dim=1).numpy(), "confidence": confidence(logits.numpy())}, index=ids
    )
    training = samples["split"] == "train"
    mapped = found.reindex(samples["id"])
    pred = mapped["pred"].fillna(UNKNOWN).astype("int64").to_numpy()
    samples = samples.assign(
        pred=samples["pred"].where(~training, pred),
        confidence=samples["confidence"].where(~training, mapped["confidence"].to_numpy()),
    )
    return samples, (
        "Accuracies are of training samples, predicted again by the kept model: they say less of "
        "new samples than validation would."
    )


def _of_dataset(
    record: Record, data_root: Path | None
) -> tuple[dict[int, str], pd.DataFrame | None]:
    """Return where each sample lies, and further columns by sample id, where the dataset says."""
    dataset, config = get_dataset(record.job.dataset), record.job.dataset_config()
    assert data_root is not None
    folder, files = dataset.require(data_root).folder, {}
    if isinstance(dataset, PhotoDataset) and FILE in (table := dataset.table(folder, config)):
        places = (str(folder / name) for name in table[FILE])  # a whole path stays as it is
        files = dict(zip(map(int, table["id"]), places, strict=True))
    columns = dataset.metadata(folder, config)
    return files, None if columns is None else columns.set_index("id")


def _pictures(data: LabelledSplit, shown: Sequence[int]) -> dict[int, str]:
    """Return pictures of samples; none where samples are no pictures."""
    where = {int(sample): place for place, sample in enumerate(data.labels.ids)}
    ids = [sample for sample in dict.fromkeys(shown) if sample in where]
    if not ids:
        return {}
    pictures: dict[int, str] = {}
    for first in range(0, len(ids), TOGETHER):
        own = ids[first : first + TOGETHER]
        batch = data.images.batch(torch.tensor([where[sample] for sample in own]))
        if batch.pixels.dtype != torch.uint8 or batch.pixels.ndim != 4:
            return {}
        for sample, pixels, (h, w) in zip(own, batch.pixels, batch.sizes, strict=True):
            pictures[sample] = data_url(pixels[:, : int(h), : int(w)])
    return pictures
