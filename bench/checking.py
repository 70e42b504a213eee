"""Whether stored runs are what their records say, by the files themselves and the code at hand.

Every metric is computed again from the predictions; what a run claims of its settings, seed, tier,
preset and data is derived again from the registered method and dataset. Accuracies are compared
exactly. A sum whose order depends on the processor (`avg_train_weighted`, the figures of a
partition) may differ by `ROUNDING`. Scores are kept in half precision, so that an AUROC has to lie
between the lowest and the highest that the rounding of its scores allows.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bench.context import stage_address
from bench.evaluation import aurocs, evaluate, partition_quality
from bench.job import DEFAULT_PRESET, KIND_PREFIX, NO_DATA, Job, Request, expand, identity_changes
from bench.provenance import Provenance, plugin_info
from bench.record import Metrics, Record, read_record, to_plain
from bench.store import Store
from datasets.base import DataKind, Facts, LabelledSplit, Labels, LoadedData, label_digest
from datasets.catalogue import get_dataset
from datasets.config import Values
from datasets.dataset import QUICK_SIZES, quick_subset
from datasets.errors import BenchError, UsageError
from datasets.fetch import Log, default_data_root
from datasets.files import Damaged, digest, to_json
from datasets.images import MemoryImages
from methods.base import get_method
from methods.metrics import CALIBRATION_BINS, auroc, calibration_error, margin_score
from methods.presets import PRESETS

ROUNDING = 1e-9
HALF_ERROR = 2.0**-11 * 1.001  # relative, of a score in half precision and of their difference
SMALLEST_HALF = 2.0**-25  # absolute, of one close to zero
LEAST, UNKNOWN, RANGES = 1.0, 5.0, 2.0
TOLERANCE = (
    f"every metric within {RANGES:g} times its range over the seeds of the same settings in the "
    f"store, at least {LEAST:g} point; {UNKNOWN:g} points where there are fewer than 3 seeds"
)
"""How far a run may be from itself on another machine: at worst it is another draw of the seed."""
NO_MATTER = ("python", "platform", "libraries")  # of an environment, or compared apart
LATER_COLUMNS = ("part", "first")  # of predictions; runs of earlier versions were made without
REPEATED = ["stage", "iteration", "phase", "epoch", "loss", "selection"]  # of a history: no times
NO_IMAGES = MemoryImages(torch.empty(0, 1, 1, 1, dtype=torch.uint8))


@dataclass(frozen=True)
class Finding:
    """Something that does not hold of a run."""

    run_id: str
    problem: str


@dataclass(frozen=True)
class Recomputed:
    """A run that was made again: how it was compared, and in what it differs."""

    run_id: str
    comparison: str
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """What came of checking stored runs; notes are no failures."""

    runs: int
    problems: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    pick_seed: int | None = None
    recomputed: tuple[Recomputed, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything holds."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """Return the content of `check --json`."""
        return {"ok": self.ok, **asdict(self)}


def check(
    path: Path | str,
    recompute: int = 0,
    *,
    pick_seed: int | None = None,
    data_root: Path | str | None = None,
    log: Log = lambda _: None,
) -> CheckResult:
    """Check stored runs, and make some of them again.

    Args:
        path: a results folder, a folder of runs, or one run.
        recompute: how many runs to make again, in a temporary folder, and to compare.
        pick_seed: chooses which; drawn and returned where it is not given.
        data_root: where datasets are; labels are compared with those that are there.
        log: prints a line.
    """
    if recompute < 0:
        raise UsageError(f"--recompute cannot be negative but got {recompute}")
    folders = find_runs(Path(path))
    checker = Checker(default_data_root() if data_root is None else Path(data_root))
    for folder in folders:
        checker.look(folder)
    checker.compare_runs()
    again: list[Recomputed] = []
    if recompute:
        pick_seed = secrets.randbelow(2**31) if pick_seed is None else pick_seed
        again = make_again(checker, recompute, pick_seed, log)
        for one in again:
            checker.add(one.run_id, *one.differences)
    problems = tuple(sorted(checker.problems, key=lambda one: one.run_id))
    notes = tuple(f"{text} ({n} run{'s' * (n > 1)})" for text, n in checker.notes.items())
    return CheckResult(
        len(folders), problems, notes, pick_seed if recompute else None, tuple(again)
    )


def find_runs(path: Path) -> list[Path]:
    """Return the folders of the runs in a results folder, a folder of runs, or of one run."""
    if (path / "record.json").is_file():
        return [path.absolute()]
    parent = path / "runs" if (path / "runs").is_dir() else path
    inside = sorted(parent.iterdir()) if parent.is_dir() else []
    found = [one.absolute() for one in inside if one.is_dir() and not one.name.startswith(".")]
    if not any((one / "record.json").is_file() for one in found):
        raise UsageError(
            f"there are no runs in {path}",
            "give a results folder (with runs/ in it), a folder of runs, or the folder of one run",
        )
    return found


@dataclass(frozen=True)
class Truth:
    """What is known of the data of runs, whatever their records say.

    Attributes:
        labels: of every split by id, where the data is on disk, else none.
        digest: of these labels, or else the one that the protocol pins.
        train_groups: of the training samples, by the data or else by the protocol's counts.
    """

    facts: Facts
    digest: str | None
    labels: Mapping[str, Labels] = field(default_factory=dict)
    train_groups: Tensor | None = None


class Checker:
    """Looks at runs one by one, then at what they have in common."""

    def __init__(self, data_root: Path) -> None:
        self.data_root = data_root
        self.problems: list[Finding] = []
        self.notes: Counter[str] = Counter()
        self.records: dict[Path, Record] = {}
        self._labels: dict[tuple[str, bool], dict[str, list[str]]] = {}  # by data and digest: runs
        self._scores: dict[str, dict[str, int]] = {}  # by digest: runs and their seeds
        self._truth = lru_cache(None)(self._read_truth)
        self._fresh: dict[str, Job] = {}  # by request: the job that it would be today

    def add(self, run_id: str, *problems: str) -> None:
        """Keep what does not hold of a run."""
        self.problems += [Finding(run_id, problem) for problem in problems]

    def look(self, folder: Path) -> None:
        """Check one run."""
        found = read_record(folder / "record.json")
        if not isinstance(found, Record):
            reason = "there is none" if found is None else found.reason
            self.add(folder.name, f"its record cannot be read: {reason}")
            return
        self.records[folder] = found
        # The results come first: they need no method, which may be a plug-in that is not here.
        for part in (_files, self._results, _identity, self._code, self._settings, self._preset):
            try:
                self.add(folder.name, *part(found, folder))
            except Exception as error:  # a stranger's file may cause whatever it likes
                message = error.message if isinstance(error, BenchError) else repr(error)
                self.add(folder.name, f"cannot be checked: {message}")

    def compare_runs(self) -> None:
        """Compare labels of the same data, and look for one run under two names or seeds."""
        for found in self._labels.values():
            usual = max(found.values(), key=len)
            for own in found.values():
                for run_id in own if own is not usual else ():
                    others = f"{len(usual)} other run{'s' * (len(usual) > 1)}, {usual[0]} say"
                    self.add(run_id, f"its ids, labels or groups are not those of {others}")
        for runs in self._scores.values():
            for run_id, seed in runs.items():
                twin = next((other for other, s in runs.items() if s != seed), None)
                if twin is not None:
                    self.add(run_id, f"its predictions are those of {twin}, which has another seed")
        names: dict[str, str] = {}
        for folder, record in self.records.items():
            first = names.setdefault(digest(_plain(record.job.identity)), folder.name)
            if first != folder.name:
                self.add(folder.name, f"it is the same run as {first}")

    def _results(self, record: Record, folder: Path) -> Iterator[str]:
        """Compute metrics again, and compare what was predicted on with the data."""
        job = record.job
        if not record.done:
            self.notes[f"{record.status.value}: there is nothing to compute again"] += 1
        if not record.done or "test" not in job.splits:
            return
        missing = [n for n in ("predictions", "history") if not (folder / f"{n}.parquet").is_file()]
        if missing:
            yield f"it is done, but has no {' and no '.join(missing)}"
            return
        selected = record.selection.epoch if record.selection else None
        epochs = pd.read_parquet(folder / "history.parquet", columns=["epoch"])["epoch"]
        if selected is not None and selected not in set(epochs.dropna()):
            yield f"its model is that of epoch {selected}, which is not in its history"
        truth = self._truth(job.dataset, job.dataset_config(), job.fingerprint, job.quick)
        table = Predictions(folder, truth.facts)
        own = self._labels.setdefault((job.fingerprint, job.quick), {})
        own.setdefault(table.label_bytes, []).append(folder.name)
        self._scores.setdefault(table.score_bytes, {})[folder.name] = job.seed
        if truth.train_groups is None:
            self.notes["training group counts are not known: avg_train_weighted not computed"] += 1
        yield from table.problems(truth, pinned=not (job.quick or job.standin))
        for split in ("val", "test"):
            low, high = table.metrics(split, truth.train_groups, record.job.data_kind)
            for problem in _wrong_metrics(record, split, low, high):
                yield f"metrics.{split}.{problem}"
        if record.partition is not None:
            yield from _wrong_partition(record, folder, truth)

    def _code(self, record: Record, folder: Path) -> Iterator[str]:
        origin = record.provenance
        if origin.code is None:
            self.notes["made before records had a digest of the code: they have the commit"] += 1
        if any(state.dirty is not False for state in record.git_states()):
            self.notes["made by code with uncommitted changes, or of no known commit"] += 1
        if (origin.plugin is None) != ("plugin" not in record.job.identity):
            yield "its identity and its record disagree on whether it is a plug-in's"
        if origin.plugin is not None:
            owners = (get_method(record.job.method), get_dataset(record.job.dataset))
            known = {own.distribution: type(own).__module__ for own in owners}
            name = origin.plugin.distribution
            if name not in known:
                yield f"it claims to be a run of {name}, whose method and dataset are not there"
            elif plugin_info(name, known[name]).digest != origin.plugin.digest:
                self.notes[f"made by other files of {name} than those installed here"] += 1

    def _settings(self, record: Record, folder: Path) -> Iterator[str]:
        """Compare tier, stages, fingerprint and label digest with method and dataset."""
        job = record.job
        method, config = get_method(job.method), job.method_config()
        granted = method.supervision(config)
        if granted != job.supervision:
            yield f"its tier is {vars(job.supervision)}, and the method declares {vars(granted)}"
        keys = {stage.name: stage_address(job, stage) for stage in method.stages(config)}
        full = record.provenance.code is not None or not (job.quick or job.standin)
        for stage in record.cost.stages:
            own = f"{stage.name}-{stage.key}"
            if full and keys.get(stage.name, own) != own:
                yield f"its stage {own} is not that of its settings, {keys[stage.name]}"
        truth = self._truth(job.dataset, job.dataset_config(), job.fingerprint, job.quick)
        if job.data_kind != "release" and not truth.labels:
            return
        if truth.facts.fingerprint() != job.fingerprint:
            right = truth.facts.fingerprint()
            yield f"its data fingerprint is {job.fingerprint}, and the protocol's is {right}"
        told = record.provenance.label_digest
        if record.done and truth.digest not in (None, told):
            yield f"its label digest is {told}, and that of the data {truth.digest}"

    def _preset(self, record: Record, folder: Path) -> Iterator[str]:
        """Compare the identity with that of the preset under the run's overrides."""
        job = record.job
        if job.preset.removeprefix(KIND_PREFIX) not in (*PRESETS, DEFAULT_PRESET):
            yield f"there is no preset '{job.preset}'"
            return
        truth = self._truth(job.dataset, job.dataset_config(), job.fingerprint, job.quick)
        if job.data_kind != "release" and not truth.labels:
            self.notes[
                f"of {job.data_kind} data that is not on disk: presets were not compared"
            ] += 1
            return
        asked = _request(job, NO_DATA if job.data_kind == "release" else self.data_root, folder)
        # The file of weights may be on another machine; what counts of it is its digest.
        kept = {key: value for key, value in job.overrides.items() if key != "backbone.weights"}
        asked = replace(asked, overrides=kept, seeds=(0,))
        if repr(asked) not in self._fresh:
            (self._fresh[repr(asked)],) = expand(asked)
        fresh = self._fresh[repr(asked)]
        if job.version < fresh.version:
            self.notes["of an earlier version of its method: presets were not compared"] += 1
            return
        if fresh.preset != job.preset:
            yield f"it says preset {job.preset}, but has the settings of preset {fresh.preset}"
        changes = identity_changes(
            _plain(job.identity), _plain({**fresh.identity, "seed": job.seed})
        )
        changes.pop("config.backbone.weights_sha256" if len(kept) < len(job.overrides) else "", 0)
        for name, (own, today) in changes.items():
            yield f"it says preset {job.preset}, but its {name} is {own} and not {today}"

    def _read_truth(self, name: str, config: Any, fingerprint: str, quick: bool) -> Truth:
        """Return what the protocol says of some data, and the labels if they are on disk."""
        dataset = get_dataset(name)
        facts, place = dataset.facts(config), dataset.locate(self.data_root)
        for some in (False, True):
            if place is None:
                break
            try:
                own = dataset.subset(place, config) if some else place
                if dataset.info_on_disk(config, own).fingerprint() != fingerprint:
                    continue
                facts, _, labels = dataset.check(self.data_root, config, allow_subset=some)
                if quick:
                    labels = {n: quick_subset(own, QUICK_SIZES[n]) for n, own in labels.items()}
                known = label_digest(labels)
                labels = {n: own[own.ids.argsort()] for n, own in labels.items()}
                return Truth(facts, known, labels, labels["train"].groups)
            except BenchError as error:  # the data is damaged, which says nothing about the runs
                self.notes[f"labels were not compared with the data: {error.message}"] += 1
        counts, groups = facts.group_counts.get("train"), None
        if counts is not None and not quick and facts.fingerprint() == fingerprint:
            groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return Truth(facts, None if quick else facts.label_digest, {}, groups)


class Predictions:
    """The predictions of a run."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.facts = facts
        self.groupings = [f"group_{name}" for name in facts.extra_groupings]
        self.scored = [f"score_{number}" for number in range(len(facts.classes))]
        columns = ["id", "split", "y", "group", *self.groupings, "pred", *self.scored]
        self.table = pd.read_parquet(folder / "predictions.parquet", columns=columns)

    @property
    def label_bytes(self) -> str:
        """Digest of which samples have which class and groups."""
        return _digest(self.table, ["split", "id", "y", "group", *self.groupings])

    @property
    def score_bytes(self) -> str:
        """Digest of what was predicted of which samples."""
        return _digest(self.table, ["split", "id", "pred", *self.scored])

    @cached_property
    def scores(self) -> np.ndarray:
        """The scores, in full precision."""
        return self.table[self.scored].to_numpy(np.float64)

    def labels(self, split: str) -> Labels:
        """Return the labels of a split."""
        own = self.table[self.table["split"] == split]
        named = {name: _tensor(own[f"group_{name}"]) for name in self.facts.extra_groupings}
        return Labels(_tensor(own["id"]), _tensor(own["y"]), _tensor(own["group"]), named)

    def problems(self, truth: Truth, *, pinned: bool) -> Iterator[str]:
        """Compare samples with the data, or else with the protocol, and classes with scores."""
        for split in ("val", "test"):
            own, right = self.labels(split), truth.labels.get(split)
            count = truth.facts.counts.get(split) if pinned else None
            count = count if right is None else len(right)
            counts = truth.facts.group_counts.get(split) if pinned else None
            if count is not None and len(own) != count:
                yield f"it has {len(own)} {split} samples of {count}"
            elif right is not None:
                own = own if torch.equal(own.ids, right.ids) else own[own.ids.argsort()]
                for name, (found, expected) in _paired(own, right).items():
                    if wrong := int((found != expected).sum()):
                        yield f"{wrong} of its {split} samples have another {name} than the data"
            elif counts is not None:
                sizes = torch.bincount(own.groups, minlength=len(counts)).tolist()
                if sizes != list(counts):
                    yield f"its {split} groups have {sizes} samples, and not {list(counts)}"
        # Rounding keeps the order, so that the predicted class has the highest score, if not alone.
        chosen = np.take_along_axis(self.scores, self.table[["pred"]].to_numpy(np.int64), 1)[:, 0]
        if wrong := int((chosen < self.scores.max(axis=1)).sum()):
            yield f"{wrong} of its predicted classes are not those with the highest score"

    def metrics(
        self, split: str, train_groups: Tensor | None, data_kind: DataKind = "release"
    ) -> tuple[Metrics, Metrics]:
        """Return the lowest and highest metrics that the stored predictions allow."""
        labels, own = self.labels(split), (self.table["split"] == split).to_numpy()
        known = train_groups if train_groups is not None else labels.groups
        train = Labels(torch.empty(0), torch.empty(0), known)
        parts = {"train": LabelledSplit(train, NO_IMAGES), split: LabelledSplit(labels, NO_IMAGES)}
        pred = one_hot(_tensor(self.table["pred"][own]), len(self.facts.classes)).double()
        found = evaluate(LoadedData(self.facts, parts, data_kind), split, pred)
        values = dict(found.values)
        if train_groups is None:
            values.pop("avg_train_weighted", None)
        bounds = [values, values]
        scores = torch.from_numpy(self.scores[own])
        error = HALF_ERROR * scores.abs().sum(dim=1) + 2 * SMALLEST_HALF
        if "auroc" in values:
            upwards = torch.where(labels.y == 1, error, -error)
            both = (margin_score(scores) - upwards, margin_score(scores) + upwards)
            if self.facts.metric == "auroc":
                bounds = [values | _defined(aurocs(self.facts, labels, score)) for score in both]
            else:
                bounds = [values | _defined({"auroc": auroc(s, labels.y)}) for s in both]
        if "ece" in values:
            least, most = calibration_bounds(scores.softmax(dim=1), labels.y, error)
            bounds = [bounds[0] | {"ece": least}, bounds[1] | {"ece": most}]
        low, high = (Metrics(one, found.group_accuracy, found.group_count) for one in bounds)
        return low, high


def calibration_bounds(probabilities: Tensor, y: Tensor, error: Tensor) -> tuple[float, float]:
    """Return the lowest and highest calibration error, each sample's logits being off by `error`.

    A confidence is off by no more than that, and a sample that this may put into the next bin
    changes the gaps of two bins by up to 1 each.
    """
    found, edges = calibration_error(probabilities, y), probabilities.amax(dim=1) * CALIBRATION_BINS
    moved = (edges - edges.round()).abs() <= error * CALIBRATION_BINS
    slack = float(error.mean() + 2 * moved.double().mean())
    return found - slack, found + slack


def _paired(own: Labels, right: Labels) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the columns of two splits side by side, by the names they are stored under."""
    pairs = {"id": (own.ids, right.ids), "y": (own.y, right.y), "group": (own.groups, right.groups)}
    more = {f"group_{n}": (v, right.extra_groupings[n]) for n, v in own.extra_groupings.items()}
    return pairs | more


def _tensor(column: Any) -> Tensor:
    return torch.from_numpy(column.to_numpy(np.int64, copy=True))


def _defined(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in values.items()}


def _digest(table: pd.DataFrame, columns: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name in columns:
        column = table[name] == "test" if name == "split" else table[name]
        found.update(column.to_numpy().tobytes())
    return found.hexdigest()


def _request(job: Job, data_root: Path, folder: Path) -> Request:
    """Return what has to be asked for to get a stored job today; presets lie beside its store."""
    known = job.preset.removeprefix(KIND_PREFIX)
    preset = PRESETS[0] if job.preset == DEFAULT_PRESET else known
    named = (job.method,), (job.dataset,), (job.seed,)
    presets = folder.parents[1] / "presets"
    some = job.data_kind == "subset"
    return Request(*named, data_root, preset, job.overrides, job.quick, presets, allow_subset=some)


def _plain(values: Values) -> Values:
    plain: dict[str, object] = json.loads(to_json(values))
    return plain


def _files(record: Record, folder: Path) -> Iterator[str]:
    """Compare lengths and checksums with those that the record has; earlier ones have none."""
    for name, known in record.files.items():
        try:
            known.check(folder / Path(name).name)
        except Damaged as error:
            yield error.message


def _identity(record: Record, folder: Path) -> Iterator[str]:
    """Compare the id, the identity, and what the record says of seed and settings."""
    job = record.job
    if record.run_id != folder.name:
        yield f"it is in a folder of another name: its record is that of {record.run_id}"
    if record.run_id != job.run_id:
        yield f"its id is not that of its settings and seed, {job.run_id}"
    if record.provenance.seed_tree.get("root") != job.seed:
        yield f"its seed is {job.seed}, and its seed tree that of {record.provenance.seed_tree}"
    if f"--seeds {job.seed}," not in record.provenance.command:
        yield f"its seed is {job.seed}, and its command is {record.provenance.command}"
    for stage in record.cost.stages:
        if stage.name == "fit" and stage.key != record.run_id:
            yield f"its fit is that of {stage.key}"
    own = job.derived_identity()
    stored = {name: job.identity.get(name) for name in own}
    for name, (said, hashed) in identity_changes(_plain(own), _plain(stored)).items():
        yield f"its {name} is {said}, and {hashed} in its identity"


def _wrong_metrics(record: Record, split: str, low: Metrics, high: Metrics) -> Iterator[str]:
    stored = record.metrics(split)
    for name in dict.fromkeys((*stored.values, *low.values)):
        said, least, most = stored.get(name), low.get(name), high.get(name)
        if name not in low.values:
            if name != "avg_train_weighted":
                yield f"{name} is no metric of the dataset"
        elif name not in stored.values:
            if name != "worst_class" or record.provenance.code is not None:  # schema 1 had none
                yield f"{name} is missing"
        elif said is None or least is None or most is None:
            if said is not least:
                yield f"{name} is {said}, and {least} by the predictions"
        else:
            exact = name != "avg_train_weighted" and least == most
            slack = 0.0 if exact else ROUNDING
            if not least - slack <= said <= most + slack:
                computed = least if least == most else f"{least} to {most}"
                yield f"{name} is {said}, and {computed} by the predictions"
    for name in ("group_accuracy", "group_count"):
        changes = identity_changes(getattr(stored, name), getattr(low, name))
        for group, (own, right) in changes.items():
            yield f"{name}.{group} is {own}, and {right} by the predictions"


def _wrong_partition(record: Record, folder: Path, truth: Truth) -> Iterator[str]:
    """Compute again how the inferred partition compares with the groups."""
    assert record.partition is not None
    said, facts = record.partition, truth.facts
    table = pd.read_parquet(folder / "partition.parquet")
    groups, right = _tensor(table["group"]), truth.labels.get(said.split)
    if right is not None:
        pairs = ((_tensor(table["id"]), right.ids), (groups, right.groups))
        if not all(torch.equal(own, known) for own, known in pairs):
            yield "the samples or groups of its partition are not those of the data"
    named = facts.group_sets or {name: (number,) for number, name in enumerate(facts.groups)}
    found = partition_quality(_tensor(table["part"]), groups, named, said.split)
    for name in ("precision", "recall", "enrichment", "ami", "sizes", "matched_group"):
        own, computed = getattr(said, name), getattr(found, name)
        near = isinstance(own, float) and abs(own - computed) <= ROUNDING * max(1.0, computed)
        if own is not None and own != computed and not near:
            yield f"partition.{name} is {own}, and {computed} by its partition"


def differences(one: Path, other: Path) -> list[str]:
    """Return in which results two stored runs differ, bit by bit; times are none."""
    found = []
    for name in ("predictions", "partition", "history"):
        paths = [folder / f"{name}.parquet" for folder in (one, other)]
        if not all(path.is_file() for path in paths):
            if any(path.is_file() for path in paths):
                found.append(f"only one of them has {name}")
            continue
        a, b = (
            pd.read_parquet(path, columns=REPEATED * (name == "history") or None) for path in paths
        )
        a, b = (
            table.drop(columns=[c for c in LATER_COLUMNS if c in table and c not in other])
            for table, other in ((a, b), (b, a))
        )
        if [*a.columns] != [*b.columns] or len(a) != len(b):
            found.append(f"{name} have other rows or columns")
        elif wrong := [str(column) for column in a if not _same_bits(a[column], b[column])]:
            found.append(f"{name} differ in {', '.join(wrong)}")
    records = [read_record(folder / "record.json") for folder in (one, other)]
    for split in ("val", "test"):
        own, its = (r.metrics(split).values if isinstance(r, Record) else {} for r in records)
        if wrong := sorted(name for name in own.keys() & its.keys() if own[name] != its[name]):
            found.append(f"metrics.{split} differ in {', '.join(wrong)}")
    return found


def _same_bits(a: pd.Series, b: pd.Series) -> bool:
    if a.dtype != b.dtype:
        return False
    return a.to_numpy().tobytes() == b.to_numpy().tobytes() if a.dtype.kind == "f" else a.equals(b)


def make_again(checker: Checker, count: int, seed: int, log: Log) -> list[Recomputed]:
    """Run some of the finished runs again in a temporary folder, and compare."""
    from bench.api import LaunchOptions, expand_on_disk, run_jobs

    done = {
        r.run_id: (f, r) for f, r in checker.records.items() if r.done and "test" in r.job.splits
    }
    picked = random.Random(seed).sample(sorted(done), min(count, len(done)))
    log(f"--pick-seed {seed} picks {', '.join(picked)}")
    jobs: dict[str, Job] = {}
    for run_id in picked:
        folder, record = done[run_id]
        request = _request(record.job, checker.data_root, folder)
        (jobs[run_id],), _ = expand_on_disk(request, explicit=True, log=log)
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        store = Store(Path(temporary))
        same = [job for run_id, job in jobs.items() if job.run_id == run_id]
        grid = run_jobs(same, checker.data_root, store, LaunchOptions(), log=log)
        for run_id, job in jobs.items():
            (folder, record), again = done[run_id], grid.statuses.get(run_id)
            comparison = "none"
            if again is None:
                where = f"with the data in {checker.data_root} it is {job.run_id}"
                wrong = [f"cannot be made again: {where}"]
            elif again.record is None or not again.record.done:
                wrong = [f"failed when it was made again: {again.reason}"]
            else:
                comparison, elsewhere = "bit by bit", other_conditions(record, again.record)
                changed = differences(folder, store.runs / run_id)
                if changed and elsewhere:
                    why = f"since it was made with {elsewhere}"
                    comparison = f"within a tolerance ({TOLERANCE}), {why}"
                    changed = beyond_tolerance(record, again.record, checker.records.values())
                wrong = [f"made again, {text}" for text in changed]
            found.append(Recomputed(run_id, comparison, tuple(wrong)))
    return found


def other_conditions(before: Record, now: Record) -> str:
    """Return what differs between two runs of a job that may change the last bits of numbers.

    What an earlier record does not say of its machine counts as different.
    """
    old, new = before.provenance, now.provenance
    changes = identity_changes(_machine(old), _machine(new))
    installed = new.environment.libraries
    for name, version in old.environment.libraries.items():
        if name != "nct-bench" and installed.get(name) != version:
            changes[name] = (version, installed.get(name))
    return ", ".join(f"{name} {had} (now {has})" for name, (had, has) in changes.items())


def _machine(origin: Provenance) -> Values:
    known = {n: v for n, v in to_plain(origin.environment).items() if n not in NO_MATTER}
    return {**known, "device": origin.device, "threads": origin.threads}


def beyond_tolerance(before: Record, now: Record, records: Iterable[Record]) -> list[str]:
    """Return the metrics in which a run made elsewhere is further off than `TOLERANCE` allows."""
    own = {**before.job.identity, "seed": None}
    alike = [r for r in records if r.done and {**r.job.identity, "seed": None} == own]
    found = []
    for split in ("val", "test"):
        for name, said in before.metrics(split).values.items():
            value = now.metrics(split).get(name)
            if said is None or value is None:
                continue
            unit = 0.01 if name.startswith("auroc") else 1.0
            known = [v for v in (r.metrics(split).get(name) for r in alike) if v is not None]
            allowed = UNKNOWN * unit
            if len(known) >= 3:
                allowed = max(LEAST * unit, RANGES * (max(known) - min(known)))
            if abs(value - said) > allowed:
                found.append(f"{split} {name} is {value}, not {said}: more than {allowed:g} off")
    return found
