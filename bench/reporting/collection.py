"""What a report is made from: the store, every record read once, and a paper's numbers.

A run is published (a table may average it), a campaign's variant (its own column of an ablation
may), a smoke run (stand-in data or a quick run: a section of its own), or left out with the reason.
Its place follows from its record and from what its settings would be today: one job is expanded for
each method, dataset, preset and variant that occurs, and identities are compared without the seed.
Runs of an earlier version of a method stand, and are called so, until today's has as many runs.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import pandas as pd

from bench.job import (
    DEFAULT_PRESET,
    FIRST_DEVELOPMENT_SEED,
    NO_DATA,
    PUBLISHED_SEEDS,
    Job,
    Request,
    expand,
    identity_changes,
)
from bench.record import Record, Unreadable
from bench.reporting.names import dataset_title, in_main_table, method_title
from bench.reporting.table import Cell, CellKey, Table
from bench.store import Store, read_table
from datasets.base import Facts, LabelledSplit
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import Values
from datasets.errors import BenchError, DataMissing
from datasets.files import Damaged, to_json
from methods.base import load_methods
from methods.presets import PRESETS

if TYPE_CHECKING:
    from bench.scoring import Evaluation

Kind = Literal["published", "variant", "smoke", "left out"]
FIRST_PRESET = "paper"
FIRST_PRESETS = (FIRST_PRESET, DEFAULT_PRESET)
"""The presets that stand before any other; a method has one of the two on a dataset."""

SHOWN_CHANGES = 4  # settings that a reason names

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class VariantSpec:
    """One column of a campaign for one method and dataset.

    Where the overrides change nothing, the column is the main runs themselves.
    """

    campaign: str
    variant: str
    method: str
    dataset: str
    overrides: Mapping[str, str]  # the change, as `--set` would make it
    seeds: tuple[int, ...]
    default_seeds: tuple[int, ...] = ()  # of a column that is the main runs, if given


FURTHER_ROWS = "further rows"
"""Stands for a campaign in the columns that `Method.further_rows` describes."""


def further_rows(seeds: Sequence[int]) -> Iterator[VariantSpec]:
    """Go through what each method says of its further rows, on every dataset."""
    for (name, method), dataset in product(load_methods().items(), load_datasets()):
        for row, settings in method.further_rows.items():
            overrides = {f"{name}.{knob}": value for knob, value in settings.items()}
            yield VariantSpec(FURTHER_ROWS, row, name, dataset, overrides, tuple(seeds))


@dataclass(frozen=True)
class Run:
    """One stored run and where it belongs."""

    record: Record
    folder: Path
    kind: Kind
    reason: str = ""  # why it is a smoke run or left out
    variants: tuple[tuple[str, str], ...] = ()  # campaign and variant, published or not
    outdated: str = ""  # if it is of an earlier version of its method: which one, and today's

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.record.run_id

    @property
    def job(self) -> Job:
        """What was run."""
        return self.record.job

    def __lt__(self, other: Run) -> bool:  # runs are ordered by their seed
        return (self.job.seed, self.run_id) < (other.job.seed, other.run_id)

    def history(self) -> pd.DataFrame | None:
        """Return the history, epoch by epoch, or none if there is none; not to be changed."""
        return self._table("history")

    def predictions(self, columns: list[str] | None = None) -> pd.DataFrame | None:
        """Return the predictions of validation and test samples, or none; not to be changed."""
        found = self._table("predictions")
        return found if found is None or columns is None else found[columns]

    def _table(self, name: str) -> pd.DataFrame | None:
        path = self.folder / f"{name}.parquet"
        try:
            return READERS[name](path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None


def _read(path: Path, modified: int) -> pd.DataFrame | None:
    """Read a table; one that was modified is another. One that cannot be read is as good as none.

    What is damaged was noticed when the store was read, but for tables of earlier versions, which
    have no checksum.
    """
    try:
        return read_table(path)
    except Damaged as error:
        sys.stderr.write(f"{error.message}: cells that need it are left empty\n")
        return None


# What is kept in memory while a report is built: kilobytes each, and one to two megabytes each.
READERS = {"history": lru_cache(1024)(_read), "predictions": lru_cache(256)(_read)}


def clear_cached_tables() -> None:
    """Free the histories and predictions that were read."""
    for reader in READERS.values():
        reader.cache_clear()


def load_split(record: Record, data_root: Path | None, split: str) -> tuple[Facts, LabelledSplit]:
    """Load the split that a run was evaluated on.

    Raises:
        DataMissing: there is no data root, or it holds other data than the run was made with.
    """
    if data_root is None:
        raise DataMissing("images were not asked for", "give --data-root")
    job = record.job
    dataset, settings = get_dataset(job.dataset), job.dataset_config()
    place, some = dataset.require(data_root), job.data_kind == "subset"
    on_disk = dataset.info_on_disk(settings, dataset.subset(place, settings) if some else place)
    if on_disk.fingerprint() != job.fingerprint:
        problem = f"{data_root} holds other data than {record.run_id} was made with"
        raise DataMissing(problem, "give the --data-root of the run")
    data = dataset.load(data_root, settings, splits=(split,), quick=job.quick, allow_subset=some)
    return data.facts, data.splits[split]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by key, both in the order in which they come."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


@dataclass(frozen=True)
class Collection:
    """All runs of a store, classified; those that cannot be read are left out as well."""

    runs: tuple[Run, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()

    def of_kind(self, kind: Kind) -> list[Run]:
        """Return the runs of one kind, in the store's order."""
        return [run for run in self.runs if run.kind == kind]

    def of_main_table(self) -> list[Run]:
        """Return the published runs of the main table's methods and datasets, in order."""
        found = self.of_kind("published")
        return [run for run in found if in_main_table(run.job.method, run.job.dataset)]

    def further(self, method: str, row: str, dataset: str) -> list[Run]:
        """Return the runs of a method's further row on one dataset, by seed."""
        own = self.variant(FURTHER_ROWS, row, dataset)
        return [run for run in own if run.job.method == method]

    def count(self, kind: Kind) -> int:
        """Return how many runs there are of one kind; unreadable ones are left out."""
        return len(self.of_kind(kind)) + (len(self.unreadable) if kind == "left out" else 0)

    def published(self, method: str, dataset: str) -> list[Run]:
        """Return the runs that a table may average, by seed."""
        own = self._cells.get((method, dataset), [])
        return sorted(run for run in own if run.kind == "published")

    def variant(self, campaign: str, variant: str, dataset: str) -> list[Run]:
        """Return the runs of one campaign column on one dataset, by seed."""
        return self._variants.get((campaign, variant, dataset), [])

    def outdated_note(self, run_ids: Iterable[str]) -> str:
        """Return which of some runs are of an earlier version of their method; or nothing."""
        methods: dict[tuple[str, str], set[str]] = {}
        for run_id in run_ids:
            if run_id in self._outdated:
                run = self._outdated[run_id]
                of_method = methods.setdefault((run.job.method, run.outdated), set())
                of_method.add(dataset_title(run.job.dataset))
        found = (
            f"{method_title(method)} on {', '.join(sorted(datasets))} ({versions})"
            for (method, versions), datasets in sorted(methods.items())
        )
        text = "; ".join(found)
        return text and f"Of an earlier version of the method, until all its runs are made: {text}."

    @cached_property
    def _outdated(self) -> dict[str, Run]:
        return {run.run_id: run for run in self.runs if run.outdated and run.kind != "left out"}

    def absence(self, method: str, dataset: str) -> str:
        """Return why there is no published number: nothing was run, or what became of the runs."""
        own = self._cells.get((method, dataset), [])
        reasons = Counter(run.reason for run in own if run.kind in ("smoke", "left out"))
        if not reasons:
            return "not run"
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        return f"no run that may stand here ({found})"

    @cached_property
    def _cells(self) -> dict[tuple[str, str], list[Run]]:
        return grouped(self.runs, lambda run: (run.job.method, run.job.dataset))

    @cached_property
    def _variants(self) -> dict[tuple[str, str, str], list[Run]]:
        found: dict[tuple[str, str, str], list[Run]] = {}
        for run in sorted(self.runs):
            for key in run.variants:
                found.setdefault((*key, run.job.dataset), []).append(run)
        return found


def collect(
    store: Store, variants: Sequence[VariantSpec] = (), seeds: Sequence[int] = PUBLISHED_SEEDS
) -> Collection:
    """Read every record of a store and classify it, by campaign columns and the seeds to show."""
    classifier = Classifier((*variants, *further_rows(seeds)), seeds)
    found = list(store.read_all())
    runs = [
        classifier.place(one, store.runs / one.run_id) for one in found if isinstance(one, Record)
    ]
    unreadable = tuple(one for one in found if isinstance(one, Unreadable))
    return Collection(tuple(_one_version(_one_preset(runs))), unreadable)


def metric_values(runs: Iterable[Run], metric: str) -> list[tuple[float, str]]:
    """Return a test metric of every run that has it, with the run's id."""
    found = ((run.record.test.get(metric), run.run_id) for run in runs)
    return [(value, run_id) for value, run_id in found if value is not None]


def metric_by_seed(runs: Iterable[Run], metric: str) -> dict[int, float]:
    """Return a test metric of every run that has it, by seed."""
    found = ((run.job.seed, run.record.test.get(metric)) for run in runs)
    return {seed: value for seed, value in found if value is not None}


class Classifier:
    """Finds the place of each record; what a setting would be today is resolved once."""

    def __init__(self, variants: Sequence[VariantSpec], seeds: Sequence[int]) -> None:
        self.seeds = seeds
        self._columns = grouped(variants, lambda spec: (spec.method, spec.dataset))
        self._resolved: dict[Hashable, Values | str] = {}

    def place(self, record: Record, folder: Path) -> Run:
        """Return a record as a run with its kind and, unless a table may show it, the reason."""
        kind, reason = _obstacle(record)
        if kind is not None:
            return Run(record, folder, kind, reason)
        job = record.job
        own = without_seed(job.identity)
        usual = self.today(job.method, job.dataset, FIRST_PRESET, {})
        today = self.today(job.method, job.dataset, job.preset, {})
        columns = self._columns_of(record, own)
        outdated = _outdated(own, usual)
        usual_settings = not job.overrides if outdated else own in (usual, today)
        if usual_settings and job.seed in self.seeds:
            return Run(record, folder, "published", "", columns, outdated)
        if columns:
            return Run(record, folder, "variant", "", columns, outdated)
        if isinstance(today, str):
            return Run(record, folder, "left out", today)
        why = describe_changes(own, today, job.dataset)
        if job.overrides:
            why = "settings changed by hand" + (f": {why}" if why else "")
        elif job.seed not in self.seeds:
            developed = job.seed >= FIRST_DEVELOPMENT_SEED
            why = "development seed" if developed else "a seed that is not shown here"
        return Run(record, folder, "left out", why)

    def today(
        self, method: str, dataset: str, preset: str, overrides: Mapping[str, str]
    ) -> Values | str:
        """Return the identity, without seed, that a new run would have; else why there is none."""
        key = (method, dataset, preset, *overrides.items())
        if key not in self._resolved:
            named = FIRST_PRESET if preset == DEFAULT_PRESET else preset
            try:
                (job,) = expand(Request((method,), (dataset,), (0,), NO_DATA, named, overrides))
                self._resolved[key] = without_seed(job.identity)
            except BenchError as error:
                self._resolved[key] = error.message
        return self._resolved[key]

    def _columns_of(self, record: Record, own: Values) -> tuple[tuple[str, str], ...]:
        """Return the campaign columns whose settings and seeds a record has."""
        job, found = record.job, []
        usual = self.today(job.method, job.dataset, FIRST_PRESET, {})
        for spec in self._columns.get((job.method, job.dataset), []):
            changed = self.today(spec.method, spec.dataset, FIRST_PRESET, spec.overrides)
            is_default = changed == usual
            seeds = spec.default_seeds if is_default and spec.default_seeds else spec.seeds
            holds = own == changed
            if _outdated(own, usual):  # by what it was asked for: presets may have changed, too
                holds = job.overrides == ({} if is_default else spec.overrides)
            if holds and job.seed in seeds:
                found.append((spec.campaign, spec.variant))
        return tuple(found)


def _obstacle(record: Record) -> tuple[Kind | None, str]:
    """Return what keeps a record from any table, whatever its settings; nothing if nothing does."""
    job = record.job
    if not record.done:
        kind = record.failure.kind if record.failure is not None else ""
        return "left out", f"{record.status.value} ({kind})" if kind else record.status.value
    uncommitted = any(state.dirty is not False for state in record.git_states())
    resumed = any(stage.resumed_from for stage in record.cost.stages)
    obstacles: tuple[tuple[object, Kind, str], ...] = (
        (job.standin, "smoke", "stand-in data"),
        (job.quick, "smoke", "quick run"),
        (job.data_kind != "release", "left out", f"data that is not the release: {job.data_kind}"),
        (record.details.get("stack"), "left out", "seeds stacked into one model"),
        (job.preset not in (*PRESETS, DEFAULT_PRESET), "left out", f"preset {job.preset}"),
        (uncommitted, "left out", "code with uncommitted changes, or of no known commit"),
        (resumed, "left out", "begun by one code and resumed by another"),
        (record.run_id != job.run_id, "left out", "its id is not that of its settings"),
    )
    return next(((kind, reason) for holds, kind, reason in obstacles if holds), (None, ""))


def _outdated(own: Values, today: Values | str) -> str:
    """Return of which earlier version of its method a run is, and today's; nothing otherwise."""
    if isinstance(today, str):
        return ""
    version, now = own["version"], today["version"]
    older = isinstance(version, int) and isinstance(now, int) and version < now
    return f"version {version}, now {now}" if older else ""


def _one_version(runs: list[Run]) -> list[Run]:
    """Keep runs of one version of a method in a place: today's once it has as many runs there.

    A place is the method's cell on a dataset, or its columns of one campaign there, so that no
    table compares a setting of one version with another setting of the next. What an earlier
    version's preset was is not known any more, so that its runs have to agree on it: those that
    have other settings than most are left out.
    """
    settings: dict[tuple[str, str], Counter[str]] = {}
    for run in runs:
        if run.kind == "published" and run.outdated:
            settings.setdefault(_cell(run), Counter())[_settings(run)] += 1
    usual = {cell: found.most_common(1)[0][0] for cell, found in settings.items()}

    def is_odd(run: Run) -> bool:
        older = run.kind == "published" and bool(run.outdated)
        return older and _settings(run) != usual[_cell(run)]

    counts = Counter(
        (*_cell(run), place, bool(run.outdated))
        for run in runs
        if not is_odd(run)
        for place in _places(run)
    )

    def stands(run: Run, place: str) -> bool:
        earlier, today = (counts[*_cell(run), place, is_earlier] for is_earlier in (True, False))
        return bool(run.outdated) == (earlier > today)

    kept = []
    for run in runs:
        if is_odd(run):
            reason = f"{run.outdated}; settings unlike those of the other runs of that version"
            kept.append(replace(run, kind="left out", reason=reason, variants=()))
            continue
        columns = tuple(column for column in run.variants if stands(run, column[0]))
        if run.kind in ("published", "variant") and not (
            stands(run, CELL) if run.kind == "published" else columns
        ):
            reason = run.outdated or "fewer runs so far than the earlier version"
            kind: Kind = "variant" if columns else "left out"
            run = replace(run, kind=kind, reason=reason)
        kept.append(replace(run, variants=columns))
    return kept


CELL = ""
"""Stands for the place of a method's published runs, beside names of campaigns."""


def _cell(run: Run) -> tuple[str, str]:
    return (run.job.method, run.job.dataset)


def _places(run: Run) -> set[str]:
    """Return where a run would be shown: in its cell, in columns of campaigns."""
    campaigns = {campaign for campaign, _ in run.variants}
    return campaigns | {CELL} if run.kind == "published" else campaigns


def _settings(run: Run) -> str:
    return to_json(without_seed(run.job.identity))


def _one_preset(runs: list[Run]) -> list[Run]:
    """Keep runs of one preset in a cell: the paper's where it was run, else another."""
    published = [run for run in runs if run.kind == "published"]
    others = {run.run_id for run in published if run.job.preset not in FIRST_PRESETS}
    first = {(run.job.method, run.job.dataset) for run in published if run.run_id not in others}
    kept = []
    for run in runs:
        if run.run_id in others and (run.job.method, run.job.dataset) in first:
            reason = f"preset {run.job.preset}, where runs of the paper's preset stand"
            run = replace(run, kind="left out", reason=reason, variants=())
        kept.append(run)
    return kept


def without_seed(identity: Values) -> Values:
    """Return an identity as JSON has it, without the seed."""
    plain: dict[str, object] = json.loads(to_json(identity))
    return {name: value for name, value in plain.items() if name != "seed"}


def describe_changes(own: Values, today: Values, dataset: str) -> str:
    """Return field by field how a stored run differs from one that would be made today."""
    changes = identity_changes(own, today)
    if any(name.startswith("config.dataset.") for name in changes):
        changes.pop("fingerprint", None)  # it follows from the setting
    owners = {"method": "", "dataset": f"{dataset}.", "backbone": "backbone."}
    parts = []
    for name, (before, after) in changes.items():
        owner = next((one for one in owners if name.startswith(f"config.{one}.")), "")
        setting = owners.get(owner, "") + name.removeprefix(f"config.{owner}.")
        now = "preset now" if owner == "method" else "now"
        old, new = ("none" if value is None else value for value in (before, after))
        parts.append(f"{setting} {old}, {now} {new}")
    more = len(parts) - SHOWN_CHANGES
    return "; ".join(parts[:SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Reference:
    """A paper's own numbers; without any, tables have no rows of a paper.

    Cells are by method, dataset and metric (`minutes`: of training). What is added to the notes of
    a table or a figure is by its label. `baselines` are the methods with which every other is
    compared, also where there is no paper; `featured` are those that the report is about.
    """

    title: str = "the paper"
    methods: tuple[str, ...] = ()  # in its order
    cells: Mapping[tuple[str, str, str], Cell] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baselines: tuple[str, ...] = ()
    featured: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.methods)

    def cell(self, key: CellKey) -> Cell | None:
        """Return the paper's number, if it has one."""
        return self.cells.get((key.method, key.dataset, key.metric))


@dataclass(frozen=True)
class Limits:
    """What a report is limited to; an empty one is no limit."""

    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()

    def admits(self, method: str, dataset: str) -> bool:
        """Return whether something of a method and a dataset is shown; a blank is of none."""
        return (not (self.methods and method) or method in self.methods) and (
            not (self.datasets and dataset) or dataset in self.datasets
        )

    def of_runs(self, runs: Collection) -> Collection:
        """Return the runs that are shown."""
        shown = [run for run in runs.runs if self.admits(run.job.method, run.job.dataset)]
        return replace(runs, runs=tuple(shown))

    def of_table(self, table: Table) -> Table:
        """Return a table without the rows and columns that are of others alone.

        What its numbers were made from stays: a p-value is still corrected for all comparisons.
        """
        if not (self.methods or self.datasets):
            return table

        def shown(cells: Sequence[Cell]) -> bool:
            return not cells or any(self.admits(c.key.method, c.key.dataset) for c in cells)

        rows = [row for row in table.rows if shown(row.cells)]
        kept = [
            place
            for place in range(len(table.columns))
            if shown([row.cells[place] for row in table.rows])
        ]
        return replace(
            table,
            columns=tuple(table.columns[place] for place in kept),
            rows=tuple(replace(row, cells=tuple(row.cells[p] for p in kept)) for row in rows),
        )


@dataclass(frozen=True)
class ReportInput:
    """What every table is made from; data may be missing where samples are counted or shown."""

    runs: Collection
    data_root: Path
    reference: Reference = field(default_factory=Reference)
    limits: Limits = field(default_factory=Limits)
    external: Sequence[Evaluation] = ()  # what was made elsewhere

    def limited(self) -> ReportInput:
        """Return it with only the runs that are shown."""
        return replace(self, runs=self.limits.of_runs(self.runs))


TableBuilder = Callable[[ReportInput], Table]
