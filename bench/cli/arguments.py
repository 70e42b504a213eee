"""What the arguments of several verbs mean to the library."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from bench.api import FoundRun, LaunchOptions, Skipped, expand_on_disk, find_run, make_request
from bench.cli.output import log
from bench.cli.parser import DEFAULT_RESULTS
from bench.job import PUBLISHED_SEEDS, Job, parse_names, parse_overrides, parse_seeds
from bench.resources import published_folder
from bench.store import Store
from datasets.catalogue import load_datasets
from datasets.errors import UsageError


def launch_options(arguments: Namespace) -> LaunchOptions:
    """Return how runs are to be carried out; what makes no sense is an error."""
    return LaunchOptions(
        workers=arguments.workers,
        rerun=arguments.rerun,
        retries=arguments.retries,
        cluster=arguments.cluster,
        wait=arguments.cluster is None or arguments.wait,
        keep_models=arguments.keep_models,
        audit=arguments.audit,
        resume=arguments.resume,
        threads=arguments.threads,
        device=arguments.device,
        command=arguments.command,
    )


def expand_jobs(
    arguments: Namespace, *, need_data: bool = True, explicit: bool | None = None
) -> tuple[list[Job], list[Skipped]]:
    """Return the jobs that the arguments name, and which datasets were left out.

    A wrong name or value is an error. Without `need_data` the datasets need not be on disk; with
    it, a missing one is an error if datasets are named one by one, and left out if by `all`:
    `explicit` says which, where the arguments do not.
    """
    _warn_of_many_seeds(arguments.seeds)
    request = make_request(
        arguments.methods,
        arguments.datasets,
        arguments.seeds,
        preset=arguments.preset,
        settings={**_network(arguments), **parse_overrides(arguments.set)},
        quick=arguments.quick,
        results=arguments.results,
        data_root=arguments.data_root,
        allow_subset=getattr(arguments, "allow_subset", False),  # campaigns are of whole data
    )
    if explicit is None:
        explicit = "all" not in [name.strip() for name in arguments.datasets.split(",")]
    return expand_on_disk(request, explicit=explicit, log=log, need_data=need_data)


def _warn_of_many_seeds(seeds: str) -> None:
    """Print what a count means that may have been meant as the number of a seed."""
    count = len(parse_seeds(seeds))
    if "," not in seeds and count > len(PUBLISHED_SEEDS):
        log(
            f"--seeds {count} means {count} runs of every method and dataset, seeds 0 to "
            f"{count - 1}; seed {count} alone is --seed {count}"
        )


def _network(arguments: Namespace) -> dict[str, str]:
    """Return what --backbone, --resolution and --features stand for, in the words of --set."""
    backbone = getattr(arguments, "backbone", None)  # campaigns have neither
    resolution = getattr(arguments, "resolution", None)
    settings = {} if backbone is None else {"backbone.name": backbone}
    settings |= frozen_setting(arguments)
    if resolution is not None:
        names = parse_names(arguments.datasets, tuple(load_datasets()))
        settings |= {f"{name}.resolution": str(resolution) for name in names}
    return settings


def frozen_setting(arguments: Namespace) -> dict[str, str]:
    """Return what --features stands for, in the words of --set."""
    return {"backbone.frozen": "true"} if getattr(arguments, "features", False) else {}


def store_to_read(arguments: Namespace) -> Store:
    """Return the store to read from: the published one, or that of --results.

    A results folder that the user names has to exist; the default one need not.
    """
    results: Path = arguments.results
    if getattr(arguments, "published", False):
        if results != DEFAULT_RESULTS:
            raise UsageError("--published and --results name two stores", "give one of them")
        return published_store()
    return Store(require_results(results))


def require_results(results: Path) -> Path:
    """Return a results folder that is to be read; one that was named has to exist."""
    if results != DEFAULT_RESULTS and not results.is_dir():
        raise UsageError(f"there is no results folder {results}", "correct --results")
    return results


def published_store() -> Store:
    """Return the store of published runs; an installed package has only a table of them."""
    store = Store(published_folder())
    if not store.runs.is_dir():
        raise UsageError(
            f"the published runs are not in {store.root}",
            "they are in a clone of the repository; an installed package has a table of them: "
            "bench.load_results('published')",
        )
    return store


def find_named_run(arguments: Namespace) -> tuple[FoundRun, str]:
    """Return the run that RUN names, and a title that says so if it is a published one."""
    found = find_run(arguments.run, store_to_read(arguments).root)
    run_id = found.record.run_id
    if found.published:
        log(f"{run_id} is a published run")
    return found, run_id + " (published)" * found.published
