"""A request as a grid: which runs it means, what state each is in, which datasets are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.plan import Job, Request, expand, missing_data, require_weights
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
            alone = replace(request, datasets=(name,), overrides=_own(request, name))
            require_weights(expand(alone), request.data_root)
            kept.append(name)
        except DataMissing:
            if explicit:
                raise
            command = get_command("weights", request.data_root)
            skipped.append(Skipped(name, command, "ImageNet weights not on disk for"))
    return tuple(kept), skipped


def _own(request: Request, dataset: str) -> dict[str, str]:
    """Keep the overrides that concern one dataset, for looking at it alone."""
    others = set(request.datasets) - {dataset}
    return {k: v for k, v in request.overrides.items() if k.split(".")[0] not in others}


def overview(jobs: Sequence[Job], store: Store, skipped: Sequence[Skipped] = ()) -> dict[str, Any]:
    """Describe a grid as `plan`, `status` and `run` print it."""
    return summarise([describe_job(job, store) for job in jobs], skipped)


def describe_job(job: Job, store: Store) -> dict[str, Any]:
    """Describe one run of a grid."""
    status = store.status(job.run_id)
    record = store.record(job.run_id) if status == "failed" else None
    return {
        "run_id": job.run_id,
        "method": job.method,
        "dataset": job.dataset,
        "seed": job.seed,
        "variant": job.variant,
        "status": status,
        "reason": record["failure"]["message"] if record else "",
        "path": str(store.runs / job.run_id) if status in ("done", "failed") else "",
    }


def stored_overview(store: Store) -> dict[str, Any]:
    """Describe everything in a results folder, finished or not."""
    runs = []
    for record in store.records():
        runs.append(
            {
                **{k: record[k] for k in ("run_id", "method", "dataset", "seed", "variant")},
                "status": store.status(record["run_id"]),
                "reason": record.get("failure", {}).get("message", ""),
                "path": str(store.runs / record["run_id"]),
            }
        )
    known = {run["run_id"] for run in runs}
    started = sorted(store.work.glob("*/progress.json")) if store.work.is_dir() else []
    for run_id in (path.parent.name for path in started):
        method, dataset, seed, _ = run_id.rsplit("-", 3) if run_id.count("-") > 2 else [""] * 4
        status = store.status(run_id)
        if run_id in known or status not in ("running", "preempted"):
            continue
        seed_number = int(seed[1:]) if seed[1:].isdigit() else None
        facts = {"run_id": run_id, "method": method, "dataset": dataset, "seed": seed_number}
        runs.append({**facts, "variant": "", "status": status, "reason": "", "path": ""})
    return summarise(runs, ())


def summarise(runs: list[dict[str, Any]], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Count states; an interrupted run counts as missing, for it has to be run."""
    counted = {state: sum(run["status"] == state for run in runs) for state in STATES}
    counted["missing"] += sum(run["status"] == "preempted" for run in runs)
    return {
        "total": len(runs),
        **counted,
        "runs": runs,
        "skipped_datasets": [{"name": s.name, "command": s.command} for s in skipped],
    }


def seconds_of(jobs: Sequence[Job], store: Store) -> dict[tuple[str, str, bool], float]:
    """Estimate what a run costs from finished runs of the same method and dataset."""
    spent: dict[tuple[str, str, bool], list[float]] = {}
    wanted = {(job.method, job.dataset, job.quick) for job in jobs}
    for record in store.records():
        key = (record["method"], record["dataset"], record["quick"])
        if key in wanted and record["status"] == "done":
            total = sum(stage["seconds_standalone"] for stage in record["stages"])
            spent.setdefault(key, []).append(total)
    return {key: sum(values) / len(values) for key, values in spent.items()}
