"""`bench demo`: every method on small synthetic data, and the report of it; nothing is needed.

It shows what the suite does before any dataset was fetched: runs, the store, the page. Its numbers
are no results, and everything it makes says so.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from bench import api
from bench.cli.output import log, print_failures, print_results
from bench.paper.demo import demo_jobs, write_standins
from bench.process import available_cores
from bench.store import Store


def run(arguments: Namespace) -> int:
    """Write stand-ins, run what is missing, render the report."""
    out: Path = arguments.out
    data_root, results = out / "data", out / "results"
    log("Demo: synthetic stand-in data and quick settings; its numbers are not results.")
    write_standins(data_root, log)
    how = api.LaunchOptions(workers=available_cores(), keep_models=True)
    grid = api.run_jobs(demo_jobs(data_root), data_root, Store(results), how)
    print_results(grid.jobs, grid.statuses)
    log("Drawing the report ...")
    page = api.report(out / "report", results=results, data_root=data_root)
    code = print_failures(grid)
    print(f"Report (stand-in data, not results): {page.resolve().as_uri()}")
    return code
