"""Runs on disk: one folder a run, complete the moment it appears, and no index that can go stale.

runs/<run id>/record.json, history.parquet, predictions.parquet, [model.safetensors]
stages/<name>-<key>/     shared stages
audits/                  what the audit saw of unfinished runs and of shared stages
work/                    checkpoints of what is not finished
launches/                what was submitted to a cluster
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import save
from torch import Tensor

from bench.files import StorageError, atomic_folder, storage_errors, tidy, to_json
from bench.lease import Lease
from bench.sample_tables import write_samples
from datasets.errors import UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Store:
    """A results folder."""

    root: Path

    @property
    def runs(self) -> Path:
        """Finished and failed runs."""
        return self.root / "runs"

    @property
    def stages(self) -> Path:
        """Stages that several runs share."""
        return self.root / "stages"

    @property
    def work(self) -> Path:
        """What unfinished runs have so far."""
        return self.root / "work"

    @property
    def audits(self) -> Path:
        """What the audit saw of unfinished runs and of shared stages, epoch by epoch."""
        return self.root / "audits"

    @property
    def launches(self) -> Path:
        """What was submitted to a cluster."""
        return self.root / "launches"

    def written(self, run_id: str) -> float:
        """Tell when a run's record was written; 0 if it has none."""
        try:
            return (self.runs / run_id / "record.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def check_writable(self) -> None:
        """Fail before any work is done if results could not be kept."""
        with storage_errors(self.root):
            for folder in (self.runs, self.stages, self.work):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.work / f".probe-{uuid.uuid4().hex[:8]}"
            probe.write_text("writable")
            probe.unlink()
            tidy(self.runs)
            tidy(self.stages)

    def lock(self, run_id: str) -> Lease:
        """Give the lock that whoever executes a run holds."""
        return Lease(self.work / run_id / "lock")

    def look(self, run_id: str) -> tuple[str, dict[str, Any] | None]:
        """Tell a run's status, and give its record if it has one.

        The status is done, failed, running, preempted (interrupted, will resume) or missing.
        """
        record = self.record(run_id)
        if record is not None and record["status"] == "done":
            return "done", record
        if self.lock(run_id).held():
            return "running", record
        if record is not None:
            return str(record["status"]), record
        return "preempted" if self.started(run_id) else "missing", None

    def status(self, run_id: str) -> str:
        """Tell a run's status."""
        return self.look(run_id)[0]

    def progress(self, run_id: str) -> dict[str, Any]:
        """Give what a running job last reported."""
        return _read_json(self.work / run_id / "progress.json") or {}

    def record(self, run_id: str) -> dict[str, Any] | None:
        """Read a run's record, if it has one."""
        return _read_json(self.runs / run_id / "record.json")

    def records(self) -> Iterator[dict[str, Any]]:
        """Read every record."""
        if self.runs.is_dir():
            for folder in sorted(self.runs.iterdir()):
                record = None if folder.name.startswith(".") else self.record(folder.name)
                if record is not None:
                    yield record

    def find(self, prefix: str) -> str:
        """Find the run whose id begins with `prefix`, or ends with it.

        Of runs that differ by the end of their ids only, the variants of a campaign, the one with
        its preset's settings is meant.
        """
        names = [p.name for p in self.runs.iterdir()] if self.runs.is_dir() else []
        names = [name for name in names if (self.runs / name / "record.json").is_file()]
        matches = [name for name in names if name.startswith(prefix) or name.endswith(prefix)]
        if prefix in names:
            return prefix
        if len(matches) > 1 and len({name.rpartition("-")[0] for name in matches}) == 1:
            plain = [name for name in matches if not (self.record(name) or {}).get("overrides")]
            matches = plain if len(plain) == 1 else matches
        if len(matches) != 1:
            what = "no run matches" if not matches else f"{len(matches)} runs match"
            raise UsageError(
                f"{what} '{prefix}' in {self.runs}",
                "python -m bench status lists the runs" if not matches else "give more of the id",
            )
        return matches[0]

    def write(
        self,
        record: dict[str, Any],
        history: pd.DataFrame | None = None,
        predictions: pd.DataFrame | None = None,
        partition: pd.DataFrame | None = None,
        model: dict[str, Tensor] | None = None,
    ) -> Path:
        """Put a run in place, all of it or nothing."""
        path = self.runs / str(record["run_id"])
        with atomic_folder(path) as draft:
            if history is not None:
                history.to_parquet(draft / "history.parquet", index=False)
            for name, table in (("predictions", predictions), ("partition", partition)):
                if table is not None:
                    write_samples(table, draft / f"{name}.parquet")
            if model is not None:
                tensors = {k: v.contiguous().cpu() for k, v in model.items()}
                (draft / "model.safetensors").write_bytes(save(tensors))
            (draft / "record.json").write_text(to_json(record) + "\n")
        return path

    def forget_work(self, run_id: str) -> None:
        """Delete the checkpoints of a finished run."""
        shutil.rmtree(self.work / run_id, ignore_errors=True)

    def started(self, run_id: str) -> bool:
        """Tell whether anybody has ever begun with a run that is not done."""
        return (self.work / run_id / "progress.json").exists()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}", f"delete {path.parent} and run the command again"
        ) from error
    return content if isinstance(content, dict) else None
