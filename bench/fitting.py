"""The fit, in a process of its own that never holds test data or hidden labels.

The process is started before the data is loaded, and is then given a `FitTask`: the task as the
method's tier shows it, the configuration, and where checkpoints go. What comes back, epoch by
epoch: the model for the audit, and progress; at the end the fitted model. This keeps accidents
out: no test image and no hidden label is ever in the memory of the process that trains. It does not
stop code that opens the data folder on purpose.

The same call runs in one process for tests, debuggers and notebooks (`fit_here`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.audit import without_hooks
from bench.context import (
    AuditCallback,
    HistoryRow,
    ProgressCallback,
    RunContext,
    RunSettings,
    StageAccount,
)
from bench.process import (
    begin_as_child,
    configure_process,
    count_oom_kills,
    peak_memory_bytes,
    starting_a_child,
    worker_exit_error,
)
from bench.record import StageCost
from datasets.base import Split, Task
from datasets.config import Values
from datasets.dataset import forbid_loading
from datasets.errors import BenchError
from datasets.resident import place
from methods.base import Fitted, Method

UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)
"""What pickling raises for an object that cannot be sent between processes."""


@dataclass(frozen=True)
class FitTask:
    """All that a fit is given.

    Attributes:
        work: the folder of the run's checkpoints.
        answers: whether progress waits for an answer, which may ask the fit to stop.
    """

    method: Method
    config: Any
    task: Task
    settings: RunSettings
    work: Path
    answers: bool = False


@dataclass(frozen=True)
class FitResult:
    """What a fit leaves behind: the model, and what it took to make it."""

    fitted: Fitted
    history: list[HistoryRow]
    stages: tuple[StageCost, ...]
    peak_memory_bytes: int
    energy_kwh: float | None


class FitFailed(Exception):
    """A fit ended with an error; it did cost what it did."""

    def __init__(self, error: BaseException, stages: tuple[StageCost, ...]) -> None:
        super().__init__(str(error))
        self.error = error
        self.stages = stages


class RemoteTraceback(Exception):
    """The traceback of an error in the fit process, as text: frames do not travel."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class FitError(BenchError):
    """An error of a fit that cannot be sent between processes as it is."""


def fit_here(given: FitTask, progress: ProgressCallback, audit: AuditCallback | None) -> FitResult:
    """Fit in this process; raise `FitFailed` if that fails."""
    costs: list[StageCost] = []
    account = StageAccount(given.settings.run_id, given.work)
    code = given.settings.code
    stop_meter = start_energy_meter()
    try:
        context = RunContext(given.settings, account, costs, progress, audit)
        train, val = (  # the same splits with their images on the device
            Split(name, place(split.images, context.device), split.y, split.ids, split._granted)
            for name, split in (("train", given.task.train), ("val", given.task.val))
        )
        task = replace(given.task, train=train, val=val)
        fitted = given.method.fit(task, given.config, context)
    except Exception as error:
        raise FitFailed(error, (*costs, account.cost("fit", code))) from error
    finally:
        kwh = stop_meter()
        # Libraries that limit threads may give back too many.
        torch.set_num_threads(given.settings.cores)
    costs.append(account.cost("fit", code))
    # Energy is not kept across an interruption, so a run that was resumed has none.
    kwh = kwh if account.earlier_attempts.wall == 0 else None
    memory = peak_memory_bytes(given.settings.device)
    return FitResult(fitted, account.history(), tuple(costs), memory, kwh)


class FitProcess:
    """A process that waits for one `FitTask`; start it before any data is loaded.

    In a worker, which is a fresh process, it is forked: that takes no time, and there is nothing in
    memory yet that it should not have. Elsewhere it comes from multiprocessing's fork server.
    """

    def __init__(self, *, fork: bool) -> None:
        context: Any = multiprocessing.get_context("fork" if fork else _clean_start())
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs,), name="fit", daemon=True
        )
        self.oom_kills = count_oom_kills()
        with starting_a_child():
            self.process.start()
        theirs.close()

    def fit(
        self, given: FitTask, progress: ProgressCallback, audit: AuditCallback | None
    ) -> FitResult:
        """Have the task fitted; raise `FitFailed` if that fails or the process dies."""
        try:
            try:
                task = pickle.dumps((given, audit is not None))
            except UNPICKLABLE as problem:
                unsent = FitError(
                    f"this fit cannot be sent to a process of its own: {problem}",
                    "define the method at the top of a module, or run it in this one "
                    "(isolate=False)",
                )
                raise FitFailed(unsent, ()) from problem
            self.pipe.send_bytes(task)
            while True:
                kind, content = pickle.loads(self.pipe.recv_bytes())
                if kind == "progress":
                    reason = progress(content)
                    if given.answers:
                        self.pipe.send_bytes(pickle.dumps(reason))
                elif kind == "audit":
                    assert audit is not None
                    audit(*content)
                    self.pipe.send_bytes(pickle.dumps(None))
                elif kind == "result":
                    result: FitResult = content
                    return result
                else:
                    error, trace, stages = content
                    error.__cause__ = RemoteTraceback(trace)
                    raise FitFailed(error, stages)
        except (EOFError, ConnectionError) as gone:
            self.process.join()
            died = count_oom_kills() > self.oom_kills
            raise FitFailed(worker_exit_error(self.process.exitcode or 0, died), ()) from gone
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _clean_start() -> str:
    """Return how to start a process that has nothing of this one's memory."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload(["bench.launch.preload"])
    return "forkserver"


def _serve(pipe: Connection) -> None:
    """Fit the one task that comes, and send what comes of it."""
    begin_as_child()
    forbid_loading()
    try:
        given, audited = pickle.loads(pipe.recv_bytes())
    except EOFError:  # the run ended before it came to the fit
        return

    def send(kind: str, content: object) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    def progress(values: Values) -> str | None:
        send("progress", dict(values))
        return pickle.loads(pipe.recv_bytes()) if given.answers else None

    def audit(key: str, where: Values, outputs: Tensor, module: nn.Module) -> None:
        send("audit", (key, dict(where), outputs, without_hooks(module)))
        pipe.recv_bytes()

    try:
        configure_process(given.settings.cores)
        result = fit_here(given, progress, audit if audited else None)
        try:
            send("result", result)
        except UNPICKLABLE as error:
            unsent = FitError(
                f"the model of {given.settings.run_id} cannot be sent to the process that "
                f"evaluates it: {error}",
                "define its classes and functions at the top of a module",
            )
            raise FitFailed(unsent, result.stages) from error
    except Exception as caught:
        failed = caught if isinstance(caught, FitFailed) else FitFailed(caught, ())
        trace = "".join(traceback.format_exception(failed.error))
        send("failed", (_sendable(failed.error), trace, failed.stages))


def _sendable(error: BaseException) -> BaseException:
    """Return the error if it survives pickling, else one that reads the same."""
    with contextlib.suppress(Exception):
        again = pickle.loads(pickle.dumps(error))
        if isinstance(again, BaseException):
            return again
    return FitError(f"{type(error).__name__}: {error}")


def start_energy_meter() -> Callable[[], float | None]:
    """Measure what this process uses; return what ends it and returns kWh, or none if unknown.

    It takes codecarbon. An estimate: that reads power counters where the machine has them and
    otherwise multiplies load by a typical power.
    """
    try:
        from codecarbon import OfflineEmissionsTracker
    except ImportError:
        return lambda: None
    logging.getLogger("codecarbon").setLevel(logging.ERROR)
    tracker = OfflineEmissionsTracker(
        country_iso_code="USA",  # it wants one; energy does not depend on it
        tracking_mode="process",
        save_to_file=False,
        allow_multiple_runs=True,
        log_level="error",
    )
    tracker.start()

    def stop() -> float:
        tracker.stop()
        return float(tracker.final_emissions_data.energy_consumed)

    return stop
