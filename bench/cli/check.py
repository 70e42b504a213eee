"""`bench check PATH`: whether stored runs are what their records say."""

from __future__ import annotations

from argparse import Namespace

from bench.checking import check
from bench.cli.output import log, print_json
from datasets.errors import count_of


def run(arguments: Namespace) -> int:
    """Print a line for each thing that does not hold, then how much was checked."""
    result = check(
        arguments.path,
        arguments.recompute,
        pick_seed=arguments.pick_seed,
        data_root=arguments.data_root,
        log=log,
    )
    for note in result.notes:
        log(f"note: {note}")
    for one in result.recomputed:
        outcome = "differs" if one.differences else "equal"
        log(f"made again: {one.run_id}: {outcome}, compared {one.comparison}")
    if arguments.json:
        print_json(result.to_json())
    else:
        for found in result.problems:
            print(f"{found.run_id}: {found.problem}")
        wrong = len({found.run_id for found in result.problems})
        again = f", {len(result.recomputed)} made again" if result.recomputed else ""
        counts = f"{len(result.problems)} problems in {wrong} of them, {len(result.notes)} notes"
        print(f"{count_of(result.runs, 'run')} checked{again}: {counts}")
    return 0 if result.ok else 1
