"""`bench predict RUN PATH`: label images by a model that was kept."""

from __future__ import annotations

import sys
from argparse import Namespace

from bench.cli.arguments import require_results
from bench.cli.output import log, print_json
from bench.models import label_files, load_model
from datasets.errors import UsageError
from datasets.files import CHOSEN, storage_errors


def run(arguments: Namespace) -> int:
    """Write a line for each image; 1 if some could not be read."""
    if arguments.json and arguments.out is not None:
        raise UsageError("--json and --out are two ways to write", "give one of them")
    unreadable: list[str] = []
    table = label_files(
        load_model(arguments.run, require_results(arguments.results)),
        arguments.path,
        unreadable.append,
    )
    for problem in unreadable:
        log(problem)
    if arguments.json:
        print_json({"predictions": table.to_dict("records"), "unreadable": unreadable})
    elif arguments.out is None:
        table.to_csv(sys.stdout, index=False)
    else:
        with storage_errors(arguments.out, CHOSEN):
            table.to_csv(arguments.out, index=False)
        log(f"{len(table):,} predictions written to {arguments.out}")
    return 1 if unreadable else 0
