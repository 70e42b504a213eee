"""Pruning: a trial of a study that lags behind the others is stopped before its end.

Trials are compared by what the fit itself reports of its epochs, the value it selects by, so that
pruning knows no more than the method's tier grants. Only epochs that are alike are compared: those
of the training that the objective is about, rather than of a first model or of a tree without a
partition; and an epoch of one phase only with the same epoch of the same phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.objective import steers
from bench.plan import Job
from bench.study import Claim, Study
from datasets.config import build_config
from datasets.errors import BenchError, UsageError
from methods.base import get_method

GRACE = 1  # epochs of a phase in which nobody is judged
LONGEST = 100_000  # more epochs than a phase can have: keeps the steps of phases apart
PHASES = 10  # more than an iteration can have


class Pruned(BenchError):
    """The trial is worse than the median of those before it."""

    kind = "pruned"


def watched_rules(job: Job) -> tuple[str, ...]:
    """Name the selection rules whose values trials of a job can be compared by."""
    method = get_method(job.method)
    rules = method.scored_by(build_config(method.config_type, job.config["method"], job.method))
    known = tuple(rule for rule in rules if steers(rule, job.supervision))
    if not known:
        said = f"scores them by {', '.join(rules)}" if rules else "so configured has no such epochs"
        raise UsageError(
            f"--prune compares the epochs of trials by what is tuned for, but {job.method} {said}",
            "leave --prune out",
        )
    return known


@dataclass(frozen=True)
class Watch:
    """Hears what the fit of one trial reports, and stops it when it falls behind.

    Attributes:
        training: whose epochs count, by its name or by what the names of its parts begin with.
    """

    study: Study
    claim: Claim
    training: str
    rules: tuple[str, ...]

    def __call__(self, progress: dict[str, Any]) -> None:
        """Note an epoch's value; raise `Pruned` if the trial is not worth going on with."""
        if not self._counts(progress):
            return
        epoch, value = int(progress["epoch"]), float(progress["selection"])
        phase = PHASES * int(progress.get("iteration", 0)) + int(progress.get("phase", 0))
        lags = self.study.lags(self.claim, phase * LONGEST + epoch, value)
        if lags and epoch > GRACE:
            raise Pruned(
                f"{progress['rule']} {value:.4f} after epoch {epoch} of {progress['stage']}: the "
                "trial's best is below the median of earlier trials"
            )

    def _counts(self, progress: dict[str, Any]) -> bool:
        """Tell whether this is an epoch of the method's own training, by the rule that counts."""
        own = f"{progress.get('stage')}-".startswith(f"{self.training}-")
        return own and progress.get("rule") in self.rules
