"""What a study leaves: a summary with its budget, a plot of its history, and a preset to run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from bench.context import derive_seed
from bench.job import overrides_without
from bench.provenance import Environment, GitState, environment, git_state
from bench.record import to_plain
from bench.runner import RunOptions
from bench.tuning import WARM_UP
from bench.tuning.study import Study, draw_of
from datasets.config import Values, as_plain, build_config
from datasets.errors import UsageError
from datasets.files import atomic_file, to_json
from methods.base import get_method
from methods.presets import Sourced, read_presets, read_tuned

if TYPE_CHECKING:
    from bench.tuning.source import Tuning

KEPT = ("overrides", "run_id", "seconds", "pruned")  # of what the journal has of a trial
MIN_TRIALS_FOR_IMPORTANCE = 4  # finished trials below which importances say nothing


@dataclass(frozen=True)
class TrialCounts:
    """How many trials a study was to have, and what became of those it had."""

    asked: int
    finished: int
    pruned: int
    diverged: int
    failed: int
    interrupted: int


@dataclass(frozen=True)
class Budget:
    """What a study cost, the trials that failed included; `trials` are the finished ones."""

    trials: int
    warm_up: int
    pruning: bool
    pruned: int
    image_passes: float
    seconds: float
    cpu_seconds: float

    def describe(self) -> str:
        """Return in a few words how many trials there were, and what they took."""
        pruned = f"{self.pruned} pruned" if self.pruning else "no pruning"
        trials = f"{self.trials} trials of which {self.warm_up} random, {pruned}"
        return f"{trials}, {self.image_passes:.3g} image passes, {self.seconds / 60:.1f} minutes"


@dataclass(frozen=True)
class TrialSummary:
    """One finished trial."""

    number: int
    draw: int
    value: float | None  # of the objective; none for a trial that was pruned or diverged
    params: Values  # what was drawn and used; not what was drawn for a knob that was set by hand
    overrides: Mapping[str, str] | None  # that, as what it changes of the preset
    run_id: str | None
    seconds: float | None
    pruned: str | None  # why it was stopped, if it was


@dataclass(frozen=True)
class Summary:
    """A study: what was maximised, how far it came, what it cost, what was best."""

    study: str
    method: str
    dataset: str
    seed: int
    meaning: Values  # what all its trials have in common
    objective: str | None
    trials: TrialCounts
    budget: Budget
    best: TrialSummary | None
    importances: Mapping[str, float]  # each parameter's share of the variance of the values
    history: tuple[TrialSummary, ...]
    optuna: str
    environment: Environment
    git: GitState
    preset: Path | None = None  # the best configuration, once the study has all its trials

    def to_json(self) -> dict[str, object]:
        """Return the content of `summary.json`."""
        values = {name: value for name, value in asdict(self).items() if name != "preset"}
        return {**values, "environment": to_plain(self.environment), "git": to_plain(self.git)}


def finish_study(tuning: Tuning) -> Summary:
    """Write a study's summary, and its preset if it has all its trials."""
    summary = write_summary(tuning)
    complete = summary.trials.finished >= summary.trials.asked
    return replace(summary, preset=_write_preset(tuning, summary)) if complete else summary


def write_summary(tuning: Tuning) -> Summary:
    """Summarise a study as it stands, and write that and a plot beside its journal."""
    summary = _summarise(tuning, tuning.open())
    with atomic_file(tuning.folder / "summary.json") as draft:
        draft.write_text(to_json(summary.to_json()) + "\n")
    _plot(summary, tuning.folder / "history.svg")
    return summary


def _summarise(tuning: Tuning, study: Study) -> Summary:
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    fixed = {key.removeprefix(f"{tuning.method}.") for key in tuning.overrides}
    history = tuple(
        TrialSummary(
            number=trial.number,
            draw=draw_of(trial),
            # Optuna gives a pruned trial its last epoch's value, which is not that of a model.
            value=trial.value if trial.state.name == "COMPLETE" else None,
            params={name: value for name, value in trial.params.items() if name not in fixed},
            **{name: trial.user_attrs.get(name) for name in KEPT},
        )
        for trial in study.finished()
    )
    valued = [trial for trial in history if trial.value is not None]
    best = max(valued, key=lambda trial: trial.value or 0.0, default=None)
    importances: dict[str, float] = {}
    if len({trial.value for trial in valued}) >= MIN_TRIALS_FOR_IMPORTANCE:
        evaluator = FanovaImportanceEvaluator(seed=derive_seed(study.seed, "importances") % 2**32)
        importances = get_param_importances(study.study, evaluator=evaluator)
    spent = {
        name: float(sum(trial.user_attrs.get(name, 0) for trial in study.trials()))
        for name in ("image_passes", "seconds", "cpu_seconds")
    }
    pruned = sum(trial.pruned is not None for trial in history)
    failures = study.trials("FAIL")
    failed = sum("reason" in trial.user_attrs for trial in failures)
    return Summary(
        study=tuning.name,
        method=tuning.method,
        dataset=tuning.dataset,
        seed=tuning.seed,
        meaning=study.meaning,
        objective=study.trials()[best.number].user_attrs["objective"] if best else None,
        trials=TrialCounts(
            asked=tuning.trials,
            finished=len(history),
            pruned=pruned,
            diverged=len(study.trials("PRUNED")) - pruned,
            failed=failed,
            interrupted=len(failures) - failed,
        ),
        budget=Budget(
            trials=len(history),
            warm_up=sum(trial.draw < WARM_UP for trial in history),
            pruning=tuning.prune,
            pruned=pruned,
            **spent,
        ),
        best=best,
        importances={k: v for k, v in importances.items() if k not in fixed},
        history=history,
        optuna=optuna.__version__,
        environment=environment(),
        git=git_state(),
    )


def _plot(summary: Summary, path: Path) -> None:
    """Draw every trial's value and the best so far, over the order in which trials were drawn."""
    from matplotlib.figure import Figure

    shown = sorted((t.draw, t.value) for t in summary.history if t.value is not None)
    numbers, values = [draw for draw, _ in shown], [value for _, value in shown]
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.scatter(numbers, values, s=18, color="tab:blue", label="trial")
    best = list(accumulate(values, max))
    axes.step(numbers, best, where="post", color="tab:orange", label="best so far")
    axes.axvspan(-0.5, WARM_UP - 0.5, color="0.93", zorder=0, label="random warm-up")
    axes.set(title=summary.study, xlabel="trial", ylabel=summary.objective or "objective")
    axes.set_xlim(-0.5, max([*numbers, 1]) + 0.5)
    axes.legend(frameon=False)
    with atomic_file(path) as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})


def _write_preset(tuning: Tuning, summary: Summary) -> Path:
    """Write the best configuration as a preset, each value with where it comes from."""
    best, budget = summary.best, summary.budget
    if best is None or best.overrides is None:
        raise UsageError(f"no trial of {tuning.name} has a value", "see why they failed")
    config = replace(tuning, quick=False).job(best.overrides).config.method
    study = (
        f"study {tuning.name}, trial {best.number}: {summary.objective} {best.value:.4f}, "
        f"seed {summary.seed}, {budget.describe()}"
    )
    given = read_presets(tuning.base).get(tuning.method, {})
    own = {key.partition(".")[2]: study for key in best.overrides} | {
        key.partition(".")[2]: "set by hand in the study"
        for key in tuning.overrides
        if key.startswith(f"{tuning.method}.")
    }
    lines = [f"# Written by `python -m bench tune`; see studies/{tuning.name}/summary.json."]
    lines += ["", f"[{tuning.method}]"]
    tables: list[str] = []
    for knob, value in config.items():
        preset = given.get(knob, Sourced(None, "the method's default")).source
        if not isinstance(value, Mapping):
            lines.append(_line(knob, value, own.get(knob, preset)))
            continue
        tables += ["", f"[{tuning.method}.{knob}]", f"source = {json.dumps(preset)}"]
        tables += [_line(n, v, own.get(f"{knob}.{n}", preset)) for n, v in value.items()]
    path = tuning.results / "presets" / f"{tuning.name}.toml"
    with atomic_file(path) as draft:
        draft.write_text("\n".join([*lines, *tables]) + "\n")
    # Read it back: a preset that says something else would be worse than none.
    method, read = get_method(tuning.method), read_tuned(tuning.method, path.stem, path.parent)
    values = {knob: entry.value for knob, entry in (read or {}).items()}
    assert as_plain(build_config(method.config_type, values, method.name)) == config
    return path


def _line(knob: str, value: object, source: str) -> str:
    """Return the line of a knob; JSON's numbers, strings and lists are TOML's, without null."""
    written = json.dumps("none" if value is None else value)
    return f"{knob} = {{ value = {written}, source = {json.dumps(source)} }}"


def run_command(tuning: Tuning) -> str:
    """Return the command that runs the study's preset, on the data and settings it is for."""
    others = overrides_without(tuning.overrides, {tuning.method})  # its own are in the preset
    words = [
        f"python -m bench run --methods {tuning.method} --datasets {tuning.dataset} --preset tuned",
        *(["--set", *(shlex.quote(f"{k}={v}") for k, v in others.items())] if others else []),
        *(["--quick"] if tuning.quick else []),
        RunOptions(tuning.data_root, tuning.results).path_arguments(),
    ]
    return " ".join(words)
