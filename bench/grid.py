"""A request as a grid: which runs it means, what state each is in, which datasets are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.arguments import overrides_without
from bench.launch.queue import claims
from bench.plan import Job, Request, expand, missing_data, one_seed, require_weights
from bench.records import INTERRUPTED
from bench.store import Store
from datasets.errors import BenchError, DataMissing
from datasets.fetch import get_command
from datasets.mnist_source import ensure_mnist

MNIST_SETS = ("umnist", "cmnist")
STATES = ("done", "failed", "running", "queued", "missing")


@dataclass(frozen=True)
class Skipped:
    """A dataset that `all` included but that cannot be run, and the command that would help."""

    name: str
    command: str
    what: str = "not on disk"


def resolve_datasets(
    request: Request, *, explicit: bool, fetch: bool, say: Any
) -> tuple[Request, list[Skipped]]:
    """Leave out what is not on disk if the user said `all`; fetch MNIST where that is allowed.

    A dataset named explicitly and missing is an error, and so is having nothing to run at all.
    """
    if fetch and any(
        name in MNIST_SETS for name in missing_data(request.datasets, request.data_root)
    ):
        try:
            ensure_mnist(request.data_root, say)
        except BenchError as error:  # no network, or a data root that only others may write
            if explicit:
                raise
            say(error.message)
    lacking = missing_data(request.datasets, request.data_root)
    skipped = [Skipped(name, get_command(name, request.data_root)) for name in lacking]
    if skipped and explicit:
        raise DataMissing(
            f"not on disk: {', '.join(lacking)} (looked in {request.data_root})",
            "; ".join(dict.fromkeys(entry.command for entry in skipped)),
        )
    present = tuple(name for name in request.datasets if name not in lacking)
    present, without_weights = _with_weights(replace(request, datasets=present), explicit)
    skipped += without_weights
    if not present:
        raise DataMissing(
            "there is nothing to run: no dataset is on disk",
            "; ".join(dict.fromkeys(entry.command for entry in skipped)),
        )
    return replace(request, datasets=present), skipped


def _with_weights(request: Request, explicit: bool) -> tuple[tuple[str, ...], list[Skipped]]:
    """Leave out datasets whose network starts from weights that are not on disk."""
    kept, skipped = [], []
    for name in request.datasets:
        try:
            own = overrides_without(request.overrides, {*request.datasets} - {name})
            alone = replace(one_seed(request), datasets=(name,), overrides=own)
            require_weights(expand(alone), request.data_root)
            kept.append(name)
        except DataMissing:
            if explicit:
                raise
            command = get_command("weights", request.data_root)
            skipped.append(Skipped(name, command, "ImageNet weights not on disk for"))
    return tuple(kept), skipped


@dataclass(frozen=True)
class Seen:
    """How a run was found.

    Attributes:
        status: done, failed, running, queued, preempted (will resume) or missing.
        claimed: whether a cluster has it, so that nobody need start it.
    """

    status: str
    record: dict[str, Any] | None
    claimed: bool = False

    @property
    def interrupted(self) -> bool:
        """Tell whether it failed only because it was stopped, so that it can simply go on."""
        failed = self.status == "failed" and self.record is not None
        return failed and self.record is not None and self.record["failure"]["kind"] in INTERRUPTED


def survey(run_ids: Iterable[str], store: Store) -> dict[str, Seen]:
    """Look at runs, each once, and at what a cluster has of them."""
    claimed = claims(store)
    seen = {}
    for run_id in run_ids:
        if run_id in claimed:
            seen[run_id] = Seen(claimed[run_id].state, None, claimed=True)
        else:
            seen[run_id] = Seen(*store.look(run_id))
    return seen


def survey_stored(store: Store) -> dict[str, Seen]:
    """Look at everything in a results folder, finished or not."""
    claimed = claims(store)
    runs = [p.name for p in store.runs.iterdir()] if store.runs.is_dir() else []
    started = [p.parent.name for p in store.work.glob("*/progress.json")]
    known = {name for name in runs if not name.startswith(".")} | set(claimed)
    seen = {run_id: Seen(*store.look(run_id)) for run_id in sorted(known - set(claimed))}
    seen = {run_id: found for run_id, found in seen.items() if found.record is not None}
    seen |= {run_id: Seen(claim.state, None, claimed=True) for run_id, claim in claimed.items()}
    for run_id in sorted(set(started) - set(seen)):
        found = Seen(*store.look(run_id))
        if found.status in ("running", "preempted"):
            seen[run_id] = found
    return seen


def overview(
    jobs: Sequence[Job],
    store: Store,
    skipped: Sequence[Skipped] = (),
    seen: Mapping[str, Seen] | None = None,
) -> dict[str, Any]:
    """Describe a grid as `plan`, `status` and `run` print it."""
    seen = survey((job.run_id for job in jobs), store) if seen is None else seen
    rows = []
    for job in jobs:
        named = {"run_id": job.run_id, "method": job.method, "dataset": job.dataset}
        which = {"seed": job.seed, "variant": job.variant}
        rows.append({**named, **which, **_state(job.run_id, seen[job.run_id], store)})
    return summarise(rows, skipped, seen)


def stored_overview(store: Store, seen: Mapping[str, Seen] | None = None) -> dict[str, Any]:
    """Describe everything in a results folder, finished or not."""
    seen = survey_stored(store) if seen is None else seen
    rows = []
    for run_id, found in seen.items():
        facts = _facts(run_id, found.record)
        rows.append({"run_id": run_id, **facts, **_state(run_id, found, store)})
    return summarise(rows, (), seen)


def _facts(run_id: str, record: dict[str, Any] | None) -> dict[str, Any]:
    """Say what a run is, by its record or else by its name."""
    if record is not None:
        return {key: record[key] for key in ("method", "dataset", "seed", "variant")}
    method, dataset, seed, _ = run_id.rsplit("-", 3) if run_id.count("-") > 2 else [""] * 4
    number = int(seed[1:]) if seed[1:].isdigit() else None
    return {"method": method, "dataset": dataset, "seed": number, "variant": ""}


def _state(run_id: str, found: Seen, store: Store) -> dict[str, Any]:
    ended = found.status in ("done", "failed")
    failed = found.record if found.status == "failed" else None
    return {
        "status": found.status,
        "reason": failed["failure"]["message"] if failed else "",
        "path": str(store.runs / run_id) if ended else "",
    }


def summarise(
    runs: list[dict[str, Any]], skipped: Sequence[Skipped], seen: Mapping[str, Seen]
) -> dict[str, Any]:
    """Count states; what was interrupted is queued if a cluster has it, else it has to be run."""
    counted = {state: sum(run["status"] == state for run in runs) for state in STATES}
    for run in runs:
        if run["status"] == "preempted":
            counted["queued" if seen[run["run_id"]].claimed else "missing"] += 1
    return {
        "total": len(runs),
        **counted,
        "runs": runs,
        "skipped_datasets": [{"name": s.name, "command": s.command} for s in skipped],
    }
