"""One way to have jobs carried out, here or on a cluster; `run`, `tune` and campaigns use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.execute import Machine, load_data
from bench.launch.follow import follow
from bench.launch.local import default_workers, run_local
from bench.launch.profile import Profile
from bench.launch.queue import claims
from bench.launch.scheduler import Cluster, find_cluster
from bench.plan import Job
from bench.progress import Steps, watching
from bench.store import Store
from datasets.base import label_digest
from datasets.errors import UsageError


def launch(
    jobs: Sequence[Job],
    machine: Machine,
    *,
    say: Callable[[str], None],
    cluster: Profile | None = None,
    wait: bool = True,
    workers: int | None = None,
    retries: int = 0,
) -> list[dict[str, Any]]:
    """Carry out jobs and return the records of those that ended; failed ones are among them.

    What a cluster has already been asked for is not asked for again, but followed like the rest.

    Args:
        jobs: what to run; those that are done are no harm.
        machine: where data and results are, and the device for worker processes.
        say: tells the user something.
        cluster: where to submit; None runs worker processes on this machine.
        wait: follow submitted jobs to their end; else return at once, with nothing.
        workers: how many processes on this machine; None chooses.
        retries: how often a failed run is tried again.
    """
    store = Store(machine.results)
    where = require_cluster() if cluster is not None else None
    taken = claims(store)
    own = [job for job in jobs if job.run_id not in taken]
    if len(own) < len(jobs):
        what = "followed" if cluster is not None and wait else "left alone"
        say(f"{len(jobs) - len(own)} runs are queued or running on a cluster already: {what}")
    digests = prepare(own, machine)
    if cluster is None or where is None:
        if not own:
            return []
        workers = min(len(own), workers or default_workers(own))
        with watching(len(own)) as watcher:
            return run_local(own, machine, workers, watcher, retries)
    from bench.launch.slurm import submit

    if own:
        label_digests = {job.run_id: digests[_data_key(job)] for job in own}
        submit(own, machine, where, cluster, retries, label_digests, say)
    if not wait:
        say("  -> python -m bench status shows how they are; python -m bench cancel stops them")
        return []
    try:
        with watching(len(jobs)) as watcher:
            return follow(jobs, store, watcher)
    except KeyboardInterrupt:
        say("\nthe submitted runs go on; python -m bench status shows how they are")
        raise


def require_cluster() -> Cluster:
    """Find the cluster, or say that there is none, before anything is prepared for it."""
    found = find_cluster()
    if found is None:
        raise UsageError(
            "SLURM does not answer on this machine (scontrol show config)",
            "run this on a login node of the cluster, or leave out --cluster",
        )
    return found


def prepare(jobs: Sequence[Job], machine: Machine) -> dict[tuple[str, str, bool], str]:
    """Check the data and decode images once, here, before workers start to wait for each other.

    Returns the digest of the labels of each kind of data.
    """
    digests = {}
    steps = Steps()
    try:
        for key, job in {_data_key(job): job for job in jobs}.items():
            data = load_data(job, machine.data_root, steps)
            digests[key] = label_digest({name: part.labels for name, part in data.splits.items()})
    finally:
        steps.close()
    return digests


def _data_key(job: Job) -> tuple[str, str, bool]:
    return job.dataset, str(job.config["dataset"]), job.quick
