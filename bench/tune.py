"""Tuning: trials of one method on one dataset, by as many workers as there are.

Every trial is an ordinary job, the paper's preset with what the trial draws from the method's
search space as overrides, so `bench run` can repeat it. Trials train on a development seed: the
published seeds are for configurations that are settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.context import Report
from bench.development import FIRST_DEVELOPMENT_SEED
from bench.execute import Machine
from bench.lease import LeaseLost
from bench.objective import TrialView, target
from bench.plan import Job, Request, expand
from bench.pruning import Watch, watched_rules
from bench.study import Claim, Study
from bench.trial import TrialData, run_trial
from datasets.config import as_plain
from datasets.errors import BenchError, UsageError
from methods.base import Method, get_method
from methods.presets import preset_config, tuned_name
from methods.training import NonFiniteLoss

TRIALS = 50  # the budget of every method, unless somebody says otherwise
POLL_SECONDS = 0.5  # how often a worker without a trial looks whether others have died
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuning:
    """What is tuned, where, and with what budget; plain values, so that it can be sent anywhere.

    Attributes:
        seed: of the trials' training, and the root of the sampler's seeds.
        prune: whether trials that lag behind are stopped; the paper's protocol does not.
        overrides: settings that hold in every trial, whatever it draws.
    """

    method: str
    dataset: str
    data_root: Path
    results: Path
    trials: int = TRIALS
    seed: int = FIRST_DEVELOPMENT_SEED
    quick: bool = False
    prune: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"--trials must be at least 1 but got {self.trials}", "e.g. 50")
        if self.seed < FIRST_DEVELOPMENT_SEED:
            raise UsageError(
                f"--seed must be at least {FIRST_DEVELOPMENT_SEED} but got {self.seed}",
                "lower seeds are for published runs, which no choice may be made on",
            )

    def job(self, drawn: Mapping[str, str] | None = None, *, quick: bool | None = None) -> Job:
        """Make the job of a trial, or of none: the preset under this tuning's overrides."""
        request = Request(
            (self.method,),
            (self.dataset,),
            (self.seed,),
            self.data_root,
            overrides={**(drawn or {}), **self.overrides},
            quick=self.quick if quick is None else quick,
        )
        return expand(request)[0]

    @property
    def name(self) -> str:
        """Name the study; quick and stand-in studies are others, and say so."""
        return tuned_name(self.method, self.dataset, quick=self.quick, standin=self.job().standin)

    @property
    def folder(self) -> Path:
        """Where the study is kept."""
        return self.results / "studies" / self.name

    def machine(self) -> Machine:
        """Say where trials run."""
        return Machine(self.data_root, self.folder, self.device, self.threads)

    def open(self) -> Study:
        """Open the study, or start it."""
        job = self.job()
        meaning = {
            "method": f"{job.method} version {job.method_version}",
            "dataset": job.config["dataset"],
            "data": job.fingerprint,
            "backbone": {k: v for k, v in job.config["backbone"].items() if k != "weights"},
            "settings": dict(job.overrides),
            "supervision": job.supervision,
            "seed": self.seed,
            "pruning": self.prune,
        }
        return Study(self.folder, self.seed, meaning)

    def watch(self, study: Study, claim: Claim) -> Report:
        """Say who hears what a trial's fit reports: nobody, unless trials are pruned."""
        if not self.prune:
            return lambda progress: None
        own = get_method(self.method).training_name
        return Watch(study, claim, own, watched_rules(self.job()))


def drawn_overrides(method: Method, dataset: str, config: Any) -> dict[str, str]:
    """Write a configuration as what it changes of the paper's preset."""
    before = _flat(as_plain(preset_config(method, dataset)))
    after = _flat(as_plain(config))
    return {f"{method.name}.{k}": _text(v) for k, v in after.items() if v != before.get(k)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else None
        flat |= {f"{prefix}{name}": value} if inner is None else inner
    return flat


def _text(value: Any) -> str:
    """Write a value as `--set` reads it."""
    if isinstance(value, list):
        return ",".join(_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def work(tuning: Tuning, say: Say) -> None:
    """Live as a worker: make trials until as many as were asked for are finished."""
    study, data, machine = tuning.open(), None, tuning.machine()
    while len(study.finished()) < tuning.trials:
        claim = study.claim(tuning.trials)
        if claim is None:
            time.sleep(POLL_SECONDS)
            continue
        data = data or TrialData.of(tuning.job(), machine)
        _make_trial(claim, study, tuning, data, machine, say)


def _make_trial(
    claim: Claim, study: Study, tuning: Tuning, data: TrialData, machine: Machine, say: Say
) -> None:
    method, number = get_method(tuning.method), claim.trial.number
    spent: dict[str, Any] = {}
    try:
        config = method.search_space(claim.trial, data.task(tuning.job()))
        drawn = drawn_overrides(method, tuning.dataset, config)
        drawn = {knob: value for knob, value in drawn.items() if knob not in tuning.overrides}
        job = tuning.job(drawn)
        if job.supervision != tuning.job().supervision:
            raise BenchError(
                f"the search space of {method.name} leads to another supervision tier",
                "leave knobs that grant group labels out of search_space",
            )
        job = replace(job, variant=f"trial {number} of study {tuning.name}")
        record = run_trial(job, data, machine, tuning.watch(study, claim))
        spent = {"overrides": drawn, "run_id": job.run_id, **_cost(record["stages"])}
        if record["status"] == "pruned":
            study.pruned(claim, {**spent, "pruned": record["reason"]})
            counted = f"[{len(study.finished())}/{tuning.trials}]"
            say(f"{counted} trial {number} pruned: {record['reason']}")
            return
        if record["status"] != "done":
            failure = record["failure"]
            if failure["kind"] != NonFiniteLoss.kind:
                raise BenchError(failure["message"], failure["remedy"])
            study.diverged(claim, spent)
            say(f"trial {number} diverged and counts as the worst")
            return
        found = target(TrialView(record, data.data.facts.metric))
        study.complete(claim, found.value, {**spent, "objective": found.name})
    except LeaseLost as lost:
        say(lost.message)
        return
    except BenchError as error:
        say(f"trial {number} failed: {error.message}")
        study.failed(claim, error.message, spent)
        return
    done = study.finished()
    best = max(trial.value for trial in study.trials("COMPLETE"))
    say(
        f"[{len(done)}/{tuning.trials}] trial {number}: {found.name} {found.value:.4f}, "
        f"best {best:.4f}  [{spent['seconds']:.0f} s]"
    )


def _cost(stages: list[dict[str, Any]]) -> dict[str, float]:
    """Add up what a trial itself cost; stages it found already made cost nothing."""
    own = [stage for stage in stages if not stage["reused"]]
    return {
        "seconds": sum(stage["seconds_marginal"] for stage in own),
        "cpu_seconds": sum(stage["cpu_seconds"] for stage in own),
        "image_passes": sum(stage["image_passes"] for stage in own),
    }
