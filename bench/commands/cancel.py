"""`bench cancel`: take runs and workers of studies off the cluster; what they have is kept."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.commands.common import add_json, print_json, say
from bench.launch.queue import Claim, claims
from bench.launch.scheduler import cancel_tasks
from bench.launch.study_queue import Workers, study_workers
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
        help="runs or studies, by a beginning or end of their name, or the number of a study's "
        "array (default: everything queued or running)",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Cancel, and wait until SLURM has let go."""
    store = Store(arguments.results)
    claimed, working = claims(store), _working(arguments.results)
    chosen = _chosen_runs(arguments.runs, claimed)
    studies = [w for w in working if not arguments.runs or any(map(w.matches, arguments.runs))]
    _check_all_matched(arguments.runs, claimed, working)
    tasks = {claimed[run_id].job for run_id in chosen} | {job for w in studies for job in w.jobs}
    cancel_tasks(sorted(tasks - {""}))
    end = time.monotonic() + PATIENCE_SECONDS
    left, busy = chosen, studies
    while (left or busy) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        claimed = claims(store) if left else {}
        left = [run_id for run_id in left if run_id in claimed]
        launches = {w.launch.id for w in _working(arguments.results)} if busy else set()
        busy = [w for w in busy if w.launch.id in launches]
    _tell(arguments, chosen, left, studies, busy)
    return 1 if left or busy else 0


def _working(results: Path) -> list[Workers]:
    return [workers for workers in study_workers(results) if workers.active]


def _tell(
    arguments: argparse.Namespace,
    chosen: Sequence[str],
    left: Sequence[str],
    studies: Sequence[Workers],
    busy: Sequence[Workers],
) -> None:
    """Say what was cancelled, and what SLURM still has."""
    cancelled = [run_id for run_id in chosen if run_id not in left]
    stopped = [workers for workers in studies if workers not in busy]
    if arguments.json:
        names = {"cancelled": [w.study.name for w in stopped]}
        names["still_there"] = [w.study.name for w in busy]
        print_json({"cancelled": cancelled, "still_there": left, "studies": names})
    for run_id in cancelled:
        say(f"cancelled: {run_id}")
    for w in stopped:
        say(f"cancelled: study {w.study.name}, array {w.array}; the same tune command goes on")
    for name in [*left, *(f"study {w.study.name}, array {w.array}" for w in busy)]:
        say(f"still there: {name}; SLURM was told, look again with python -m bench status")
    if not chosen and not studies:
        say("nothing is queued or running on a cluster")


def _meant(part: str, claimed: Mapping[str, Claim]) -> list[str]:
    return [run_id for run_id in claimed if run_id.startswith(part) or run_id.endswith(part)]


def _check_all_matched(
    wanted: Sequence[str], claimed: Mapping[str, Claim], working: Sequence[Workers]
) -> None:
    """Refuse a name that means nothing, before anything is cancelled."""
    for part in wanted:
        if not _meant(part, claimed) and not any(workers.matches(part) for workers in working):
            raise UsageError(
                f"no run or study that is queued or running on a cluster matches '{part}'",
                "python -m bench status lists them",
            )


def _chosen_runs(wanted: Sequence[str], claimed: Mapping[str, Claim]) -> list[str]:
    """Find the runs that are meant; a task can only be cancelled with all its runs."""
    if not wanted:
        return list(claimed)
    chosen = list(dict.fromkeys(run_id for part in wanted for run_id in _meant(part, claimed)))
    for run_id in chosen:
        claim = claimed[run_id]
        packed = [r for r in claim.array.tasks[claim.number] if r in claimed and r not in chosen]
        if packed:
            raise UsageError(
                f"{run_id} shares task {claim.job} with {', '.join(packed)}",
                "name these as well: a task is cancelled as a whole",
            )
    return chosen
