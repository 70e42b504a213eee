"""`bench status`: what is done, running, interrupted or failed, and studies on a cluster."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.api import count_statuses, log_unreadable, run_row, status_row, survey
from bench.cli.arguments import expand_jobs, store_to_read
from bench.cli.output import log, print_json, print_table
from bench.launch.progress import describe, result_line
from bench.launch.queue import submitted_runs
from bench.paper.campaigns import CampaignProgress, campaign_progress
from bench.record import Status
from bench.store import RunStatus, Store
from bench.tuning.workers import StudyWorkers, study_workers
from datasets.catalogue import load_datasets

STUDY_COLUMNS = ("study", "method", "dataset", "finished", "asked", "array", "queued", "running")


def run(arguments: Namespace) -> None:
    """Print the state of a grid, or of everything."""
    store = store_to_read(arguments)
    workers = study_workers(store.root)
    campaigns: list[CampaignProgress] = []
    if arguments.methods or arguments.datasets:
        arguments.methods = arguments.methods or "all"
        arguments.datasets = arguments.datasets or "all"
        jobs, skipped = expand_jobs(arguments, need_data=False)
        grid = survey(jobs, store, skipped)
        statuses, content = grid.statuses, grid.to_json()
        wanted = {(job.method, job.dataset) for job in grid.jobs}
        workers = [w for w in workers if (w.method, w.dataset) in wanted]
    else:
        statuses = store.all_statuses({i: run.status for i, run in submitted_runs(store).items()})
        campaigns = _campaign_progress(statuses)
        content = _overview(statuses, store)
        content["campaigns"] = [asdict(campaign) for campaign in campaigns]
    if arguments.json:
        studies = [w.to_json() for w in workers if w.active]
        print_json({**content, "studies": studies, "published": arguments.published})
        return
    _print_runs(statuses, store, "published runs" if arguments.published else "runs")
    if campaigns:
        rows = [(c.name, c.dataset, f"{c.done} of {c.total}") for c in campaigns]
        print_table("campaigns", ("campaign", "dataset", "done"), rows)
    _print_studies(workers)


def _overview(statuses: Mapping[str, RunStatus], store: Store) -> dict[str, object]:
    """Describe everything in a results folder as `Grid.to_json` describes a grid."""
    runs = [_named(i, found) | status_row(i, found, store) for i, found in statuses.items()]
    counts = count_statuses(statuses.values())
    return {"total": len(runs), **counts, "runs": runs, "skipped_datasets": []}


def _named(run_id: str, found: RunStatus) -> dict[str, object]:
    """Return what a run is, by its record or else by its id."""
    if found.record is not None:
        return run_row(found.record.job) | {"run_id": run_id}
    method, dataset, seed, _ = run_id.rsplit("-", 3) if run_id.count("-") > 2 else [""] * 4
    number = int(seed[1:]) if seed[1:].isdecimal() else None
    return {"run_id": run_id, "method": method, "dataset": dataset, "seed": number, "variant": ""}


def _campaign_progress(statuses: Mapping[str, RunStatus]) -> list[CampaignProgress]:
    """Return how far each campaign is on the datasets that were run.

    That takes the methods' code and presets, which may be in the middle of an edit while runs go
    on; what is stored has to be shown all the same.
    """
    records = (found.record for found in statuses.values())
    done = {r.run_id: r.job.dataset for r in records if r is not None and r.done}
    try:
        return campaign_progress(done.keys(), [d for d in load_datasets() if d in done.values()])
    except (Exception, SystemExit) as error:  # whatever a half-edited file may raise
        log(f"campaigns are not counted, for the methods cannot be loaded: {error}")
        return []


def _print_runs(statuses: Mapping[str, RunStatus], store: Store, what: str) -> None:
    counts = count_statuses(statuses.values())
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    rows = [(run_id, *_state(run_id, found, store)) for run_id, found in statuses.items()]
    print_table(f"{len(statuses)} {what}: {states}", ("run", "state", ""), rows)
    log_unreadable(found.unreadable for found in statuses.values() if found.unreadable)


def _state(run_id: str, found: RunStatus, store: Store) -> tuple[str, str]:
    """Return a run's state and what there is to say about it."""
    if found.unreadable is not None:
        return "unreadable", found.unreadable.reason
    if found.status in (Status.RUNNING, Status.PREEMPTED):
        return found.status, describe(store.progress(run_id))
    ended = found.status in (Status.DONE, Status.FAILED)
    return found.status, result_line(found.record) if found.record and ended else ""


def _print_studies(workers: Sequence[StudyWorkers]) -> None:
    """Print the studies that a cluster works at, and name those that have no workers any more."""
    active = [w.to_json() for w in workers if w.active]
    if active:
        rows = [[row[column] for column in STUDY_COLUMNS] for row in active]
        print_table("studies with workers on a cluster", STUDY_COLUMNS, rows)
    worked_at = {w.study for w in workers if w.active}
    for w in workers:
        if w.study not in worked_at:
            log(
                f"study {w.study.name} stopped after {w.finished} of {w.trials} trials: the same "
                f"tune command goes on with it; what its workers printed is in {w.launch.folder}"
            )
