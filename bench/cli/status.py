"""`bench status`: what is done, running, unfinished or failed, and studies on a cluster.

Runs are summed up by dataset, method and variant. Single runs are listed where there are few or
where there is something to say of them.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bench.api import count_statuses, log_unreadable, run_row, status_row, survey
from bench.cli.arguments import expand_jobs, store_to_read
from bench.cli.output import job_notes, log, mean_and_spread, print_json, print_table
from bench.commands import GivenCommand, unfinished_commands
from bench.job import shown_split
from bench.launch.progress import describe, result_line
from bench.launch.queue import submitted_runs
from bench.paper.campaigns import CampaignProgress, campaign_progress
from bench.record import Record, Status
from bench.store import RunStatus, Store
from bench.tuning.workers import StudyWorkers, study_workers
from datasets.catalogue import load_datasets
from datasets.dataset import DATASETS
from datasets.errors import UsageError, count_of

STUDY_COLUMNS = ("study", "method", "dataset", "finished", "asked", "array", "queued", "running")
FEW = 30  # runs that are all listed unasked
BEGIN = "python -m bench run --methods erm,nct --datasets cmnist --seeds 1"
CLEAR = "\x1b[2J\x1b[H"  # what a terminal empties its screen by
WORDS = {Status.PREEMPTED: "interrupted", Status.MISSING: "not started"}


def run(arguments: Namespace) -> None:
    """Print the state of a grid, or of everything; with `--watch` again and again."""
    if arguments.watch is None:
        _show(arguments)
        return
    if arguments.json:
        raise UsageError("--watch prints for people, --json for programs", "give one of them")
    if arguments.watch < 1:
        few = f"--watch must be at least 1 second but got {arguments.watch}"
        raise UsageError(few, "e.g. --watch 10")
    methods, datasets = arguments.methods, arguments.datasets
    while True:
        sys.stdout.write(CLEAR if sys.stdout.isatty() else f"{time.strftime('%H:%M:%S')}\n")
        arguments.methods, arguments.datasets = methods, datasets
        if not _show(arguments):
            return
        sys.stdout.flush()
        time.sleep(arguments.watch)


def _show(arguments: Namespace) -> bool:
    """Print how runs stand; return whether any is running or waiting to run."""
    store = store_to_read(arguments)
    workers = study_workers(store.root)
    campaigns: list[CampaignProgress] = []
    if arguments.methods or arguments.datasets:
        arguments.methods = arguments.methods or "all"
        arguments.datasets = arguments.datasets or "all"
        jobs, skipped = expand_jobs(arguments, need_data=False)
        grid = survey(jobs, store, skipped)
        statuses, content = dict(grid.statuses), grid.to_json()
        commands = _commands(store, statuses, {job.run_id for job in jobs})
        wanted = {(job.method, job.dataset) for job in grid.jobs}
        workers = [w for w in workers if (w.method, w.dataset) in wanted]
    else:
        statuses = store.all_statuses({i: run.status for i, run in submitted_runs(store).items()})
        campaigns = _campaign_progress(statuses)
        commands = _commands(store, statuses)
        begun = {run_id for given in commands for run_id in given.runs}
        statuses |= {i: RunStatus(Status.MISSING) for i in sorted(begun - statuses.keys())}
        content = _overview(statuses, store)
        content["campaigns"] = [asdict(campaign) for campaign in campaigns]
    active = any(f.status in (Status.RUNNING, Status.QUEUED) for f in statuses.values())
    if arguments.json:
        studies = [w.to_json() for w in workers if w.active]
        content["unfinished"] = [asdict(given) for given in commands]
        print_json({**content, "studies": studies, "published": arguments.published})
        return active
    what = "published run" if arguments.published else "run"
    _print_summary(statuses, what)
    _print_runs(statuses, store, commands, every=arguments.runs)
    if campaigns:
        rows = [(c.name, c.dataset, f"{c.done} of {c.total}") for c in campaigns]
        print_table("campaigns", ("campaign", "dataset", "done"), rows)
    _print_studies(workers)
    for given in commands:
        _print_command(given)
    return active or any(given.running for given in commands)


def _commands(
    store: Store, statuses: Mapping[str, RunStatus], among: set[str] | None = None
) -> list[GivenCommand]:
    """Return the commands that have runs left, of those named if any are."""

    def ended(run_id: str) -> bool:
        found = statuses.get(run_id)
        state = found.status if found is not None else store.status_of(run_id).status
        return state in (Status.DONE, Status.FAILED)

    found = unfinished_commands(store, ended)
    return [given for given in found if among is None or among & {*given.runs}]


def _overview(statuses: Mapping[str, RunStatus], store: Store) -> dict[str, object]:
    """Describe everything in a results folder as `Grid.to_json` describes a grid."""
    runs = [_named(i, found) | status_row(i, found, store) for i, found in statuses.items()]
    counts = count_statuses(statuses.values())
    return {"total": len(runs), **counts, "runs": runs, "skipped_datasets": []}


def _named(run_id: str, found: RunStatus) -> dict[str, object]:
    """Return what a run is, by its record or else by its id."""
    if found.record is not None:
        return run_row(found.record.job) | {"run_id": run_id}
    method, dataset, seed, _ = run_id.rsplit("-", 3) if run_id.count("-") > 2 else [""] * 4
    number = int(seed[1:]) if seed[1:].isdecimal() else None
    return {"run_id": run_id, "method": method, "dataset": dataset, "seed": number, "variant": ""}


def _campaign_progress(statuses: Mapping[str, RunStatus]) -> list[CampaignProgress]:
    """Return how far each campaign is on the datasets that were run.

    That takes the methods' code and presets, which may be in the middle of an edit while runs go
    on; what is stored has to be shown all the same.
    """
    records = (found.record for found in statuses.values())
    done = {r.run_id: r.job.dataset for r in records if r is not None and r.done}
    try:
        known = [name for name in load_datasets() if name in DATASETS]  # own data is in no table
        run_on = [name for name in known if name in done.values()]
        return campaign_progress(done.keys(), run_on)
    except (Exception, SystemExit) as error:  # whatever a half-edited file may raise
        log(f"campaigns are not counted, for the methods cannot be loaded: {error}")
        return []


def _print_summary(statuses: Mapping[str, RunStatus], what: str) -> None:
    """Print how many runs there are in each state, by dataset, method and variant."""
    versions: dict[tuple[str, str], set[int]] = {}
    for found in statuses.values():
        if found.record is not None:
            job = found.record.job
            versions.setdefault((job.dataset, job.method), set()).add(job.version)
    cells: dict[tuple[str, str, str, str], list[RunStatus]] = {}
    for run_id, found in statuses.items():
        named = _named(run_id, found)
        seed = named["seed"]
        split = shown_split(seed) if isinstance(seed, int) else "test"
        method, dataset = str(named["method"]), str(named["dataset"])
        variant = _variant(found)
        if found.record is not None and len(versions[dataset, method]) > 1:
            variant = f"{variant}, " * bool(variant) + f"version {found.record.job.version}"
        key = dataset, method, variant, split
        cells.setdefault(key, []).append(found)
    rows = []
    for (dataset, method, variant, shown), own in cells.items():
        done = [one.record for one in own if one.record is not None and one.record.done]
        others = [WORDS.get(one.status, one.status.value) for one in own]
        others = [word for word in others if word != Status.DONE]
        counts = [f"{others.count(word)} {word}" for word in dict.fromkeys(others)]
        runs = ", ".join((f"{len(done)} of {len(own)} done", *counts))
        on = "validation " if shown == "val" else ""
        rows.append((dataset, method, variant, runs, on + _result(done) if done else ""))
    found_states = Counter(WORDS.get(one.status, one.status.value) for one in statuses.values())
    order = ("done", "failed", "running", "queued")  # always named; others where there are some
    states = ", ".join(f"{found_states[s]} {s}" for s in dict.fromkeys((*order, *found_states)))
    title = f"{count_of(len(statuses), what)}: {states}"
    if rows:
        print_table(title, ("dataset", "method", "variant", "runs", "mean +- std"), sorted(rows))
    else:
        print(title)
        log(f"nothing was run here yet; {BEGIN} begins")


def _variant(found: RunStatus) -> str:
    """Return what tells a run from others of its method and dataset, besides the seed."""
    if found.record is None:
        return ""
    job = found.record.job
    return job.variant or ", ".join(job_notes(job))


def _result(records: Sequence[Record]) -> str:
    """Return the mean headline figures of runs, as far as they are shown."""
    found = [record.shown_metrics() for record in records]
    titles = {"auroc": "AUROC", "wga": "WGA", "avg": "average"}
    parts = []
    for name, title in titles.items():
        values = [one.get(name) for one in found]
        if any(value is not None for value in values):
            parts.append(f"{title} {mean_and_spread(values)}")
    return ", ".join(parts[:2])


def _print_runs(
    statuses: Mapping[str, RunStatus],
    store: Store,
    commands: Sequence[GivenCommand],
    *,
    every: bool,
) -> None:
    """Print a line a run: for all if they are few, else for those that need a look."""
    waiting = {run_id for given in commands if given.running for run_id in given.runs}
    rows = []
    for run_id, found in statuses.items():
        fine, unbegun = found.status is Status.DONE, found.status is Status.MISSING
        shown = not (fine or unbegun) or found.unreadable or (fine and len(statuses) <= FEW)
        if every or shown:
            state, text = _state(run_id, found, store)
            if found.status is Status.MISSING and run_id in waiting:
                state = "waiting"
            rows.append((run_id, _variant(found), state, text))
    if rows:
        print_table("", ("run", "variant", "state", ""), rows)
    if len(rows) < len(statuses):
        log("--runs lists every run")
    log_unreadable(found.unreadable for found in statuses.values() if found.unreadable)


def _print_command(given: GivenCommand) -> None:
    runs = count_of(len(given.runs), "run")
    began = time.strftime("%d %B, %H:%M", time.localtime(given.created))
    if given.running:
        log(f"at work since {began}, {runs} to go: {given.command}")
    else:
        log(f"unfinished: {runs} of a command of {began}\n  -> to go on: {given.command}")


def _state(run_id: str, found: RunStatus, store: Store) -> tuple[str, str]:
    """Return a run's state and what there is to say about it."""
    if found.unreadable is not None:
        return "unreadable", found.unreadable.reason
    if found.status in (Status.RUNNING, Status.PREEMPTED):
        word = WORDS.get(found.status, found.status.value)
        return word, describe(store.progress(run_id))
    if found.status is Status.MISSING:
        return WORDS[Status.MISSING], ""
    ended = found.status in (Status.DONE, Status.FAILED)
    return found.status, result_line(found.record) if found.record and ended else ""


def _print_studies(workers: Sequence[StudyWorkers]) -> None:
    """Print the studies that a cluster works at, and name those that have no workers any more."""
    active = [w.to_json() for w in workers if w.active]
    if active:
        rows = [[row[column] for column in STUDY_COLUMNS] for row in active]
        print_table("studies with workers on a cluster", STUDY_COLUMNS, rows)
    worked_at = {w.study for w in workers if w.active}
    for w in workers:
        if w.study not in worked_at:
            log(
                f"study {w.study.name} stopped after {w.finished} of {w.trials} trials: the same "
                f"tune command goes on with it; what its workers printed is in {w.launch.folder}"
            )
