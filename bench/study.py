"""A study on disk: an Optuna journal that many workers share and that outlives any of them.

Three locks, none of which a killed holder can keep: one around every write to the journal, one that
each worker holds on the trial it is at, and one under which trials are given out, so that there are
never more than were asked for. A trial that is said to run but whose lock is free was left by a
dead worker; it is failed, and has an heir: a trial in the queue with what it had drawn. Draws are
counted, and an heir is the same draw as its forebear. The sampler is seeded by the draw: one worker
makes the same trials every time, killed or not, and the first draws, which are random, are the same
however many workers there are. Where trials are pruned, an heir is judged by the epochs that its
forebears went through, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.files import storage_errors
from bench.lease import Lease, LeaseLost
from bench.seeds import derive_seed
from datasets.errors import BenchError, UsageError

WARM_UP = 20  # random trials before TPE takes over, as in the paper
MEDIAN_OF = 3  # complete trials that got as far as a step, for their median to be a yardstick
WRITE_SECONDS = 0.02  # how long a write to the journal takes, about
FINISHED = ("COMPLETE", "PRUNED")  # Optuna's states of trials that count
FAILURES = 5  # failed trials after which something other than luck is at fault


class StudyFailing(BenchError):
    """Trials fail, and not because they were interrupted."""

    kind = "study_failing"


class JournalLock:
    """The lock around writes to the journal; it also mends what a killed writer left."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.lock = Lease(journal.with_name(f"{journal.name}.lock"))

    def acquire(self) -> bool:
        """Wait for the lock, then drop a last line that was never finished."""
        while not self.lock.acquire():
            time.sleep(WRITE_SECONDS)
        if self.journal.is_file():
            drop_torn_line(self.journal)
        return True

    def release(self) -> None:
        """Let the next one write."""
        self.lock.release()


def drop_torn_line(journal: Path) -> None:
    """Cut a journal back to its last complete line; a line appended to half a one is lost too."""
    with journal.open("rb+") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        if size == 0 or file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


@dataclass(frozen=True)
class Claim:
    """A trial that this worker is at, and the lock that says so."""

    trial: Any
    lock: Lease


class Study:
    """One study: claims trials, tells how they ended, and counts them."""

    def __init__(self, folder: Path, seed: int, meaning: Mapping[str, Any]) -> None:
        """Start a study, or open it if it means the same as when it was started."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.seed = folder, seed
        self.optuna = optuna
        with storage_errors(folder):
            (folder / "trials").mkdir(parents=True, exist_ok=True)
        journal = folder / "journal.log"
        self.turn = Lease(folder / "turn.lock")
        with self.turn.hold(wait=True):
            lock: Any = JournalLock(journal)  # all that Optuna wants is acquire and release
            storage = JournalStorage(JournalFileBackend(str(journal), lock))
            self.study = optuna.create_study(
                storage=storage, study_name=folder.name, direction="maximize", load_if_exists=True
            )
            if "meaning" not in self.study.user_attrs:
                self.study.set_user_attr("meaning", dict(meaning))
            # A study that does not mention pruning was begun before there was any.
            known = {"pruning": False, **self.study.user_attrs["meaning"]}
            self._check(json.loads(json.dumps(meaning)), known)

    def _check(self, meaning: dict[str, Any], known: dict[str, Any]) -> None:
        changed = [name for name in meaning if meaning[name] != known.get(name)]
        if changed:
            told = ", ".join(f"{n} was {known.get(n)} and is {meaning[n]}" for n in changed)
            raise UsageError(
                f"the study in {self.folder} is another one: {told}",
                "give the settings it was started with, use another --results folder, or delete it",
            )

    def ask_for(self, wanted: int) -> None:
        """Note how many finished trials are wanted, for whoever looks at the study."""
        self.study.set_user_attr("asked", wanted)

    @property
    def asked(self) -> int | None:
        """Tell how many finished trials were last wanted; None if nobody has said."""
        found: int | None = self.study.user_attrs.get("asked")
        return found

    def trials(self, *states: str) -> list[Any]:
        """List the trials, those in the given states if any are given."""
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if not states or trial.state.name in states]

    def finished(self) -> list[Any]:
        """List the trials that count: those with a value, and those pruned or diverged."""
        return self.trials(*FINISHED)

    def claim(self, wanted: int) -> Claim | None:
        """Take the next trial; none if all that are wanted are finished or under way."""
        with self.turn.hold(wait=True):
            self._collect_orphans()
            if len(self.trials(*FINISHED, "RUNNING")) >= wanted:
                return None
            waiting = self.trials("WAITING")  # Optuna takes the first of them, if there are any
            draw = draw_of(waiting[0]) if waiting else self._draws()
            self.study.sampler = self._sampler(draw)
            self.study.pruner = self.optuna.pruners.MedianPruner(
                n_startup_trials=WARM_UP, n_min_trials=MEDIAN_OF
            )
            trial = self.study.ask()
            lock = self._lock(trial.number)
            lock.acquire()
            trial.set_user_attr("draw", draw)
            self._take_over(trial)
            return Claim(trial, lock)

    def _draws(self) -> int:
        """Count the draws so far; trials that were made again are one with what they became."""
        return 1 + max(map(draw_of, self.trials()), default=-1)

    def _sampler(self, draw: int) -> Any:
        """Give the sampler of a draw, by its place in the seed tree."""
        seed = derive_seed(self.seed, "tune", draw) % 2**32
        if draw < WARM_UP:
            return self.optuna.samplers.RandomSampler(seed=seed)
        return self.optuna.samplers.TPESampler(n_startup_trials=0, seed=seed)

    def _take_over(self, trial: Any) -> None:
        """Give an heir the epochs it does not go through a second time."""
        if (again := trial.user_attrs.get("again")) is not None:
            for step, value in self.trials()[again].intermediate_values.items():
                trial.report(value, step)

    def lags(self, claim: Claim, step: int, value: float) -> bool:
        """Note a value on the way; tell if the trial's best is below the others' median there."""
        claim.trial.report(value, step)
        return bool(claim.trial.should_prune())

    def complete(self, claim: Claim, value: float, facts: Mapping[str, Any]) -> None:
        """Tell a trial's value."""
        self._end(claim, "COMPLETE", facts, value)

    def pruned(self, claim: Claim, facts: Mapping[str, Any]) -> None:
        """Tell that a trial was stopped: it counts, and the sampler ranks it below the others."""
        self._end(claim, "PRUNED", facts)

    def diverged(self, claim: Claim, facts: Mapping[str, Any]) -> None:
        """Tell that training blew up: the trial counts, and the sampler ranks it last."""
        self._end(claim, "PRUNED", facts)

    def failed(self, claim: Claim, reason: str, facts: Mapping[str, Any]) -> None:
        """Tell that a trial failed; too many of them end the study."""
        self._end(claim, "FAIL", {**facts, "reason": reason})
        failures = [t for t in self.trials("FAIL") if "reason" in t.user_attrs]
        if len(failures) >= FAILURES:
            raise StudyFailing(
                f"{len(failures)} trials of {self.folder.name} failed, the last one with: {reason}",
                f"their records are in {self.folder / 'runs'}; delete the study to start anew",
            )

    def _end(
        self, claim: Claim, state: str, facts: Mapping[str, Any], value: float | None = None
    ) -> None:
        """Tell how a trial ended; raise `LeaseLost` if it was given to another meanwhile."""
        with self.turn.hold(wait=True):
            if self.trials()[claim.trial.number].state.name != "RUNNING":
                raise LeaseLost(
                    f"trial {claim.trial.number} was taken for a dead worker's, and is made again",
                    "nothing is lost: look at why this worker stood still",
                )
            for name, fact in facts.items():
                claim.trial.set_user_attr(name, fact)
            self.study.tell(claim.trial, value, state=self.optuna.trial.TrialState[state])
            claim.lock.release()

    def _collect_orphans(self) -> None:
        """Fail the trials of dead workers, and see to it that each has an heir.

        Whoever does this may be killed between the two, so heirs are looked for every time.
        """
        for trial in self.trials("RUNNING"):
            if not self._lock(trial.number).held():
                self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        having_heirs = {trial.user_attrs.get("again") for trial in self.trials()}
        for trial in self.trials("FAIL"):
            if "reason" in trial.user_attrs or trial.number in having_heirs:
                continue
            inherited = trial.system_attrs.get("fixed_params", {})
            known = {"again": trial.number, "draw": draw_of(trial)}
            self.study.enqueue_trial({**inherited, **trial.params}, known)

    def _lock(self, number: int) -> Lease:
        return Lease(self.folder / "trials" / f"{number}.lock")


def draw_of(trial: Any) -> int:
    """Tell which draw a trial is; one that was killed before it could say is its own number's."""
    return int(trial.user_attrs.get("draw", trial.number))


def count_finished(folder: Path) -> int:
    """Count a study's finished trials without touching it: from its journal, as far as it goes."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = folder / "journal.log"
    if not journal.is_file():
        return 0
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    found = optuna.load_study(study_name=folder.name, storage=storage).get_trials(deepcopy=False)
    return sum(trial.state.name in FINISHED for trial in found)
