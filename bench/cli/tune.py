"""`bench tune`: search a method's hyperparameters on a dataset, under the method's own tier."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from bench.cli.arguments import frozen_setting, require_results
from bench.cli.output import log, print_json, print_table
from bench.job import parse_overrides
from bench.launch.profile import read_profile
from bench.tuning import TRIALS
from bench.tuning.source import Tuning, tune
from bench.tuning.summary import Summary, finish_study, run_command, write_summary
from bench.tuning.workers import submit
from datasets.errors import UsageError


def run(arguments: Namespace) -> int:
    """Tune until the study has the trials that were asked for, then write the best as a preset."""
    tuning = Tuning(
        method=arguments.method,
        dataset=arguments.dataset,
        data_root=arguments.data_root.resolve(),
        results=arguments.results.resolve(),
        trials=TRIALS if arguments.trials is None else arguments.trials,
        seed=arguments.seed,
        quick=arguments.quick,
        prune=arguments.prune,
        preset=arguments.preset,
        overrides={**frozen_setting(arguments), **parse_overrides(arguments.set)},
    )
    if arguments.show:
        require_results(arguments.results)
        _show(tuning, arguments)
        return 0
    if arguments.cluster is None:
        summary = tune(tuning, workers=arguments.workers, log=log)
    else:
        profile = read_profile(arguments.cluster)
        if submit(tuning, workers=arguments.workers, profile=profile, log=log):
            log(
                "  -> python -m bench status and --show tell how far they are, python -m bench "
                "cancel stops them; the preset is written when the last trial ends"
            )
            return 0
        summary = finish_study(tuning)
    _print(summary, tuning, as_json=arguments.json)
    if summary.preset is None:
        log("the study is not finished; the same command goes on with it")
        return 1
    log(f"wrote {summary.preset}; to run it: {run_command(tuning)}")
    return 0


def _show(tuning: Tuning, arguments: Namespace) -> None:
    """Print a study as it stands."""
    if not (tuning.folder / "journal.log").is_file():
        raise UsageError(
            f"there is no study {tuning.name} in {tuning.folder.parent}",
            f"python -m bench tune --method {tuning.method} --dataset {tuning.dataset}",
        )
    asked = arguments.trials or tuning.open().asked or TRIALS
    _print(write_summary(replace(tuning, trials=asked)), tuning, as_json=arguments.json)


def _print(summary: Summary, tuning: Tuning, *, as_json: bool) -> None:
    log(f"wrote {tuning.folder / 'summary.json'} and history.svg")
    if as_json:
        print_json(summary.to_json())
        return
    trials, best = summary.trials, summary.best
    shares = {name: f"{share:.2f}" for name, share in summary.importances.items()}
    title = (
        f"{summary.study}: {trials.finished} of {trials.asked} trials finished"
        f" ({trials.pruned} pruned, {trials.diverged} diverged, {trials.failed} failed, "
        f"{trials.interrupted} interrupted)"
    )
    rows = [
        (name, f"{value:.6g}" if isinstance(value, float) else value, shares.get(name, "-"))
        for name, value in (best.params if best else {}).items()
    ]
    print_table(title, ("parameter", "best so far", "importance"), rows)
    if best:
        found = f"{summary.objective} {best.value:.4f} in trial {best.number}"
        log(f"best: {found}; budget: {summary.budget.describe()}")
