"""What a study leaves: a summary with its budget, a plot of its history, and a preset to run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.files import atomic_file, to_json
from bench.provenance import environment, git_state
from bench.seeds import derive_seed
from bench.study import WARM_UP, Study, draw_of
from bench.tune import Tuning
from datasets.config import as_plain, build_config
from datasets.errors import UsageError
from methods.base import get_method
from methods.presets import Sourced, read_presets, read_tuned

COSTS = ("image_passes", "seconds", "cpu_seconds")
ENOUGH = 4  # finished trials below which importances say nothing


def look(tuning: Tuning) -> dict[str, Any]:
    """Write down how a study stands."""
    summary = summarise(tuning, tuning.open())
    write_summary(summary, tuning.folder)
    return summary


def finish(tuning: Tuning) -> tuple[dict[str, Any], Path | None]:
    """Write down how a study stands, and its preset if it has all its trials."""
    summary = look(tuning)
    complete = summary["trials"]["finished"] >= tuning.trials
    return summary, write_preset(tuning, summary) if complete else None


def best_trial(study: Study) -> Any | None:
    """Give the trial with the highest value; of equal ones the first."""
    return max(study.trials("COMPLETE"), key=lambda trial: trial.value, default=None)


def summarise(tuning: Tuning, study: Study) -> dict[str, Any]:
    """Describe a study: what was maximised, how far it came, what it cost, what was best."""
    import optuna

    finished, best = study.finished(), best_trial(study)
    failures = study.trials("FAIL")
    fixed = {key.removeprefix(f"{tuning.method}.") for key in tuning.overrides}
    pruned = [trial for trial in finished if "pruned" in trial.user_attrs]
    return {
        "study": tuning.name,
        "method": tuning.method,
        "dataset": tuning.dataset,
        "seed": tuning.seed,
        "meaning": study.study.user_attrs["meaning"],
        "objective": best.user_attrs["objective"] if best else None,
        "trials": {
            "asked": tuning.trials,
            "finished": len(finished),
            "pruned": len(pruned),
            "diverged": len(study.trials("PRUNED")) - len(pruned),
            "failed": sum("reason" in trial.user_attrs for trial in failures),
            "interrupted": sum("reason" not in trial.user_attrs for trial in failures),
        },
        "budget": {
            "trials": len(finished),
            "warm_up": sum(draw_of(trial) < WARM_UP for trial in finished),
            "pruning": tuning.prune,
            "pruned": len(pruned),
            **{name: _total(study.trials(), name) for name in COSTS},
        },
        "best": _described(best, fixed) if best else None,
        "importances": {k: v for k, v in importances(study).items() if k not in fixed},
        "history": [_described(trial, fixed) for trial in finished],
        "optuna": optuna.__version__,
        "environment": environment(),
        "git": git_state(),
    }


def _total(trials: list[Any], name: str) -> float:
    """Add up what was spent, on trials that failed as well."""
    return float(sum(trial.user_attrs.get(name, 0) for trial in trials))


def _described(trial: Any, fixed: set[str]) -> dict[str, Any]:
    """Describe a trial; what it drew for a knob that was set by hand was not used."""
    attributes = ("overrides", "run_id", "seconds", "pruned")
    return {
        "number": trial.number,
        "draw": draw_of(trial),
        # Optuna gives a pruned trial its last epoch's value, which is not that of a model.
        "value": trial.value if trial.state.name == "COMPLETE" else None,
        "params": {name: value for name, value in trial.params.items() if name not in fixed},
        **{name: trial.user_attrs.get(name) for name in attributes},
    }


def importances(study: Study) -> dict[str, float]:
    """Give each parameter's share of the variance of the values; none while that says nothing."""
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    values = {trial.value for trial in study.trials("COMPLETE")}
    if len(values) < ENOUGH:
        return {}
    evaluator = FanovaImportanceEvaluator(seed=derive_seed(study.seed, "importances") % 2**32)
    found: dict[str, float] = get_param_importances(study.study, evaluator=evaluator)
    return found


def write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """Write the summary and the plot beside the journal."""
    with atomic_file(folder / "summary.json") as draft:
        draft.write_text(to_json(dict(summary)) + "\n")
    _plot(summary, folder / "history.svg")


def _plot(summary: Mapping[str, Any], path: Path) -> None:
    """Draw every trial's value and the best so far, over the order in which trials were drawn."""
    from matplotlib.figure import Figure

    shown = [trial for trial in summary["history"] if trial["value"] is not None]
    shown.sort(key=lambda trial: trial["draw"])
    numbers = [trial["draw"] for trial in shown]
    values = [trial["value"] for trial in shown]
    best = [max(values[: i + 1]) for i in range(len(values))]
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.scatter(numbers, values, s=18, color="tab:blue", label="trial")
    axes.step(numbers, best, where="post", color="tab:orange", label="best so far")
    axes.axvspan(-0.5, WARM_UP - 0.5, color="0.93", zorder=0, label="random warm-up")
    axes.set_xlim(-0.5, max([*numbers, 1]) + 0.5)
    axes.set(title=summary["study"], xlabel="trial", ylabel=summary["objective"] or "objective")
    axes.legend(frameon=False)
    with atomic_file(path) as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})


def write_preset(tuning: Tuning, summary: Mapping[str, Any]) -> Path:
    """Write the best configuration as a preset, each value with where it comes from."""
    best = summary["best"]
    if best is None:
        raise UsageError(f"no trial of {tuning.name} has a value", "see why they failed")
    drawn: dict[str, str] = best["overrides"]
    config = tuning.job(drawn, quick=False).config["method"]
    study = f"study {tuning.name}, trial {best['number']}: {_budget(summary)}"
    given = read_presets(tuning.dataset).get(tuning.method, {})
    own = {key.partition(".")[2]: study for key in drawn} | {
        key.partition(".")[2]: "set by hand in the study"
        for key in tuning.overrides
        if key.startswith(f"{tuning.method}.")
    }
    lines = [f"# Written by `python -m bench tune`; see studies/{tuning.name}/summary.json."]
    lines += ["", f"[{tuning.method}]"]
    tables: list[str] = []
    for knob, value in config.items():
        usual = given.get(knob, Sourced(None, "the method's default")).source
        if not isinstance(value, dict):
            lines.append(_line(knob, value, own.get(knob, usual)))
            continue
        tables += ["", f"[{tuning.method}.{knob}]", f"source = {json.dumps(usual)}"]
        for name, inner in value.items():
            tables.append(_line(name, inner, own.get(f"{knob}.{name}", usual)))
    path = tuning.results / "presets" / f"{tuning.name}.toml"
    with atomic_file(path) as draft:
        draft.write_text("\n".join([*lines, *tables]) + "\n")
    _check(tuning, path, config)
    return path


def budget_trials(budget: Mapping[str, Any]) -> str:
    """Say how many trials there were, and how many of them pruning cut short."""
    pruned = f"{budget['pruned']} pruned" if budget["pruning"] else "no pruning"
    return f"{budget['trials']} trials of which {budget['warm_up']} random, {pruned}"


def _budget(summary: Mapping[str, Any]) -> str:
    budget = summary["budget"]
    return (
        f"{summary['objective']} {summary['best']['value']:.4f}, seed {summary['seed']}, "
        f"{budget_trials(budget)}, "
        f"{budget['image_passes']:.3g} image passes, {budget['seconds'] / 60:.1f} minutes"
    )


def _line(knob: str, value: Any, source: str) -> str:
    """Write a knob; JSON's numbers, strings and lists are TOML's, which has no null."""
    written = json.dumps("none" if value is None else value)
    return f"{knob} = {{ value = {written}, source = {json.dumps(source)} }}"


def _check(tuning: Tuning, path: Path, config: Mapping[str, Any]) -> None:
    """Read the preset back: a preset that says something else would be worse than none."""
    method = get_method(tuning.method)
    read = read_tuned(tuning.method, path.stem, path.parent) or {}
    values = {knob: entry.value for knob, entry in read.items()}
    assert as_plain(build_config(method.config_type, values, method.name)) == config
