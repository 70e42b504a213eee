"""`bench tune`: search a method's hyperparameters on a dataset, under the method's own tier."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.arguments import parse_overrides
from bench.commands.common import add_overrides, add_places, print_json, print_table, say
from bench.commands.run import check_workers
from bench.development import FIRST_DEVELOPMENT_SEED
from bench.grid import resolve_datasets
from bench.launch.crew import run_workers
from bench.launch.dispatch import prepare
from bench.launch.local import cores
from bench.launch.profile import Profile, read_profile
from bench.plan import Request
from bench.pruning import watched_rules
from bench.study import WARM_UP
from bench.tune import TRIALS, Tuning
from bench.tuned import budget_trials, finish, look
from datasets.catalogue import get_dataset
from datasets.errors import UsageError
from methods.base import get_method


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--method", required=True, metavar="M")
    parser.add_argument("--dataset", required=True, metavar="D")
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help=f"finished trials to reach (default: {TRIALS}, the first {WARM_UP} random); the same "
        "for every method unless you say otherwise",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="worker processes, here or on the cluster; one makes the same trials every time "
        "(default)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="submit the workers to SLURM as this profile says (slurm/*.toml), and return at once",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=FIRST_DEVELOPMENT_SEED,
        metavar="S",
        help=f"a development seed (default: {FIRST_DEVELOPMENT_SEED})",
    )
    add_overrides(parser, "a setting that holds in every trial, searched or not")
    parser.add_argument(
        "--prune",
        action="store_true",
        help=f"once {WARM_UP} trials are complete, stop those below the median of earlier ones in "
        "the same epoch (default: off, as in the paper's protocol)",
    )
    parser.add_argument("--quick", action="store_true", help="smoke trials, a study of their own")
    parser.add_argument("--show", action="store_true", help="show the study as it is, run nothing")
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Tune until the study has the trials that were asked for, then write the best as a preset."""
    check_workers(arguments.workers)
    get_method(arguments.method)
    get_dataset(arguments.dataset)
    tuning = Tuning(
        method=arguments.method,
        dataset=arguments.dataset,
        data_root=arguments.data_root.resolve(),
        results=arguments.results.resolve(),
        trials=TRIALS if arguments.trials is None else arguments.trials,
        seed=arguments.seed,
        quick=arguments.quick,
        prune=arguments.prune,
        overrides=parse_overrides(arguments.overrides),
        device="cuda" if torch.cuda.is_available() else "cpu",
        threads=max(1, cores() // arguments.workers),
    )
    job = tuning.job()  # wrong names and values are errors before anything is fetched
    if tuning.prune:
        watched_rules(job)
    if arguments.show and not (tuning.folder / "journal.log").is_file():
        raise UsageError(
            f"there is no study {tuning.name} in {tuning.folder.parent}",
            f"python -m bench tune --method {job.method} --dataset {job.dataset}",
        )
    if arguments.show:
        asked = arguments.trials or tuning.open().asked or TRIALS
        _show(look(replace(tuning, trials=asked)), tuning, as_json=arguments.json)
        return 0
    profile = read_profile(arguments.cluster) if arguments.cluster is not None else None
    if _make_trials(tuning, arguments.workers, profile):
        return 0
    summary, preset = finish(tuning)
    _show(summary, tuning, as_json=arguments.json)
    if preset is None:
        say("the study is not finished; the same command goes on with it")
        return 1
    say(f"wrote {preset}; run it with --preset tuned")
    return 0


def _make_trials(tuning: Tuning, workers: int, profile: Profile | None) -> bool:
    """Have the missing trials made; true if that was left to a cluster."""
    request = Request(
        (tuning.method,),
        (tuning.dataset,),
        (tuning.seed,),
        tuning.data_root,
        overrides=tuning.overrides,
        quick=tuning.quick,
    )
    resolve_datasets(request, explicit=True, fetch=True, say=say)
    study = tuning.open()
    missing = tuning.trials - len(study.finished())
    say(f"study {tuning.name}: {len(study.finished())} of {tuning.trials} trials finished")
    if missing <= 0:
        return False
    study.ask_for(tuning.trials)
    prepare([tuning.job()], tuning.machine())
    if profile is None:
        run_workers(tuning, min(workers, missing), say)
        return False
    from bench.launch.studies import submit_workers

    submit_workers(tuning, min(workers, missing), profile, say)
    say(
        "  -> python -m bench status and --show tell how far they are, python -m bench cancel "
        "stops them; the preset is written when the last trial ends"
    )
    return True


def _show(summary: Mapping[str, Any], tuning: Tuning, *, as_json: bool) -> None:
    say(f"wrote {tuning.folder / 'summary.json'} and history.svg")
    if as_json:
        print_json(summary)
        return
    trials, best = summary["trials"], summary["best"]
    print_table(
        f"{summary['study']}: {trials['finished']} of {trials['asked']} trials finished"
        f" ({trials['pruned']} pruned, {trials['diverged']} diverged, {trials['failed']} failed, "
        f"{trials['interrupted']} interrupted)",
        ("parameter", "best so far", "importance"),
        [
            (name, f"{value:.6g}" if isinstance(value, float) else value, _share(summary, name))
            for name, value in (best["params"] if best else {}).items()
        ],
    )
    if best:
        budget = summary["budget"]
        say(
            f"best: {summary['objective']} {best['value']:.4f} in trial {best['number']}; budget: "
            f"{budget_trials(budget)}, "
            f"{budget['image_passes']:.3g} image passes, {budget['seconds'] / 60:.1f} minutes"
        )


def _share(summary: Mapping[str, Any], name: str) -> str:
    share = summary["importances"].get(name)
    return "-" if share is None else f"{share:.2f}"
