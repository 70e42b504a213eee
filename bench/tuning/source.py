"""Trials as jobs: what is tuned and by which figure, and where a pool takes them from.

Every trial is an ordinary job without a test split: the paper's preset with what the trial draws
from the method's search space as overrides, so `bench run` can repeat it. Trials train on a
development seed: the published seeds are for configurations that are settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.api import expand_on_disk, setting_text
from bench.devices import choose_device
from bench.evaluation import granted_metrics
from bench.job import (
    FIRST_DEVELOPMENT_SEED,
    KIND_PREFIX,
    Job,
    Request,
    expand,
    identity_changes,
)
from bench.launch import prepare
from bench.launch.pool import run_pool
from bench.launch.progress import progress_display
from bench.record import Metrics, Record, Selection, Status
from bench.runner import RunOptions
from bench.tuning import TRIALS
from bench.tuning.study import Study
from bench.tuning.summary import Summary, finish_study
from datasets.base import Facts, outline_task
from datasets.catalogue import get_dataset
from datasets.config import LIMIT, Values, as_plain
from datasets.errors import BenchError, UsageError
from datasets.fetch import Log
from datasets.lock import LockLost
from methods.base import Method, Supervision, get_method
from methods.presets import KINDS, preset_config, preset_file, tuned_name
from methods.selection import RULES, WORST_GROUP_RULES
from methods.training import NonFiniteLoss

if TYPE_CHECKING:
    from optuna.trial import Trial

SPLITS = ("train", "val")  # a trial's: the test split is never loaded
MAX_WORKER_DEATHS = 3  # of one launcher, after which something other than luck is at fault
RULES_WITHOUT_GROUPS = ("val_avg", "val_auroc", "val_worst_class", "last")
MIN_EPOCHS = 1  # epochs of a phase in which no trial is pruned
LONGEST_PHASE = 100_000  # more epochs than a phase can have: keeps the steps of phases apart
MOST_PHASES = 10  # more than an iteration can have


@dataclass(frozen=True)
class Tuning:
    """What is tuned, where, and with what budget; plain values, so that it can be sent anywhere."""

    method: str
    dataset: str
    data_root: Path
    results: Path
    trials: int = TRIALS
    seed: int = FIRST_DEVELOPMENT_SEED  # of the trials' training, and root of the sampler's seeds
    quick: bool = False
    prune: bool = False  # stop trials that fall behind; the paper's protocol does not
    preset: str = "paper"  # of what is not searched; or a kind of data
    overrides: Mapping[str, str] = field(default_factory=dict)  # these hold in every trial

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise UsageError(f"--trials must be at least 1 but got {self.trials}", "e.g. 50")
        if self.seed >= LIMIT:
            raise UsageError(f"--seed must be below 10^18 but got {self.seed}", "e.g. 100")
        if self.seed < FIRST_DEVELOPMENT_SEED:
            raise UsageError(
                f"--seed must be at least {FIRST_DEVELOPMENT_SEED} but got {self.seed}",
                "lower seeds are for published runs, which no choice may be made on",
            )
        if self.preset not in (known := ("paper", *KINDS)):
            problem = f"a search cannot start from the preset '{self.preset}'"
            raise UsageError(problem, f"choose from {', '.join(known)}")

    @cached_property
    def base_job(self) -> Job:
        """The job of a trial that draws nothing: the preset under this tuning's overrides."""
        return self.job({})

    def request(self, drawn: Mapping[str, str]) -> Request:
        """Return the request for a run with these overrides, and this tuning's own."""
        method, dataset, seed = (self.method,), (self.dataset,), (self.seed,)
        overrides = {**drawn, **self.overrides}
        named = self.data_root, self.preset
        return Request(method, dataset, seed, *named, overrides=overrides, quick=self.quick)

    def job(self, drawn: Mapping[str, str]) -> Job:
        """Return the job of a trial that has drawn these overrides."""
        return replace(expand(self.request(drawn))[0], splits=SPLITS)

    @property
    def base(self) -> str:
        """The file of presets from which a trial takes what it does not draw.

        That of the dataset or, where it has none of its own, of its kind.
        """
        return preset_file(self.dataset, self.base_job.preset.removeprefix(KIND_PREFIX))

    @property
    def name(self) -> str:
        """The study's name; studies of quick runs, or not on the release, are called so."""
        kind, frozen = self.base_job.data_kind, self.base_job.network().frozen
        return tuned_name(
            self.method, self.dataset, quick=self.quick, data_kind=kind, frozen=frozen
        )

    @property
    def folder(self) -> Path:
        """Where the study is kept."""
        return self.results / "studies" / self.name

    def options(self, *, isolate: bool = True) -> RunOptions:
        """Return where and how trials run."""
        return RunOptions(
            data_root=self.data_root.resolve(),
            results=self.folder.resolve(),
            device=choose_device(None),
            isolate=isolate,
            steered=self.prune,
        )

    def open(self) -> Study:
        """Open the study, or start it."""
        job = self.base_job
        config = job.identity["config"]
        assert isinstance(config, Mapping)
        meaning = {
            "method": f"{job.method} version {job.version}",
            "dataset": config["dataset"],
            "data": job.fingerprint,
            "backbone": config["backbone"],
            "settings": dict(job.overrides),
            "supervision": asdict(job.supervision),
            "seed": self.seed,
            "pruning": self.prune,
        }
        if self.base != self.dataset:
            meaning["preset"] = job.preset
        return Study(self.folder, self.seed, meaning)


class StudySource:
    """A `JobSource` that takes trials from a study and returns to it how they ended.

    It is used by one launcher; several of them, here or on a cluster, share the study. What is
    under way when it is left, or when its process dies, is made again by whichever comes next.
    """

    def __init__(self, tuning: Tuning, log: Log) -> None:
        self.tuning = tuning
        self.study = tuning.open()
        self._log = log
        self._method = get_method(tuning.method)
        job = tuning.base_job
        facts = get_dataset(job.dataset).facts(job.dataset_config())
        # A search space takes the rest from the preset that the task's name stands for.
        self._facts = replace(facts, name=tuning.base)
        self._rules = comparable_rules(job) if tuning.prune else ()
        # By the job's variant, which names the trial: the trial, and the overrides it has drawn.
        self._under_way: dict[str, tuple[Trial, dict[str, str]]] = {}
        self._enough = False
        self._deaths = 0

    def __enter__(self) -> StudySource:
        return self

    def __exit__(self, *_: object) -> None:
        """Abandon what is under way, so that it can be made again at once."""
        for trial, _drawn in self._under_way.values():
            self.study.release(trial)
        self._under_way.clear()

    @property
    def exhausted(self) -> bool:
        """Whether the study has all its trials; as of the last look at it, which costs time."""
        return self._enough and not self._under_way

    def next(self) -> Job | None:
        """Draw the next trial; none while others have under way what is missing."""
        while (trial := self.study.claim(self.tuning.trials)) is not None:
            try:
                return self._draw(trial)
            except BenchError as error:
                self._failed(trial, error.message, {})
            except BaseException:
                self.study.release(trial)
                raise
        self._enough = len(self.study.finished()) >= self.tuning.trials
        return None

    def _draw(self, trial: Trial) -> Job:
        """Draw a trial's configuration from the method's search space."""
        tuning, base = self.tuning, self.tuning.base_job
        config = self._method.search_space(trial, outline_task(self._facts, base.backbone()))
        drawn = drawn_overrides(self._method, tuning.base, config)
        drawn = {knob: value for knob, value in drawn.items() if knob not in tuning.overrides}
        job = tuning.job(drawn)
        if job.supervision != base.supervision:
            raise BenchError(
                f"the search space of {self._method.name} leads to another supervision tier",
                "leave knobs that grant group labels out of search_space",
            )
        job = replace(job, variant=f"trial {trial.number} of study {tuning.name}")
        self._under_way[job.variant] = (trial, drawn)
        return job

    def progress(self, job: Job, progress: Values) -> str | None:
        """Take a trial's progress; return why it is to stop if it falls behind the others."""
        trial, _ = self._under_way[job.variant]
        report = partial(self.study.report_and_should_prune, trial)
        return reason_to_prune(progress, self._method.training_name, self._rules, report)

    def finish(self, job: Job, record: Record) -> None:
        """Keep how a trial ended; raise `StudyFailing` if too many have failed."""
        trial, drawn = self._under_way.pop(job.variant)
        own = [stage for stage in record.cost.stages if not stage.reused]  # others cost it nothing
        facts = {
            "overrides": drawn,
            "run_id": job.run_id,
            "seconds": sum(stage.seconds_marginal for stage in own),
            "cpu_seconds": sum(stage.cpu_seconds or 0.0 for stage in own),
            "image_passes": sum(stage.image_passes for stage in own),
        }
        failure = record.failure
        try:
            if failure is not None and failure.interrupted:  # made again, unless that goes on
                self._deaths += 1
                if self._deaths >= MAX_WORKER_DEATHS:
                    raise BenchError(failure.message, failure.remedy)
                self._log(f"{failure.message}; trial {trial.number} is made again")
            elif failure is not None and failure.kind == NonFiniteLoss.kind:
                self.study.end(trial, "PRUNED", facts)
                self._log(f"trial {trial.number} diverged and counts as the worst")
            elif failure is not None:
                self._failed(trial, failure.message, facts)
            elif record.status is Status.PRUNED:
                reason = record.details["reason"]
                self.study.end(trial, "PRUNED", {**facts, "pruned": reason})
                self._log(f"{self._counted()} trial {trial.number} pruned: {reason}")
            else:
                self._complete(trial, record, facts)
        except LockLost as lost:
            self._log(lost.message)
        finally:
            self.study.release(trial)
        self._enough = len(self.study.finished()) >= self.tuning.trials

    def _complete(self, trial: Trial, record: Record, facts: Values) -> None:
        tier = record.job.supervision
        val = granted_metrics(record.val, tier)
        objective, value = objective_value(record.selection, val, tier, self._facts)
        if value is None:
            self._failed(trial, f"the trial has no value of {objective}", facts)
            return
        self.study.end(trial, "COMPLETE", {**facts, "objective": objective}, value)
        self._log(
            f"{self._counted()} trial {trial.number}: {objective} {value:.4f}, "
            f"best {self.study.study.best_value:.4f}  [{facts['seconds']:.0f} s]"
        )

    def _counted(self) -> str:
        return f"[{len(self.study.finished())}/{self.tuning.trials}]"

    def _failed(self, trial: Trial, reason: str, facts: Values) -> None:
        self._log(f"trial {trial.number} failed: {reason}")
        try:
            self.study.failed(trial, reason, facts)
        except LockLost as lost:
            self._log(lost.message)


def objective_value(
    selected: Selection | None, val: Metrics, tier: Supervision, facts: Facts
) -> tuple[str, float | None]:
    """Return the figure that a trial's tier is tuned by, and its value if it has one.

    A method with validation groups is tuned by its validation worst group; an unsupervised method
    by the worst group of its own making where it has such a figure (NCT's pWGA_2, the worst cluster
    of GEORGE and ExMap), and by its plain validation metric where it has none. Higher is better.
    What the tier hides is not given to it: `val` has the validation metrics that the tier grants.
    """
    rule = selected.rule if selected is not None else ""
    # The method's own figure, made under its tier, or the counterpart of a worst group without any.
    own = rule != "" and (rule not in RULES or rule == "val_worst_class")
    if selected is not None and (own or (tier.val_groups and rule in WORST_GROUP_RULES)):
        name, value = rule, selected.value
    else:
        plain = "auroc" if facts.metric == "auroc" else "avg"
        metric = facts.worst_group_metric if tier.val_groups else plain
        name, value = f"val_{metric}", val.get(metric)
    return name, None if value is None or math.isnan(value) else float(value)


def comparable_rules(job: Job) -> tuple[str, ...]:
    """Return the selection rules whose values are what the tier is tuned by; raise without any."""
    of_tier = WORST_GROUP_RULES if job.supervision.val_groups else RULES_WITHOUT_GROUPS
    rules = get_method(job.method).selection_rules(job.method_config())
    known = tuple(rule for rule in rules if rule in of_tier or rule not in RULES)
    if not known:
        why = f"scores them by {', '.join(rules)}" if rules else "so configured has no such epochs"
        raise UsageError(
            f"--prune compares the epochs of trials by what is tuned for, but {job.method} {why}",
            "leave --prune out",
        )
    return known


def reason_to_prune(
    progress: Values, training: str, rules: tuple[str, ...], report: Callable[[int, float], bool]
) -> str | None:
    """Report an epoch of a trial's fit if it counts; return why the fit is to stop, if it is.

    Trials are compared by the value that the fit itself selects by, so that pruning knows no more
    than the method's tier grants. Only epochs that are alike are compared: those of `training`,
    which the objective is about, and its parts, scored by one of the rules; and an epoch of one
    phase only with the same epoch of the same phase. `report` keeps the value of a step, and
    returns whether the trial falls behind the others there.
    """
    epoch, value = progress.get("epoch"), progress.get("selection")
    own = f"{progress.get('stage')}-".startswith(f"{training}-")
    if not own or progress.get("rule") not in rules:
        return None
    if not isinstance(epoch, int) or not isinstance(value, int | float):
        return None
    iteration, phase = (int(str(progress.get(name, 0))) for name in ("iteration", "phase"))
    behind = report((MOST_PHASES * iteration + phase) * LONGEST_PHASE + epoch, float(value))
    if not behind or epoch <= MIN_EPOCHS:
        return None
    return (
        f"{progress['rule']} {value:.4f} after epoch {epoch} of {progress['stage']}: the "
        "trial's best is below the median of earlier trials"
    )


def drawn_overrides(method: Method, base: str, config: Any) -> dict[str, str]:
    """Return a configuration as what it changes of a dataset's preset, or of a kind's."""
    preset = as_plain(preset_config(method, base))
    changes = identity_changes(preset, as_plain(config), f"{method.name}.")
    return {key: setting_text(drawn) for key, (_, drawn) in changes.items()}


def tune(tuning: Tuning, *, workers: int = 1, log: Log, isolate: bool | None = None) -> Summary:
    """Make the trials that a study lacks, and write its summary and its preset.

    One worker makes the same trials every time. Fits run in processes of their own by default,
    unless the method was defined in the program itself, which no other process can import.
    """
    missing = missing_trials(tuning, workers, log)
    if missing > 0:
        if isolate is None:
            isolate = type(get_method(tuning.method)).__module__ != "__main__"
        display = progress_display(tuning.trials, done=tuning.trials - missing, noun="trials")
        with StudySource(tuning, log) as source, display as shown:
            run_pool(source, tuning.options(isolate=isolate), min(workers, missing), shown)
    return finish_study(tuning)


def missing_trials(tuning: Tuning, workers: int, log: Log) -> int:
    """Check and prepare what trials need, and return how many the study lacks."""
    if workers < 1:
        raise UsageError(f"--workers must be at least 1 but got {workers}", "e.g. --workers 2")
    job = tuning.base_job  # a wrong name or value is an error here
    if tuning.prune:
        comparable_rules(job)
    expand_on_disk(tuning.request({}), explicit=True, log=log)  # data and weights are there then
    study = tuning.open()
    finished = len(study.finished())
    log(f"study {tuning.name}: {finished} of {tuning.trials} trials finished")
    if finished < tuning.trials:
        study.study.set_user_attr("asked", tuning.trials)  # for a later look at the study
        prepare([job], tuning.options())
    return tuning.trials - finished
