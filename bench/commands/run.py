"""`bench run`: run what is asked for and not yet done, and print the table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.arguments import parse_names, parse_overrides, parse_seeds
from bench.commands.common import add_places, add_selection, print_json, say
from bench.commands.results import print_results
from bench.execute import Machine
from bench.grid import Seen, Skipped, overview, resolve_datasets, survey
from bench.launch.dispatch import launch
from bench.launch.profile import read_profile
from bench.plan import Job, Request, expand, missing_data, one_seed
from bench.stacked import USUAL_SEEDS, as_stacked, check_size, stacks_of
from bench.store import Store
from datasets.catalogue import DATASETS, get_dataset
from datasets.errors import UsageError
from datasets.fetch import get_command
from methods.base import get_method, load_methods

RERUN = ("missing", "failed", "always", "never")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_selection(parser, required=True)
    add_carrying_out(parser)
    parser.add_argument(
        "--stack-seeds",
        type=int,
        nargs="?",
        const=USUAL_SEEDS,
        metavar="N",
        help="train up to N seeds (default: %(const)s) of a LeNet method in one model and one "
        "process; such runs have ids of their own, never count as published, and go on from "
        "their last epoch when killed",
    )
    add_places(parser)


def add_carrying_out(parser: argparse.ArgumentParser) -> None:
    """Add what says how runs are carried out, whichever verb named them."""
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes on this machine")
    parser.add_argument(
        "--rerun",
        choices=RERUN,
        default="missing",
        help="which runs to carry out: those without a result (default), those that failed, "
        "all, or none",
    )
    parser.add_argument(
        "--retries", type=int, default=0, metavar="N", help="try a failed run up to N times more"
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="submit to SLURM as this profile says (slurm/*.toml), and return at once",
    )
    parser.add_argument(
        "--wait", action="store_true", help="with --cluster: follow the runs until they end"
    )
    parser.add_argument("--keep-models", action="store_true", help="keep each run's weights")


def run(arguments: argparse.Namespace) -> int:
    """Run the grid."""
    check_how(arguments)
    _check_stacking(arguments)
    request, skipped = request_from(arguments, fetch=True)
    jobs = expand(request)
    if arguments.stack_seeds is not None:
        jobs = as_stacked(jobs)
    content = carry_out(jobs, skipped, arguments)
    if not arguments.json:
        print_results(jobs, Store(arguments.results))
    return tell_outcome(content, skipped, arguments)


def check_workers(workers: int | None) -> None:
    """Refuse to work with nobody."""
    if workers is not None and workers < 1:
        raise UsageError(f"--workers must be at least 1 but got {workers}", "e.g. --workers 2")


def check_how(arguments: argparse.Namespace) -> None:
    """Refuse ways of carrying out runs that make no sense, before anything is fetched."""
    check_workers(arguments.workers)
    if arguments.retries < 0:
        raise UsageError(f"--retries cannot be negative but got {arguments.retries}")
    if arguments.cluster is None:
        return
    read_profile(arguments.cluster)
    if arguments.workers is not None:
        raise UsageError(
            "--workers is about processes on this machine, --cluster about other machines",
            "give one of them; `pack` and `parallel` in the profile say how many run at once",
        )


def _check_stacking(arguments: argparse.Namespace) -> None:
    check_size(arguments.stack_seeds)
    if arguments.stack_seeds is not None and arguments.cluster is not None:
        raise UsageError(
            "--stack-seeds is about processes on this machine, --cluster about other machines",
            "give one of them; `pack` in the profile puts several runs on one node",
        )


def carry_out(
    jobs: Sequence[Job], skipped: Sequence[Skipped], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run what of the jobs is wanted and not yet done; describe how all of them stand."""
    profile = read_profile(arguments.cluster) if arguments.cluster is not None else None
    store = Store(arguments.results)
    store.check_writable()
    _tell_skipped(skipped)
    seen = survey((job.run_id for job in jobs), store)
    todo = [job for job in jobs if wanted(seen[job.run_id], arguments.rerun)]
    machine = Machine(
        data_root=arguments.data_root.resolve(),
        results=arguments.results.resolve(),
        device="cuda" if torch.cuda.is_available() else "cpu",
        keep_models=arguments.keep_models,
        not_before=time.time() if arguments.rerun == "always" else 0.0,
    )
    say(f"{len(jobs)} runs: {len(jobs) - len(todo)} not to be run, {len(todo)} to run")
    records: list[dict[str, Any]] = []
    if todo:
        records = launch(
            *(_in_stacks(todo, arguments), machine),
            say=say,
            cluster=profile,
            wait=profile is None or arguments.wait,
            workers=arguments.workers,
            retries=arguments.retries,
        )
        seen = survey((job.run_id for job in jobs), store)
    content = overview(jobs, store, skipped, seen)
    _add_unwritten(content, records)
    return content


def _in_stacks(jobs: list[Job], arguments: argparse.Namespace) -> list[Job]:
    """Put seeds together where that was asked for, and say which."""
    most = getattr(arguments, "stack_seeds", None)  # campaigns do not have it
    if most is None:
        return jobs
    leads = stacks_of(jobs, most)
    for lead in leads:
        say(f"one model: {lead.method} on {lead.dataset}, seeds {', '.join(map(str, lead.stack))}")
    return leads


def tell_outcome(
    content: dict[str, Any], skipped: Sequence[Skipped], arguments: argparse.Namespace
) -> int:
    """Say what failed and what was left out; give the exit code."""
    if arguments.json:
        print_json(content)
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
        presets=arguments.results / "presets",
    )
    expand(one_seed(request))  # wrong values are errors before anything is fetched
    if not need_data:
        lacking = missing_data(datasets, request.data_root)
        return request, [Skipped(name, get_command(name, request.data_root)) for name in lacking]
    explicit = "all" not in arguments.datasets.split(",")
    return resolve_datasets(request, explicit=explicit, fetch=fetch, say=say)


def wanted(found: Seen, rerun: str) -> bool:
    """Decide whether a run that was found so is to be carried out, or followed where it is."""
    if found.claimed or rerun == "always":
        return rerun != "never"
    if rerun == "failed":
        return found.status == "failed"
    return rerun == "missing" and (found.interrupted or found.status not in ("done", "failed"))


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
