"""One job, start to finish: data -> task -> fit -> evaluate -> record.

A tuning trial is a job without a test split: it goes the same way, nothing is audited, and its
record keeps only what the method's tier may know of validation.
"""

from __future__ import annotations

import multiprocessing
import shlex
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.audit import Auditor, default_interval
from bench.context import FitStopped, ProgressCallback, RunSettings, stage_scope, with_audit
from bench.evaluation import (
    describe_partition,
    describe_snapshots,
    granted_metrics,
    history_table,
    predict_splits,
)
from bench.features import on_features, with_network
from bench.fitting import FitFailed, FitProcess, FitResult, FitTask, fit_here
from bench.job import Job
from bench.launch.progress import Pace
from bench.models import ModelCard
from bench.process import configure_process, default_threads
from bench.record import (
    RECORD_KEYS,
    AuditCost,
    Cost,
    Outcome,
    Record,
    Selection,
    StageCost,
    Status,
    Unreadable,
    code_of,
    failed_record,
    new_record,
)
from bench.store import Store
from datasets.base import Facts, LoadedData
from datasets.catalogue import get_dataset
from datasets.config import Values
from datasets.dataset import Progress, silent
from datasets.errors import BenchError
from datasets.fetch import use_data_root
from datasets.files import atomic_file, set_aside, to_json, with_checksum
from datasets.lock import Lock, LockBusy, LockLost
from datasets.pixels import pixel_digest
from methods.backbones import SMALL_NETWORKS
from methods.base import get_method
from methods.network_input import with_input

WORKER = "bench-worker"
"""What the names of worker processes begin with: fresh processes, from which a fit is forked."""

DECODED_BETWEEN = 500  # images, from one report to the next: some seconds

DETAILS_BYTES = 2**20
"""The most that one key of a method's details may take; a tree of three levels takes 40,000."""


@dataclass(frozen=True)
class RunOptions:
    """Where and how a job runs; nothing of it belongs to the run's identity.

    Attributes:
        device: `cpu`, `cuda` or one of several GPUs such as `cuda:1`.
        gpu: which GPU alone a worker process is shown, as CUDA_VISIBLE_DEVICES names it.
        threads: cores that a job may keep busy, by default as `default_threads` says; a LeNet's
            has one.
        not_before: results (runs and shared stages) older than this are made again.
        isolate: whether the fit gets a process of its own; not in tests and notebooks, whose
            methods no other process could import.
        steered: whether the fit waits for the answer to its progress, as a trial does that may be
            pruned.
        audit_every: epochs from one look of the audit to the next (infinitely many is the last
            alone, 0 no look); none is the default for the kind of data.
        resume_anyway: whether an unfinished run that other code began goes on all the same.
    """

    data_root: Path
    results: Path
    device: str = "cpu"
    gpu: str | None = None
    threads: int | None = None
    keep_models: bool = False
    not_before: float = 0.0
    isolate: bool = True
    steered: bool = False
    audit_every: float | None = None
    resume_anyway: bool = False

    def threads_for(self, job: Job) -> int:
        """Return a job's threads; small networks take one, since more only wait for each other."""
        return 1 if job.backbone().name in SMALL_NETWORKS else self.network_threads()

    def network_threads(self) -> int:
        """Return the threads of a large network, also of a frozen one, whose head is small."""
        return self.threads or default_threads()

    def path_arguments(self) -> str:
        """Return the folders as arguments of a command that runs the job again."""
        folders = {"--data-root": self.data_root, "--results": self.results}
        return " ".join(f"{name} {shlex.quote(str(path))}" for name, path in folders.items())


def run_job(
    job: Job, options: RunOptions, progress: ProgressCallback, *, final: bool = True
) -> Record:
    """Run a job and store its record; a failure becomes a failed record, never an exception.

    A job that was finished meanwhile is not repeated. Returns the record, or one with status
    `running` if another process is at it. Where the attempt is not the `final` one, a failure is
    returned but not stored: it is not the end yet.
    """
    use_data_root(options.data_root)
    store = Store(options.results)
    in_worker = multiprocessing.current_process().name.startswith(WORKER)
    fit_process = FitProcess(fork=in_worker) if options.isolate else None
    try:
        with store.lock(job.run_id).hold(wait=False) as lock:
            found = store.read(job.run_id)
            existing = found if isinstance(found, Record) else None
            if isinstance(found, Unreadable):
                set_aside(store.runs / job.run_id, store.damaged, found.reason)
            new_enough = store.record_mtime(job.run_id) >= options.not_before
            if existing and existing.status in (Status.DONE, Status.PRUNED) and new_enough:
                return existing
            started = time.time()
            try:
                return _run(job, options, store, lock, progress, fit_process)
            except LockLost:
                raise
            except Exception as error:
                record = _failed(job, error, started, options)
            # Only here: a live exception may hold open the very file that filled the disk.
            if record.status is Status.PRUNED:
                store.write(record)
                store.delete_checkpoints(job.run_id)
            elif final:
                return store.write_failure(record)
            return record
    except (LockBusy, LockLost):
        return new_record(job, Status.RUNNING)
    except (BenchError, OSError) as error:  # not even a failed record could be written
        return failed_record(job, error, time.time(), options.path_arguments())
    finally:
        if fit_process is not None:
            fit_process.close()


def _failed(job: Job, caught: Exception, started: float, options: RunOptions) -> Record:
    """Return the record of a run that was stopped or failed, with what its fit took."""
    failed = caught if isinstance(caught, FitFailed) else FitFailed(caught, ())
    cost, error = Cost(failed.stages), failed.error
    if isinstance(error, FitStopped):
        return new_record(job, Status.PRUNED, cost=cost, details={"reason": error.message})
    return replace(failed_record(job, error, started, options.path_arguments()), cost=cost)


def _run(
    job: Job,
    options: RunOptions,
    store: Store,
    lock: Lock,
    progress: ProgressCallback,
    fit_process: FitProcess | None,
) -> Record:
    configure_process(options.threads_for(job))
    pace, file = Pace(), store.work / job.run_id / "progress.json"
    last: Values = {}

    def report(values: Values) -> str | None:
        """Write progress to the store, and pass it on to the launcher."""
        nonlocal last
        lock.check()
        last = values
        values = {**values, **pace.expect(values)}
        with atomic_file(file) as draft:
            draft.write_text(with_checksum({**values, "time": time.time()}))
        return progress(values)

    report({"stage": "loading"})
    data = load_data(job, options.data_root, partial(report_decoding, report))
    device = torch.device(options.device)
    facts = data.facts
    features: tuple[StageCost, ...] = ()
    if job.network().frozen:

        def show(what: str, done: int, total: int) -> None:
            report({"stage": f"{what} {done}/{total}"})

        later = options.not_before
        torch.set_num_threads(options.network_threads())
        data, cost = on_features(job, data, store, device=device, progress=show, not_before=later)
        torch.set_num_threads(options.threads_for(job))
        features = (cost,)
    given = fit_task(job, data, options, store)
    data = data.to(device)
    audited = "test" in data.splits and options.audit_every != 0
    auditor = Auditor(data, store.audits, given.settings.code) if audited else None

    def look(key: str, where: Values, val_outputs: Tensor, module: nn.Module) -> None:
        """Have the model audited; where epochs are long, that takes long as well."""
        assert auditor is not None
        if "step" in last:
            report({**last, "activity": "auditing"})
        auditor.look(key, where, val_outputs, module)

    fit = fit_here if fit_process is None else fit_process.fit
    try:
        result = fit(given, report, look if audited else None)
    except FitFailed as failed:
        raise FitFailed(failed.error, (*features, *failed.stages)) from failed.error
    result = replace(result, stages=(*features, *result.stages))
    report({"stage": "evaluating"})
    return save_run(job, result, data, store, options, facts)


def fit_task(job: Job, data: LoadedData, options: RunOptions, store: Store) -> FitTask:
    """Return what the fit of a job is given: what its tier shows of the data, and no more."""
    granted, every = job.supervision, options.audit_every
    settings = RunSettings(
        run_id=job.run_id,
        seed=job.seed,
        device=torch.device(options.device),
        scope=stage_scope(job),
        stages=store.stages.resolve(),
        supervision=granted,
        label_digest=data.label_digest,
        pixel_digest=pixel_digest({split: data.splits[split] for split in ("train", "val")}),
        not_before=options.not_before,
        cores=options.threads_for(job),
        code=code_of(job),
        resume_anyway=options.resume_anyway,
        audit_every=default_interval(data) if every is None else every,
    )
    return FitTask(
        method=get_method(job.method),
        config=job.method_config(),
        task=data.task(
            job.backbone(), train_groups=granted.train_groups, val_groups=granted.val_groups
        ),
        settings=settings,
        work=(store.work / job.run_id).resolve(),
        answers=options.steered,
    )


def report_decoding(report: ProgressCallback, what: str, done: int, total: int) -> None:
    """Report how many images are decoded, now and then."""
    if done % DECODED_BETWEEN == 0:
        report({"stage": what, "done": done, "total": total})


def load_data(job: Job, root: Path, progress: Progress = silent) -> LoadedData:
    """Load a job's dataset, cut down for a quick run, and check that it is the planned one."""
    dataset = get_dataset(job.dataset)
    data = dataset.load(
        root,
        job.dataset_config(),
        progress,
        splits=job.splits,
        quick=job.quick,
        allow_subset=job.data_kind == "subset",
    )
    if data.facts.fingerprint() != job.fingerprint:
        raise BenchError(
            f"{job.dataset} in {root} is not the data this job was planned for",
            "plan the job again with the same --data-root"
            + (", and the same images in it" if job.data_kind == "subset" else ""),
        )
    return replace(data, facts=with_input(data.facts, job.config.backbone))


def checked_details(details: Values) -> dict[str, object]:
    """Return what a method says of itself; raise if it would overwrite or swamp the record."""
    if clash := sorted(RECORD_KEYS & set(details)):
        raise BenchError(
            f"the fitted model's details have the keys {', '.join(clash)}, which are the record's",
            "put all that a method says of itself under one key of its own",
        )
    for key, value in details.items():
        size = len(to_json({key: value}))
        if size > DETAILS_BYTES:
            raise BenchError(
                f"details['{key}'] of the fitted model has {size:,} bytes, more than the "
                f"{DETAILS_BYTES:,} that a record has room for",
                "put figures there, not samples or weights",
            )
    return dict(details)


def save_run(
    job: Job,
    result: FitResult,
    data: LoadedData,
    store: Store,
    options: RunOptions,
    images: Facts | None = None,
) -> Record:
    """Evaluate what a fit left, and store the run.

    Where a network is frozen, `data` are its features and `images` the facts of what they are of: a
    kept model has both the network and the head, and takes images.
    """
    fitted, history = result.fitted, result.history
    details = checked_details(fitted.details)
    predictions, metrics = predict_splits(fitted, data)
    partition, quality, audit = None, None, None
    trial = "test" not in data.splits
    if trial:
        metrics = {split: granted_metrics(m, job.supervision) for split, m in metrics.items()}
    else:
        if fitted.partition is not None:
            quality, partition = describe_partition(fitted, data)
        history = with_audit(history, store.audits, result.stages)
        looks = [float(str(row.pop("audit_seconds"))) for row in history if "audit_seconds" in row]
        audit = AuditCost(len(looks), sum(looks))
        if fitted.tree_key:
            details[fitted.tree_key] = describe_snapshots(fitted, data, history)
    selection = None if fitted.selection is None else Selection(**vars(fitted.selection))
    record = new_record(
        job,
        Status.DONE,
        cost=Cost(result.stages, result.peak_memory_bytes, result.energy_kwh, audit),
        outcome=Outcome(metrics, selection, quality),
        details=details,
    )
    cuda = torch.device(options.device).type == "cuda"
    origin = replace(
        record.provenance,
        device=torch.cuda.get_device_name(options.device) if cuda else "cpu",
        threads=options.threads_for(job),
        label_digest=data.label_digest,
        pixel_digest=data.pixel_digest or None,
    )
    record = replace(record, provenance=origin)
    model, about = None, None
    if options.keep_models and not trial:
        seen, network = images or data.facts, job.network()
        kept = with_network(fitted, network, seen.channels) if network.frozen else fitted
        model = dict(kept.module.state_dict())
        about = ModelCard.of_job(job, seen).metadata()
    tables = history_table(history), None if trial else predictions, partition
    store.write(record, *tables, model, about)
    store.delete_checkpoints(job.run_id)
    return record
