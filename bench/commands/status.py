"""`bench status`: what is done, running, interrupted or failed, and studies on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from bench.campaigns import campaign_progress
from bench.commands.common import add_places, add_selection, print_json, print_table, say
from bench.commands.run import request_from
from bench.grid import Seen, overview, stored_overview, survey, survey_stored
from bench.launch.study_queue import Workers, study_workers
from bench.plan import expand
from bench.progress import describe, outcome
from bench.store import Store
from datasets.catalogue import DATASETS


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; without a selection everything in the results folder is shown."""
    add_selection(parser, required=False)
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the state of a grid, or of everything."""
    store = Store(arguments.results)
    workers = study_workers(arguments.results)
    if arguments.methods or arguments.datasets:
        arguments.methods = arguments.methods or "all"
        arguments.datasets = arguments.datasets or "all"
        request, skipped = request_from(arguments, fetch=False, need_data=False)
        workers = [
            w
            for w in workers
            if w.tuning.method in request.methods and w.tuning.dataset in request.datasets
        ]
        jobs = expand(request)
        seen = survey((job.run_id for job in jobs), store)
        content = overview(jobs, store, skipped, seen)
    else:
        seen = survey_stored(store)
        content = stored_overview(store, seen)
        content["campaigns"] = _campaigns(seen)
    if arguments.json:
        print_json({**content, "studies": [w.facts() for w in workers if w.active]})
        return 0
    counted = ("done", "failed", "running", "queued", "missing")
    states = ", ".join(f"{content[state]} {state}" for state in counted)
    rows = [(run_id, found.status, _detail(run_id, found, store)) for run_id, found in seen.items()]
    print_table(f"{content['total']} runs: {states}", ("run", "state", ""), rows)
    if content.get("campaigns"):
        counts = [
            (c["name"], c["dataset"], f"{c['done']} of {c['total']}") for c in content["campaigns"]
        ]
        print_table("campaigns, on the paper's seeds", ("campaign", "dataset", "done"), counts)
    _tell_studies(workers)
    return 0


def _campaigns(seen: Mapping[str, Seen]) -> list[dict[str, Any]]:
    """Say how far each campaign is on the datasets that were run.

    That takes the methods' code and presets, which somebody may be in the middle of editing while
    runs go on; what is stored has to be told all the same.
    """
    done = {run_id for run_id, found in seen.items() if found.status == "done"}
    run_on = {str((seen[run_id].record or {}).get("dataset")) for run_id in done}
    names = ("name", "dataset", "done", "total")
    try:
        counted = campaign_progress(done, [name for name in DATASETS if name in run_on])
    except (Exception, SystemExit) as error:  # whatever a half-edited file may raise
        say(f"campaigns are not counted, for the methods cannot be loaded: {error}")
        return []
    return [dict(zip(names, row, strict=True)) for row in counted]


def _tell_studies(workers: Sequence[Workers]) -> None:
    """Show the studies that a cluster works at, and name those that nobody works at any more."""
    columns = ("study", "method", "dataset", "finished", "asked", "array", "queued", "running")
    facts = [w.facts() for w in workers if w.active]
    if facts:
        rows = [[row[column] for column in columns] for row in facts]
        print_table("studies with workers on a cluster", columns, rows)
    at_work = {w.study for w in workers if w.active}
    for w in workers:
        if w.study not in at_work:
            say(
                f"study {w.study.name} stopped after {w.finished} of {w.tuning.trials} trials: the "
                f"same tune command goes on with it; what its workers said is in {w.launch.folder}"
            )


def _detail(run_id: str, found: Seen, store: Store) -> str:
    if found.status in ("running", "preempted"):
        return describe(store.progress(run_id))
    return outcome(found.record) if found.record and found.status in ("done", "failed") else ""
