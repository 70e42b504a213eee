"""`bench plan`: what `run` would do, and what it would cost, without doing it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.commands.common import add_places, add_selection, print_json, print_table, say
from bench.commands.run import request_from
from bench.grid import Skipped, overview, seconds_of
from bench.plan import Job, expand
from bench.store import Store


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_selection(parser, required=True)
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the matrix; datasets need not be on disk."""
    request, skipped = request_from(arguments, fetch=False, need_data=False)
    return print_plan(expand(request), skipped, arguments)


def print_plan(
    jobs: Sequence[Job], skipped: Sequence[Skipped], arguments: argparse.Namespace
) -> int:
    """Print what is done of the jobs and what the rest is expected to cost."""
    store = Store(arguments.results)
    content = overview(jobs, store, skipped)
    cost = seconds_of(jobs, store)
    for job, run in zip(jobs, content["runs"], strict=True):
        run["expected_seconds"] = cost.get((job.method, job.dataset, job.quick, bool(job.stack)))
    if arguments.json:
        print_json(content)
        return 0
    rows = [
        (run["run_id"], run["status"], _seconds(run["expected_seconds"])) for run in content["runs"]
    ]
    print_table(
        f"{content['total']} runs, {content['done']} done", ("run", "state", "expected"), rows
    )
    open_runs = [run for run in content["runs"] if run["status"] not in ("done", "failed")]
    known = [run["expected_seconds"] for run in open_runs if run["expected_seconds"] is not None]
    if open_runs:
        unknown = len(open_runs) - len(known)
        say(
            f"to run: {len(open_runs)}, expected {_seconds(sum(known))} of one worker"
            + (f", plus {unknown} runs of unknown cost" if unknown else "")
        )
    for entry in skipped:
        say(f"{entry.what}: {entry.name}; to get it: {entry.command}")
    return 0


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
