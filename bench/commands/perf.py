"""`bench perf`: how close the loop comes to the network alone, and how far the usual one stays."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from bench.arguments import parse_names
from bench.commands.common import add_json, print_json, print_table, say
from bench.perf import stored, table
from bench.perf.cases import cases_of
from bench.perf.measure import Row, summarise, take_turns
from bench.store import Store
from datasets.catalogue import DATASETS, get_dataset
from datasets.errors import UsageError

MEASURED = "umnist,cmnist,waterbirds"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; none is needed."""
    parser.add_argument(
        "--datasets",
        default=MEASURED,
        metavar="A,B",
        help=f"stand-in images of these (default: {MEASURED}; photos take a ResNet-50)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="measured turns of every arm (default: 5; photos take fewer)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/perf"),
        metavar="DIR",
        help="where this machine's CSV goes (default: ./results/perf)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="whose stored runs are added up (default: ./results)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and keep the numbers."""
    if arguments.repeats < 1:
        raise UsageError(
            f"--repeats must be at least 1 but got {arguments.repeats}", "e.g. --repeats 5"
        )
    names = parse_names(arguments.datasets, tuple(DATASETS))
    for name in names:
        get_dataset(name)
    cases = [case for name in names for case in cases_of(name)]
    path = table.write_csv(arguments.out, [])  # fails before the work, if at all
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        say(f"[{number}/{len(cases)}] {case.name} ...")
        rows += summarise(case, take_turns(case, arguments.repeats))
        table.write_csv(arguments.out, rows)  # now, for the rest may be interrupted
    totals = stored.totals(Store(arguments.results))
    if arguments.json:
        print_json(
            {
                "rows": [asdict(row) for row in rows],
                "machine": table.machine(),
                "stored": [asdict(total) for total in totals],
            }
        )
    else:
        _print(rows, totals)
    say(f"written to {path}")
    return 0


def _print(rows: list[Row], totals: list[stored.Total]) -> None:
    known = table.machine()
    title = (
        f"Stand-in images on {known['processor']}, {known['cores']} cores, "
        f"{known['threads']} torch thread, torch {known['torch']}, commit {known['commit']}"
    )
    print_table(title, table.HEADINGS, table.cells(rows))
    for line in table.step_costs(rows):
        print(line)
    if totals:
        print_table(
            "Stored runs under the paper's settings, stand-alone",
            stored.HEADINGS,
            stored.cells(totals),
        )
