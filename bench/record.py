"""One run as it is kept: typed, and read and written here and nowhere else.

`record.json` is flat; Python sees groups of fields. A file of an older schema is upgraded when it
is read and stays as it is on disk; a key that no field has, what a method says of itself above all,
is kept in `details` (or in the `extra` of its part) and survives a rewrite. A file that cannot be
read is an `Unreadable`, never an exception: it costs one run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from bench.job import STORED_NAMES, Job, shown_split
from bench.provenance import (
    Environment,
    GitState,
    Plugin,
    Provenance,
    code_digest,
    environment,
    git_state,
    plugin_info,
)
from datasets.catalogue import get_dataset
from datasets.config import Values, build_config, field_types
from datasets.errors import BenchError
from datasets.files import FileFacts, StorageError, read_checked
from methods.base import get_method

SCHEMA_VERSION = 2
INTERRUPTED = ("worker_died", "node_failure", "cancelled", "lost", StorageError.kind)
"""Kinds of failure that say nothing about the run: it was stopped, and can simply go on."""
WITHOUT_GROUPS = (
    "avg",
    "auroc",
    "worst_class",
    "balanced",
    "ece",
)  # metrics that no group label enters
BY_GROUP = ("group_accuracy", "group_count")
# Keys that schema 1 lacks, and those that only a finished run has.
LEFT_OUT_IF_NONE = (
    *("epochs_run", "code", "resumed_from", "after_seconds"),
    *("cpu", "cpu_capability", "numerics"),
    *("device", "threads", "label_digest", "audit", "partition"),
)

Part = TypeVar("Part")


class Status(StrEnum):
    """What has become of a run; `missing` is one that was never begun."""

    DONE = "done"
    FAILED = "failed"
    RUNNING = "running"
    QUEUED = "queued"
    PREEMPTED = "preempted"
    PRUNED = "pruned"
    MISSING = "missing"


@dataclass(frozen=True)
class Metrics:
    """The metrics of one split; accuracies in percent, AUROCs between 0 and 1.

    A value is none where it is undefined.
    """

    values: Mapping[str, float | None] = field(default_factory=dict)
    group_accuracy: Mapping[str, float | None] = field(default_factory=dict)
    group_count: Mapping[str, int] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        """Return a metric, or none where the split has no such figure."""
        return self.values.get(name)

    @property
    def wga(self) -> float | None:
        """Worst-group accuracy."""
        return self.get("wga")

    @property
    def avg(self) -> float | None:
        """Plain average accuracy."""
        return self.get("avg")

    def to_json(self) -> dict[str, object]:
        """Return the metrics as the record keeps them."""
        groups = {name: dict(vars(self)[name]) for name in BY_GROUP}
        return {**self.values, **{name: own for name, own in groups.items() if own}}

    @staticmethod
    def from_json(raw: Values) -> Metrics:
        """Read them back."""
        groups = {name: raw[name] for name in BY_GROUP if name in raw}
        values = {name: value for name, value in raw.items() if name not in groups}
        return build_config(Metrics, {"values": values, **groups}, "metrics")


@dataclass(frozen=True)
class StageCost:
    """What one stage of a run took, by itself and, with what it found made already, in this run.

    Attributes:
        key: the stage's address, or the run's id for the fit itself.
        seconds_standalone: as if the run had made it.
        seconds_marginal: what it added to this run; nothing for a stage that was reused.
        git, code: of the code that computed it.
        resumed_from: digests of other code that computed the first part of it, if any.
    """

    name: str
    key: str
    seconds_standalone: float
    seconds_marginal: float
    cpu_seconds: float | None
    image_passes: int
    reused: bool
    git: GitState = field(default_factory=GitState)
    code: str | None = None
    resumed_from: tuple[str, ...] | None = None
    extra: Values = field(default_factory=dict)


@dataclass(frozen=True)
class AuditCost:
    """What the audit took beside the run: its looks, and their processor time."""

    looks: int
    cpu_seconds: float


@dataclass(frozen=True)
class Cost:
    """What a run took; the audit's part is not in its stages."""

    stages: tuple[StageCost, ...] = ()
    peak_memory_bytes: int | None = None
    energy_kwh: float | None = None
    audit: AuditCost | None = None

    def standalone(self) -> float:
        """Return the seconds of all stages, as if nothing had been shared."""
        return sum(stage.seconds_standalone for stage in self.stages)

    def marginal(self) -> float:
        """Return the seconds that the run itself took."""
        return sum(stage.seconds_marginal for stage in self.stages)

    def cpu(self) -> float | None:
        """Return the processor's seconds of all stages, if every stage has them."""
        known = [stage.cpu_seconds for stage in self.stages if stage.cpu_seconds is not None]
        return sum(known) if len(known) == len(self.stages) else None

    def image_passes(self) -> int:
        """Return the images that went through the network in all stages."""
        return sum(stage.image_passes for stage in self.stages)


@dataclass(frozen=True)
class Selection:
    """What the fit chose its model by; a value that is not finite is stored as none."""

    rule: str
    value: float | None = None
    epoch: int | None = None
    epochs_run: int | None = None
    extra: Values = field(default_factory=dict)


@dataclass(frozen=True)
class PartitionQuality:
    """How an inferred partition of a split compares with the true groups there.

    Attributes:
        matched_group: the rarest group, or named set of groups, that precision and recall are of.
        enrichment: how many times more of it the best part holds than the whole split.
    """

    split: str
    precision: float | None
    recall: float | None
    enrichment: float | None
    ami: float | None
    sizes: tuple[int, ...]
    matched_group: str
    extra: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a run that ended well."""

    metrics: Mapping[str, Metrics]
    selection: Selection | None = None
    partition: PartitionQuality | None = None


@dataclass(frozen=True)
class Failure:
    """Why a run failed, what to do about it, and the command that runs it again."""

    kind: str
    message: str
    remedy: str = ""
    command: str = ""
    stderr_tail: str = ""
    after_seconds: float | None = None
    extra: Values = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether the run was only stopped, and can simply go on."""
        return self.kind in INTERRUPTED


@dataclass(frozen=True)
class Record:
    """One run: what it was, how it came about, what it took, and what came of it.

    Attributes:
        details: what the method says of itself, each under one key, and keys no field has.
        files: length and SHA-256 of the files beside it; runs of earlier versions have none.
    """

    job: Job
    status: Status
    provenance: Provenance = field(default_factory=Provenance)
    cost: Cost = field(default_factory=Cost)
    outcome: Outcome | None = None
    failure: Failure | None = None
    details: Values = field(default_factory=dict)
    stored_id: str = ""
    files: Mapping[str, FileFacts] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The name of the run; that of its folder where it was read from one."""
        return self.stored_id or self.job.run_id

    @property
    def done(self) -> bool:
        """Whether the run ended well."""
        return self.status is Status.DONE

    @property
    def test(self) -> Metrics:
        """Test metrics; empty where there are none."""
        return self.metrics("test")

    @property
    def val(self) -> Metrics:
        """Validation metrics; empty where there are none."""
        return self.metrics("val")

    def metrics(self, split: str) -> Metrics:
        """Return the metrics of a split; empty where there are none."""
        return self.outcome.metrics.get(split, Metrics()) if self.outcome else Metrics()

    @property
    def selection(self) -> Selection | None:
        """What the model was chosen by, if the run ended well and chose anything."""
        return self.outcome.selection if self.outcome else None

    @property
    def partition(self) -> PartitionQuality | None:
        """Quality of the inferred partition, where the method has one."""
        return self.outcome.partition if self.outcome else None

    def git_states(self) -> list[GitState]:
        """Return the states of the code that computed the run and the stages it took over."""
        return [self.provenance.git, *(stage.git for stage in self.cost.stages)]

    def shown_metrics(self) -> dict[str, float | None]:
        """Return the figures that the terminal shows of a finished run.

        Of a development seed these are validation figures that the method's tier grants; a method
        without validation groups is developed by what it selects by itself, which then stands in
        the place of worst groups.
        """
        if shown_split(self.job.seed) == "test":
            return dict(self.test.values)
        if self.job.supervision.val_groups:
            return dict(self.val.values)
        own = {name: self.val.get(name) for name in WITHOUT_GROUPS if name in self.val.values}
        return {"selection": self.selection.value if self.selection else None, **own}

    def to_json(self) -> dict[str, object]:
        """Return the record as it is written: flat, as the contract names its keys."""
        raw: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "status": self.status.value,
            **self.job.to_json(),
            **to_plain(self.provenance),
            "code": self.provenance.code,
        }
        if self.outcome is not None or self.cost.stages:
            raw |= to_plain(self.cost)
        if self.outcome is not None:
            raw |= to_plain(replace(self.outcome, metrics={}))
            raw["metrics"] = {split: m.to_json() for split, m in self.outcome.metrics.items()}
        if self.failure is not None:
            raw["failure"] = to_plain(self.failure)
        if self.files:
            raw["files"] = {name: to_plain(facts) for name, facts in self.files.items()}
        return {**raw, **self.details}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Record:
        """Read a record of any schema up to today's; what is none raises one error or another."""
        raw = _from_schema_1(raw) if raw.get("schema_version") == 1 else raw
        outcome = Outcome(
            {split: Metrics.from_json(values) for split, values in raw.get("metrics", {}).items()},
            _read_optional(Selection, raw.get("selection")),
            _read_optional(PartitionQuality, raw.get("partition")),
        )
        return Record(
            job=Job.from_json(raw),
            status=Status(raw["status"]),
            provenance=_read_flat(
                Provenance,
                raw,
                environment=read_part(Environment, raw["environment"]),
                git=read_part(GitState, raw["git"]),
                plugin=_read_optional(Plugin, raw.get("plugin")),
            ),
            cost=_read_flat(
                Cost,
                raw,
                stages=tuple(read_part(StageCost, stage) for stage in raw.get("stages", [])),
                audit=_read_optional(AuditCost, raw.get("audit")),
            ),
            outcome=outcome if "metrics" in raw else None,
            failure=_read_optional(Failure, raw.get("failure")),
            details={name: value for name, value in raw.items() if name not in RECORD_KEYS},
            stored_id=str(raw["run_id"]),
            files={n: read_part(FileFacts, facts) for n, facts in raw.get("files", {}).items()},
        )


RECORD_KEYS = {
    *("schema_version", "run_id", "status", "failure", "files", "checksum"),
    *(STORED_NAMES.get(own.name, own.name) for own in fields(Job)),
    *(own.name for part in (Provenance, Cost, Outcome) for own in fields(part)),
}
"""The keys of a record; a method's details may have none of them."""


@dataclass(frozen=True)
class Unreadable:
    """A run that cannot be read: its record, or a table of it, is damaged, foreign or newer.

    Attributes:
        path: its record's.
        command: what makes the run again, where the record says it.
    """

    run_id: str
    path: Path
    reason: str
    command: str = ""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        again = self.command or "`python -m bench run` with its settings"
        return f"to make it again: {again}; what is damaged is then kept in `damaged`"


def read_record(path: Path) -> Record | Unreadable | None:
    """Read a record file; none if there is no file."""
    run_id = path.parent.name
    try:
        raw = read_checked(path)
        version = raw.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            return Unreadable(
                run_id, path, f"it has schema version {version}: update nct-bench to read it"
            )
        record = Record.from_json(raw)
        if record.run_id != run_id:
            return Unreadable(run_id, path, f"it is the record of {record.run_id}")
        return record
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a file with other content may cause
        named = f"{type(error).__name__}: {error}"
        return Unreadable(run_id, path, getattr(error, "message", named))


def _from_schema_1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Derive what schema 1 left out: the hashed identity, and the kind of data."""
    config = raw["config"]
    backbone = {name: value for name, value in config["backbone"].items() if name != "weights"}
    identity = {
        "method": raw["method"],
        "version": raw["method_version"],
        "config": {**config, "backbone": backbone},
        "fingerprint": raw["data_fingerprint"],
        "seed": raw["seed"],
        "quick": raw["quick"],
        **({"stacked": True} if raw.get("stack") else {}),
    }
    trial = "metrics" in raw and "test" not in raw["metrics"]
    return {
        **raw,
        "identity": identity,
        "data_kind": "standin" if raw["standin"] else "release",
        **({"splits": ["train", "val"]} if trial else {}),
    }


def new_record(job: Job, status: Status, **parts: object) -> Record:
    """Return a record of a run by the code and on the machine at hand."""
    provenance = Provenance(
        command=job.command(),
        seed_tree={"root": job.seed, "rule": "sha256('root/name/...'), first 63 bits"},
        environment=environment(),
        git=git_state(),
        code=code_digest(),
        plugin=next(iter(_plugins_of(job)), None),
    )
    return Record(job=job, status=status, provenance=provenance, **parts)  # type: ignore[arg-type]


def _plugins_of(job: Job) -> list[Plugin]:
    """Describe the distributions of the job's method and dataset, as far as they have any."""
    if "plugin" not in job.identity:  # built-ins, whose code need not even be importable
        return []
    owners = (get_method(job.method), get_dataset(job.dataset))
    found = [plugin_info(o.distribution, type(o).__module__) for o in owners if o.distribution]
    return list(dict.fromkeys(found))


def code_of(job: Job) -> str:
    """Return the digest of all code that a job's numbers hang on, plug-ins' included."""
    return "+".join((code_digest(), *(str(plugin.digest) for plugin in _plugins_of(job))))


def failed_record(
    job: Job, error: BaseException, started: float, path_arguments: str = ""
) -> Record:
    """Return the record of a failed run: what went wrong, what to do, how to run it again.

    `path_arguments` name its data root and results folder in the command.
    """
    kind, remedy = str(getattr(error, "kind", "error")), str(getattr(error, "remedy", ""))
    # On a CPU torch only says in a RuntimeError's text that memory ran out.
    in_text = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if in_text or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        kind, remedy = "out_of_memory", "use a smaller batch_size, fewer --workers, or more memory"
    # Where a disk was full there may be no failed record: then the run is just missing.
    again = "" if kind == StorageError.kind else "--rerun failed"
    failure = Failure(
        kind=kind,
        message=getattr(error, "message", f"{type(error).__name__}: {error}"),
        remedy=remedy or "see stderr_tail; if it looks like a defect, report it",
        command=" ".join(filter(None, (job.command(), path_arguments, again))),
        stderr_tail="".join(traceback.format_exception(error))[-4000:],
        after_seconds=round(time.time() - started, 1),
    )
    return new_record(job, Status.FAILED, failure=failure)


def to_plain(part: object) -> dict[str, object]:
    """Return a part of a record as JSON-ready values, its unknown keys among them."""
    assert is_dataclass(part) and not isinstance(part, type)
    values = dict(vars(part))
    extra: dict[str, object] = values.pop("extra", {})
    kept = {n: v for n, v in values.items() if v is not None or n not in LEFT_OUT_IF_NONE}
    return {n: _plain_value(v) for n, v in kept.items()} | extra


def _plain_value(value: object) -> object:
    if is_dataclass(value):
        return to_plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, tuple) else value


def read_part(kind: type[Part], raw: object) -> Part:
    """Read a part of a record; keys that it has no field for go into its `extra`."""
    if not isinstance(raw, Mapping):
        raise BenchError(f"{kind.__name__} of the record is not an object")
    names = field_types(kind)
    values: dict[str, object] = {name: raw[name] for name in names if name in raw}
    unknown = {name: value for name, value in raw.items() if name not in names}
    if unknown and "extra" in names:
        values["extra"] = unknown
    return build_config(kind, values, kind.__name__)


def _read_optional(kind: type[Part], raw: object) -> Part | None:
    return None if raw is None else read_part(kind, raw)


def _read_flat(kind: type[Part], raw: Values, **parts: object) -> Part:
    """Read a part whose values stand in the record itself, but for `parts` with their own key."""
    names = field_types(kind).keys() - parts.keys()
    own = build_config(kind, {n: raw[n] for n in names if raw.get(n) is not None}, "record")
    return replace(own, **parts)  # type: ignore[type-var]
