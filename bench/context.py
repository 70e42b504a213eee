"""What the harness lends to a fit: seeds, stages, checkpoints, clocks, progress, and the audit."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bench.audit import AuditLink
from bench.files import (
    append_line,
    atomic_file,
    atomic_folder,
    digest,
    read_lines,
    storage_errors,
    to_json,
)
from bench.lease import Lease
from bench.provenance import environment, git_state
from bench.pruning import Pruned
from bench.seeds import derive_seed
from bench.spent import Spent as Spent  # part of the accounts that this module keeps
from datasets.config import as_plain
from methods.base import Context, SharedStage, StageResult

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunScope:
    """What every part of one run has in common.

    Attributes:
        meaning: what, besides its own configuration, a stage's result depends on.
        not_before: stages written before this time are computed again.
        cores: how many the run may keep busy.
    """

    run_id: str
    seed: int
    device: torch.device
    meaning: dict[str, Any]
    stages: Path
    report: Report
    audit: AuditLink
    not_before: float = 0.0
    cores: int = 1


@dataclass
class Part:
    """The accounts of a run or of one stage of it."""

    record: str
    folder: Path
    before: Spent = field(default_factory=Spent)  # by earlier attempts
    began: Spent = field(default_factory=Spent.now)
    away: Spent = field(default_factory=Spent)  # in audits and inner stages, which count their own
    image_passes: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of checkpoints: two with one name would clash

    def elapsed(self) -> Spent:
        """Count the seconds of this part's own work, over all attempts."""
        return self.before + Spent.now() - self.began - self.away


class RunContext:
    """The context of one part of a run; stages get one of their own."""

    def __init__(self, scope: RunScope, part: Part, stages: list[dict[str, Any]]) -> None:
        self.scope = scope
        self.part = part
        self.stage_records = stages
        self.device = scope.device
        self.cores = scope.cores

    def seed(self, *names: str | int) -> int:
        """Derive the seed that belongs to a name."""
        return derive_seed(self.scope.seed, *names)

    def generator(self, *names: str | int) -> torch.Generator:
        """Make a generator on the run's device, seeded by name."""
        return torch.Generator(self.device).manual_seed(self.seed(*names))

    def history(self, where: dict[str, Any], **row: float) -> None:
        """Keep one line of the training history."""
        append_line(self.part.folder / "history.jsonl", {**where, **row})

    def count_passes(self, images: int) -> None:
        """Count images that went through the network."""
        self.part.image_passes += images

    def report(self, **progress: Any) -> None:
        """Tell whoever watches how far the work has come."""
        began = Spent.now()
        self.scope.report(progress)
        self.part.away += Spent.now() - began

    def audit(self, where: dict[str, Any], val_outputs: Tensor, module: nn.Module) -> None:
        """Let the harness look at the model; its time is not the method's."""
        began = Spent.now()
        self.scope.audit.look(self.part.record, where, val_outputs, module)
        self.part.away += Spent.now() - began

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a checkpoint of the current part, atomically, with its accounts."""
        began = Spent.now()
        spent = self.part.elapsed()
        accounts = {
            "seconds": spent.wall,
            "cpu_seconds": spent.cpu,
            "image_passes": self.part.image_passes,
        }
        # Through memory: torch reports a full disk in a way that cannot be told from a defect.
        content = io.BytesIO()
        torch.save({"state": state, "accounts": accounts}, content)
        with atomic_file(self.part.folder / f"{name}.checkpoint") as draft:
            draft.write_bytes(content.getbuffer())
        self.part.away += Spent.now() - began

    def restore(self, name: str) -> dict[str, Any] | None:
        """Read back a checkpoint of the current part, and take up its accounts."""
        if name in self.part.names:
            raise RuntimeError(f"two trainings of one fit are called '{name}'; give each its own")
        self.part.names.add(name)
        path = self.part.folder / f"{name}.checkpoint"
        if not path.is_file():
            return None
        saved = torch.load(path, map_location=self.device, weights_only=True)
        accounts = saved["accounts"]
        if accounts["image_passes"] > self.part.image_passes:
            self.part.before = Spent(accounts["seconds"], accounts.get("cpu_seconds", math.nan))
            self.part.image_passes = accounts["image_passes"]
            self.part.began, self.part.away = Spent.now(), Spent()
        state: dict[str, Any] = saved["state"]
        return state

    def stage(
        self, name: str, config: Any, compute: Callable[[Context], StageResult], version: int
    ) -> StageResult:
        """Compute a piece of work once for every job that asks for the same one.

        Its address is what it means: data, configuration, seed. Its checkpoints belong to it
        rather than to the run, so that any job can take up what a killed one left.
        """
        began = Spent.now()
        stage = SharedStage(name, config, version)
        meaning = stage_meaning(self.scope.meaning, stage, self.scope.seed)
        key = digest(meaning)
        path = self.scope.stages / f"{name}-{key}"
        with storage_errors(path):
            self.scope.stages.mkdir(parents=True, exist_ok=True)
        if not self._usable(path):
            with Lease(path.with_name(f"{path.name}.lock")).hold(wait=True):
                if not self._usable(path):
                    self._compute_stage(path, meaning, compute)
        result, facts = _read_stage(path)
        # A run that was killed after it computed a stage did compute it.
        reused = facts["computed_by"] != self.scope.run_id
        self.part.away += Spent.now() - began
        self.part.rows.extend(facts["history"])
        self.stage_records += [_charged(inner, reused) for inner in facts["stages"]]
        record = {
            "name": name,
            "key": key,
            "seconds_standalone": facts["seconds"],
            "seconds_marginal": facts["seconds"],
            "cpu_seconds": facts.get("cpu_seconds"),
            "image_passes": facts["image_passes"],
            "reused": False,
            "git": facts["git"],
        }
        self.stage_records.append(_charged(record, reused))
        return result

    def _usable(self, path: Path) -> bool:
        """Tell whether the stage is there, and not older than a rerun of everything wants it."""
        try:
            return (path / "stage.json").stat().st_mtime >= self.scope.not_before
        except FileNotFoundError:
            return False

    def _compute_stage(
        self, path: Path, meaning: dict[str, Any], compute: Callable[[Context], StageResult]
    ) -> None:
        work = path.with_name(f"{path.name}.work")
        began = Spent.now()
        part = Part(path.name, work)
        inner = RunContext(self.scope, part, [])
        threads = torch.get_num_threads()
        try:
            result = compute(inner)
        except Exception as stopped:  # it did cost what it did
            self.stage_records += [*inner.stage_records, part_record("unfinished", part)]
            self.part.away += Spent.now() - began
            if isinstance(stopped, Pruned):  # nobody will ask for the rest of it
                shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            torch.set_num_threads(threads)  # libraries that limit them may give back too many
        spent = part.elapsed()
        facts = {
            "meaning": meaning,
            "computed_by": self.scope.run_id,
            "git": git_state(),
            "environment": environment(),
            "seconds": spent.wall,
            "cpu_seconds": spent.cpu,
            "image_passes": part.image_passes,
            "history": history_rows(part),
            "stages": inner.stage_records,
            "facts": result.facts,
        }
        with atomic_folder(path) as draft:
            tensors = {k: v.detach().cpu().contiguous() for k, v in result.tensors.items()}
            (draft / "tensors.safetensors").write_bytes(save(tensors))
            (draft / "stage.json").write_text(to_json(facts))
        shutil.rmtree(work, ignore_errors=True)


def part_record(name: str, part: Part) -> dict[str, Any]:
    """Say what a part cost the run that it belongs to."""
    own = part.elapsed()
    return {
        "name": name,
        "key": part.record,
        "seconds_standalone": own.wall,
        "seconds_marginal": own.wall,
        "cpu_seconds": own.cpu,
        "image_passes": part.image_passes,
        "reused": False,
        "git": git_state(),
    }


def stage_meaning(common: dict[str, Any], stage: SharedStage, seed: int) -> dict[str, Any]:
    """Say all that a stage's result depends on; the digest of it is the stage's address."""
    own = {"stage": stage.name, "version": stage.version, "config": as_plain(stage.config)}
    return {**common, **own, "seed": seed}


def _charged(record: dict[str, Any], reused: bool) -> dict[str, Any]:
    """Charge a stage to the run that computed it; others get it for nothing."""
    return {**record, "seconds_marginal": 0.0, "reused": True} if reused else record


def history_rows(part: Part) -> list[dict[str, Any]]:
    """Collect a part's history; a row written again after a resume replaces the first."""
    rows = {_row_key(row): row for row in read_lines(part.folder / "history.jsonl")}
    return [*part.rows, *({**row, "record": part.record} for row in rows.values())]


def with_audit(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Join to history rows what the audit saw; only after the fit has ended."""
    seen: dict[Any, dict[str, Any]] = {}
    for record in {row["record"] for row in rows}:
        for row in read_lines(folder / f"{record}.jsonl"):
            seen[record, _row_key(row)] = row
    return [{**seen.get((row["record"], _row_key(row)), {}), **row} for row in rows]


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("stage", "iteration", "phase", "epoch"))


def _read_stage(path: Path) -> tuple[StageResult, dict[str, Any]]:
    facts: dict[str, Any] = json.loads((path / "stage.json").read_text())
    return StageResult(load_file(path / "tensors.safetensors"), facts["facts"]), facts
