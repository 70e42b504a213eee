"""`bench status`: what is done, running, interrupted or failed, read from disk alone."""

from __future__ import annotations

import argparse
from typing import Any

from bench.commands.common import add_places, add_selection, print_json, print_table
from bench.commands.run import request_from
from bench.grid import overview, stored_overview
from bench.plan import expand
from bench.progress import describe, outcome
from bench.store import Store


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; without a selection everything in the results folder is shown."""
    add_selection(parser, required=False)
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the state of a grid, or of everything."""
    store = Store(arguments.results)
    if arguments.methods or arguments.datasets:
        arguments.methods = arguments.methods or "all"
        arguments.datasets = arguments.datasets or "all"
        request, skipped = request_from(arguments, fetch=False, need_data=False)
        content = overview(expand(request), store, skipped)
    else:
        content = stored_overview(store)
    if arguments.json:
        print_json(content)
        return 0
    states = ", ".join(f"{content[s]} {s}" for s in ("done", "failed", "running", "missing"))
    rows = [(run["run_id"], run["status"], _detail(run, store)) for run in content["runs"]]
    print_table(f"{content['total']} runs: {states}", ("run", "state", ""), rows)
    return 0


def _detail(run: dict[str, Any], store: Store) -> str:
    if run["status"] in ("running", "preempted"):
        return describe(store.progress(run["run_id"]))
    record = store.record(run["run_id"]) if run["path"] else None
    return outcome(record) if record else ""
