"""What several verbs share: their arguments, and how they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.files import to_json
from datasets.fetch import default_data_root

PLAIN_WIDTH = 160  # columns where nobody's terminal says otherwise


def add_places(parser: argparse.ArgumentParser, *, results: bool = True) -> None:
    """Add --data-root, and --results where the verb has results."""
    parser.add_argument(
        "--data-root",
        type=Path,
        default=default_data_root(),
        metavar="DIR",
        help="where the datasets are (default: $BENCH_DATA or the user's cache)",
    )
    if results:
        parser.add_argument(
            "--results",
            type=Path,
            default=Path("results"),
            metavar="DIR",
            help="where runs are kept (default: ./results)",
        )
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_selection(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the arguments that name a grid of runs."""
    default = None if not required else "all"
    parser.add_argument("--methods", default=default, metavar="A,B", help="methods, or all")
    parser.add_argument("--datasets", default=default, metavar="A,B", help="datasets, or all")
    parser.add_argument("--seeds", default="5", metavar="N|A,B", help="5 is 0..4; 3,7 is those two")
    parser.add_argument("--preset", default="paper", help="which hyperparameters (default: paper)")
    add_overrides(parser, "change a setting: METHOD.KNOB, DATASET.KNOB or backbone.KNOB")
    parser.add_argument(
        "--quick", action="store_true", help="smoke run: two epochs, a few hundred images"
    )


def add_overrides(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add --set; `meaning` says what a setting changes for this verb."""
    parser.add_argument(
        "--set",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help=meaning,
    )


def print_json(value: Any) -> None:
    """Print JSON to stdout."""
    sys.stdout.write(json.dumps(json.loads(to_json(value)), indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table to stdout, wide enough not to cut anything where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console.print(table)


def say(text: str) -> None:
    """Tell the user something on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
