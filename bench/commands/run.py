"""`bench run`: run what is asked for and not yet done, and print the table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.arguments import parse_names, parse_overrides, parse_seeds
from bench.commands.common import add_places, add_selection, print_json, say
from bench.commands.results import print_results
from bench.execute import Machine
from bench.grid import Skipped, overview, resolve_datasets
from bench.launch.local import WorkerDied, default_workers, run_local
from bench.plan import Job, Request, expand, missing_data
from bench.progress import Steps, watching
from bench.store import Store
from datasets.catalogue import DATASETS, get_dataset
from datasets.config import build_config
from datasets.errors import UsageError
from datasets.fetch import get_command
from methods.base import get_method, load_methods

RERUN = ("missing", "failed", "always", "never")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_selection(parser, required=True)
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes on this machine")
    parser.add_argument(
        "--rerun",
        choices=RERUN,
        default="missing",
        help="which runs to carry out: those without a result (default), those that failed, "
        "all, or none",
    )
    parser.add_argument("--keep-models", action="store_true", help="keep each run's weights")
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the grid."""
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(
            f"--workers must be at least 1 but got {arguments.workers}", "e.g. --workers 2"
        )
    request, skipped = request_from(arguments, fetch=True)
    jobs = expand(request)
    store = Store(arguments.results)
    store.check_writable()
    _tell_skipped(skipped)
    todo = [job for job in jobs if wanted(store.state(job.run_id), arguments.rerun)]
    machine = Machine(
        data_root=request.data_root.resolve(),
        results=arguments.results.resolve(),
        device="cuda" if torch.cuda.is_available() else "cpu",
        keep_models=arguments.keep_models,
        not_before=time.time() if arguments.rerun == "always" else 0.0,
    )
    say(f"{len(jobs)} runs: {len(jobs) - len(todo)} not to be run, {len(todo)} to run")
    records: list[dict[str, Any]] = []
    if todo:
        prepare(todo, machine)
        workers = min(len(todo), arguments.workers or default_workers(todo))
        with watching(len(todo)) as watcher:
            records = run_local(todo, machine, workers, watcher)
    content = overview(jobs, store, skipped)
    _add_unwritten(content, records)
    if arguments.json:
        print_json(content)
    else:
        print_results(jobs, store)
    _tell_failed(content)
    _tell_skipped(skipped)
    return 1 if content["failed"] else 0


def request_from(
    arguments: argparse.Namespace, *, fetch: bool, need_data: bool = True
) -> tuple[Request, list[Skipped]]:
    """Read a request from the command line, checking names and values before anything else."""
    methods = parse_names(arguments.methods, tuple(load_methods()))
    datasets = parse_names(arguments.datasets, tuple(DATASETS))
    for name in methods:
        get_method(name)
    for name in datasets:
        get_dataset(name)
    request = Request(
        methods=methods,
        datasets=datasets,
        seeds=parse_seeds(arguments.seeds),
        data_root=arguments.data_root,
        preset=arguments.preset,
        overrides=parse_overrides(arguments.overrides),
        quick=arguments.quick,
    )
    expand(request)  # wrong values are errors before anything is fetched
    if not need_data:
        lacking = missing_data(datasets, request.data_root)
        return request, [Skipped(name, get_command(name, request.data_root)) for name in lacking]
    explicit = "all" not in arguments.datasets.split(",")
    return resolve_datasets(request, explicit=explicit, fetch=fetch, say=say)


def wanted(state: tuple[str, str], rerun: str) -> bool:
    """Decide whether a run in this state is to be carried out.

    A run whose worker was killed counts as interrupted, not as failed: it can simply go on.
    """
    status, failure = state
    if rerun == "always":
        return True
    if rerun == "failed":
        return status == "failed"
    killed = failure == WorkerDied.kind
    return rerun == "missing" and (killed or status not in ("done", "failed"))


def prepare(jobs: Sequence[Job], machine: Machine) -> None:
    """Check the data and decode images once, here, before workers start to wait for each other."""
    steps = Steps()
    try:
        for job in {(job.dataset, str(job.config["dataset"])): job for job in jobs}.values():
            dataset = get_dataset(job.dataset)
            config = build_config(dataset.config_type, job.config["dataset"], job.dataset)
            dataset.load(machine.data_root, config, steps)
    finally:
        steps.close()


def _add_unwritten(content: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """Count failures that could not even be written down, say because the disk is full."""
    failures = {r["run_id"]: r for r in records if r["status"] == "failed"}
    for run in content["runs"]:
        failure = failures.get(run["run_id"])
        if failure is not None and run["status"] != "failed":
            content["missing"] -= run["status"] in ("missing", "preempted")
            content["done"] -= run["status"] == "done"
            content["failed"] += 1
            run |= {"status": "failed", "reason": failure["failure"]["message"]}


def _tell_failed(content: dict[str, Any]) -> None:
    failed = [run for run in content["runs"] if run["status"] == "failed"]
    for run in failed:
        say(f"failed: {run['run_id']}: {run['reason']}")
    if failed:
        say("  -> python -m bench show RUN tells more; --rerun failed runs them again")


def _tell_skipped(skipped: Sequence[Skipped]) -> None:
    for entry in skipped:
        say(f"{entry.what}: {entry.name}; to get it: {entry.command}")
