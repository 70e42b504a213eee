"""Where jobs run: worker processes on this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.job import Job
    from bench.launch.profile import Profile
    from bench.record import Record
    from bench.runner import RunOptions


def launch(
    jobs: Sequence[Job],
    options: RunOptions,
    *,
    log: Callable[[str], None],
    profile: Profile | None = None,
    wait: bool = True,
    workers: int | None = None,
    retries: int = 0,
    expected: Mapping[str, float] | None = None,
) -> list[Record]:
    """Run jobs and return the records of those that ended; failed ones are among them.

    Without a profile they run in worker processes on this machine; else on that cluster, and
    `wait` follows them to their end. What a cluster has already been asked for is not asked for
    again, but followed like the rest. `expected` has the seconds of runs, by id, where known.
    """
    from bench.launch.pool import FixedJobs, default_workers, run_pool
    from bench.launch.progress import progress_display
    from bench.launch.queue import follow, submitted_runs
    from bench.launch.remaining import WithRemaining
    from bench.launch.scheduler import require_cluster
    from bench.store import Store
    from datasets.errors import count_of

    store = Store(options.results)
    cluster = require_cluster() if profile is not None else None
    submitted = submitted_runs(store)
    own = [job for job in jobs if job.run_id not in submitted]
    if len(own) < len(jobs):
        what = "followed" if profile is not None and wait else "left alone"
        runs = count_of(len(jobs) - len(own), "run")
        are = "is" if len(jobs) - len(own) == 1 else "are"
        log(f"{runs} {are} queued or running on a cluster already: {what}")
    prepare(own, options)
    if profile is None or cluster is None:
        if not own:
            return []
        prepare_features(own, options)
        workers = min(len(own), workers or default_workers(own, options.device))
        with progress_display(len(own)) as shown:
            timed = WithRemaining(shown, expected or {}, workers, log)
            return run_pool(FixedJobs(own), options, workers, timed, retries)
    from bench.launch.slurm import submit

    if own:
        submit(own, options, cluster, profile, retries, log)
    if not wait:
        log("  -> python -m bench status shows how they are; python -m bench cancel stops them")
        return []
    try:
        with progress_display(len(jobs)) as display:
            return follow(jobs, store, display)
    except KeyboardInterrupt:
        log("\nthe submitted runs go on; python -m bench status shows how they are")
        raise


def prepare(jobs: Sequence[Job], options: RunOptions) -> None:
    """Decode the images of the jobs' datasets once, before workers wait for each other."""
    from bench.launch.progress import preparation_bar
    from datasets.catalogue import get_dataset

    kinds = {
        (job.dataset, str(job.config.dataset), job.splits, job.quick, job.data_kind): job
        for job in jobs
    }
    with preparation_bar() as bar:
        for job in kinds.values():
            get_dataset(job.dataset).prepare(
                options.data_root,
                job.dataset_config(),
                bar,
                splits=job.splits,
                quick=job.quick,
                allow_subset=job.data_kind == "subset",
            )


def prepare_features(jobs: Sequence[Job], options: RunOptions) -> None:
    """Compute the features of frozen networks once, on all cores, before workers ask for them."""
    if not any(job.network().frozen for job in jobs):
        return
    import torch

    from bench.features import on_features
    from bench.launch.progress import preparation_bar
    from bench.runner import load_data
    from bench.store import Store

    kinds: dict[object, Job] = {}
    for job in jobs:
        if job.network().frozen:
            config = str(job.config.dataset), str(job.config.backbone)
            kinds.setdefault((job.dataset, *config, job.splits, job.quick), job)
    before = torch.get_num_threads()
    torch.set_num_threads(options.network_threads())
    try:
        with preparation_bar() as bar:
            for job in kinds.values():
                on_features(
                    job,
                    load_data(job, options.data_root),
                    Store(options.results),
                    device=torch.device(options.device),
                    progress=bar,
                    not_before=options.not_before,
                )
    finally:
        torch.set_num_threads(before)
