"""`bench cancel`: take runs and workers of studies off the cluster; what they have is kept."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.cli.arguments import store_to_read
from bench.cli.output import log, print_json
from bench.launch.queue import SubmittedRun, submitted_runs
from bench.launch.scheduler import cancel_tasks
from bench.tuning.workers import StudyWorkers, study_workers
from datasets.errors import UsageError

PATIENCE_SECONDS = 60.0  # SLURM gives a task some time to end by itself
POLL_SECONDS = 1.0


def run(arguments: Namespace) -> int:
    """Cancel, and wait until SLURM has let go."""
    store = store_to_read(arguments)
    submitted, workers = submitted_runs(store), _active_workers(store.root)
    chosen = _chosen_runs(arguments.runs, submitted, workers)
    studies = [w for w in workers if not arguments.runs or any(map(w.matches, arguments.runs))]
    tasks = {submitted[run_id].job for run_id in chosen} | {job for w in studies for job in w.jobs}
    cancel_tasks(sorted(tasks - {""}))
    end = time.monotonic() + PATIENCE_SECONDS
    left, active = chosen, studies
    while (left or active) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        submitted = submitted_runs(store) if left else {}
        left = [run_id for run_id in left if run_id in submitted]
        launches = {w.launch.id for w in _active_workers(store.root)} if active else set()
        active = [w for w in active if w.launch.id in launches]
    cancelled = [run_id for run_id in chosen if run_id not in left]
    stopped = [w for w in studies if w not in active]
    if arguments.json:
        names = {"cancelled": [w.study.name for w in stopped]}
        names["still_there"] = [w.study.name for w in active]
        print_json({"cancelled": cancelled, "still_there": left, "studies": names})
    for run_id in cancelled:
        log(f"cancelled: {run_id}")
    for w in stopped:
        log(f"cancelled: study {w.study.name}, array {w.array}; the same tune command goes on")
    for name in [*left, *(f"study {w.study.name}, array {w.array}" for w in active)]:
        log(f"still there: {name}; SLURM was told, look again with python -m bench status")
    if not chosen and not studies:
        log("nothing is queued or running on a cluster")
    return 1 if left or active else 0


def _active_workers(results: Path) -> list[StudyWorkers]:
    return [w for w in study_workers(results) if w.active]


def _chosen_runs(
    parts: Sequence[str], submitted: Mapping[str, SubmittedRun], workers: Sequence[StudyWorkers]
) -> list[str]:
    """Return the runs that are meant; a name that matches nothing is an error.

    So is a part of a task's runs: a task can only be cancelled with all of them.
    """
    chosen = [] if parts else [*submitted]
    for part in parts:
        own = [run_id for run_id in submitted if run_id.startswith(part) or run_id.endswith(part)]
        if not own and not any(w.matches(part) for w in workers):
            raise UsageError(
                f"no run or study that is queued or running on a cluster matches '{part}'",
                "python -m bench status lists them",
            )
        chosen += [run_id for run_id in own if run_id not in chosen]
    for run_id in chosen:
        run = submitted[run_id]
        packed = [r for r in run.array.tasks[run.number] if r in submitted and r not in chosen]
        if packed:
            raise UsageError(
                f"{run_id} shares task {run.job} with {', '.join(packed)}",
                "name these as well: a task is cancelled as a whole",
            )
    return chosen
