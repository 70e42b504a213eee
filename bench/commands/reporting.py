"""`bench report`: the main table from stored runs, the paper's numbers beside ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.report.render import write_report
from bench.store import Store


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Render from the store alone; a partial store renders, empty cells say why."""
    for path in write_report(Store(arguments.results).records(), arguments.out):
        print(path)
    return 0
