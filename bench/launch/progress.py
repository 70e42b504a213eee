"""Showing work as it goes: a live table on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import progress as bars
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from bench.job import Job, shown_split
from bench.record import Record, Status
from datasets.config import Values
from datasets.dataset import Progress

BETWEEN_STEPS = ("validating", "auditing")  # what is done at the end of an epoch
PREPARATION_SECONDS = 5.0  # between two lines about preparation, where there is no terminal
QUIET_SECONDS = 30.0  # how often plain lines tell how far a running job is


class Display(Protocol):
    """Something that shows how the work is going."""

    def started(self, job: Job) -> None:
        """Show that a job was handed to a worker."""

    def progressed(self, job: Job, progress: Values) -> None:
        """Show how far a running job is."""

    def finished(self, job: Job, record: Record) -> None:
        """Show how a job ended."""


class PlainProgress(Display):
    """One line when a job starts, when it ends, and now and then in between."""

    def __init__(self, total: int, console: Console, *, done: int = 0) -> None:
        self.total, self.done, self.console = total, done, console
        self._last_line: dict[str, float] = {}
        self._began: dict[str, float] = {}

    def started(self, job: Job) -> None:
        """Print that a job starts."""
        self._began[job.run_id] = self._last_line[job.run_id] = time.monotonic()
        self._print(f"start  {job.run_id}")

    def progressed(self, job: Job, progress: Values) -> None:
        """Print how far a job is, if its last line was long ago."""
        if time.monotonic() - self._last_line.get(job.run_id, 0.0) > QUIET_SECONDS:
            self._last_line[job.run_id] = time.monotonic()
            self._print(f"  ...  {job.run_id}  {describe(progress)}")

    def finished(self, job: Job, record: Record) -> None:
        """Print how a job ended."""
        self.done += 1
        seconds = time.monotonic() - self._began.get(job.run_id, time.monotonic())
        self._print(f"{record.status:6} {job.run_id}  {result_line(record)}  [{seconds:.0f} s]")

    def _print(self, text: str) -> None:
        line = f"[{self.done}/{self.total}] {text}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveTable(Display):
    """A table of running jobs that is drawn over and over, and a line for each finished one."""

    def __init__(self, total: int, console: Console, *, done: int = 0, noun: str = "runs") -> None:
        self.total, self.done, self.noun = total, done, noun
        self._running: dict[str, tuple[float, Values]] = {}  # since when, and how far
        self.live = Live(get_renderable=self._table, console=console, transient=True)

    def started(self, job: Job) -> None:
        """Add a row."""
        self._running[job.run_id] = time.monotonic(), {}

    def progressed(self, job: Job, progress: Values) -> None:
        """Update a row; within an epoch, the score of the last one stays."""
        began, before = self._running.get(job.run_id, (time.monotonic(), {}))
        within = "step" in progress and before.get("stage") == progress.get("stage")
        kept = {"selection": before["selection"]} if within and "selection" in before else {}
        self._running[job.run_id] = began, {**kept, **progress}

    def finished(self, job: Job, record: Record) -> None:
        """Turn a row into a line above the table."""
        began, _ = self._running.pop(job.run_id, (time.monotonic(), {}))
        seconds = time.monotonic() - began
        self.done += 1
        colour = "green" if record.done else "red"
        self.live.console.print(
            f"[{colour}]{record.status:6}[/] {job.run_id}  {escape(result_line(record))}  "
            f"[dim]{seconds:.0f} s[/]"
        )

    def _table(self) -> Table:
        title = f"{self.done} of {self.total} {self.noun} finished"
        columns = ("run", "stage", "epoch", "images/s", "selection", "running for", "left in stage")
        table = Table(*columns, title=title, title_justify="left")
        for run_id, (began, progress) in list(self._running.items()):  # drawn in another thread
            value, end = _number(progress, "selection"), _number(progress, "expected_end")
            table.add_row(
                run_id,
                _stage(progress),
                _epoch_cell(progress),
                f"{speed:.3g}" if (speed := _number(progress, "images_per_second")) else "",
                f"{value:.2f}" if value is not None else "",
                f"{time.monotonic() - began:.0f} s",
                f"{max(0.0, end - time.time()):.0f} s" if end is not None else "",
            )
        return table


@contextmanager
def progress_display(total: int, *, done: int = 0, noun: str = "runs") -> Iterator[Display]:
    """Show progress as a live table on a terminal, else as plain lines.

    Of all `total` jobs `done` were finished before; the table calls them by the noun.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield PlainProgress(total, console, done=done)
        return
    table = LiveTable(total, console, done=done, noun=noun)
    with table.live:
        yield table


@contextmanager
def preparation_bar() -> Iterator[Progress]:
    """Show the progress of preparation such as decoding, unless it is done at once."""
    console, last_line = Console(stderr=True), time.monotonic()
    text, count = bars.TextColumn("{task.description}"), bars.MofNCompleteColumn()
    columns = text, bars.BarColumn(), count, bars.TimeRemainingColumn()
    bar, tasks = bars.Progress(*columns, console=console), dict[str, bars.TaskID]()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last_line
        if console.is_terminal:
            bar.start()
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)
        elif time.monotonic() - last_line > PREPARATION_SECONDS:
            last_line = time.monotonic()
            console.print(f"{what}: {done}/{total}", highlight=False)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()


class Pace:
    """Follows the epochs of a stage, and from them when the stage should end."""

    def __init__(self) -> None:
        self._stage: object = None
        self._since = self._first = 0.0

    def expect(self, progress: Values) -> dict[str, float]:
        """Return when the stage should end, once two points of it were seen."""
        epochs, done = _number(progress, "epochs"), _epochs_done(progress)
        if not epochs or not done:
            return {}
        now = time.time()
        stage = (progress.get("stage"), progress.get("iteration"), epochs)
        if stage != self._stage or done <= self._first:
            self._stage, self._since, self._first = stage, now, done
            return {}
        each = (now - self._since) / (done - self._first)
        return {"expected_end": now + each * max(0.0, epochs - done)}


def describe(progress: Values) -> str:
    """Return in a few words how far a job is."""
    if "epoch" not in progress:
        done = f" {progress['done']}/{progress.get('total')}" if "done" in progress else ""
        return f"{_stage(progress)}{done}"
    between = progress.get("activity") in BETWEEN_STEPS
    within = "step" in progress and not between
    step = f", step {progress['step']}/{progress.get('steps')}" if within else ""
    value, end = _number(progress, "selection"), _number(progress, "expected_end")
    speed = _number(progress, "images_per_second")
    images = f", {speed:.3g} images/s" if speed is not None and not between else ""
    selection = f", selection {value:.2f}" if value is not None else ""
    left = f", {_duration(end - time.time())} left" if end else ""
    until = f", until about {time.strftime('%H:%M', time.localtime(end))}" if end else ""
    epoch = f"{_epoch_number(progress)}/{progress.get('epochs')}"
    return f"{_stage(progress)} epoch {epoch}{step}{images}{selection}{left}{until}"


def _stage(progress: Values) -> str:
    """Return what is being done: `training erm`, `auditing erm`, `loading`."""
    words = progress.get("activity", ""), progress.get("stage", "")
    return " ".join(str(word) for word in words if word)


def _duration(seconds: float) -> str:
    """Return a time in the largest unit that it has two of."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def result_line(record: Record) -> str:
    """Return in a few words how a job ended."""
    if record.status is Status.PRUNED:
        return str(record.details.get("reason", record.status))
    if not record.done:
        return record.failure.message if record.failure is not None else record.status.value
    found = record.shown_metrics()
    on = "validation " if shown_split(record.job.seed) == "val" else ""
    own = record.job.data_kind == "own"  # judged by groups or classes, whatever else is known
    if found.get("auroc") is not None and not own:
        nonpatch = found.get("auroc_nonpatch")
        more = "" if nonpatch is None else f", non-patch {nonpatch:.3f}"
        return f"{on}AUROC {found['auroc']:.3f}{more}"
    wga, average = ("-" if (v := found.get(n)) is None else f"{v:.1f}" for n in ("wga", "avg"))
    if "wga" in found:
        return f"{on}WGA {wga}, average {average}"
    if own and found.get("worst_class") is not None:
        return f"{on}worst class {found['worst_class']:.1f}, average {average}"
    value = found.get("selection")
    chosen = "" if value is None else f"selection {value:.3g}, "
    return f"{on}{chosen}average {average}"


def _number(progress: Values, name: str) -> float | None:
    value = progress.get(name)
    return float(value) if isinstance(value, int | float) else None


def _epochs_done(progress: Values) -> float:
    """Return the epochs of a stage that are behind it, the begun one in part."""
    epoch, step, steps = (_number(progress, name) for name in ("epoch", "step", "steps"))
    return (epoch + (step / steps if step and steps else 0.0)) if epoch is not None else 0.0


def _epoch_number(progress: Values) -> int:
    """Return the number of the epoch that was finished last, or that a step is of."""
    return int(_number(progress, "epoch") or 0) + ("step" in progress)


def _epoch_cell(progress: Values) -> str:
    epochs, done = _number(progress, "epochs"), _epochs_done(progress)
    if not epochs or not done:
        return ""
    share = f", {done % 1:.0%}" if "step" in progress else ""
    return f"{_epoch_number(progress)}/{epochs:.0f}{share}"
