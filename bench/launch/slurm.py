"""Submitting to SLURM through submitit: claim the runs, copy the code, send the arrays."""

from __future__ import annotations

import getpass
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.execute import Machine
from bench.files import storage_errors
from bench.launch.arrays import Draft, draft_arrays, shared_stage
from bench.launch.ledger import Array, Launch, launches_lock, new_launch_id
from bench.launch.profile import Profile, Resources
from bench.launch.queue import Claim, claims
from bench.launch.scheduler import Cluster
from bench.launch.snapshot import take_snapshot
from bench.launch.task import Task
from bench.plan import Job
from bench.provenance import git_state
from bench.store import Store
from datasets.errors import UsageError

Say = Callable[[str], None]


def submit(
    jobs: Sequence[Job],
    machine: Machine,
    cluster: Cluster,
    profile: Profile,
    retries: int,
    label_digests: Mapping[str, str],
    say: Say,
) -> Launch | None:
    """Submit the jobs that no other launch has claimed; None if that leaves nothing.

    All of it happens under one lock, so that of two launchers on the same grid the second sees
    what the first has claimed. The claim is on disk before SLURM is asked: whatever happens to this
    process, `status` finds what was submitted by the name it was given.
    """
    store = Store(machine.results)
    with launches_lock(store).hold(wait=True):
        taken = claims(store)
        jobs = [job for job in jobs if job.run_id not in taken and _to_do(job, machine, store)]
        if not jobs:
            return None
        launch = prepare_launch(cluster, profile, machine, store, say)
        launch.write_jobs(jobs)
        stages = _missing_stages(jobs, store, machine, label_digests)
        being_made = _being_made(taken, cluster)
        drafts = draft_arrays(
            jobs, profile.resources, stages, being_made, max(1, cluster.largest_array)
        )
        planned = [_planned(launch, number, draft) for number, draft in enumerate(drafts)]
        launch = replace(launch, arrays=tuple(planned))
        launch.write()
        for array, draft in zip(planned, drafts, strict=True):
            after = tuple(sorted({being_made[s] for s in draft.waits_for if s in being_made}))
            sent = _send(launch, replace(array, after=after), draft, machine, retries)
            being_made |= {stage: sent.task(number) for stage, number in sent.makes.items()}
            launch = launch.with_array(sent)
            launch.write()
            waiting = f", after {', '.join(after)}" if after else ""
            say(f"submitted array {sent.job}: {_count(draft)}{waiting}")
    return launch


def _to_do(job: Job, machine: Machine, store: Store) -> bool:
    """Tell whether a run was not finished by another launcher meanwhile."""
    return store.written(job.run_id) < machine.not_before or store.status(job.run_id) != "done"


def prepare_launch(
    cluster: Cluster, profile: Profile, machine: Machine, store: Store, say: Say
) -> Launch:
    """Give a launch its folder and its copy of the code; nothing of it is submitted yet."""
    name = new_launch_id()
    folder = store.launches / name
    with storage_errors(folder):
        folder.mkdir(parents=True)
        created = folder.stat().st_mtime  # by the clock that also dates the records
    code = take_snapshot(folder / "code")
    if code is None:
        say("there is no source tree: jobs run the installed package as it is when they start")
    return Launch(
        id=name,
        folder=folder,
        created=created,
        user=getpass.getuser(),
        cluster=cluster.name,
        profile=profile.name,
        places=machine.arguments(),
        git=git_state(),
        code=str(code or ""),
    )


def _missing_stages(
    jobs: Sequence[Job], store: Store, machine: Machine, label_digests: Mapping[str, str]
) -> dict[str, str]:
    """Give the shared stage of each job, by run id, where it is not on disk."""
    found = {}
    for job in jobs:
        stage = shared_stage(job, label_digests[job.run_id])
        if stage is not None and not _made(store.stages / stage, machine.not_before):
            found[job.run_id] = stage
    return found


def _made(stage: Path, not_before: float) -> bool:
    try:
        return (stage / "stage.json").stat().st_mtime >= not_before
    except FileNotFoundError:
        return False


def _being_made(taken: Mapping[str, Claim], cluster: Cluster) -> dict[str, str]:
    """Give the stages that tasks on this cluster are going to make, and the task of each."""
    return {
        stage: claim.job
        for claim in taken.values()
        if claim.active and claim.job and claim.launch.cluster == cluster.name
        for stage, number in claim.array.makes.items()
        if number == claim.number
    }


def _planned(launch: Launch, number: int, draft: Draft) -> Array:
    return Array(
        name=f"bench-{launch.id}-{number}",
        resources=asdict(draft.resources),
        tasks=tuple(tuple(job.run_id for job in task) for task in draft.tasks),
        makes=dict(draft.makes),
    )


def _send(launch: Launch, array: Array, draft: Draft, machine: Machine, retries: int) -> Array:
    place = replace(machine, device=draft.resources.device)
    tasks = [Task(task, place, retries) for task in draft.tasks]
    return send_array(launch, array, draft.resources, tasks, _count(draft))


def send_array(
    launch: Launch,
    array: Array,
    asked: Resources,
    tasks: Sequence[Callable[[], object]],
    what: str,
) -> Array:
    """Submit the tasks of one array; `what` names them in case SLURM refuses."""
    import submitit
    from submitit.core.utils import FailedJobError

    executor = submitit.AutoExecutor(
        folder=launch.folder / "tasks", cluster="slurm", slurm_max_num_timeout=asked.requeues
    )
    executor.update_parameters(**parameters(asked, array, launch.code))
    try:
        with executor.batch():
            sent = [executor.submit(task) for task in tasks]
    except (FailedJobError, subprocess.CalledProcessError) as refused:
        raise UsageError(
            f"SLURM refused {what}: {refused}",
            f"correct {launch.profile}; what was submitted before stays so, the rest is missing",
        ) from refused
    return replace(array, job=str(sent[0].job_id).split("_")[0])


def parameters(asked: Resources, array: Array, code: str) -> dict[str, Any]:
    """Say it in submitit's words."""
    as_they_are = ("partition", "account", "qos", "constraint", "exclude", "gres")
    further: dict[str, Any] = {"requeue": True, **({"chdir": code} if code else {})}
    setup = list(asked.setup)
    if code:
        setup.append(f"export PYTHONPATH={shlex.quote(code)}${{PYTHONPATH:+:$PYTHONPATH}}")
    # What kills a task outright tells nobody, and neither does a warning (USR2) that comes before
    # it can listen; the shell around it notices and asks for a new start.
    again = (
        'code=$?; if { [ "$code" -eq 137 ] || [ "$code" -eq 140 ]; } && '
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {asked.requeues} ]; '
        'then scontrol requeue "$SLURM_JOB_ID"; fi; exit "$code"'
    )
    parameters: dict[str, Any] = {
        "name": array.name,
        "timeout_min": asked.minutes,
        "cpus_per_task": asked.cpus,
        "slurm_array_parallelism": asked.parallel,
        "slurm_signal_delay_s": asked.signal_seconds,
        "slurm_setup": setup,
        "slurm_teardown": [again],
        "slurm_srun_args": ["--cpus-per-task", str(asked.cpus)],
        **{f"slurm_{key}": value for key in as_they_are if (value := getattr(asked, key))},
    }
    if asked.memory_gb:
        parameters["mem_gb"] = asked.memory_gb
    if asked.gpus:
        parameters["gpus_per_node"] = asked.gpus
    if array.after:
        parameters["slurm_dependency"] = "afterany:" + ":".join(array.after)
    return parameters | {"slurm_additional_parameters": further}


def _count(draft: Draft) -> str:
    runs, tasks = sum(len(task) for task in draft.tasks), len(draft.tasks)
    return f"{runs} run{'s' * (runs != 1)} in {tasks} task{'s' * (tasks != 1)}"
