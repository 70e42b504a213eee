"""`bench plan`: what `run` would do, and what it would cost, without doing it."""

from __future__ import annotations

import math
from argparse import Namespace

from bench.api import Grid, log_unreadable, survey
from bench.cli.arguments import expand_jobs, published_store
from bench.cli.output import log, print_json, print_table
from bench.cli.parser import DEFAULT_RESULTS
from bench.cost import ExpectedCost
from bench.job import input_notes
from bench.store import Store
from datasets.errors import count_of


def run(arguments: Namespace) -> None:
    """Print the matrix; datasets need not be on disk."""
    jobs, skipped = expand_jobs(arguments, need_data=False)
    store = published_store() if arguments.published else Store(arguments.results)
    if arguments.results != DEFAULT_RESULTS and not store.root.is_dir():
        log(f"there is no results folder {store.root} yet: nothing is done in it")
    grid = survey(jobs, store, skipped, expected=True)
    print_plan(grid, as_json=arguments.json, published=arguments.published)


def print_plan(grid: Grid, *, as_json: bool, published: bool = False) -> None:
    """Print what is done of a grid and what the rest should cost; published runs are not run."""
    if as_json:
        print_json({**grid.to_json(), "published": published})
        return
    rows = [
        (
            *(job.run_id, grid.statuses[job.run_id].status),
            "about " * (job.run_id in grid.estimated) + _seconds(grid.seconds.get(job.run_id)),
            job.preset,
        )
        for job in grid.jobs
    ]
    done = f"{grid.counts()['done']} {'published' if published else 'done'}"
    print_table(
        f"{count_of(len(grid.jobs), 'run')}, {done}", ("run", "state", "expected", "preset"), rows
    )
    assert grid.expected is not None and grid.remaining is not None
    print(f"all of them: {_described(grid.expected)}")
    if (to_run := grid.to_run()) and not published:
        log(f"to run: {len(to_run)}, expected {_described(grid.remaining)}")
    log_unreadable(grid.unreadable())
    for note in input_notes(grid.jobs):
        log(note)
    for entry in grid.skipped:
        log(str(entry))


def _described(cost: ExpectedCost) -> str:
    """Return both totals: what a machine without any stage on disk does, and each run by itself."""
    if cost.unknown and not cost.standalone:
        return "unknown"
    shared = f"{_seconds(cost.shared)} of one worker with shared stages counted once"
    unknown = f", plus {count_of(cost.unknown, 'run')} of unknown cost" if cost.unknown else ""
    guessed = (
        f"; {cost.estimated} of them by an estimate: image passes times the network's speed, "
        "measured on this machine"
    )
    known = f"{shared}, {_seconds(cost.standalone)} with each run by itself{unknown}"
    return known + guessed * bool(cost.estimated)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{math.ceil(seconds)} s"
