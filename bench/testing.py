"""What every method and every dataset owes the harness, as classes of tests to subclass.

In a test file of a package that brings a method or a dataset of its own:

    from bench.testing import DatasetContract, MethodContract

    class TestMine(MethodContract):
        method = "mine"

    class TestOurs(DatasetContract):
        dataset = "ours"

The tests of a method make short runs on synthetic digits, through the real harness: the record is
complete, the same seed gives the same numbers also after a kill, another seed gives others,
declarations hold, and the process that fits never holds test data or group labels that the tier
hides. They need pytest, and Linux for the last. Those of a dataset read a small sample of it, and
run a method on that.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from torch import Tensor

from bench.audit import Auditor
from bench.context import stage_address
from bench.fitting import FitProcess
from bench.job import Job, Request, expand
from bench.record import RECORD_KEYS, Record
from bench.runner import RunOptions, fit_task, load_data, run_job, save_run
from bench.store import Store
from datasets import standins
from datasets.base import SPLITS, BackboneSpec, LoadedData, label_digest, outline_task
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import Values, as_plain, build_config
from datasets.dataset import DATASETS, Dataset
from datasets.errors import DataMissing, UsageError
from datasets.fetch import default_data_root
from methods.backbones import SMALL_NETWORKS
from methods.base import Method, Supervision, get_method, load_methods
from methods.presets import preset_config

STANDIN, STANDIN_SIZE = "mnist", 600
FORMATS = ("i2", "i8")  # as predictions are stored, and as labels are held
LABELS_SEARCHED = 160  # of the first of a split: enough not to be met by chance
BLOCK = 2**16  # memory is searched by blocks, leaving out those that are empty
HISTORY = ["stage", "iteration", "phase", "epoch", "loss", "selection"]
AUDITED = ["audit_val_wga", "audit_test_wga"]


class Killed(BaseException):
    """What no `except Exception` stops, as with Ctrl-C."""


@dataclass
class EpochCounter:
    """Counts finished epochs by a fit's progress; ends it after `kill_after` of them, if given."""

    kill_after: int = 0
    epochs: int = 0

    def __call__(self, progress: Values) -> None:
        """Count, where an epoch has ended."""
        self.epochs += "epoch" in progress and "step" not in progress
        if self.epochs and self.epochs == self.kill_after:
            raise Killed


@dataclass(frozen=True)
class Run:
    """A finished run, and what it left in its store."""

    job: Job
    record: Record
    store: Store
    epochs: int = 0
    leaks: frozenset[str] = frozenset()
    granted: frozenset[str] = frozenset()

    @property
    def predictions(self) -> pd.DataFrame:
        """Predictions of validation and test samples."""
        table = self.store.predictions(self.job.run_id)
        assert table is not None
        return table

    @property
    def history(self) -> pd.DataFrame:
        """The history without its clock readings, which no two runs have in common."""
        table = self.store.history(self.job.run_id)
        assert table is not None
        return table.drop(columns="seconds", errors="ignore")


@dataclass
class Runs:
    """Short runs on stand-in digits; each is made once, however many tests ask for it."""

    data_root: Path
    home: Path
    made: dict[str, Run] = field(default_factory=dict)

    def job(
        self, method: str, dataset: str, seed: int = 0, overrides: Mapping[str, str] | None = None
    ) -> Job:
        """Return the job of a quick run."""
        request = Request(
            (method,), (dataset,), (seed,), self.data_root, overrides=overrides or {}, quick=True
        )
        return expand(request)[0]

    def run_inline(self, job: Job, results: str, kill_after: int = 0) -> Run:
        """Run in this process; `kill_after` ends it after that many epochs were saved."""
        options = RunOptions(self.data_root, self.home / results, isolate=False)
        counter = EpochCounter(kill_after)
        return Run(job, run_job(job, options, counter), Store(options.results), counter.epochs)

    def run(self, method: str, dataset: str, seed: int = 0) -> Run:
        """Run in a process of its own, once, and search that process's memory on the way."""
        job = self.job(method, dataset, seed)
        if job.run_id not in self.made:
            self.made[job.run_id] = self._run_searched(job)
        return self.made[job.run_id]

    def _run_searched(self, job: Job) -> Run:
        options = RunOptions(self.data_root, self.home / f"whole-{job.method}")
        store = Store(options.results)
        process = FitProcess(fork=False)
        data = load_data(job, self.data_root)
        hidden, granted = secrets_of(data, job)
        found: set[str] = set()
        counter, auditor = EpochCounter(), Auditor(data, store.audits)

        def audit(key: str, where: Values, outputs: Tensor, module: Any) -> None:
            if not found:  # the search takes time, and always finds what the fit may hold
                assert process.process.pid is not None
                found.update(found_in_memory(process.process.pid, granted | hidden))
            auditor.look(key, where, outputs, module)

        result = process.fit(fit_task(job, data, options, store), counter, audit)
        record = save_run(job, result, data, store, options)
        leaks, seen = found & set(hidden.values()), found & set(granted.values())
        return Run(job, record, store, counter.epochs, frozenset(leaks), frozenset(seen))


def secrets_of(data: LoadedData, job: Job) -> tuple[dict[bytes, str], dict[bytes, str]]:
    """Return byte patterns that a fit must not hold, and some that it does, each with a name."""
    tier = job.supervision
    granted = {"train": tier.train_groups, "val": tier.val_groups, "test": False}
    hidden: dict[bytes, str] = {}
    known: dict[bytes, str] = {}
    for split, part in data.splits.items():
        labels = part.labels
        seen = [labels.y, *([labels.groups] if granted[split] else [])] if split != "test" else []
        for name, values in {"groups": labels.groups, **labels.extra_groupings}.items():
            if not any(bool((values == own).all()) for own in seen):
                hidden |= _label_patterns(f"{name} of {split}", values)
    hidden |= _label_patterns("classes of test", data.splits["test"].labels.y)
    known[_bytes(data.splits["train"].labels.y[:LABELS_SEARCHED], "i8")] = "classes of train"
    for split, patterns in (("test", hidden), ("train", known)):
        images = data.splits[split].images
        for position in range(0, len(images), max(1, len(images) // 3)):
            pixels = images.batch(torch.tensor([position])).pixels[0]
            patterns[pixels.contiguous().numpy().tobytes()] = f"an image of {split}"
    return hidden, known


def _label_patterns(name: str, values: Tensor) -> dict[bytes, str]:
    return {_bytes(values[:LABELS_SEARCHED], kind): name for kind in FORMATS}


def _bytes(values: Tensor, kind: str) -> bytes:
    return values.numpy().astype(kind).tobytes()


def found_in_memory(pid: int, patterns: Mapping[bytes, str]) -> set[str]:
    """Search all memory that a process can write to; return the names of the patterns in it."""
    found: set[str] = set()
    for content in _writable_memory(pid):
        found |= {name for pattern, name in patterns.items() if pattern in content}
    return found


def _writable_memory(pid: int) -> Iterator[bytes]:
    regions = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p")
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            match = regions.match(line)
            if match is None:
                continue
            start, end = (int(number, 16) for number in match.groups())
            try:
                memory.seek(start)
                yield from _filled(memory.read(end - start))
            except (OSError, OverflowError, ValueError):  # a region without pages behind it
                continue


def _filled(content: bytes) -> Iterator[bytes]:
    """Yield the stretches of a region that have anything in them."""
    count = len(content) // BLOCK
    blocks = np.frombuffer(content, np.uint8, count * BLOCK).reshape(count, BLOCK).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], blocks, [False]))))
    for start, end in edges.reshape(-1, 2):
        yield content[start * BLOCK : end * BLOCK]
    yield content[max(0, count - 1) * BLOCK :]


class MethodContract:
    """Tests of one method; subclass it and name the method."""

    method: ClassVar[str]
    datasets: ClassVar[tuple[str, ...]] = ()
    """Digit-sized datasets to run on; those that the stand-in digits serve by default."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run on every digit-sized dataset, and check declarations for all that are registered.

        A user's own data is not among them: the tests have a data root of their own.
        """
        every = {name: one for name, one in load_datasets().items() if name in DATASETS}
        digits = self.datasets or tuple(n for n, d in every.items() if d.source == STANDIN)
        names = {"dataset": digits, "last_digits": digits[-1:], "any_dataset": tuple(every)}
        for fixture in names.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(fixture, names[fixture])

    @pytest.fixture(scope="session")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        """Stand-in digits and short runs on them."""
        root = tmp_path_factory.mktemp("standins")
        standins.write(STANDIN, root, size=STANDIN_SIZE)
        return Runs(root, tmp_path_factory.mktemp("results"))

    @property
    def subject(self) -> Method:
        """The method under test."""
        return get_method(self.method)

    def test_record_is_done_and_complete(self, runs: Runs, dataset: str) -> None:
        """The stored record has every field of the contract."""
        run = runs.run(self.method, dataset)
        assert run.record.done, run.record.failure
        stored = run.store.record(run.job.run_id)
        assert stored is not None
        assert set(stored.to_json()) >= RECORD_KEYS - {"partition", "failure", "checksum"}
        assert stored.job == run.job
        assert stored.selection is not None and stored.selection.rule
        assert stored.job.standin and stored.job.quick
        assert (stored.cost.peak_memory_bytes or 0) > 0
        assert stored.cost.image_passes() > 0
        for metrics in (stored.val, stored.test):
            assert {"wga", "avg", "worst_class", "avg_train_weighted"} <= set(metrics.values)
            assert metrics.group_accuracy and metrics.group_count

    def test_partition_is_that_of_its_split(self, runs: Runs, dataset: str) -> None:
        """An inferred partition has a row for every sample of its split."""
        run = runs.run(self.method, dataset)
        quality, table = run.record.partition, run.store.partition(run.job.run_id)
        assert (quality is None) == (table is None)
        if quality is None or table is None:
            return
        labels = load_data(run.job, runs.data_root).splits[quality.split].labels
        order = labels.ids.argsort()
        np.testing.assert_array_equal(table["id"], labels.ids[order])
        np.testing.assert_array_equal(table["group"], labels.groups[order])
        assert sorted(table["part"].value_counts()) == sorted(n for n in quality.sizes if n)

    def test_declarations_hold(self, runs: Runs, dataset: str) -> None:
        """Recorded supervision and shared stages are the declared ones."""
        run = runs.run(self.method, dataset)
        config = run.job.method_config()
        assert run.record.job.supervision == self.subject.supervision(config)
        declared = [stage_address(run.job, stage) for stage in self.subject.stages(config)]
        own = [f"{s.name}-{s.key}" for s in run.record.cost.stages if s.name != "fit"]
        assert set(declared) <= set(own)
        assert bool(declared) == bool(own)

    def test_predictions_cover_validation_and_test(self, runs: Runs, dataset: str) -> None:
        """Every sample has a row with its labels and finite scores, which give the metrics."""
        run = runs.run(self.method, dataset)
        data, table = load_data(run.job, runs.data_root), run.predictions
        scores = [f"score_{c}" for c in range(len(data.facts.classes))]
        assert {"id", "split", "y", "group", "pred", "leaf", *scores} <= set(table)
        assert f"score_{len(scores)}" not in table
        for split, metrics in (("val", run.record.val), ("test", run.record.test)):
            rows, labels = table[table["split"] == split], data.splits[split].labels
            for column, truth in (("id", labels.ids), ("y", labels.y), ("group", labels.groups)):
                np.testing.assert_array_equal(rows[column], truth)
            assert (rows["pred"] == rows["y"]).mean() * 100 == pytest.approx(metrics.avg)
            by_group = (rows["pred"] == rows["y"]).groupby(rows["group"]).mean() * 100
            assert by_group.min() == pytest.approx(metrics.wga)
        values = table[scores].to_numpy()
        assert np.isfinite(values).all()
        chosen = values[np.arange(len(values)), table["pred"]]
        np.testing.assert_array_equal(chosen, values.max(axis=1))  # ties may arise from float16

    def test_history_has_a_row_for_every_epoch(self, runs: Runs, dataset: str) -> None:
        """Each epoch is there once, with what the audit saw."""
        run = runs.run(self.method, dataset)
        table = run.history
        assert list(table.columns)[:8] == [*HISTORY, *AUDITED]
        assert len(table) == run.epochs > 0
        assert not table.duplicated(["stage", "iteration", "phase", "epoch"]).any()
        assert table[["loss", *AUDITED]].notna().all(axis=None)

    def test_killed_run_goes_on_to_the_same_end(self, runs: Runs, dataset: str) -> None:
        """A run killed in the middle and taken up again has the bits of an undisturbed one."""
        whole = runs.run(self.method, dataset)
        self._resumed_equals(runs, whole, (whole.epochs + 1) // 2)

    def test_run_killed_at_its_last_checkpoint(self, runs: Runs, last_digits: str) -> None:
        """Nothing is trained twice, and nothing is left out."""
        whole = runs.run(self.method, last_digits)
        self._resumed_equals(runs, whole, whole.epochs)

    def _resumed_equals(self, runs: Runs, whole: Run, kill_after: int) -> None:
        results = f"killed-{self.method}-{whole.job.dataset}-{kill_after}"
        with pytest.raises(Killed):
            runs.run_inline(whole.job, results, kill_after)
        status = Store(runs.home / results).status_of(whole.job.run_id).status
        assert status.value == "preempted"
        resumed = runs.run_inline(whole.job, results)
        assert kill_after + resumed.epochs == whole.epochs
        pd.testing.assert_frame_equal(whole.predictions, resumed.predictions, check_exact=True)
        pd.testing.assert_frame_equal(whole.history, resumed.history, check_exact=True)
        assert resumed.record.selection == whole.record.selection
        costs = [[(s.key, s.image_passes) for s in r.record.cost.stages] for r in (whole, resumed)]
        assert costs[0] == costs[1]

    def test_another_seed_gives_another_run(self, runs: Runs, last_digits: str) -> None:
        """The seed reaches the numbers, and no stage is shared between seeds."""
        first = runs.run(self.method, last_digits)
        other = runs.run_inline(runs.job(self.method, last_digits, seed=1), "other-seed")
        scores = [column for column in first.predictions if str(column).startswith("score_")]
        assert not np.array_equal(first.predictions[scores], other.predictions[scores])
        keys = [{stage.key for stage in run.record.cost.stages} for run in (first, other)]
        assert not keys[0] & keys[1]

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_fit_never_holds_what_its_tier_hides(self, runs: Runs, dataset: str) -> None:
        """No test image, test label or hidden group is in the memory of the process that fits."""
        run = runs.run(self.method, dataset)
        assert "classes of train" in run.granted, "the search does not find what is there"
        assert "an image of train" in run.granted
        assert run.leaks == frozenset()

    def test_module_says_where_the_method_comes_from(self) -> None:
        """The docstring of the method's module names paper, supervision and deviations."""
        text = sys.modules[type(self.subject).__module__].__doc__ or ""
        for heading in ("Paper:", "Supervision:", "Deviations:"):
            assert heading in text, f"the docstring of {self.method}'s module lacks '{heading}'"

    def test_search_space_gives_valid_configs(self, runs: Runs, any_dataset: str) -> None:
        """Drawn configurations are legal, can be drawn again, and stay in the method's tier."""
        known = get_dataset(any_dataset)
        facts = known.facts(known.config_type())
        task = outline_task(facts, BackboneSpec(facts.backbone))
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        trials = [study.ask() for _ in range(3)]
        configs = [self.subject.search_space(trial, task) for trial in trials]
        usual = self.subject.supervision(preset_config(self.subject, any_dataset))
        for trial, config in zip(trials, configs, strict=True):
            assert trial.params
            assert type(config) is self.subject.config_type
            rebuilt = build_config(self.subject.config_type, as_plain(config), self.method)
            assert rebuilt == config
            assert self.subject.search_space(optuna.trial.FixedTrial(trial.params), task) == config
            assert self.subject.supervision(config) == usual
        assert configs[0] != configs[1]

    def test_quick_shortens(self, any_dataset: str) -> None:
        """`quick` lowers numbers, raises none, and changes nothing the second time."""
        config = preset_config(self.subject, any_dataset)
        quick = config.quick()
        assert type(quick) is type(config)
        assert quick.quick() == quick
        assert quick != config
        for name, before in vars(config).items():
            after = vars(quick)[name]
            if isinstance(before, int | float) and not isinstance(before, bool):
                assert after <= before, f"quick() raises {name} from {before} to {after}"

    def test_quick_is_quick(self, runs: Runs, dataset: str) -> None:
        """A smoke run takes at most forty passes over its few images."""
        run = runs.run(self.method, dataset)
        data = load_data(run.job, runs.data_root)
        most = 40 * (len(data.splits["train"]) + len(data.splits["val"]))
        assert run.record.cost.image_passes() <= most


class DatasetContract:
    """Tests of one dataset; subclass it and name the dataset.

    They need data: a stand-in where there is one, else what its own `write_sample(folder)` writes
    in its real format, else what is in the data root. Replace `write` to bring some.
    """

    dataset: ClassVar[str]

    def write(self, root: Path) -> Path:
        """Put a small sample of the data below `root`, and return where the data is."""
        subject = self.subject
        sample = getattr(subject, "write_sample", None)
        if subject.source in standins.NAMES:
            standins.write(subject.source, root, size=STANDIN_SIZE)
        elif sample is not None:
            folder = root / subject.search_paths[0]
            folder.mkdir(parents=True)
            sample(folder)
        else:
            assert subject.locate(default_data_root()) is not None, (
                f"{self.dataset} is not in {default_data_root()}: give it a write_sample(folder), "
                "or replace `write` in this class"
            )
            return default_data_root()
        return root

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory) -> Runs:
        """The data, and a place for runs on it."""
        root = cls().write(tmp_path_factory.mktemp("data"))
        return Runs(root, tmp_path_factory.mktemp("results"))

    @property
    def subject(self) -> Dataset:
        """The dataset under test."""
        return get_dataset(self.dataset)

    @property
    def config(self) -> Any:
        """Its default settings."""
        return self.subject.config_type()

    def test_facts_are_complete(self) -> None:
        """What is known without the data fits together, and is the same every time."""
        facts = self.subject.facts(self.config)
        assert facts.name == self.dataset
        assert len(facts.classes) >= 2 and facts.groups and facts.protocol
        for names in (facts.classes, facts.groups, facts.codes):
            assert len({*names}) == len(names), f"two of {names} are alike"
        assert len(facts.codes) in (0, len(facts.classes))
        assert {*facts.counts, *facts.group_counts} <= {*SPLITS}
        assert all(len(n) == len(facts.groups) for n in facts.group_counts.values())
        again = self.subject.facts(self.config)
        assert again.fingerprint() == facts.fingerprint()

    def test_search_finds_it_where_it_is(self, runs: Runs, tmp_path: Path) -> None:
        """An empty folder is not taken for it, and a missing one is an error with a remedy."""
        assert self.subject.locate(tmp_path) is None
        with pytest.raises(DataMissing) as missing:
            self.subject.require(tmp_path)
        assert missing.value.remedy
        assert self.subject.locate(runs.data_root) is not None

    def test_labels_are_in_range(self, runs: Runs) -> None:
        """Every split has samples of every class; ids are unique, and the same at every reading."""
        facts, found, labels = self.subject.check(runs.data_root, self.config)
        assert set(labels) == {*SPLITS}
        for split, part in labels.items():
            assert len(part) > 0, f"{split} is empty"
            assert part.y.unique().tolist() == list(range(len(facts.classes))), split
            assert int(part.groups.min()) >= 0 and int(part.groups.max()) < len(facts.groups)
            assert part.ids.dtype == part.y.dtype == part.groups.dtype == torch.int64
            assert set(part.extra_groupings) == set(facts.extra_groupings)
        ids = torch.cat([labels[split].ids for split in SPLITS])
        assert len(ids.unique()) == len(ids), "two samples have one id"
        again = self.subject.labels(found.folder, self.config)
        assert label_digest(again) == label_digest(labels)

    def test_images_belong_to_the_labels(self, runs: Runs) -> None:
        """Each sample has its image, whichever samples and splits are asked for."""
        data = self.subject.load(runs.data_root, self.config)
        for split, part in data.splits.items():
            assert len(part.images) == len(part.labels), split
        alone = self.subject.load(runs.data_root, self.config, splits=("val",))
        assert set(alone.splits) == {"val"}
        last = torch.arange(len(alone.splits["val"]))[-3:]
        whole, part = data.splits["val"], alone.splits["val"]
        for images in (part.images, whole.images.subset(last)):
            index = last if images is part.images else torch.arange(len(last))
            expected, got = whole.images.batch(last), images.batch(index)
            assert torch.equal(got.pixels, expected.pixels)
            assert torch.equal(got.sizes, expected.sizes)
        quick = self.subject.load(runs.data_root, self.config, quick=True).splits["train"]
        ids = {int(number): at for at, number in enumerate(data.splits["train"].labels.ids)}
        where = torch.tensor([ids[int(number)] for number in quick.labels.ids[:5]])
        first = data.splits["train"].images.batch(where).pixels
        assert torch.equal(quick.images.batch(torch.arange(len(where))).pixels, first)

    def test_transforms_fit_the_images(self, runs: Runs) -> None:
        """Both transforms bring images to what a network takes: finite, of the stated channels."""
        data = self.subject.load(runs.data_root, self.config)
        few = data.splits["train"].images.batch(torch.arange(4))
        assert few.pixels.shape[1] == data.facts.channels
        for transform in (data.facts.train_transform, data.facts.eval_transform):
            batch = transform(few, torch.Generator().manual_seed(0))
            assert batch.shape == (4, data.facts.channels, *transform.shape)
            assert bool(torch.isfinite(batch).all())

    def test_a_method_runs_on_it(self, runs: Runs) -> None:
        """A smoke run goes through, and its predictions are of these samples."""
        free = (
            name
            for name, method in load_methods().items()
            if Supervision().covers(method.supervision(method.config_type()))
        )
        facts = self.subject.facts(self.config)
        scratch = {"backbone.pretrained": "false"} if facts.backbone not in SMALL_NETWORKS else {}
        job = runs.job(next(free), self.dataset, overrides=scratch)
        run = runs.run_inline(job, "smoke")
        assert run.record.done, run.record.failure
        assert run.record.test.avg is not None
        data = load_data(job, runs.data_root)
        table = run.predictions[run.predictions["split"] == "test"]
        np.testing.assert_array_equal(table["id"], data.splits["test"].labels.ids)


def contracts_of(subject: str) -> dict[str, type]:
    """Return the classes of tests of a method or dataset, or of all that a file registers.

    The file (`NAME.py`) has to be where Python finds it.
    """
    module = subject.removesuffix(".py")
    if module != subject:
        importlib.import_module(module)
    found: dict[str, type] = {}
    for name, method in load_methods().items():
        if subject == name or type(method).__module__ == module != subject:
            found[f"Test_{name}"] = type(f"Test_{name}", (MethodContract,), {"method": name})
    for name, dataset in load_datasets().items():
        if subject == name or type(dataset).__module__ == module != subject:
            found[f"Test_{name}"] = type(f"Test_{name}", (DatasetContract,), {"dataset": name})
    if not found:
        raise UsageError(f"{subject} registers no method and no dataset", "see `bench new --help`")
    return found
