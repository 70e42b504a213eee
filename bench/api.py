"""The library: what `import bench` offers, and what the command line calls.

A request becomes jobs once, the store is looked at once, what is missing is launched, and the same
`Grid` describes it before and after.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, get_args

from bench.audit import parse_interval
from bench.commands import unfinished_command
from bench.cost import (
    ExpectedCost,
    StageSeconds,
    describe_expected,
    expected_totals,
    stage_seconds,
)
from bench.devices import choose_device
from bench.estimate import estimated_seconds
from bench.job import (
    FIRST_DEVELOPMENT_SEED,
    PUBLISHED_SEEDS,
    Job,
    Request,
    Unsuited,
    expand,
    input_notes,
    locate,
    parse_names,
    parse_seeds,
    require_weights,
)
from bench.launch import launch
from bench.launch.profile import read_profile
from bench.launch.queue import submitted_runs
from bench.record import Record, Status, Unreadable
from bench.resources import PUBLISHED_TABLE, published_folder
from bench.runner import RunOptions, run_job
from bench.store import RunStatus, Store
from datasets.catalogue import get_dataset, load_datasets
from datasets.config import coerce
from datasets.errors import BenchError, DataMissing, UsageError, count_of, did_you_mean
from datasets.fetch import Log, default_data_root, get_command, use_data_root
from datasets.files import Damaged, atomic_file
from methods.base import get_method, load_methods

if TYPE_CHECKING:
    import pandas as pd

    from bench.scoring import Evaluation
    from bench.tuning.summary import Summary

Names = str | Sequence[str]
Seeds = int | str | Sequence[int]
Rerun = Literal["missing", "failed", "always", "never"]
Resume = Literal["same-code", "anyway"]
RERUN: tuple[Rerun, ...] = get_args(Rerun)
COUNTED = (Status.DONE, Status.FAILED, Status.RUNNING, Status.QUEUED, Status.MISSING)


def log_to_stderr(text: str) -> None:
    """Print a line for the user; results go to stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def log_unreadable(runs: Iterable[Unreadable], log: Log = log_to_stderr) -> None:
    """Print which runs are damaged, and what makes each again."""
    for one in runs:
        log(f"damaged: {one.run_id}: {one.reason}\n  -> {one.remedy}")


@dataclass(frozen=True)
class Skipped:
    """A dataset that `all` included but that cannot be run, and the command that would help."""

    name: str
    command: str
    what: str = "not on disk"

    def __str__(self) -> str:
        return f"{self.what}: {self.name}; to get it: {self.command}"


@dataclass(frozen=True)
class LeftOut(Skipped):
    """A method that `all` included but that cannot run on a dataset; `what` is the reason."""

    method: str = ""

    def __str__(self) -> str:
        return f"left out: {self.method} on {self.name}: {self.what}; {self.command}"


@dataclass(frozen=True)
class Grid:
    """Jobs, and how each stands.

    Attributes:
        statuses: by run id.
        expected: what the jobs are expected to cost, by finished runs; none if not asked for.
        remaining: the same of the jobs that have not ended.
        seconds: the expected seconds of each run, by run id, where they can be told.
        estimated: the runs whose seconds come from a short measurement, not from finished runs.
    """

    jobs: tuple[Job, ...]
    store: Store
    statuses: Mapping[str, RunStatus]
    skipped: tuple[Skipped, ...] = ()
    expected: ExpectedCost | None = None
    remaining: ExpectedCost | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    estimated: frozenset[str] = frozenset()

    def records(self) -> list[Record]:
        """Return the records of the runs that are done."""
        found = (self.statuses[job.run_id].record for job in self.jobs)
        return [record for record in found if record is not None and record.done]

    def unreadable(self) -> list[Unreadable]:
        """Return what could not be read of the runs; they count as missing."""
        found = (self.statuses[job.run_id].unreadable for job in self.jobs)
        return [one for one in found if one is not None]

    def to_run(self) -> list[Job]:
        """Return the jobs that are neither done nor failed."""
        ended = (Status.DONE, Status.FAILED)
        return [job for job in self.jobs if self.statuses[job.run_id].status not in ended]

    def counts(self) -> dict[str, int]:
        """Count states; what was interrupted is queued if a cluster has it, else missing."""
        return count_statuses(self.statuses[job.run_id] for job in self.jobs)

    def to_json(self) -> dict[str, object]:
        """Return the content of `plan`, `status` and `run` with `--json`."""
        runs = [
            run_row(job)
            | {"preset": job.preset}
            | status_row(job.run_id, self.statuses[job.run_id], self.store)
            for job in self.jobs
        ]
        content: dict[str, object] = {
            "total": len(self.jobs),
            **self.counts(),
            "runs": runs,
            "skipped_datasets": [
                {"name": s.name, "command": s.command}
                for s in self.skipped
                if not isinstance(s, LeftOut)
            ],
            "left_out": [
                {"method": s.method, "dataset": s.name, "reason": s.what, "remedy": s.command}
                for s in self.skipped
                if isinstance(s, LeftOut)
            ],
        }
        if self.expected is not None:
            for row, job in zip(runs, self.jobs, strict=True):
                row["expected_seconds"] = self.seconds.get(job.run_id)
                row["estimated"] = job.run_id in self.estimated
            totals = {"shared": self.expected.shared, "standalone": self.expected.standalone}
            content["expected_seconds"] = totals
        return content

    def frame(self) -> pd.DataFrame:
        """Return a row for every job: status, settings, and the metrics of what is done."""
        import pandas as pd

        rows = []
        for job in self.jobs:
            found = self.statuses[job.run_id]
            row = run_row(job) | {"status": found.status.value}
            rows.append(row | (result_row(found.record) if found.record else {}))
        return pd.DataFrame(rows)


def run_row(job: Job) -> dict[str, object]:
    """Return what a line about a run begins with."""
    return {name: getattr(job, name) for name in ("run_id", "method", "dataset", "seed", "variant")}


def status_row(run_id: str, found: RunStatus, store: Store) -> dict[str, object]:
    """Return how a run stands, as `--json` has it."""
    ended = found.status in (Status.DONE, Status.FAILED)
    return {
        "status": found.status.value,
        "reason": found.reason,
        "path": str(store.runs / run_id) if ended or found.unreadable else "",
    }


def count_statuses(statuses: Iterable[RunStatus]) -> dict[str, int]:
    """Count states; what was interrupted is queued if a cluster has it, else missing."""
    counts = {status.value: 0 for status in COUNTED}
    for found in statuses:
        status = found.status
        if status is Status.PREEMPTED:
            status = Status.QUEUED if found.submitted else Status.MISSING
        if status in COUNTED:
            counts[status.value] += 1
    return counts


class Wanted(TypedDict, total=False):
    """Which runs, besides methods, datasets and seeds.

    Attributes:
        preset: whose hyperparameters, `paper` or `tuned`.
        settings: changes by `--set` key, such as `{"erm.lr": 0.01}`.
        quick: smoke runs.
        results: where runs are kept; `results` by default.
        data_root: where datasets are; by default $BENCH_DATA or the user's cache.
        allow_subset: use a dataset some of whose images are missing without them; such runs are
            labelled, and kept out of the paper's tables.
    """

    preset: str
    settings: Mapping[str, object] | None
    quick: bool
    results: Path | str
    data_root: Path | str | None
    allow_subset: bool


def make_request(
    methods: Names = "all", datasets: Names = "all", seeds: Seeds = 5, **wanted: Unpack[Wanted]
) -> Request:
    """Check names and put a request together.

    Args:
        methods: names, comma separated or as a list; `all` is every method.
        datasets: likewise.
        seeds: a count (5 is 0..4), or the seeds themselves as a list or as text (`3,7`).
        wanted: see `Wanted`.
    """
    use_data_root(_data_root(wanted.get("data_root")))
    named = parse_names(_joined(methods), tuple(load_methods()))
    on = parse_names(_joined(datasets), tuple(load_datasets()))
    return Request(
        methods=tuple(get_method(name).name for name in named),
        datasets=tuple(get_dataset(name).name for name in on),
        seeds=_seeds(seeds),
        data_root=_data_root(wanted.get("data_root")),
        preset=wanted.get("preset", "paper"),
        overrides=_overrides(wanted.get("settings")),
        quick=wanted.get("quick", False),
        presets=Path(wanted.get("results", "results")) / "presets",
        all_methods="all" in parse_names(_joined(methods), ("all",)),
        allow_subset=wanted.get("allow_subset", False),
    )


def _seeds(given: Seeds) -> tuple[int, ...]:
    return parse_seeds(
        str(given) if isinstance(given, int | str) else ",".join(map(str, given)) + ","
    )


def _data_root(given: Path | str | None) -> Path:
    return default_data_root() if given is None else Path(given)


def _overrides(settings: Mapping[str, object] | None) -> dict[str, str]:
    return {key: setting_text(value) for key, value in (settings or {}).items()}


def _joined(names: Names) -> str:
    return names if isinstance(names, str) else ",".join(names)


def setting_text(value: object) -> str:
    """Write a value as `--set` reads it."""
    if isinstance(value, list | tuple):
        return ",".join(setting_text(item) for item in value)
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def expand_on_disk(
    request: Request, *, explicit: bool, log: Log, need_data: bool = True
) -> tuple[list[Job], list[Skipped]]:
    """Expand a request: fetch the data that can be fetched, and leave out what cannot be run.

    Any wrong name or value is an error before anything is fetched. A dataset named explicitly,
    rather than by `all`, and missing is an error, and so is having nothing to run at all. Without
    `need_data`, what is missing is only listed.
    """
    found = locate(request)
    unsuited: list[Unsuited] = []
    jobs = expand(request, found, unsuited)
    left_out = [LeftOut(own.dataset, own.remedy, own.reason, own.method) for own in unsuited]
    root = request.data_root
    missing = [name for name in request.datasets if found[name] is None]
    if need_data:
        missing = _after_fetching(missing, root, explicit, log)
    skipped = [*left_out, *(Skipped(name, get_command(name, root)) for name in missing)]
    if not need_data:
        return jobs, skipped
    if missing and explicit:
        looked = f"not on disk: {', '.join(missing)} (looked in {root})"
        raise DataMissing(looked, _commands(skipped[len(left_out) :]))
    jobs = [job for job in jobs if job.dataset not in missing]
    for name in dict.fromkeys(job.dataset for job in jobs):
        try:
            require_weights((job for job in jobs if job.dataset == name), root)
        except DataMissing:
            if explicit:
                raise
            jobs = [job for job in jobs if job.dataset != name]
            command = get_command("weights", root)
            skipped.append(Skipped(name, command, "ImageNet weights not on disk for"))
    if not jobs and left_out:
        raise UsageError("there is nothing to run: no method suits the data", left_out[0].command)
    if not jobs:
        raise DataMissing("there is nothing to run: no dataset is on disk", _commands(skipped))
    return jobs, skipped


def _after_fetching(missing: list[str], root: Path, explicit: bool, log: Log) -> list[str]:
    """Fetch the missing datasets that fetch themselves; return those still missing."""
    for name in missing:
        dataset = get_dataset(name)
        if dataset.locate(root) is not None:  # fetched together with another
            continue
        try:
            dataset.fetch(root, log)
        except BenchError as error:  # no network, or a data root that only others may write
            if explicit:
                raise
            log(error.message)
            break
    return [name for name in missing if get_dataset(name).locate(root) is None]


def _commands(skipped: Sequence[Skipped]) -> str:
    return "; ".join(dict.fromkeys(entry.command for entry in skipped))


def survey(
    jobs: Sequence[Job], store: Store, skipped: Sequence[Skipped] = (), *, expected: bool = False
) -> Grid:
    """Look at the runs of jobs, each once; `expected` adds what they should cost."""
    submitted = {run_id: run.status for run_id, run in submitted_runs(store).items()}
    statuses = store.statuses((job.run_id for job in jobs), submitted)
    grid = Grid(tuple(jobs), store, statuses, tuple(skipped))
    if not expected:
        return grid
    known, guessed = known_stages(jobs, store)
    return replace(
        grid,
        expected=_totals(jobs, known, guessed),
        remaining=_totals(grid.to_run(), known, guessed),
        seconds={run_id: sum(stages.values()) for run_id, stages in known.items()},
        estimated=guessed,
    )


def _totals(
    jobs: Sequence[Job], known: Mapping[str, StageSeconds], guessed: Set[str]
) -> ExpectedCost:
    """Return what jobs cost together, and how many of them by an estimate."""
    return replace(
        expected_totals(jobs, known), estimated=sum(job.run_id in guessed for job in jobs)
    )


def _finished(store: Store) -> list[Record]:
    """Return the runs that tell what others cost: those finished here, and the published ones."""
    roots = dict.fromkeys((store.root.resolve(), published_folder().resolve()))
    return [record for root in roots for record in Store(root).records() if record.done]


def known_stages(
    jobs: Sequence[Job], store: Store, options: RunOptions | None = None
) -> tuple[dict[str, StageSeconds], frozenset[str]]:
    """Return what the stages of runs took in finished runs like them, or an estimate.

    Second are the ids of the runs that no finished run tells the cost of, which are estimated: for
    the threads and the device of `options`, or what runs have by default.
    """
    finished = _finished(store)
    known = stage_seconds(jobs, finished)
    rest = [job for job in jobs if job.run_id not in known]
    how = options or RunOptions(Path(), store.root, device=choose_device(None) if rest else "cpu")

    def threads(job: Job) -> int:
        """Return the threads of a network; the head on a frozen one has fewer."""
        return how.network_threads() if job.network().frozen else how.threads_for(job)

    guessed = estimated_seconds(rest, finished, threads, device=how.device)
    return known | guessed, frozenset(guessed)


def plan(
    methods: Names = "all", datasets: Names = "all", seeds: Seeds = 5, **wanted: Unpack[Wanted]
) -> Grid:
    """Return what `run` would do with the same arguments, and its expected cost.

    Nothing is run, and datasets need not be on disk. See `make_request` for the arguments.

    >>> import bench
    >>> grid = bench.plan(methods="erm,nct", datasets="cmnist", seeds=2, results="nowhere")
    >>> [job.run_id for job in grid.jobs]  # doctest: +NORMALIZE_WHITESPACE
    ['erm-cmnist-s0-6bd327180d', 'erm-cmnist-s1-952869a555',
     'nct-cmnist-s0-3177f4e2c8', 'nct-cmnist-s1-79a608f956']
    >>> grid.counts()["missing"]
    4
    """
    request = make_request(methods, datasets, seeds, **wanted)
    jobs, skipped = expand_on_disk(request, explicit=False, log=log_to_stderr, need_data=False)
    return survey(jobs, Store(Path(wanted.get("results", "results"))), skipped, expected=True)


def run(
    methods: Names = "all",
    datasets: Names = "all",
    seeds: Seeds = 5,
    *,
    workers: int | None = None,
    rerun: Rerun = "missing",
    retries: int = 0,
    cluster: Path | str | None = None,
    wait: bool = True,
    keep_models: bool = False,
    isolate: bool | None = None,
    audit: str | None = None,
    resume: Resume = "same-code",
    threads: int | None = None,
    device: str | None = None,
    log: Log = log_to_stderr,
    **wanted: Unpack[Wanted],
) -> Grid:
    """Run what is asked for and not yet done, and return how all of it stands.

    A run that fails is one entry with status `failed`, not an exception.

    Args:
        methods: see `make_request`, as for the next two and `wanted`.
        datasets: which.
        seeds: which.
        workers: processes on this machine; by default as many as make sense.
        rerun: which runs to carry out: those without a result, those that failed, all, or none.
        retries: how often a failed run is tried again.
        cluster: a SLURM profile to submit to.
        wait: whether to follow submitted runs to their end.
        keep_models: keep each run's weights, for `load_model`.
        isolate: whether fits run in processes of their own; by default they do, unless a method was
            defined in the program itself (a notebook, say), which no other process can import.
        audit: when the harness looks at the model on true groups: `all` epochs, `"N"` for every
            N-th and the last, `last`, or `off`; by default all, for photos every fifth.
        resume: whether an unfinished run that other code began starts again, or goes on `anyway`.
        threads: cores of one run on a CPU, LeNets aside, which have one; by default
            OMP_NUM_THREADS, or the workers share the cores.
        device: `cpu`, `cuda` (each worker on a GPU of its own) or `cuda:1`; by default the GPUs
            where there are any.
        log: prints a line.
    """
    how = LaunchOptions(
        *(workers, rerun, retries, cluster, wait, keep_models, isolate, audit, resume, threads),
        device=device,
    )
    request = make_request(methods, datasets, seeds, **wanted)
    explicit = "all" not in _joined(datasets).split(",")
    jobs, skipped = expand_on_disk(request, explicit=explicit, log=log)
    store = Store(Path(wanted.get("results", "results")))
    return run_jobs(jobs, request.data_root, store, how, skipped=skipped, log=log)


@dataclass(frozen=True)
class LaunchOptions:
    """How runs are carried out; `run` explains each.

    Attributes:
        command: what was typed, for `status` to name where runs are left unfinished.
    """

    workers: int | None = None
    rerun: Rerun = "missing"
    retries: int = 0
    cluster: Path | str | None = None
    wait: bool = True
    keep_models: bool = False
    isolate: bool | None = None
    audit: str | None = None
    resume: Resume = "same-code"
    threads: int | None = None
    device: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        """Refuse what makes no sense, before anything is fetched."""
        coerce(self.rerun, Rerun, "--rerun")
        coerce(self.resume, Resume, "--resume")
        for name in ("workers", "threads"):
            if (number := getattr(self, name)) is not None and number < 1:
                few = f"--{name} must be at least 1 but got {number}"
                raise UsageError(few, f"e.g. --{name} 2")
        if self.audit is not None:
            parse_interval(self.audit)
        if self.retries < 0:
            raise UsageError(f"--retries cannot be negative but got {self.retries}")
        if self.cluster is None:
            if self.device is not None:
                choose_device(self.device)
            return
        read_profile(Path(self.cluster))
        if self.workers is not None:
            raise UsageError(
                "--workers is about processes on this machine, --cluster about other machines",
                "give one of them; `pack` and `parallel` in the profile say how many run at once",
            )
        if self.device is not None:
            raise UsageError(
                "--device is about this machine, --cluster about other machines",
                "give one of them; `gpus` or `gres` in the profile say which jobs have a GPU",
            )


def run_jobs(
    jobs: Sequence[Job],
    data_root: Path,
    store: Store,
    how: LaunchOptions,
    *,
    skipped: Sequence[Skipped] = (),
    log: Log = log_to_stderr,
) -> Grid:
    """Run what of the jobs is wanted and not yet done; return how all of them stand."""
    from bench.launch.pool import default_workers

    store.check_writable()
    for entry in skipped:
        log(str(entry))
    grid = survey(jobs, store, skipped)
    todo = [job for job in jobs if wanted(grid.statuses[job.run_id], how.rerun)]
    options = RunOptions(
        data_root=data_root.resolve(),
        results=store.root.resolve(),
        device=choose_device(how.device),
        keep_models=how.keep_models,
        not_before=time.time() if how.rerun == "always" else 0.0,
        audit_every=None if how.audit is None else parse_interval(how.audit),
        resume_anyway=how.resume == "anyway",
        threads=how.threads,
    )
    log_unreadable(grid.unreadable(), log)
    for note in input_notes(jobs):
        log(note)
    log(f"{count_of(len(jobs), 'run')}: {len(jobs) - len(todo)} not to be run, {len(todo)} to run")
    if not todo:
        return grid
    known: dict[str, StageSeconds] = {}
    if how.cluster is None:
        known, guessed = known_stages(todo, store, options)
        workers = min(len(todo), how.workers or default_workers(todo, options.device))
        log(describe_expected(_totals(todo, known, guessed), known, workers))
    # A method that was defined in the running program itself is in no other process.
    modules = {type(get_method(job.method)).__module__ for job in todo}
    isolate = "__main__" not in modules if how.isolate is None else how.isolate
    with unfinished_command(store, how.command, [job.run_id for job in todo]):
        if not isolate:
            here = replace(options, isolate=False)
            records = [run_job(job, here, lambda _: None) for job in todo]
        else:
            records = launch(
                *(todo, options),
                log=log,
                profile=read_profile(Path(how.cluster)) if how.cluster is not None else None,
                wait=how.wait,
                workers=how.workers,
                retries=how.retries,
                expected={run_id: sum(stages.values()) for run_id, stages in known.items()},
            )
    ended = {record.run_id: RunStatus(record.status, record) for record in records}
    unknown = [job for job in todo if job.run_id not in ended]  # submitted and not waited for
    later = survey(unknown, store).statuses if unknown else {}
    return replace(grid, statuses={**grid.statuses, **later, **ended})


def wanted(found: RunStatus, rerun: Rerun) -> bool:
    """Return whether a run found so is to be carried out, or followed where it is."""
    if found.submitted or rerun == "always":
        return rerun != "never"
    if rerun == "failed":
        return found.status is Status.FAILED
    ended = found.status in (Status.DONE, Status.FAILED)
    return rerun == "missing" and (found.interrupted or not ended)


def tune(
    method: str,
    dataset: str,
    *,
    trials: int = 50,
    seed: int = FIRST_DEVELOPMENT_SEED,
    prune: bool = False,
    workers: int = 1,
    log: Log = log_to_stderr,
    **wanted: Unpack[Wanted],
) -> Summary:
    """Search a method's hyperparameters on a dataset under the method's own tier.

    The best configuration becomes the preset `tuned`: `bench.run(..., preset="tuned")`.

    Args:
        method: whose.
        dataset: on which.
        trials: how many finished trials the study is to have.
        seed: of the trials' training; development seeds begin at 100.
        prune: stop trials that lag behind the others.
        workers: how many trials run at once.
        log: prints a line.
        wanted: settings (they hold in every trial), preset (`paper` or a kind of data, for what is
            not searched), quick, results, data_root.
    """
    from bench.tuning import source

    tuning = source.Tuning(
        method=method,
        dataset=dataset,
        data_root=_data_root(wanted.get("data_root")),
        results=Path(wanted.get("results", "results")),
        trials=trials,
        seed=seed,
        quick=wanted.get("quick", False),
        prune=prune,
        preset=wanted.get("preset", "paper"),
        overrides=_overrides(wanted.get("settings")),
    )
    return source.tune(tuning, workers=workers, log=log)


def report(
    out: Path | str = "report",
    *,
    results: Path | str = "results",
    published: bool = False,
    seeds: Seeds = PUBLISHED_SEEDS,
    data_root: Path | str | None = None,
    methods: Names = (),
    datasets: Names = (),
    tables: Names = (),
    external: Sequence[Evaluation] = (),
    pdf: bool = False,
) -> Path:
    """Write tables, figures and one page from stored runs; return the page.

    Args:
        out: the folder to write to.
        results: whose runs to show.
        published: show the published runs instead.
        seeds: those that tables average, of the published ones; 5 are the paper's.
        data_root: where datasets are, for counts and pictures; they need not be there.
        methods: the only ones to show; all of them if none is named.
        datasets: likewise.
        tables: likewise, by the names of their files.
        external: what `bench.evaluate` returned, for a table with rows marked external.
        pdf: also build `main.pdf`, which needs pdflatex.
    """
    from bench import paper, reporting

    shown_methods = _known_names(methods, "method", tuple(load_methods()))
    limits = reporting.Limits(
        (*shown_methods, *(one.name for one in external)) if shown_methods else (),
        _known_names(datasets, "dataset", tuple(load_datasets())),
    )
    wanted = () if _joined(tables) in ("", "all") else parse_names(_joined(tables), ())
    builders = reporting.choose_tables(paper.TABLES, wanted, paper.reference())
    if external:
        builders = (*builders, reporting.external_results)

    shown = _seeds(seeds)
    if others := set(shown) - set(PUBLISHED_SEEDS):
        known = f"{PUBLISHED_SEEDS[0]} to {PUBLISHED_SEEDS[-1]}"
        raise UsageError(f"no table shows seed {min(others)}", f"published seeds are {known}")
    store = Store(published_folder() if published else Path(results))
    given = reporting.ReportInput(
        runs=reporting.collect(store, paper.variant_specs(), shown),
        data_root=_data_root(data_root),
        reference=paper.reference(),
        limits=limits,
        external=external,
    )
    log_unreadable(given.runs.unreadable)
    formats = ("svg", "pdf") if pdf else ("svg",)
    page = reporting.build(
        Path(out), given, builders, paper.FIGURES, formats, outline=paper.outline()
    )
    if pdf:
        reporting.build_pdf(Path(out))
    return page


def _known_names(given: Names, what: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that are given, in their order; none stands for all of them."""
    text = _joined(given)
    names = () if text in ("", "all") else parse_names(text, known)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"unknown {what} '{name}'{hint}", f"choose from {', '.join(known)}")
    return names


def load_results(source: Path | str = "published") -> pd.DataFrame:
    """Return stored results as a table with a row for each run.

    Columns: what was run (`run_id`, `method`, `version`, `dataset`, `protocol`, `variant`, `seed`,
    `preset`, `quick`, `data_kind`, `train_groups`, `val_groups`), `status`, every metric of both
    splits as `val_...` and `test_...`, and what it took (`seconds`, `cpu_seconds`, `image_passes`).

    Args:
        source: `published` for the results that come with the package, or a results folder.

    >>> import bench
    >>> table = bench.load_results("published")
    >>> main = table[(table.variant == "") & table.seed.between(0, 4) & (table.dataset == "cmnist")]
    >>> print(round(main[(main.method == "nct") & (main.version == 2)].test_wga.mean(), 1))
    74.6
    """
    import pandas as pd

    if str(source) == "published":
        return pd.read_csv(published_folder() / PUBLISHED_TABLE).fillna({"variant": ""})
    store = Store(Path(source))
    if not store.runs.is_dir():
        raise UsageError(f"there are no results in {source}", "give a results folder, or published")
    return results_table(store)


def results_table(store: Store) -> pd.DataFrame:
    """Return the runs of a store as `load_results` does."""
    import pandas as pd

    found = list(store.read_all())
    log_unreadable(one for one in found if isinstance(one, Unreadable))
    return pd.DataFrame([result_row(one, store) for one in found if isinstance(one, Record)])


def result_row(record: Record, store: Store | None = None) -> dict[str, object]:
    """Return a run as a row of a table; what an older schema lacks is computed from the store."""
    job, cost = record.job, record.cost
    row = run_row(job) | {
        "run_id": record.run_id,
        "version": job.version,
        "protocol": job.protocol,
        "preset": job.preset,
        "quick": job.quick,
        "data_kind": job.data_kind,
        "train_groups": job.supervision.train_groups,
        "val_groups": job.supervision.val_groups,
        "status": record.status.value,
    }
    for split in ("val", "test"):
        values = dict(record.metrics(split).values)
        if values and "worst_class" not in values and store is not None:
            values["worst_class"] = _worst_class(record.run_id, split, store)
        row |= {f"{split}_{name}": value for name, value in values.items()}
    return row | {
        "seconds": cost.standalone(),
        "cpu_seconds": cost.cpu(),
        "image_passes": cost.image_passes(),
        "commit": record.provenance.git.commit,
    }


def _worst_class(run_id: str, split: str, store: Store) -> float | None:
    """Compute the accuracy of the worst class from a run's predictions."""
    try:
        table = store.predictions(run_id, ["split", "y", "pred"])
    except Damaged as error:  # of an earlier version, whose records have no checksums
        log_to_stderr(f"{error.message}: worst_class is not known")
        table = None
    if table is None:
        return None
    own = table[table["split"] == split]
    return float(100.0 * (own["y"] == own["pred"]).groupby(own["y"]).mean().min())


@dataclass(frozen=True)
class FoundRun:
    """A stored run, and whether it was found among the published ones."""

    record: Record
    store: Store
    published: bool


def find_run(name: str, results: Path | str = "results") -> FoundRun:
    """Find a run, by the beginning or end of its id, in a results folder or else the published."""
    own, shipped = Store(Path(results)), Store(published_folder())
    published = not own.matches(name) and bool(shipped.matches(name))
    store = shipped if published else own
    run_id = store.find(name)
    return FoundRun(_readable(run_id, store), store, published)


def _readable(run_id: str, store: Store) -> Record:
    found = store.read(run_id)
    assert found is not None  # only what has a record is found
    if isinstance(found, Unreadable):
        raise Damaged(f"{found.path.parent} cannot be read: {found.reason}", found.remedy)
    return found


def write_results_table(store: Store) -> Path:
    """Write the runs of a store as one table, which is what a wheel carries of the published."""
    path = store.root / PUBLISHED_TABLE
    with atomic_file(path) as draft:
        results_table(store).to_csv(draft, index=False)
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write_results_table(Store(published_folder()))}\n")
