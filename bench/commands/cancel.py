"""`bench cancel`: take runs off the cluster; what they have so far is kept."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.commands.common import add_json, print_json, say
from bench.launch.queue import Claim, claims
from bench.launch.scheduler import cancel_tasks
from bench.store import Store
from datasets.errors import UsageError

PATIENCE_SECONDS = 60.0  # SLURM gives a task some time to end by itself
POLL_SECONDS = 1.0


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run ids, or beginnings or ends of them (default: everything queued or running)",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cancel, and wait until SLURM has let go."""
    store = Store(arguments.results)
    claimed = claims(store)
    chosen = _chosen(arguments.runs, claimed)
    cancel_tasks(sorted({claimed[run_id].job for run_id in chosen} - {""}))
    end = time.monotonic() + PATIENCE_SECONDS
    left = chosen
    while left and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        claimed = claims(store)
        left = [run_id for run_id in chosen if run_id in claimed]
    cancelled = [run_id for run_id in chosen if run_id not in left]
    if arguments.json:
        print_json({"cancelled": cancelled, "still_there": left})
    for run_id in cancelled:
        say(f"cancelled: {run_id}")
    for run_id in left:
        say(f"still there: {run_id}; SLURM was told, look again with python -m bench status")
    if not chosen:
        say("nothing is queued or running on a cluster")
    return 1 if left else 0


def _chosen(wanted: Sequence[str], claimed: Mapping[str, Claim]) -> list[str]:
    """Find the runs that are meant; a task can only be cancelled with all its runs."""
    if not wanted:
        return list(claimed)
    chosen: list[str] = []
    for part in wanted:
        found = [r for r in claimed if r.startswith(part) or r.endswith(part)]
        if not found:
            raise UsageError(
                f"no run that is queued or running on a cluster matches '{part}'",
                "python -m bench status lists them",
            )
        chosen += [run_id for run_id in found if run_id not in chosen]
    for run_id in chosen:
        claim = claimed[run_id]
        packed = [r for r in claim.array.tasks[claim.number] if r in claimed and r not in chosen]
        if packed:
            raise UsageError(
                f"{run_id} shares task {claim.job} with {', '.join(packed)}",
                "name these as well: a task is cancelled as a whole",
            )
    return chosen
