"""`bench run`: run what is asked for and not yet done, and print the table."""

from __future__ import annotations

import shlex
from argparse import Namespace

from bench.api import Grid, run_jobs
from bench.cli.arguments import expand_jobs, launch_options
from bench.cli.output import log, print_failures, print_json, print_results
from bench.cli.parser import DEFAULT_RESULTS
from bench.store import Store


def run(arguments: Namespace) -> int:
    """Run the grid."""
    how = launch_options(arguments)
    jobs, skipped = expand_jobs(arguments)
    store = Store(arguments.results)
    grid = run_jobs(jobs, arguments.data_root, store, how, skipped=skipped)
    if arguments.json:
        print_json(grid.to_json())
    else:
        print_results(grid.jobs, grid.statuses)
        _print_pointers(grid)
    return print_failures(grid)


def _print_pointers(grid: Grid) -> None:
    """Print where the numbers can be looked into."""
    records = grid.records()
    if not records:
        return
    run_id, root = records[-1].run_id, grid.store.root
    where = "" if root == DEFAULT_RESULTS else f" --results {shlex.quote(str(root))}"
    log(f"python -m bench show {run_id}{where} opens a run")
    log(f"python -m bench report{where} draws every table and figure, the paper's beside them")
