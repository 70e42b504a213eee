"""A study on disk: an Optuna journal that many launchers share and that outlives any of them.

Three locks, none of which a killed owner can keep: one around every write to the journal, one that
a launcher holds on each trial it has under way, and one under which trials are allocated, so that
there are never more than were asked for. A trial that the journal says is running but whose lock is
free was abandoned: it is failed, and a trial with what it had drawn is put into the queue. Draws
are counted, and a trial that is made again is the same draw as before. The sampler is seeded by the
draw: one worker makes the same trials every time, killed or not, and the first draws, which are
random, are the same however many workers there are. Where trials are pruned, one that is made again
is judged by the epochs of its earlier attempts, too.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.context import derive_seed
from bench.tuning import WARM_UP
from datasets.config import Values
from datasets.errors import BenchError, UsageError
from datasets.files import set_aside, storage_errors
from datasets.lock import Lock, LockLost

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial, Trial

MEDIAN_OF = 3  # complete trials that got as far as a step, for their median to be a yardstick
WRITE_SECONDS = 0.02  # how long a write to the journal takes, about
FINISHED = ("COMPLETE", "PRUNED")  # Optuna's states of trials that count
MAX_FAILURES = 5  # failed trials after which something other than luck is at fault


class StudyFailing(BenchError):
    """Trials fail, and not because they were interrupted."""

    kind = "study_failing"


class JournalLock(Lock):
    """The lock around writes to the journal; it also mends what a killed writer left."""

    def __init__(self, journal: Path) -> None:
        super().__init__(journal.with_name(f"{journal.name}.lock"))
        self.journal = journal

    def acquire(self) -> bool:
        """Wait for the lock, then drop half a last line: what is appended to it is lost too."""
        while not super().acquire():
            time.sleep(WRITE_SECONDS)
        if self.journal.is_file():
            with self.journal.open("rb+") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 1))
                if size > 0 and file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return True


class Study:
    """One study: allocates trials, keeps how they ended, and counts them."""

    def __init__(self, folder: Path, seed: int, meaning: Values) -> None:
        """Start a study, or open it if it means the same as when it was started."""
        import optuna

        self.folder, self.seed, self.optuna = folder, seed, optuna
        with storage_errors(folder):
            (folder / "trials").mkdir(parents=True, exist_ok=True)
        self._held: dict[int, Lock] = {}  # on the trials that this process has under way
        journal = folder / "journal.log"
        self.allocation_lock = Lock(folder / "turn.lock")
        with self.allocation_lock.hold(wait=True):
            if (reason := _damage(journal)) is not None:
                # The same trials are drawn again, and those whose runs are stored cost nothing.
                place = set_aside(journal, folder / "damaged", reason)
                sys.stderr.write(f"study {folder.name} starts again: {reason}; see {place}\n")
            self.study = optuna.create_study(
                storage=_open_journal(journal, JournalLock(journal)),
                study_name=folder.name,
                direction="maximize",
                load_if_exists=True,
            )
            if "meaning" not in self.study.user_attrs:
                self.study.set_user_attr("meaning", dict(meaning))
        self.meaning: dict[str, object] = self.study.user_attrs["meaning"]
        self.asked: int | None = self.study.user_attrs.get("asked")  # finished trials last wanted
        # A study that does not mention pruning was begun before there was any.
        known, now = ({"pruning": False, **one} for one in (self.meaning, meaning))
        now = json.loads(json.dumps(now))
        changed = [name for name in {**known, **now} if now.get(name) != known.get(name)]
        if changed:
            what = ", ".join(f"{n} was {known.get(n)} and is {now.get(n)}" for n in changed)
            raise UsageError(
                f"the study in {folder} is another one: {what}",
                "give the settings it was started with, use another --results folder, or delete it",
            )

    def trials(self, *states: str) -> list[FrozenTrial]:
        """Return the trials, those in the given states if any are given."""
        found = self.study.get_trials(deepcopy=False)
        return [trial for trial in found if not states or trial.state.name in states]

    def finished(self) -> list[FrozenTrial]:
        """Return the trials that count: those with a value, and those pruned or diverged."""
        return self.trials(*FINISHED)

    def claim(self, wanted: int) -> Trial | None:
        """Take the next trial; none if all that are wanted are finished or under way."""
        samplers, median = self.optuna.samplers, self.optuna.pruners.MedianPruner
        with self.allocation_lock.hold(wait=True):
            self._requeue_abandoned()
            if len(self.trials(*FINISHED, "RUNNING")) >= wanted:
                return None
            # Optuna takes the first that waits, which is the draw it was before, if there is any.
            waiting = self.trials("WAITING")
            last = max(map(draw_of, self.trials()), default=-1)
            draw = draw_of(waiting[0]) if waiting else last + 1
            seed = derive_seed(self.seed, "tune", draw) % 2**32
            if draw < WARM_UP:
                self.study.sampler = samplers.RandomSampler(seed=seed)
            else:
                self.study.sampler = samplers.TPESampler(n_startup_trials=0, seed=seed)
            self.study.pruner = median(n_startup_trials=WARM_UP, n_min_trials=MEDIAN_OF)
            trial = self.study.ask()
            self._held[trial.number] = self._lock(trial.number)
            self._held[trial.number].acquire()
            trial.set_user_attr("draw", draw)
            if (again := trial.user_attrs.get("again")) is not None:
                # Made again, it does not go through the epochs before its checkpoint once more.
                for step, value in self.trials()[again].intermediate_values.items():
                    trial.report(value, step)
            return trial

    def release(self, trial: Trial) -> None:
        """Release the lock on a trial, if it is held; a trial that has not ended is made again."""
        if (lock := self._held.pop(trial.number, None)) is not None:
            lock.release()

    def report_and_should_prune(self, trial: Trial, step: int, value: float) -> bool:
        """Keep a value on the way; return if the trial's best is below the others' median there."""
        try:
            trial.report(value, step)
        except self.optuna.exceptions.UpdateFinishedTrialError:
            return False  # it was given to another, which has a use for what this one finds
        return bool(trial.should_prune())

    def failed(self, trial: Trial, reason: str, facts: Values) -> None:
        """Keep that a trial failed; too many of them end the study."""
        self.end(trial, "FAIL", {**facts, "reason": reason})
        failures = [t for t in self.trials("FAIL") if "reason" in t.user_attrs]
        if len(failures) >= MAX_FAILURES:
            raise StudyFailing(
                f"{len(failures)} trials of {self.folder.name} failed, the last one with: {reason}",
                f"their records are in {self.folder / 'runs'}; delete the study to start anew",
            )

    def end(self, trial: Trial, state: str, facts: Values, value: float | None = None) -> None:
        """Keep how a trial ended; raise `LockLost` if it was given to another meanwhile.

        One that diverged is `PRUNED`, too: it counts, and the sampler ranks it below the others.
        """
        with self.allocation_lock.hold(wait=True):
            if self.trials()[trial.number].state.name != "RUNNING":
                raise LockLost(
                    f"trial {trial.number} was taken for a dead worker's, and is made again",
                    "nothing is lost: look at why this worker stood still",
                )
            for name, fact in facts.items():
                trial.set_user_attr(name, fact)
            self.study.tell(trial, value, state=self.optuna.trial.TrialState[state])
            self.release(trial)

    def _requeue_abandoned(self) -> None:
        """Fail the trials of dead launchers, and put each into the queue once more.

        The process that does this may be killed between the two, so trials that were failed
        without being queued again are looked for every time.
        """
        for trial in self.trials("RUNNING"):
            if not self._lock(trial.number).held():
                self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        made_again = {trial.user_attrs.get("again") for trial in self.trials()}
        for trial in self.trials("FAIL"):
            if "reason" not in trial.user_attrs and trial.number not in made_again:
                params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
                self.study.enqueue_trial(params, {"again": trial.number, "draw": draw_of(trial)})

    def _lock(self, number: int) -> Lock:
        return Lock(self.folder / "trials" / f"{number}.lock")


def _damage(journal: Path) -> str | None:
    """Return what is wrong with a journal; half a last line is not, a killed writer leaves it."""
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            whole = isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if not whole:
            return f"line {number} of {journal.name} is damaged"
    return None


def _open_journal(journal: Path, lock: Any = None) -> JournalStorage:
    """Open a journal; all that Optuna wants of a lock is acquire and release."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return JournalStorage(JournalFileBackend(str(journal), lock))


def draw_of(trial: FrozenTrial) -> int:
    """Return which draw a trial is; one killed before that was written is its own number's."""
    return int(trial.user_attrs.get("draw", trial.number))


def count_finished(folder: Path) -> int:
    """Count a study's finished trials without touching it: from its journal, as far as it goes."""
    import optuna

    journal = folder / "journal.log"
    if not journal.is_file() or _damage(journal) is not None:
        return 0
    try:
        study = optuna.load_study(study_name=folder.name, storage=_open_journal(journal))
    except KeyError:  # it is only just being started
        return 0
    return sum(trial.state.name in FINISHED for trial in study.get_trials(deepcopy=False))
