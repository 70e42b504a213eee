"""`bench demo`: a shortcut learnt and undone, on synthetic digits, and the report of it.

It shows what the suite does before any data were fetched: runs, the table, the page. Its numbers
are no results, and everything it makes says so.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from bench import api
from bench.cli.output import log, print_failures, print_results
from bench.paper.demo import demo_jobs, what_happened, write_standins
from bench.process import available_cores
from bench.store import Store

NEXT = "python -m bench run --methods erm,nct_plus,dfr --datasets cmnist --seeds 1"
BEFORE = (
    "Five classes of digits. In training nearly every digit has the colour of its class, on test "
    "images any: who reads the colour is right in training and wrong where it counts.",
    "The digits are synthetic and the runs short: these numbers are not results.",
)


def run(arguments: Namespace) -> int:
    """Write stand-ins, run what is missing, render the report."""
    out: Path = arguments.out
    data_root, results = out / "data", out / "results"
    for line in BEFORE:
        log(line)
    write_standins(data_root, log)
    how = api.LaunchOptions(workers=available_cores(), keep_models=True, command=arguments.command)
    grid = api.run_jobs(demo_jobs(data_root), data_root, Store(results), how)
    print_results(grid.jobs, grid.statuses)
    for line in what_happened(grid.records()):
        print(line)
    log("Drawing the report ...")
    page = api.report(out / "report", results=results, data_root=data_root)
    code = print_failures(grid)
    print(f"Report (stand-in data, not results): {page.resolve().as_uri()}")
    log(f"next, on real digits: {NEXT}")
    return code
