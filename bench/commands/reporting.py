"""`bench report`: every table of the paper from stored runs, the paper's numbers beside ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.report.collection import collect
from bench.report.pdf import build_pdf
from bench.report.render import write_report
from bench.store import Store
from datasets.fetch import default_data_root


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument(
        "--data-root",
        type=Path,
        default=default_data_root(),
        metavar="DIR",
        help="datasets found there are counted again (default: $BENCH_DATA or the user's cache)",
    )
    parser.add_argument("--pdf", action="store_true", help="build main.pdf; needs pdflatex")


def run(arguments: argparse.Namespace) -> int:
    """Render from the store alone; a partial store renders, empty cells say why."""
    runs = collect(Store(arguments.results))
    for path in write_report(runs, arguments.out, arguments.data_root):
        print(path)
    if arguments.pdf:
        print(build_pdf(arguments.out))
    return 0
