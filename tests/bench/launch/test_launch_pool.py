"""Worker processes: what they cost when they die, who hears of it, and that they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from launch_fakes import Notes

from bench.job import Job, Request, expand
from bench.launch import pool
from bench.launch.pool import Attempt, FixedJobs, default_workers, run_pool
from bench.process import WorkerDied
from bench.record import Failure, Record, Status, new_record
from bench.runner import RunOptions, run_job
from bench.store import Store
from datasets.config import Values
from datasets.lock import Lock
from methods.base import METHODS, get_method

REPOSITORY = Path(__file__).parents[3]

PLUG_IN = '''
"""A method outside the repository that trains nothing, and on request brings down its process,
keeps memory for good, or takes its time."""

import os
import signal
import time
from dataclasses import dataclass

from methods.backbones import FittedClassifier, build_classifier
from methods.base import Method, register


@dataclass(frozen=True)
class TroubleConfig:
    trouble: str = ""
    on: int = -1
    note: str = ""

    def quick(self):
        return self


KEPT = []


@register("troubled", version=1, config=TroubleConfig)
class Troubled(Method):
    def fit(self, task, config, ctx):
        trouble = config.trouble if ctx.settings.seed == config.on else ""
        if config.note:  # trouble comes once
            trouble = "" if os.path.exists(config.note) else config.trouble
            open(config.note, "w").close()
        if trouble == "exit":
            os._exit(3)
        if trouble == "error":
            raise RuntimeError("made to fail")
        if trouble == "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if trouble == "keep":
            KEPT.append(b"x" * 6 * 10**8)
        if trouble == "wait":
            ctx.report(stage="waiting", pid=os.getpid())
            time.sleep(600)
        for epoch in range(1, 4):
            ctx.report(stage="troubled", epoch=epoch, epochs=3)
        return FittedClassifier(build_classifier(task, ctx, "net"))

    def search_space(self, trial, task):
        return TroubleConfig()
'''

LAUNCHER = """
import sys
from pathlib import Path
from bench.job import Request, expand
from bench.launch.pool import FixedJobs, run_pool
from bench.launch.progress import progress_display
from bench.runner import RunOptions

if __name__ == "__main__":
    root, results = map(Path, sys.argv[1:])
    settings = {"troubled.trouble": "wait", "troubled.on": "0"}
    request = Request(("troubled",), ("cmnist",), (0,), root, overrides=settings, quick=True)
    with progress_display(1) as display:
        run_pool(FixedJobs(expand(request)), RunOptions(root, results), 1, display)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in, as pip would install it."""
    folder = tmp_path_factory.mktemp("site")
    facts = folder / "troubled_method-1.0.dist-info"
    facts.mkdir()
    (folder / "troubled_method.py").write_text(PLUG_IN)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: troubled-method\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[bench.methods]\ntroubled = troubled_method\n")
    return folder


@pytest.fixture
def troubled(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install the plug-in; workers inherit the path."""
    monkeypatch.syspath_prepend(str(site))
    assert get_method("troubled").name == "troubled"
    yield "troubled"
    METHODS.pop("troubled")
    sys.modules.pop("troubled_method")


def jobs_of(method: str, root: Path, seeds: tuple[int, ...], **overrides: str) -> list[Job]:
    settings = {f"{method}.{knob}": value for knob, value in overrides.items()}
    return expand(Request((method,), ("cmnist",), seeds, root, overrides=settings, quick=True))


@pytest.mark.parametrize(("trouble", "how"), [("exit", "exit code 3"), ("kill", "SIGKILL")])
def test_a_crash_costs_one_run(
    troubled: str, digits_root: Path, store: Store, notes: Notes, trouble: str, how: str
) -> None:
    """Whether the process that fits dies or the worker that started it."""
    jobs = jobs_of(troubled, digits_root, (0, 1, 2), trouble=trouble, on="1")
    records = run_pool(FixedJobs(jobs), RunOptions(digits_root, store.root), 1, notes)

    ids = [job.run_id for job in jobs]
    assert [record.run_id for record in records] == ids  # one worker: in the order given
    assert notes.started_jobs == notes.finished_jobs == ids
    assert [record.status for record in records] == [Status.DONE, Status.FAILED, Status.DONE]
    assert {"loading", "evaluating"} <= set(notes.stages)
    assert [store.status_of(run).status for run in ids] == [r.status for r in records]
    failure = records[1].failure
    assert failure is not None
    assert failure.kind == "worker_died"
    assert how in failure.message
    assert "--workers" in failure.remedy
    assert failure.command.endswith("--rerun failed")
    assert f"troubled.trouble={trouble}" in failure.command
    stored = store.record(ids[1])
    assert stored is not None
    assert stored.failure == failure
    # A method that keeps no history still has the table, with the columns every run has.
    history = pd.read_parquet(store.runs / ids[0] / "history.parquet")
    assert len(history) == 0
    assert {"stage", "epoch", "loss", "selection", "audit_test_wga"} <= set(history)
    assert not multiprocessing.active_children()


@pytest.mark.skipif(pool.START_METHOD != "forkserver", reason="there is no fork server")
@pytest.mark.parametrize("deaths", [1, pool.START_TRIES])
def test_a_fork_server_that_dies_as_a_worker_starts(
    jobs: list[Job],
    digits_root: Path,
    store: Store,
    notes: Notes,
    monkeypatch: pytest.MonkeyPatch,
    deaths: int,
) -> None:
    """Another is started, and no run is lost by it; unless it never lives."""
    server, killed = forkserver._forkserver, []
    ensure_running = server.ensure_running

    def kill_when_ensured() -> None:
        """Kill it in the moment between the last look at it and the request for a worker."""
        ensure_running()
        if len(killed) < deaths:
            killed.append(server._forkserver_pid)
            os.kill(killed[-1], signal.SIGKILL)
            os.waitid(os.P_PID, killed[-1], os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(server, "ensure_running", kill_when_ensured)
    options, source = RunOptions(digits_root, store.root), FixedJobs(jobs[:2])
    if deaths == pool.START_TRIES:
        with pytest.raises(WorkerDied, match="died as often as it started"):
            run_pool(source, options, 1, notes)
        assert store.run_ids() == []
    else:
        records = run_pool(source, options, 1, notes)
        assert [record.status for record in records] == [Status.DONE] * 2
    assert len(set(killed)) == deaths


@pytest.mark.skipif(pool.START_METHOD != "forkserver", reason="there is no fork server")
def test_a_fork_server_that_takes_its_time_to_die(
    jobs: list[Job], digits_root: Path, store: Store, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was killed still counts as alive for a moment, and answers no more."""
    connect, dead_at = forkserver.connect_to_new_process, time.monotonic() + 1.0

    def connect_to_dying(fds: list[int]) -> tuple[int, int]:
        if time.monotonic() < dead_at:
            raise ConnectionResetError
        return connect(fds)

    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_to_dying)
    (record,) = run_pool(FixedJobs(jobs[:1]), RunOptions(digits_root, store.root), 1, notes)
    assert record.status is Status.DONE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process")
def test_no_run_counts_the_memory_of_another(
    troubled: str, digits_root: Path, store: Store, notes: Notes
) -> None:
    jobs = jobs_of(troubled, digits_root, (0, 1), trouble="keep", on="0")
    records = run_pool(FixedJobs(jobs), RunOptions(digits_root, store.root), 1, notes)
    first, second = (record.cost.peak_memory_bytes for record in records)
    assert first is not None and second is not None
    assert first - second > 5 * 10**8


def test_a_crash_does_not_replace_a_good_record(
    troubled: str, digits_root: Path, store: Store, notes: Notes
) -> None:
    (job,) = jobs_of(troubled, digits_root, (1,), trouble="kill", on="1")
    store.write(new_record(job, Status.DONE, details={"kept": True}))
    options = RunOptions(digits_root, store.root, not_before=time.time() + 1)
    (record,) = run_pool(FixedJobs([job]), options, 1, notes)
    assert record.status is Status.FAILED
    stored = store.record(job.run_id)
    assert stored is not None and stored.done
    assert stored.details == {"kept": True}


class Releasing(Notes):
    """Gives a lock back when it was seen that another process has the job."""

    def __init__(self, lock: Lock) -> None:
        super().__init__()
        self.lock = lock

    def progressed(self, job: Job, progress: Values) -> None:
        super().progressed(job, progress)
        if progress["stage"] == "run by another process":
            self.lock.release()


def test_a_job_of_another_process_is_looked_at_again(
    troubled: str, digits_root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "RETRY_SECONDS", 0.1)
    (job,) = jobs_of(troubled, digits_root, (0,))
    lock = store.lock(job.run_id)
    assert lock.acquire()
    display = Releasing(lock)
    (record,) = run_pool(FixedJobs([job]), RunOptions(digits_root, store.root), 1, display)
    assert record.status is Status.DONE
    assert "run by another process" in display.stages
    assert display.started_jobs == [job.run_id]  # shown once, however often it was tried


class Checking(Notes):
    """Looks into the store when a job is about to be tried again."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def progressed(self, job: Job, progress: Values) -> None:
        super().progressed(job, progress)
        if progress["stage"] == "starting again":
            assert self.store.record(job.run_id) is None


@pytest.mark.parametrize(
    ("trouble", "retries", "resumes"), [("error", 1, 0), ("exit", 0, 1), ("kill", 0, 1)]
)
def test_a_run_that_is_tried_again_leaves_no_trace_of_its_failure(
    troubled: str,
    digits_root: Path,
    store: Store,
    tmp_path: Path,
    trouble: str,
    retries: int,
    resumes: int,
) -> None:
    note = str(tmp_path / "note")
    (job,) = jobs_of(troubled, digits_root, (0,), trouble=trouble, note=note)
    options, display = RunOptions(digits_root, store.root), Checking(store)
    (record,) = run_pool(FixedJobs([job]), options, 1, display, retries, resumes)
    assert record.status is Status.DONE
    assert "starting again" in display.stages
    assert display.started_jobs == display.finished_jobs == [job.run_id]


def test_the_failure_of_the_last_try_is_stored(
    troubled: str, digits_root: Path, store: Store, notes: Notes
) -> None:
    """An error counts as a try, and no number of resumes helps against it."""
    (job,) = jobs_of(troubled, digits_root, (0,), trouble="error", on="0")
    options = RunOptions(digits_root, store.root)
    (record,) = run_pool(FixedJobs([job]), options, 1, notes, retries=1, resumes=5)
    assert notes.stages.count("starting again") == 1
    stored = store.record(job.run_id)
    assert stored is not None and stored.failure is not None
    assert stored.failure.message == "RuntimeError: made to fail"
    assert stored.failure == record.failure


def failed(job: Job, kind: str) -> Record:
    return new_record(job, Status.FAILED, failure=Failure(kind, "made up"))


def test_retries_and_resumes_are_counted_apart(jobs: list[Job]) -> None:
    job = jobs[0]
    died, error = failed(job, "worker_died"), failed(job, "error")
    attempt = Attempt(job, retries=1, resumes=2)
    finals = [attempt.final]
    assert not attempt.should_retry(new_record(job, Status.DONE))
    assert [attempt.should_retry(died) for _ in range(2)] == [True, True]
    assert attempt.should_retry(error)
    assert [*finals, attempt.final] == [False, True]
    assert not attempt.should_retry(error)
    assert not Attempt(job, retries=0, resumes=9).should_retry(error)
    # With no resumes left, a retry serves a killed worker too.
    assert Attempt(job, retries=1, resumes=0).should_retry(died)


class Steering(FixedJobs):
    """Stops the first job after its second epoch, and remembers what it was asked."""

    def __init__(self, jobs: list[Job]) -> None:
        super().__init__(jobs)
        self.asked: list[tuple[str, object]] = []
        self.finished: list[tuple[str, Status]] = []

    def progress(self, job: Job, progress: Values) -> str | None:
        self.asked.append((job.run_id, progress.get("epoch")))
        stop = job is self.jobs[0] and progress.get("epoch") == 2
        return "it falls behind" if stop else None

    def finish(self, job: Job, record: Record) -> None:
        self.finished.append((job.run_id, record.status))


@pytest.mark.parametrize("isolate", [True, False])
def test_a_source_can_stop_a_job(
    troubled: str, digits_root: Path, store: Store, notes: Notes, isolate: bool
) -> None:
    jobs = jobs_of(troubled, digits_root, (0, 1))
    source = Steering(jobs)
    options = RunOptions(digits_root, store.root, steered=True, isolate=isolate)
    stopped, done = run_pool(source, options, 1, notes)
    assert (stopped.status, done.status) == (Status.PRUNED, Status.DONE)
    assert stopped.details["reason"] == "it falls behind"
    ids = [job.run_id for job in jobs]
    assert source.finished == [(ids[0], Status.PRUNED), (ids[1], Status.DONE)]
    epochs = {run: [e for r, e in source.asked if r == run and e] for run in ids}
    assert epochs == {ids[0]: [1, 2], ids[1]: [1, 2, 3]}


def test_a_source_is_not_asked_where_runs_do_not_wait_for_it(
    troubled: str, digits_root: Path, store: Store, notes: Notes
) -> None:
    source = Steering(jobs_of(troubled, digits_root, (0,)))
    (record,) = run_pool(source, RunOptions(digits_root, store.root, isolate=False), 1, notes)
    assert record.status is Status.DONE
    assert source.asked == []
    assert notes.stages.count("troubled") == 3


class Hesitating(FixedJobs):
    """Has nothing to hand out at first, and fails when it gets the second record."""

    asked = 0
    ended = 0

    def next(self) -> Job | None:
        self.asked += 1
        return super().next() if self.asked > 2 else None

    def finish(self, job: Job, record: Record) -> None:
        self.ended += 1
        if self.ended == 2:
            raise RuntimeError("enough")


@pytest.mark.parametrize("isolate", [True, False])
def test_a_source_may_have_nothing_yet_and_may_end_it_all(
    troubled: str,
    digits_root: Path,
    store: Store,
    notes: Notes,
    isolate: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "SOURCE_SECONDS", 0.05)
    source = Hesitating(jobs_of(troubled, digits_root, (0, 1, 2)))
    with pytest.raises(RuntimeError, match="enough"):
        run_pool(source, RunOptions(digits_root, store.root, isolate=isolate), 1, notes)
    assert len(list(store.records())) == 2
    assert not multiprocessing.active_children()


def test_without_isolation_a_failed_run_is_tried_again_too(
    troubled: str, digits_root: Path, store: Store, tmp_path: Path, notes: Notes
) -> None:
    note = str(tmp_path / "note")
    (job,) = jobs_of(troubled, digits_root, (0,), trouble="error", note=note)
    options = RunOptions(digits_root, store.root, isolate=False)
    first = run_job(job, options, lambda progress: None, final=False)
    assert first.status is Status.FAILED
    assert store.record(job.run_id) is None
    Path(note).unlink()
    (record,) = run_pool(FixedJobs([job]), options, 1, notes, retries=1)
    assert record.status is Status.DONE


def descendants(process: int) -> list[int]:
    """List the processes below one, as the kernel sees it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    found = [process]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found[1:]


def alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2][1] != "Z"
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_nothing_outlives_the_launcher(
    site: Path, digits_root: Path, tmp_path: Path, wait_until: Callable[..., Any], how: str
) -> None:
    """Whatever ends the launcher; and what it runs is its own code, wherever it was started."""
    script, trap, results = (tmp_path / name for name in ("launcher.py", "trap", "results"))
    script.write_text(LAUNCHER)
    for name in ("bench", "methods", "datasets"):
        (trap / name).mkdir(parents=True)
        (trap / name / "__init__.py").write_text("raise SystemExit('the wrong code')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(site)])}
    launcher = subprocess.Popen(
        [sys.executable, script, digits_root, results],
        cwd=trap,
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    store = Store(results)

    def waiting() -> list[int]:
        assert launcher.poll() is None
        runs = [path.name for path in store.work.glob("*")]
        ready = any(store.progress(run).get("stage") == "waiting" for run in runs)
        return descendants(launcher.pid) if ready else []

    processes = wait_until(waiting)
    assert len(processes) >= 4  # resource tracker, fork server, worker, fit
    if how == "killed":
        launcher.kill()
    else:  # as a terminal does it: the signal reaches every process
        os.killpg(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate()
    assert err.count("Traceback") == (how == "interrupted")  # the launcher's own, and no other
    assert "wrong code" not in err
    wait_until(lambda: not any(map(alive, processes)))


def test_default_workers(digits_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    lenets = jobs_of("erm", digits_root, tuple(range(5)))
    assert default_workers(lenets) == 3
    assert default_workers(lenets[:2]) == 2
    resnet = {"name": "resnet18", "pretrained": False}
    other = replace(lenets[0], config=replace(lenets[0].config, backbone=resnet))
    assert default_workers([*lenets, other]) == 1
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_workers(lenets, "cuda") == 2
    assert default_workers(lenets[:1], "cuda") == 1
    assert default_workers(lenets, "cuda:1") == 1
    assert default_workers(lenets, "cpu") == 3


def test_workers_have_the_threads_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    options = RunOptions(Path("data"), Path("results"))
    assert [share.threads for share in pool._shares(options, 2)] == [3, 3]
    assert [share.threads for share in pool._shares(replace(options, threads=5), 2)] == [5, 5]


def test_photos_use_the_threads_and_lenets_one(
    digits_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (lenet,) = jobs_of("erm", digits_root, (0,))
    other = {"name": "resnet18", "pretrained": False}
    resnet = replace(lenet, config=replace(lenet.config, backbone=other))
    options = RunOptions(Path("data"), Path("results"))
    assert (options.threads_for(lenet), options.threads_for(resnet)) == (1, 8)
    options = replace(options, threads=3)
    assert (options.threads_for(lenet), options.threads_for(resnet)) == (1, 3)


def test_workers_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = RunOptions(Path("data"), Path("results"))
    assert [(s.threads, s.device) for s in pool._shares(options, 3)] == [(2, "cpu")] * 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shares = pool._shares(replace(options, device="cuda"), 3)
    assert [(share.device, share.gpu) for share in shares] == [
        *(("cuda", "0"), ("cuda", "1"), ("cuda", "0"))
    ]
    shares = pool._shares(replace(options, device="cuda:1"), 2)
    assert [(share.device, share.gpu) for share in shares] == [("cuda", "1")] * 2
    assert {share.threads for share in pool._shares(options, 20)} == {1}


def test_a_worker_is_shown_its_own_gpu_alone(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the run begins, and so before anything can touch another one."""
    seen: list[tuple[str | None, str]] = []

    def run(job: Job, options: RunOptions, report: object, *, final: bool) -> str:
        seen.append((os.environ.get("CUDA_VISIBLE_DEVICES"), options.device))
        return "record"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")  # is put back when the test ends
    monkeypatch.setattr(pool, "run_job", run)
    monkeypatch.setattr(pool, "begin_as_child", lambda: None)
    (job,) = jobs_of("erm", digits_root, (0,))
    options = RunOptions(digits_root, tmp_path, device="cuda")
    shares = pool._shares(options, 2)
    ours, theirs = multiprocessing.Pipe()
    for share in (*shares, replace(options, device="cpu")):
        pool._work(theirs, job, share, True)
        assert ours.recv() == "record"
    assert seen == [("GPU-a", "cuda"), ("GPU-b", "cuda"), ("GPU-b", "cpu")]


def test_a_broken_method_does_not_end_the_fork_server() -> None:
    """What its import raises is left to workers, which can say so."""
    code = (
        "import methods.base\n"
        "def broken():\n    raise SystemExit('half-edited')\n"
        "methods.base.load_methods = broken\n"
        "import bench.launch.preload\nprint('lives')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "lives\n", done.stderr
