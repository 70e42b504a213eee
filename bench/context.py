"""What the harness lends to a fit: seeds, stages, checkpoints, clocks, progress, and the audit.

It lives in the process that fits, and holds nothing that a fit may not see: the audit and the
progress leave it through two callables.
"""

from __future__ import annotations

import hashlib
import io
import math
import shutil
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bench import numerics
from bench.job import Job
from bench.process import CpuClock
from bench.provenance import GitState, environment, git_state
from bench.record import StageCost, read_part, to_plain
from datasets.base import GroupLabelsHidden, Task
from datasets.catalogue import get_dataset
from datasets.config import Values, identity_values
from datasets.errors import BenchError
from datasets.files import (
    Damaged,
    FileFacts,
    append_line,
    atomic_file,
    atomic_folder,
    digest,
    read_checked,
    read_lines,
    set_aside,
    storage_errors,
    with_checksum,
)
from datasets.lock import Lock
from methods.base import Context, Stage, StageResult, Supervision

ProgressCallback = Callable[[Values], str | None]
"""Called with how far the work has come; a text asks the fit to stop, and says why."""
AuditCallback = Callable[[str, Values, Tensor, nn.Module], None]
"""Called with the key of the run or stage, the place in it, validation outputs and the model."""
HistoryRow = dict[str, object]
TENSORS = "tensors.safetensors"  # of a stage
ROW_KEY = ("stage", "iteration", "phase", "epoch")
AUDIT = "audit_"  # what the names of the columns begin with that the audit alone fills
AUDIT_CODE = f"{AUDIT}code"  # in the audit's rows: the code whose model it saw


class FitStopped(BenchError):
    """The launcher asked the fit to stop; nothing is wrong with it."""

    kind = "pruned"


def derive_seed(root: int, *names: str | int) -> int:
    """Derive a seed below 2^63 from a root seed and a path of names.

    Streams do not depend on the method or on the order in which they are asked for, so that a stage
    shared by two methods is the same in both, and resuming needs no saved random state.
    """
    path = "/".join(str(name) for name in (root, *names))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1


def stage_scope(job: Job) -> dict[str, object]:
    """Return what, besides its own configuration and seed, a stage of this job depends on.

    The labels are those that the protocol pins, so that an address follows from the job alone; a
    stage notes the digest of those it saw, and is not used with others.
    """
    config = job.identity["config"]
    assert isinstance(config, Mapping)
    pinned = get_dataset(job.dataset).facts(job.dataset_config()).label_digest
    whole = not job.quick and job.data_kind not in ("standin", "subset")
    known = pinned is not None and whole
    return {
        "fingerprint": job.fingerprint,
        "labels": pinned if known else "",
        "dataset": config["dataset"],
        "backbone": config["backbone"],
        "quick": job.quick,
    }


def stage_identity(scope: Values, stage: Stage, seed: int) -> dict[str, object]:
    """Return all that a stage's result depends on; the digest of it is the stage's address."""
    own = {"stage": stage.name, "version": stage.version, "config": identity_values(stage.config)}
    needs = {name: True for name, needed in vars(stage.needs).items() if needed}
    return {**scope, **own, **({"needs": needs} if needs else {}), "seed": seed}


def stage_address(job: Job, stage: Stage) -> str:
    """Return the name under which a stage that a job asks for is kept."""
    return f"{stage.name}-{digest(stage_identity(stage_scope(job), stage, job.seed))}"


@dataclass(frozen=True)
class RunSettings:
    """What every part of one run has in common; what is not explained here is in `RunOptions`.

    Attributes:
        scope: what, besides its own configuration, a stage's result depends on.
        supervision: what the run may see; a stage may not need more.
        pixel_digest: of a sample of the images of train and val.
        code: digest of the code at work; a checkpoint of other code is not taken up.
    """

    run_id: str
    seed: int
    device: torch.device
    scope: Values
    stages: Path
    supervision: Supervision = field(default_factory=Supervision)
    label_digest: str = ""
    pixel_digest: str = ""
    not_before: float = 0.0
    cores: int = 1
    code: str = ""
    resume_anyway: bool = False
    audit_every: float = 1.0


@dataclass
class StageAccount:
    """The account of a run or of one stage of it: what it took, and where its checkpoints are."""

    key: str
    folder: Path
    earlier_attempts: CpuClock = field(default_factory=CpuClock)
    began: CpuClock = field(default_factory=CpuClock.now)
    excluded: CpuClock = field(default_factory=CpuClock)  # audits, and stages with their own
    image_passes: int = 0
    resumed_from: tuple[str, ...] = ()  # digests of other code whose checkpoints were taken up
    rows: list[HistoryRow] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of checkpoints: two with one name would clash

    def elapsed(self) -> CpuClock:
        """Return the seconds of this account's own work, over all attempts."""
        return self.earlier_attempts + CpuClock.now() - self.began - self.excluded

    def cost(self, name: str, code: str) -> StageCost:
        """Return what the work took the run that it belongs to."""
        own = self.elapsed()
        return StageCost(
            name=name,
            key=self.key,
            seconds_standalone=own.wall,
            seconds_marginal=own.wall,
            cpu_seconds=None if math.isnan(own.cpu) else own.cpu,
            image_passes=self.image_passes,
            reused=False,
            git=git_state(),
            code=code or None,
            resumed_from=self.resumed_from or None,
        )

    def history(self) -> list[HistoryRow]:
        """Collect the history; a row written again after a resume replaces the first."""
        rows = {_row_key(row): row for row in read_lines(self.folder / "history.jsonl")}
        return [*self.rows, *({**row, "record": self.key} for row in rows.values())]

    def written_history(self) -> str:
        """Return the file of history rows, byte by byte; checkpoints have a copy."""
        file = self.folder / "history.jsonl"
        return file.read_text("latin-1") if file.is_file() else ""

    def mend_history(self, copy: str) -> None:
        """Put back the history of a checkpoint, unless it is there."""
        if not self.written_history().startswith(copy):
            file = self.folder / "history.jsonl"
            if file.is_file():
                set_aside(file, self.folder / "damaged", "it is not as the checkpoint has it")
            with atomic_file(file) as draft:
                draft.write_text(copy, "latin-1")

    def check_code(self, code: str, *, resume_anyway: bool) -> str:
        """Discard checkpoints that other code wrote; return a line that says so, or nothing.

        Half a training by one code and half by another would be a run of neither. Where it is to go
        on anyway, the cost names all codes.
        """
        mark = self.folder / "code"
        *earlier, written = (mark.read_text().split() if mark.is_file() else []) or [""]
        if written == code:
            self.resumed_from = tuple(earlier)
            return ""
        left = [*self.folder.glob("*.checkpoint"), *self.folder.glob("history.jsonl")]
        if left and resume_anyway:
            self.resumed_from = (*earlier, written or "unknown")
        else:
            for path in left:
                path.unlink(missing_ok=True)
        with atomic_file(mark) as draft:
            draft.write_text(" ".join((*self.resumed_from, code)))
        verb = "going on although" if self.resumed_from else "starting again:"
        changed = f"{verb} the code has changed ({written or 'unknown'} -> {code})"
        return changed if left else ""


class RunContext:
    """The context of one part of a run; stages get one of their own."""

    def __init__(
        self,
        settings: RunSettings,
        account: StageAccount,
        stage_costs: list[StageCost],
        progress: ProgressCallback | None = None,
        audit: AuditCallback | None = None,
    ) -> None:
        self.settings = settings
        self.account = account
        self.stage_costs = stage_costs
        self.device = settings.device
        self._progress = progress
        self._audit = audit
        anyway = settings.resume_anyway
        # Half a training in other arithmetic would be a run of neither, too.
        arithmetic = numerics.in_effect()["choice"]
        mark = settings.code if arithmetic == "pinned" else f"{settings.code}-{arithmetic}"
        note = account.check_code(mark, resume_anyway=anyway) if settings.code else ""
        if note:
            self.report(stage=note, note=note)

    def seed(self, *names: str | int) -> int:
        """Derive the seed that belongs to a name."""
        return derive_seed(self.settings.seed, *names)

    def generator(self, *names: str | int) -> torch.Generator:
        """Make a generator on the run's device, seeded by name."""
        return torch.Generator(self.device).manual_seed(self.seed(*names))

    def history(self, where: Values, **row: float) -> None:
        """Keep one line of the training history."""
        append_line(self.account.folder / "history.jsonl", {**where, **row})

    def count_passes(self, images: int) -> None:
        """Count images that went through the network."""
        self.account.image_passes += images

    def report(self, **progress: object) -> None:
        """Report how far the work has come; raise `FitStopped` if it is asked to stop."""
        if self._progress is None:
            return
        began = CpuClock.now()
        reason = self._progress(progress)
        self.account.excluded += CpuClock.now() - began
        if reason is not None:
            raise FitStopped(reason)

    def audit(
        self, where: Values, val_outputs: Tensor, module: nn.Module, *, last: bool = False
    ) -> None:
        """Show the harness the model where a look is due; its time is not the method's."""
        epoch = where.get("epoch")
        done = epoch + 1 if isinstance(epoch, int) else 0
        if self._audit is None or not (last or done % self.settings.audit_every == 0):
            return
        began = CpuClock.now()
        self._audit(self.account.key, where, val_outputs, module)
        self.account.excluded += CpuClock.now() - began

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Write a checkpoint of the current part, atomically, with its account."""
        began = CpuClock.now()
        spent, passes = self.account.elapsed(), self.account.image_passes
        accounts = {"seconds": spent.wall, "cpu_seconds": spent.cpu, "image_passes": passes}
        own = {"of": [self.account.key, name], "history": self.account.written_history()}
        # Through memory: torch reports a full disk in a way that cannot be told from a defect.
        content = io.BytesIO()
        torch.save({"state": state, "accounts": accounts, **own}, content)
        with atomic_file(self.account.folder / f"{name}.checkpoint") as draft:
            draft.write_bytes(content.getbuffer())
        self.account.excluded += CpuClock.now() - began

    def restore(self, name: str) -> dict[str, Any] | None:
        """Read back a checkpoint of the current part, and take up its account."""
        if name in self.account.names:
            raise RuntimeError(f"two trainings of one fit are called '{name}'; give each its own")
        self.account.names.add(name)
        saved = self._read_checkpoint(name)
        if saved is None:
            return None
        self.account.mend_history(saved.get("history", ""))
        accounts = saved["accounts"]
        if accounts["image_passes"] > self.account.image_passes:
            spent = CpuClock(accounts["seconds"], accounts.get("cpu_seconds", math.nan))
            self.account.earlier_attempts = spent
            self.account.image_passes = accounts["image_passes"]
            self.account.began, self.account.excluded = CpuClock.now(), CpuClock()
        state: dict[str, Any] = saved["state"]
        return state

    def _read_checkpoint(self, name: str) -> dict[str, Any] | None:
        """Read a checkpoint; one that is damaged is set aside, and its part starts again.

        torch writes the CRC-32 of each tensor and never looks at it. Checking them takes half as
        long as loading does, and nothing is added to the writing, which happens every epoch.
        """
        path, of = self.account.folder / f"{name}.checkpoint", [self.account.key, name]
        if not path.is_file():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                if (damaged := archive.testzip()) is not None:
                    raise Damaged(f"the checksum of {damaged} does not fit")
                if not any(member.endswith("/data.pkl") for member in archive.namelist()):
                    raise Damaged("it is no checkpoint")
            saved: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
            if saved.get("of", of) != of:
                raise Damaged(f"it is that of {saved['of']}")
        except (Damaged, zipfile.BadZipFile, zlib.error, UnpicklingError, OSError) as error:
            set_aside(path, self.account.folder / "damaged", str(error))
            note = f"{path.name} is damaged ({error}): this part starts again"
            self.report(stage=note, note=note)
            return None
        return saved

    def stage(
        self, stage: Stage, task: Task, compute: Callable[[Task, Context], StageResult]
    ) -> StageResult:
        """Compute a piece of work once for every job that asks for the same one.

        Its address is its identity: data, configuration, seed, and the supervision it needs. Its
        checkpoints belong to it rather than to the run, so that any job can take up what a killed
        one left. It is computed on a task that shows what it needs and no more.
        """
        began = CpuClock.now()
        if not self.settings.supervision.covers(stage.needs):
            raise GroupLabelsHidden(
                f"the stage '{stage.name}' needs group labels that this method's tier does not "
                "grant",
                "choose a selection rule for it that needs none, or declare the supervision",
            )
        identity = stage_identity(self.settings.scope, stage, self.settings.seed)
        path = self.settings.stages / f"{stage.name}-{digest(identity)}"
        with storage_errors(path):
            self.settings.stages.mkdir(parents=True, exist_ok=True)
        stored = self._stored_stage(path)
        if stored is None:
            with Lock(path.with_name(f"{path.name}.lock")).hold(wait=True):
                stored = self._stored_stage(path, set_damaged_aside=True)
                if stored is None:
                    narrowed = task.narrowed(
                        train_groups=stage.needs.train_groups, val_groups=stage.needs.val_groups
                    )
                    self._compute_stage(path, identity, narrowed, compute)
                    stored = StoredStage.read(path)
        self.account.excluded += CpuClock.now() - began
        self.account.rows.extend(stored.history)
        # A run that was killed after it computed a stage did compute it.
        costs = stored.costs
        if stored.computed_by != self.settings.run_id:
            costs = tuple(replace(cost, seconds_marginal=0.0, reused=True) for cost in costs)
        self.stage_costs += costs
        return stored.result

    def _stored_stage(self, path: Path, *, set_damaged_aside: bool = False) -> StoredStage | None:
        """Return the stage if it is there and whole, new enough, and made from the data at hand.

        Only who holds its lock may set a damaged one aside: else it may be just being replaced.
        """
        if not path.exists():
            return None
        try:
            stored = StoredStage.read(path)
            new_enough = (path / "stage.json").stat().st_mtime >= self.settings.not_before
        except (Damaged, OSError) as error:
            if set_damaged_aside:
                place = set_aside(path, path.parents[1] / "damaged", str(error))
                note = f"the stage {path.name} is damaged ({error}): computed again, see {place}"
                self.report(stage=note, note=note)
            return None
        arithmetic = numerics.in_effect()["choice"]
        at_hand = (self.settings.label_digest, self.settings.pixel_digest, arithmetic)
        fits = all(own in (None, now) for own, now in zip(stored.made_from, at_hand, strict=True))
        return stored if new_enough and fits else None

    def _compute_stage(
        self,
        path: Path,
        identity: Values,
        task: Task,
        compute: Callable[[Task, Context], StageResult],
    ) -> None:
        work = path.with_name(f"{path.name}.work")
        began = CpuClock.now()
        account = StageAccount(path.name, work)
        inner = RunContext(self.settings, account, [], self._progress, self._audit)
        threads = torch.get_num_threads()
        try:
            result = compute(task, inner)
        except Exception as stopped:  # it did cost what it did
            self.stage_costs += [
                *inner.stage_costs,
                account.cost("unfinished", self.settings.code),
            ]
            self.account.excluded += CpuClock.now() - began
            if isinstance(stopped, FitStopped):  # the rest of it will never be asked for
                shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            torch.set_num_threads(threads)  # libraries that limit them may give back too many
        spent = account.elapsed()
        facts = {
            "identity": identity,
            "label_digest": self.settings.label_digest,
            "pixel_digest": self.settings.pixel_digest,
            "computed_by": self.settings.run_id,
            "git": vars(git_state()),
            "code": self.settings.code or None,
            "resumed_from": account.resumed_from,
            "environment": to_plain(environment()),
            "seconds": spent.wall,
            "cpu_seconds": spent.cpu,
            "image_passes": account.image_passes,
            "history": account.history(),
            "stages": [to_plain(cost) for cost in inner.stage_costs],
            "facts": result.facts,
        }
        with atomic_folder(path) as draft:
            tensors = {k: v.detach().cpu().contiguous() for k, v in result.tensors.items()}
            (draft / TENSORS).write_bytes(save(tensors))
            files = {TENSORS: vars(FileFacts.of(draft / TENSORS))}
            (draft / "stage.json").write_text(with_checksum({**facts, "files": files}))
        shutil.rmtree(work, ignore_errors=True)


@dataclass(frozen=True)
class StoredStage:
    """A finished stage on disk; its costs are those to the run that computed it.

    `made_from` are the digests of the labels and pixels it saw, where it says so, and the choice of
    arithmetic, which before there was one was the processor's own.
    """

    result: StageResult
    computed_by: str
    history: tuple[HistoryRow, ...]
    costs: tuple[StageCost, ...]
    made_from: tuple[str | None, str | None, str | None]

    @staticmethod
    def read(path: Path) -> StoredStage:
        """Read it; raise `Damaged` if it is not as it was written."""
        try:
            raw = read_checked(path / "stage.json")
            for name, facts in raw.get("files", {}).items():
                read_part(FileFacts, facts).check(path / name)
            return StoredStage._from_json(raw, path)
        except (BenchError, SafetensorError, LookupError, TypeError, AttributeError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _from_json(raw: dict[str, Any], path: Path) -> StoredStage:
        name, _, key = path.name.rpartition("-")
        own = StageCost(
            name=name,
            key=key,
            seconds_standalone=raw["seconds"],
            seconds_marginal=raw["seconds"],
            cpu_seconds=raw.get("cpu_seconds"),
            image_passes=raw["image_passes"],
            reused=False,
            git=read_part(GitState, raw["git"]),
            code=raw.get("code"),
            resumed_from=tuple(raw.get("resumed_from", ())) or None,
        )
        inner = (read_part(StageCost, cost) for cost in raw["stages"])
        arithmetic = (raw["environment"].get("numerics") or {"choice": "native"})["choice"]
        return StoredStage(
            result=StageResult(load_file(path / TENSORS), raw["facts"]),
            computed_by=raw["computed_by"],
            history=tuple(raw["history"]),
            costs=(*inner, own),
            made_from=(raw.get("label_digest"), raw.get("pixel_digest"), arithmetic),
        )


def with_audit(
    rows: Sequence[HistoryRow], folder: Path, costs: Sequence[StageCost] = ()
) -> list[HistoryRow]:
    """Join to history rows what the audit saw; only after the fit has ended.

    What a method itself writes into the audit's columns is no finding of the audit, nor is what was
    seen of an attempt that other code made and that was started again: where the audit is thinned,
    nothing has taken its place. The costs say which code each part is by.
    """
    codes = {
        one.key if one.name == "fit" else f"{one.name}-{one.key}": _codes(one) for one in costs
    }
    seen: dict[tuple[object, ...], Values] = {}
    for key in {str(row["record"]) for row in rows}:
        for row in read_lines(folder / f"{key}.jsonl"):
            code = row.pop(AUDIT_CODE, None)
            if code is None or code in codes.get(key, {code}):
                seen[key, *_row_key(row)] = row
    own = ({n: v for n, v in row.items() if not n.startswith(AUDIT)} for row in rows)
    return [{**seen.get((row["record"], *_row_key(row)), {}), **row} for row in own]


def _codes(cost: StageCost) -> set[str]:
    """Return the digests of the code that computed something, without the arithmetic's name."""
    return {mark.partition("-")[0] for mark in (cost.code or "", *(cost.resumed_from or ()))}


def _row_key(row: Values) -> tuple[object, ...]:
    return tuple(row.get(name) for name in ROW_KEY)
