"""`bench run`: run what is asked for and not yet done, and print the table."""

from __future__ import annotations

from argparse import Namespace

from bench.api import run_jobs
from bench.cli.arguments import expand_jobs, launch_options
from bench.cli.output import print_failures, print_json, print_results
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
    return print_failures(grid)
