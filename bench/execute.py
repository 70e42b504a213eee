"""One job, start to finish: data -> task -> fit -> evaluate -> record."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bench.allocation import keep_freed_memory
from bench.audit import start_audit
from bench.context import history_rows, with_audit
from bench.diagnostics import describe_tree
from bench.evaluate import evaluate, partition_quality
from bench.files import atomic_file, to_json
from bench.fitting import fit_job
from bench.lease import Busy, Lease, LeaseLost
from bench.pace import Pace
from bench.plan import Job
from bench.provenance import PeakMemory
from bench.records import base_record, failed_record
from bench.store import Store
from bench.subsample import quick_subset
from datasets.base import LoadedData, label_digest
from datasets.catalogue import get_dataset
from datasets.config import build_config
from datasets.dataset import Progress, silent
from datasets.errors import BenchError
from methods.backbones import LENETS
from methods.base import Fitted
from methods.nct.fitted import FittedTree
from methods.prediction import EvalImages, predict


@dataclass(frozen=True)
class Machine:
    """Where and how a job runs; nothing of it belongs to what the job means.

    Attributes:
        threads: cores that a job may keep busy.
        not_before: results (runs and shared stages) older than this are made again.
    """

    data_root: Path
    results: Path
    device: str = "cpu"
    threads: int = 1
    keep_models: bool = False
    not_before: float = 0.0

    def threads_for(self, job: Job) -> int:
        """LeNets take one thread: more only wait for each other, and results stay comparable."""
        return 1 if job.config["backbone"]["name"] in LENETS else self.threads

    def arguments(self) -> str:
        """Give the places as arguments of a command that runs the job again."""
        places = {"--data-root": self.data_root, "--results": self.results}
        return " ".join(f"{name} {shlex.quote(str(path))}" for name, path in places.items())


Report = Callable[[dict[str, Any]], None]


def execute(job: Job, machine: Machine, report: Report, *, final: bool = True) -> dict[str, Any]:
    """Run a job and store its record; a failure becomes a failed record, never an exception.

    A job that was finished meanwhile is not repeated. Returns the record, or one with status
    `running` if another process is at it. Where the attempt is not the `final` one, a failure is
    returned but not stored: nobody should take it for the end.
    """
    store = Store(machine.results)
    try:
        with store.lock(job.run_id).hold(wait=False) as lease:
            existing = store.record(job.run_id)
            done = existing is not None and existing["status"] == "done"
            if existing is not None and done and store.written(job.run_id) >= machine.not_before:
                return existing
            started = time.time()
            try:
                return _run(job, machine, store, lease, report)
            except LeaseLost:
                raise
            except Exception as error:
                failed = failed_record(job, error, started, machine.arguments())
            # Only here: a live exception may hold open the very file that filled the disk.
            if final and not done:
                store.write(failed)
            return failed
    except (Busy, LeaseLost):
        return {**base_record(job), "status": "running"}
    except (BenchError, OSError) as error:  # not even a failed record could be written
        return failed_record(job, error, time.time(), machine.arguments())


def _run(job: Job, machine: Machine, store: Store, lease: Lease, report: Report) -> dict[str, Any]:
    threads = machine.threads_for(job)
    torch.set_num_threads(threads)
    keep_freed_memory()
    device = torch.device(machine.device)
    memory = PeakMemory(device)
    progress_file = store.work / job.run_id / "progress.json"

    pace = Pace()

    def tell(progress: dict[str, Any]) -> None:
        lease.check()
        progress = {**progress, **pace.expect(progress)}
        with atomic_file(progress_file) as draft:
            draft.write_text(to_json({**progress, "time": time.time()}))
        report(progress)

    tell({"stage": "loading"})
    data = load_data(job, machine.data_root).to(device)
    digest_of_labels = label_digest({name: part.labels for name, part in data.splits.items()})
    audit = start_audit(data, store.audits, threads)
    fit = fit_job(
        *(job, data, digest_of_labels, store, device, audit, tell),
        not_before=machine.not_before,
        cores=machine.threads,
    )
    fitted = fit.fitted
    tell({"stage": "evaluating"})
    predictions, metrics = predict_splits(fitted, data)
    facts = dict(fitted.facts)
    record = {
        **base_record(job),
        "status": "done",
        "selection": facts.pop("selection", None),
        "stages": fit.stages,
        "peak_memory_bytes": memory.read(),
        "energy_kwh": fit.energy_kwh,
        "device": device_name(device),
        "threads": threads,
        "label_digest": digest_of_labels,
        "metrics": metrics,
        **facts,
    }
    partition = None
    if fitted.partition is not None:
        record["partition"], partition = describe_partition(fitted, data)
    rows = with_audit(history_rows(fit.part), store.audits)
    if isinstance(fitted, FittedTree):
        record["nct"] = describe_tree(fitted, data, rows)
    history = history_table(rows)
    model = dict(fitted.module.state_dict()) if machine.keep_models else None
    store.write(record, history, predictions, partition, model)
    store.forget_work(job.run_id)
    (store.audits / f"{job.run_id}.jsonl").unlink(missing_ok=True)
    return record


def load_data(job: Job, root: Path, progress: Progress = silent) -> LoadedData:
    """Load a job's dataset, cut down for a quick run, and check that it is the planned one."""
    dataset = get_dataset(job.dataset)
    settings = build_config(dataset.config_type, job.config["dataset"], job.dataset)
    data = dataset.load(root, settings, progress)
    if data.facts.fingerprint() != job.fingerprint:
        raise BenchError(
            f"{job.dataset} in {root} is not the data this job was planned for",
            "plan the job again with the same --data-root",
        )
    return quick_subset(data) if job.quick else data


def predict_splits(fitted: Fitted, data: LoadedData) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Predict validation and test, keep every sample's scores, and compute the metrics."""
    fitted.module.eval()
    frames, metrics = [], {}
    for split in ("val", "test"):
        part = data.splits[split]
        images = EvalImages(part.images, data.facts.eval_transform)
        logits = predict(fitted.logits, images)
        first = next(iter(images))
        leaf = (
            predict(_leaves(fitted), images).long() if fitted.leaf(first[:1]) is not None else None
        )
        metrics[split] = evaluate(data, split, logits)
        columns: dict[str, Any] = {
            "id": part.labels.ids,
            "split": split,
            "y": part.labels.y.to(torch.int16),
            "group": part.labels.groups.to(torch.int16),
            **{f"group_{n}": v.to(torch.int16) for n, v in part.labels.alternates.items()},
            "pred": logits.argmax(1).to(torch.int16),
            **{f"score_{c}": logits[:, c].half() for c in range(logits.shape[1])},
            "leaf": torch.full((len(logits),), -1) if leaf is None else leaf,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True), metrics


def describe_partition(fitted: Fitted, data: LoadedData) -> tuple[dict[str, Any], pd.DataFrame]:
    """Compare an inferred partition of a split with the groups there, and tabulate it."""
    assert fitted.partition is not None
    partition, split = fitted.partition.cpu(), fitted.partition_split
    labels, facts = data.splits[split].labels, data.facts
    # Where a dataset has many small groups, the unions it names are what one looks for.
    named = facts.unions or {name: (number,) for number, name in enumerate(facts.groups)}
    columns = {
        "id": labels.ids,
        "group": labels.groups.to(torch.int16),
        "part": partition.to(torch.int16),
    }
    table = pd.DataFrame(columns).sort_values("id", ignore_index=True)
    return {"split": split, **partition_quality(partition, labels.groups, named)}, table


def history_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Put history rows into a table whose first columns every run has."""
    table = pd.DataFrame(rows).drop(columns="record", errors="ignore")
    first = ("stage", "iteration", "phase", "epoch", "loss", "selection")
    audited = ("audit_val_wga", "audit_test_wga")
    for name in (*first, *audited):
        if name not in table:
            table[name] = None
    rest = [name for name in table if name not in (*first, *audited)]
    whole = {name: "Int64" for name in ("iteration", "phase", "epoch")}
    return table[[*first, *audited, *rest]].astype(whole)


def _leaves(fitted: Fitted) -> Callable[[Tensor], Tensor]:
    def leaves(images: Tensor) -> Tensor:
        leaf = fitted.leaf(images)
        assert leaf is not None
        return leaf

    return leaves


def device_name(device: torch.device) -> str:
    """Name the device as records do."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
