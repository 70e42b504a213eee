"""`bench plan`: what `run` would do, and what it would cost, without doing it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.commands.common import add_places, add_selection, print_json, print_table, say
from bench.commands.run import request_from
from bench.grid import Skipped, overview
from bench.plan import Job, expand
from bench.sharing import Totals, expected_totals, kind_of, stage_seconds
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
    known = stage_seconds(jobs, store)
    for job, run in zip(jobs, content["runs"], strict=True):
        stages = known.get(kind_of(job))
        run["expected_seconds"] = None if stages is None else sum(stages.values())
    totals = expected_totals(jobs, known)
    content["expected_seconds"] = {"shared": totals.shared, "standalone": totals.standalone}
    if arguments.json:
        print_json(content)
        return 0
    rows = [
        (run["run_id"], run["status"], _seconds(run["expected_seconds"])) for run in content["runs"]
    ]
    print_table(
        f"{content['total']} runs, {content['done']} done", ("run", "state", "expected"), rows
    )
    print(f"all of them: {_described(totals)}")
    ended = [run["status"] in ("done", "failed") for run in content["runs"]]
    to_run = [job for job, over in zip(jobs, ended, strict=True) if not over]
    if to_run:
        say(f"to run: {len(to_run)}, expected {_described(expected_totals(to_run, known))}")
    for entry in skipped:
        say(f"{entry.what}: {entry.name}; to get it: {entry.command}")
    return 0


def _described(totals: Totals) -> str:
    """Give both totals: what a machine without any stage on disk does, and each run by itself."""
    return (
        f"{_seconds(totals.shared)} of one worker with shared stages counted once, "
        f"{_seconds(totals.standalone)} with each run by itself"
        + (f", plus {totals.unknown} runs of unknown cost" if totals.unknown else "")
    )


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
