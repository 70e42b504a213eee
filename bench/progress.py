"""Showing work as it goes: a live table on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.development import shown_figures, shown_split
from bench.launch.local import Watcher
from bench.plan import Job

PLAIN_STEP_SECONDS = 5.0
QUIET_SECONDS = 30.0  # how often plain output says that a job is still at work


class Plain:
    """One line when a job starts, ends, or has been quiet for a while."""

    def __init__(self, total: int, console: Console) -> None:
        self.total = total
        self.done = 0
        self.console = console
        self.last: dict[str, float] = {}
        self.began: dict[str, float] = {}

    def started(self, job: Job) -> None:
        """Say that a job starts."""
        self.began[job.run_id] = self.last[job.run_id] = time.monotonic()
        self._say(f"start  {job.run_id}")

    def progressed(self, job: Job, progress: dict[str, Any]) -> None:
        """Say how far a job is, now and then."""
        if time.monotonic() - self.last[job.run_id] > QUIET_SECONDS:
            self.last[job.run_id] = time.monotonic()
            self._say(f"  ...  {job.run_id}  {describe(progress)}")

    def finished(self, job: Job, record: dict[str, Any]) -> None:
        """Say how a job ended."""
        self.done += 1
        seconds = time.monotonic() - self.began[job.run_id]
        self._say(f"{record['status']:6} {job.run_id}  {outcome(record)}  [{seconds:.0f} s]")

    def tick(self) -> None:
        """Do nothing: lines are only printed when something happens."""

    def _say(self, text: str) -> None:
        self.console.print(
            f"[{self.done}/{self.total}] {text}", markup=False, highlight=False, soft_wrap=True
        )


class LiveTable:
    """A table of running jobs that is drawn over and over, and a line for each finished one."""

    def __init__(self, total: int, console: Console) -> None:
        self.total = total
        self.done = 0
        self.console = console
        self.running: dict[str, tuple[float, dict[str, Any]]] = {}
        self.stage: dict[str, tuple[str, float, int]] = {}  # name, and when and where it was met
        self.live = Live(self._table(), console=console, refresh_per_second=4, transient=True)

    def started(self, job: Job) -> None:
        """Add a row."""
        self.running[job.run_id] = (time.monotonic(), {})

    def progressed(self, job: Job, progress: dict[str, Any]) -> None:
        """Update a row."""
        began, _ = self.running[job.run_id]
        self.running[job.run_id] = (began, progress)
        if self.stage.get(job.run_id, ("",))[0] != progress.get("stage"):
            met = (str(progress.get("stage")), time.monotonic(), int(progress.get("epoch", 0)))
            self.stage[job.run_id] = met

    def finished(self, job: Job, record: dict[str, Any]) -> None:
        """Turn a row into a line above the table."""
        began, _ = self.running.pop(job.run_id)
        self.done += 1
        mark = "[green]done  [/]" if record["status"] == "done" else "[red]failed[/]"
        seconds = time.monotonic() - began
        self.live.console.print(
            f"{mark} {job.run_id}  {escape(outcome(record))}  [dim]{seconds:.0f} s[/]"
        )

    def tick(self) -> None:
        """Draw the table as it is now."""
        self.live.update(self._table())

    def _table(self) -> Table:
        table = Table(title=f"{self.done} of {self.total} runs finished", title_justify="left")
        for column in ("run", "stage", "epoch", "selection", "running for", "left in stage"):
            table.add_column(column)
        for run_id, (began, progress) in self.running.items():
            spent = time.monotonic() - began
            epoch, epochs = progress.get("epoch"), progress.get("epochs")
            _, since, first = self.stage.get(run_id, ("", began, 0))
            pace = (time.monotonic() - since) / (epoch - first) if epoch and epoch > first else None
            left = f"{pace * (epochs - epoch):.0f} s" if pace is not None and epochs else ""
            value = progress.get("selection")
            table.add_row(
                run_id,
                str(progress.get("stage", "")),
                f"{epoch}/{epochs}" if epoch else "",
                f"{value:.2f}" if value is not None else "",
                f"{spent:.0f} s",
                left,
            )
        return table


@contextmanager
def watching(total: int) -> Iterator[Watcher]:
    """Choose how to show progress by whether anybody can see it move."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Plain(total, console)
        return
    table = LiveTable(total, console)
    with table.live:
        yield table


class Steps:
    """A progress bar for preparation work such as decoding; silent for what is done at once."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.tasks: dict[str, Any] = {}
        self.said = time.monotonic()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` is done."""
        if not self.console.is_terminal:
            if time.monotonic() - self.said > PLAIN_STEP_SECONDS:
                self.said = time.monotonic()
                self.console.print(f"{what}: {done}/{total}", highlight=False)
            return
        if self.bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self.bar.start()
        if what not in self.tasks:
            self.tasks[what] = self.bar.add_task(what, total=total)
        self.bar.update(self.tasks[what], completed=done)

    def close(self) -> None:
        """Leave the terminal as it should be."""
        if self.bar is not None:
            self.bar.stop()


def describe(progress: dict[str, Any]) -> str:
    """Say in a few words how far a job is."""
    if "epoch" not in progress:
        return str(progress.get("stage", ""))
    text = f"{progress['stage']} epoch {progress['epoch']}/{progress['epochs']}"
    value, end = progress.get("selection"), progress.get("expected_end")
    text += f", selection {value:.2f}" if value is not None else ""
    return text + (f", until about {time.strftime('%H:%M', time.localtime(end))}" if end else "")


def outcome(record: dict[str, Any]) -> str:
    """Say in a few words how a job ended."""
    if record["status"] != "done":
        return str(record["failure"]["message"])
    found = shown_figures(record)
    on = "validation " if shown_split(record["seed"]) == "val" else ""
    if found.get("auroc") is not None:
        nonpatch = found.get("auroc_nonpatch")
        more = "" if nonpatch is None else f", non-patch {nonpatch:.3f}"
        return f"{on}AUROC {found['auroc']:.3f}{more}"
    if "wga" not in found:
        value = found["selection"]
        chosen = "" if value is None else f"selection {value:.3g}, "
        return f"{on}{chosen}average {found['avg']:.1f}"
    return f"{on}WGA {found['wga']:.1f}, average {found['avg']:.1f}"
