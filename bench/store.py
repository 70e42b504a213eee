"""Runs on disk: one folder a run, complete the moment it appears, and no index that can go stale.

runs/<run id>/record.json, history.parquet, predictions.parquet, [model.safetensors]
stages/<name>-<key>/     shared stages
features/<name>-<key>/   what frozen networks made of images; a study's are those of its folder
audits/                  what the audit saw of unfinished runs and of shared stages
work/                    checkpoints of what is not finished
damaged/                 what was found damaged and made again, with a line a piece in notes.jsonl
launches/                what was submitted to a cluster
commands/                commands whose runs have not all ended (`bench.commands`)
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.record import Failure, Record, Status, Unreadable, read_record
from datasets.config import Values
from datasets.errors import BenchError, UsageError, did_you_mean
from datasets.files import (
    Damaged,
    FileFacts,
    StorageError,
    atomic_folder,
    read_checked,
    remove_stale_temporaries,
    storage_errors,
    with_checksum,
)
from datasets.lock import Lock, LockBusy

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


TABLES = ("history", "predictions", "partition")
MODEL = "model.safetensors"
PARQUET = b"PAR1"  # what files of that format begin and end with


@dataclass(frozen=True)
class RunStatus:
    """How a run was found; one that a cluster has (`submitted`) need not be started."""

    status: Status
    record: Record | None = None
    unreadable: Unreadable | None = None
    submitted: bool = False

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if it did."""
        return self.record.failure if self.record and self.status is Status.FAILED else None

    @property
    def interrupted(self) -> bool:
        """Whether it failed only because it was stopped, so that it can simply go on."""
        return self.failure is not None and self.failure.interrupted

    @property
    def reason(self) -> str:
        """Why it failed, or why it cannot be read."""
        if self.unreadable is not None:
            return f"it cannot be read: {self.unreadable.reason}"
        return self.failure.message if self.failure is not None else ""


class Store:
    """A results folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.stages = root / "stages"
        shared = root.parents[1] if root.parent.name == "studies" else root
        self.features = shared / "features"
        self.work = root / "work"
        self.audits = root / "audits"
        self.launches = root / "launches"
        self.damaged = root / "damaged"

    def record_mtime(self, run_id: str) -> float:
        """Return when a run's record was written; 0 if it has none."""
        return _mtime(self.runs / run_id / "record.json")

    def check_writable(self) -> None:
        """Fail before any work is done if results could not be kept."""
        with storage_errors(self.root):
            for folder in (self.runs, self.stages, self.work):
                folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.work) as probe:
                probe.write(b"writable")
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what killed processes left of runs and stages that no process works at."""
        remove_stale_temporaries(self.runs, lambda run_id: self.lock(run_id).held())
        remove_stale_temporaries(self.stages, lambda stage: self._stage_lock(stage).held())
        remove_stale_temporaries(
            self.features, lambda name: Lock(self.features / f"{name}.lock").held()
        )
        begun = [path.name for path in self.work.iterdir() if path.is_dir()]
        audited = [path.stem for path in self.audits.glob("*.jsonl")]
        for run_id in {*begun, *audited} & {*self.run_ids()}:
            record, progress = self.record(run_id), self.work / run_id / "progress.json"
            # What is newer than its record belongs to a run that is being made again.
            if record is not None and record.done and _mtime(progress) <= self.record_mtime(run_id):
                with contextlib.suppress(LockBusy), self.lock(run_id).hold(wait=False):
                    self.delete_checkpoints(run_id)
        for work in self.stages.glob("*.work"):
            if _mtime(work) <= _mtime(work.with_suffix("") / "stage.json"):
                with contextlib.suppress(LockBusy), self._stage_lock(work.stem).hold(wait=False):
                    shutil.rmtree(work, ignore_errors=True)

    def _stage_lock(self, name: str) -> Lock:
        return Lock(self.stages / f"{name}.lock")

    def lock(self, run_id: str) -> Lock:
        """Return the lock that the process which executes a run holds."""
        return Lock(self.work / run_id / "lock")

    def read(self, run_id: str) -> Record | Unreadable | None:
        """Read a run's record; none if it has none.

        Its tables are checked by their content, which takes a tenth of the time that reading the
        record takes; a kept model, which may be large, by its length until it is loaded.
        """
        path = self.runs / run_id / "record.json"
        found = read_record(path)
        if not isinstance(found, Record):
            return found
        try:
            for name, facts in found.files.items():
                facts.check(path.with_name(name), content=name.endswith(".parquet"))
            for table in {f"{name}.parquet" for name in TABLES} - set(found.files):
                _check_parquet(path.with_name(table))
        except (Damaged, OSError) as error:
            model = ["--keep-models"] if MODEL in found.files else []
            words = (found.provenance.command, "--results", shlex.quote(str(self.root)), *model)
            return Unreadable(run_id, path, str(error), " ".join(words))
        return found

    def record(self, run_id: str) -> Record | None:
        """Read a run's record; none if it has none, or none that can be read."""
        found = self.read(run_id)
        return found if isinstance(found, Record) else None

    def run_ids(self) -> list[str]:
        """List the runs that have a folder."""
        if not self.runs.is_dir():
            return []
        return sorted(path.name for path in self.runs.iterdir() if not path.name.startswith("."))

    def records(self) -> Iterator[Record]:
        """Read every record that can be read."""
        return (found for found in self.read_all() if isinstance(found, Record))

    def read_all(self) -> Iterator[Record | Unreadable]:
        """Read every record, the damaged ones included."""
        found = (self.read(run_id) for run_id in self.run_ids())
        return (one for one in found if one is not None)

    def status_of(self, run_id: str) -> RunStatus:
        """Return a run's status, with its record if it has one."""
        found = self.read(run_id)
        record = found if isinstance(found, Record) else None
        if record is not None and record.done:
            return RunStatus(Status.DONE, record)
        if self.lock(run_id).held():
            return RunStatus(Status.RUNNING, record)
        if record is not None:
            return RunStatus(record.status, record)
        if isinstance(found, Unreadable):
            return RunStatus(Status.MISSING, unreadable=found)
        return RunStatus(Status.PREEMPTED if self.has_progress(run_id) else Status.MISSING)

    def statuses(
        self, run_ids: Iterable[str], submitted: Mapping[str, Status]
    ) -> dict[str, RunStatus]:
        """Look at runs, each once; those that a cluster has are as they are there."""
        return {
            run_id: RunStatus(submitted[run_id], submitted=True)
            if run_id in submitted
            else self.status_of(run_id)
            for run_id in run_ids
        }

    def all_statuses(self, submitted: Mapping[str, Status]) -> dict[str, RunStatus]:
        """Look at everything in the folder, finished or not."""
        begun = sorted(path.parent.name for path in self.work.glob("*/progress.json"))
        found = self.statuses(dict.fromkeys((*self.run_ids(), *submitted, *begun)), submitted)
        return {n: s for n, s in found.items() if s.status is not Status.MISSING or s.unreadable}

    def progress(self, run_id: str) -> Values:
        """Return what a running job last reported."""
        try:
            return read_checked(self.work / run_id / "progress.json")
        except (OSError, Damaged):
            return {}

    def matches(self, prefix: str) -> list[str]:
        """List the runs whose ids begin or end so."""
        named = [n for n in self.run_ids() if n.startswith(prefix) or n.endswith(prefix)]
        return [name for name in named if (self.runs / name / "record.json").is_file()]

    def find(self, prefix: str) -> str:
        """Find the run whose id begins with `prefix`, or ends with it.

        Of runs that differ by the end of their ids only, variants of a campaign or versions of a
        method, the one with its preset's settings is meant, of the latest version.
        """
        matches = self.matches(prefix)
        if prefix in matches:
            return prefix
        if len(matches) > 1 and len({name.rpartition("-")[0] for name in matches}) == 1:
            records = {name: self.record(name) for name in matches}
            plain = {name: r for name, r in records.items() if r is None or not r.job.overrides}
            latest = max((r.job.version for r in plain.values() if r is not None), default=0)
            meant = [name for name, r in plain.items() if r is None or r.job.version == latest]
            matches = meant if len(meant) == 1 else matches
        if len(matches) != 1:
            what = "no run matches" if not matches else f"{len(matches)} runs match"
            stems = {name.rpartition("-")[0] for name in self.run_ids()}
            near = "" if matches else did_you_mean(prefix, stems)
            raise UsageError(
                f"{what} '{prefix}' in {self.runs}{near}",
                "python -m bench status lists the runs" if not matches else "give more of the id",
            )
        return matches[0]

    def history(self, run_id: str) -> pd.DataFrame | None:
        """Read a run's history, epoch by epoch; none if there is none."""
        return self._table(run_id, "history")

    def predictions(self, run_id: str, columns: list[str] | None = None) -> pd.DataFrame | None:
        """Read a run's predictions of validation and test samples; none if there are none."""
        return self._table(run_id, "predictions", columns)

    def partition(self, run_id: str) -> pd.DataFrame | None:
        """Read the partition that a run's method inferred; none if there is none."""
        return self._table(run_id, "partition")

    def _table(
        self, run_id: str, name: str, columns: list[str] | None = None
    ) -> pd.DataFrame | None:
        path = self.runs / run_id / f"{name}.parquet"
        return read_table(path, columns) if path.is_file() else None

    def write(
        self,
        record: Record,
        history: pd.DataFrame | None = None,
        predictions: pd.DataFrame | None = None,
        partition: pd.DataFrame | None = None,
        model: Mapping[str, Tensor] | None = None,
        about: Mapping[str, str] | None = None,
    ) -> Path:
        """Put a run in place, all of it or nothing; `about` is what the model's file says of it."""
        path = self.runs / record.run_id
        with atomic_folder(path) as draft:
            if history is not None:
                history.to_parquet(draft / "history.parquet", index=False)
            for name, table in (("predictions", predictions), ("partition", partition)):
                if table is not None:
                    write_samples(table, draft / f"{name}.parquet")
            if model is not None:
                from safetensors.torch import save

                tensors = {k: v.contiguous().cpu() for k, v in model.items()}
                (draft / MODEL).write_bytes(save(tensors, metadata=dict(about or {})))
            files = {file.name: FileFacts.of(file) for file in sorted(draft.iterdir())}
            content = with_checksum(replace(record, files=files).to_json())
            (draft / "record.json").write_text(content + "\n")
        return path

    def write_failure(self, failed: Record) -> Record:
        """Keep the end of a run that could not keep it itself, unless there is a result already.

        Returns the record; where it could not be written, with a word on why and the command that
        runs what is then just missing.
        """
        try:
            existing = self.record(failed.run_id)
            if existing is None or not existing.done:
                self.write(failed)
        except (BenchError, OSError) as error:
            assert failed.failure is not None
            failure = replace(
                failed.failure,
                kind=StorageError.kind,
                message=f"{failed.failure.message}; {getattr(error, 'message', error)}",
                remedy=getattr(error, "remedy", "") or failed.failure.remedy,
                command=failed.failure.command.removesuffix(" --rerun failed"),
            )
            return replace(failed, failure=failure)
        return failed

    def delete_checkpoints(self, run_id: str) -> None:
        """Delete the checkpoints of a finished run, and what the audit saw of it."""
        with contextlib.suppress(OSError):  # the run is stored: what is left over is no failure
            (self.audits / f"{run_id}.jsonl").unlink()
        shutil.rmtree(self.work / run_id, ignore_errors=True)

    def has_progress(self, run_id: str) -> bool:
        """Return whether a run that is not done was ever begun."""
        return (self.work / run_id / "progress.json").exists()


def read_table(path: Path, columns: list[str] | None = None) -> pd.DataFrame:
    """Read a table of a run; raise `Damaged` if it is none."""
    import pandas as pd

    try:
        return pd.read_parquet(path, columns=columns)
    except Exception as error:  # parquet's readers raise many kinds
        raise Damaged(f"{path} cannot be read: {error}", "run it again, or delete it") from error


def _check_parquet(path: Path) -> None:
    """Raise `Damaged` if there is a table that is torn, by how parquet files begin and end.

    Records of earlier versions say nothing of the tables beside them.
    """
    if path.is_file():
        with path.open("rb") as source:
            ends = source.read(len(PARQUET)), source.seek(0, os.SEEK_END)
            source.seek(max(0, ends[1] - len(PARQUET)))
            if ends[0] != PARQUET or source.read() != PARQUET:
                raise Damaged(f"{path.name} is damaged: it has {ends[1]} bytes and is no table")


def _mtime(path: Path) -> float:
    """Return when a file was changed last; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def write_samples(table: pd.DataFrame, path: Path) -> None:
    """Write a table with a row a sample as parquet, in little room: most of a run's is here.

    Sorted ids are written as differences, and the two bytes of a half-precision score apart, since
    the first varies little and the second is noise. Nothing is lost. Readers need parquet's format
    2.11: pyarrow has it from version 17 on, other readers may not know it for half precision yet.
    """
    from pandas.api.types import is_float_dtype, is_integer_dtype

    encodings = {str(n): "BYTE_STREAM_SPLIT" for n in table if is_float_dtype(table[n].dtype)}
    if "id" in table and is_integer_dtype(table["id"].dtype):
        encodings["id"] = "DELTA_BINARY_PACKED"
    table.to_parquet(
        path,
        index=False,
        compression="zstd",
        use_dictionary=[str(name) for name in table if name not in encodings],
        column_encoding=encodings,
    )
