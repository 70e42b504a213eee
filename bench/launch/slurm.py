"""Submitting to SLURM through submitit: plan the arrays, copy the code, send and run the tasks."""

from __future__ import annotations

import contextlib
import getpass
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from bench.context import stage_address
from bench.job import Job
from bench.launch.pool import FixedJobs, JobSource, run_pool
from bench.launch.profile import Profile, Resources
from bench.launch.progress import PlainProgress
from bench.launch.queue import (
    Array,
    Launch,
    SubmittedRun,
    launches_lock,
    read_jobs,
    submitted_runs,
)
from bench.launch.scheduler import Cluster
from bench.provenance import PACKAGES, SUBMITTED, git_state, source_root
from bench.record import Status, failed_record
from bench.runner import RunOptions
from bench.store import Store
from datasets.errors import BenchError, UsageError
from datasets.fetch import Log
from datasets.files import atomic_file, storage_errors, to_json
from datasets.lock import Lock, LockBusy
from methods.base import get_method

RESUMES = 3  # how often a run goes on whose process was killed while its task lived
Item = TypeVar("Item")


class TimeLimit(BenchError):
    """A task ran into its time limit as often as it may."""

    kind = "time_limit"


def jobs_of_launch(folder: Path, run_ids: Sequence[str]) -> FixedJobs:
    """Return the source of one task: some jobs of a launch, which are read from its folder."""
    jobs = read_jobs(folder)
    return FixedJobs([jobs[run_id] for run_id in run_ids])


@dataclass(frozen=True)
class ArrayTask:
    """What one task of an array does: a pool, as on a workstation. Small, for it is pickled.

    It can be stopped and started at any time. Nothing is carried from one start to the next but
    what the runs keep themselves: a requeue that was not announced resumes like one that was.
    """

    make_source: Callable[[], JobSource]  # called when it runs
    options: RunOptions
    total: int  # how many jobs there are, for the lines it prints
    workers: int
    retries: int = 0
    lock: Path | None = None  # held while it runs, where others want to know that
    on_complete: Callable[[], object] | None = None  # called when no job is left

    def __call__(self) -> list[str]:
        """Run what is not done yet, and return how it ended; records go to the store."""
        from submitit.core.utils import UncompletedJobError

        source, began = self.make_source(), time.time()
        display = PlainProgress(self.total, Console(stderr=True))
        held = contextlib.nullcontext() if self.lock is None else Lock(self.lock).hold(wait=True)
        try:
            with held:
                tries = self.retries, RESUMES
                records = run_pool(source, self.options, self.workers, display, *tries)
        except UncompletedJobError as refused:  # submitit will not requeue us once more
            if not isinstance(source, FixedJobs):  # a study goes on when more workers come
                raise
            return [record_time_limit(job, self.options, refused, began) for job in source.jobs]
        if self.on_complete is not None:
            self.on_complete()
        return [record.status.value for record in records]

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Return what submitit is to start again: the same task, for its state is on disk."""
        from submitit.core.utils import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)


def record_time_limit(job: Job, options: RunOptions, refused: Exception, began: float) -> str:
    """Store a failure of a run with no result, and none since the task began; return its status."""
    store = Store(options.results)
    error = TimeLimit(
        f"not finished when the task reached its last time limit: {refused}",
        "give it more minutes or requeues in the cluster profile; it goes on from its last epoch",
    )
    try:
        with store.lock(job.run_id).hold(wait=False):
            record = store.record(job.run_id)
            if record is None or (not record.done and store.record_mtime(job.run_id) < began):
                record = failed_record(job, error, began, options.path_arguments())
                store.write(record)
            return record.status.value
    except LockBusy:  # the process that runs it now will store how it ends
        return Status.RUNNING.value


def shared_stage(job: Job) -> str | None:
    """Return the address of the stage that a job asks for first and that others may share."""
    stages = get_method(job.method).stages(job.method_config())
    return stage_address(job, stages[0]) if stages else None


def plan_arrays(
    jobs: Sequence[Job],
    resources: Callable[[Job], Resources],
    stages: Mapping[str, str],
    in_progress: Mapping[str, str],
    largest: int,
    name: str,
) -> tuple[Array, ...]:
    """Sort jobs into arrays called `name` and a number, those that compute shared stages first.

    A stage that several jobs share is computed by one of them. The others are submitted with a
    dependency on its task, so that no GPU waits for another. The dependency is on the end of that
    task, not on its success: should it fail, the next job computes the stage itself.

    `stages` has, by run id, the stage that a job needs and that is not on disk, if there is one;
    `in_progress` has those that tasks submitted earlier compute.
    """
    producers: dict[str, str] = {}
    # A job that is nothing but the stage is done with it soonest, so it goes first.
    for job in sorted(jobs, key=lambda job: not stages.get(job.run_id, "").startswith(job.method)):
        stage = stages.get(job.run_id)
        if stage is not None and stage not in in_progress:
            producers.setdefault(stage, job.run_id)
    kinds: dict[tuple[Resources, str], list[Job]] = {}
    for job in jobs:
        stage = stages.get(job.run_id)
        waits = stage is not None and producers.get(stage) != job.run_id
        # Those that wait do so by dataset: its stages take about as long as each other.
        kinds.setdefault((resources(job), job.dataset if waits else ""), []).append(job)
    planned: list[Array] = []
    for (asked, waiting), members in sorted(kinds.items(), key=lambda kind: bool(kind[0][1])):
        for tasks in chunks(chunks(members, asked.pack), largest):
            needed = {
                stage: number
                for number, packed in enumerate(tasks)
                for job in packed
                if (stage := stages.get(job.run_id)) is not None
            }
            produces, waits_for = ({}, tuple(needed)) if waiting else (needed, ())
            runs = tuple(tuple(job.run_id for job in task) for task in tasks)
            planned.append(Array(f"{name}-{len(planned)}", asked, runs, produces, waits_for))
    return tuple(planned)


def submit(
    jobs: Sequence[Job],
    options: RunOptions,
    cluster: Cluster,
    profile: Profile,
    retries: int,
    log: Log,
) -> Launch | None:
    """Submit the jobs that no other launch has; return none if that leaves nothing.

    All of it happens under one lock, so that of two launchers on the same grid the second sees
    what the first has submitted. The launch is on disk before SLURM is asked: whatever happens to
    this process, `status` finds what was submitted by the name it was given.
    """
    store = Store(options.results)
    with launches_lock(store).hold(wait=True):
        submitted = submitted_runs(store)
        jobs = [job for job in jobs if job.run_id not in submitted]
        jobs = [  # those that no other launcher has finished meanwhile
            job
            for job in jobs
            if store.record_mtime(job.run_id) < options.not_before
            or store.status_of(job.run_id).status is not Status.DONE
        ]
        if not jobs:
            return None
        launch = new_launch(cluster, profile, options, store, log)
        launch.write_jobs(jobs)
        stages, in_progress = _missing_stages(jobs, options), _in_progress(submitted, cluster)
        largest, name = max(1, cluster.largest_array), f"bench-{launch.id}"
        arrays = plan_arrays(jobs, profile.resources, stages, in_progress, largest, name)
        launch = replace(launch, arrays=arrays)
        launch.write()
        for array in arrays:
            found = {in_progress[stage] for stage in array.waits_for if stage in in_progress}
            array = replace(array, depends_on=tuple(sorted(found)))
            place = replace(options, device=array.resources.device)
            tasks = [
                ArrayTask(
                    partial(jobs_of_launch, launch.folder, ids), place, len(ids), len(ids), retries
                )
                for ids in array.tasks
            ]
            sent = send(launch, array, tasks, "run")
            in_progress |= {stage: sent.task(number) for stage, number in sent.produces.items()}
            launch = launch.with_array(sent)
            launch.write()
            waiting = f", after {', '.join(sent.depends_on)}" if sent.depends_on else ""
            log(f"submitted array {sent.job}: {sent.describe('run')}{waiting}")
    return launch


def new_launch(
    cluster: Cluster, profile: Profile, options: RunOptions, store: Store, log: Log
) -> Launch:
    """Return a launch with its folder and its copy of the code; nothing of it is submitted yet."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"  # names sort by time
    folder = store.launches.resolve() / name
    with storage_errors(folder):
        folder.mkdir(parents=True)
        created = folder.stat().st_mtime  # by the clock that also dates the records
    code = take_snapshot(folder / "code")
    if code is None:
        log("there is no source tree: jobs run the installed package as it is when they start")
    return Launch(
        id=name,
        folder=folder,
        created=created,
        user=getpass.getuser(),
        cluster=cluster.name,
        profile=profile.name,
        path_arguments=options.path_arguments(),
        git=git_state(),
        code=str(code or ""),
    )


def take_snapshot(target: Path) -> Path | None:
    """Copy the source tree, edits and new files included, and note its commit.

    Queued jobs run the copy, so that later edits do not reach them. Returns none where there is no
    source tree but an installed package: that is what jobs run then.
    """
    root = source_root()
    if (root / SUBMITTED).exists():  # a job that launches others: its own copy serves them as well
        return root
    if not (root / ".git").exists():
        return None
    state = git_state()
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard", "--"]
    listed = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=True)
    with storage_errors(target):
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # one that was deleted but not committed is still listed
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target / name)
    with atomic_file(target / SUBMITTED) as draft:
        draft.write_text(to_json(asdict(state)))
    return target


def _missing_stages(jobs: Sequence[Job], options: RunOptions) -> dict[str, str]:
    """Return the shared stage of each job, by run id, where it is not on disk."""
    folder, found = Store(options.results).stages, {}
    for job in jobs:
        if (stage := shared_stage(job)) is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            if (folder / stage / "stage.json").stat().st_mtime >= options.not_before:
                continue
        found[job.run_id] = stage
    return found


def _in_progress(submitted: Mapping[str, SubmittedRun], cluster: Cluster) -> dict[str, str]:
    """Return the stages that tasks on this cluster are going to compute, and the task of each."""
    return {
        stage: run.job
        for run in submitted.values()
        if run.active and run.job and run.launch.cluster == cluster.name
        for stage, number in run.array.produces.items()
        if number == run.number
    }


def send(launch: Launch, array: Array, tasks: Sequence[ArrayTask], noun: str) -> Array:
    """Submit the tasks of an array; the noun names what is in them in case SLURM refuses."""
    import submitit
    from submitit.core.utils import FailedJobError

    folder, requeues = launch.folder / "tasks", array.resources.requeues
    options = tasks[0].options
    places = [options.data_root, options.results, launch.folder]
    places += [Path(launch.code)] if launch.code else []
    executor = submitit.AutoExecutor(
        folder,
        cluster="slurm",
        slurm_max_num_timeout=requeues,
        slurm_python=array.resources.python_command(places),
    )
    executor.update_parameters(**submitit_parameters(array, launch.code))
    try:
        with executor.batch():
            sent = [executor.submit(task) for task in tasks]
    except (FailedJobError, subprocess.CalledProcessError) as refused:
        raise UsageError(
            f"SLURM refused {array.describe(noun)}: {refused}",
            f"correct {launch.profile}; what was submitted before stays so, the rest is missing",
        ) from refused
    return replace(array, job=str(sent[0].job_id).split("_")[0])


def submitit_parameters(array: Array, code: str) -> dict[str, object]:
    """Return what an array asks for, under submitit's names."""
    asked = array.resources
    verbatim = ("partition", "account", "qos", "constraint", "exclude", "gres")
    optional = {
        **{f"slurm_{key}": getattr(asked, key) for key in verbatim},
        "mem_gb": asked.memory_gb,
        "gpus_per_node": asked.gpus,
        "slurm_dependency": array.depends_on and "afterany:" + ":".join(array.depends_on),
    }
    path = f"export PYTHONPATH={shlex.quote(code)}${{PYTHONPATH:+:$PYTHONPATH}}"
    # A task that is killed outright cannot ask for a new start, nor can one that is warned (USR2)
    # before it listens; the shell around it notices and asks.
    requeue = (
        'code=$?; if { [ "$code" -eq 137 ] || [ "$code" -eq 140 ]; } && '
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {asked.requeues} ]; '
        'then scontrol requeue "$SLURM_JOB_ID"; fi; exit "$code"'
    )
    return {
        "name": array.name,
        "timeout_min": asked.minutes,
        "cpus_per_task": asked.cpus,
        "slurm_array_parallelism": asked.parallel,
        "slurm_signal_delay_s": asked.signal_seconds,
        "slurm_setup": [*asked.setup, path] if code else [*asked.setup],
        "slurm_teardown": [requeue],
        "slurm_srun_args": ["--cpus-per-task", str(asked.cpus)],
        "slurm_additional_parameters": {"requeue": True, **({"chdir": code} if code else {})},
        **{name: value for name, value in optional.items() if value},
    }


def chunks(items: Sequence[Item], size: int) -> tuple[tuple[Item, ...], ...]:
    """Divide items into tuples of at most that size."""
    return tuple(tuple(items[start : start + size]) for start in range(0, len(items), size))
