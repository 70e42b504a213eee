"""From a fitted model to a stored run: predictions, metrics, history, record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from bench.context import history_rows, with_audit
from bench.diagnostics import describe_tree
from bench.evaluate import evaluate, partition_quality
from bench.fitting import Fit
from bench.plan import Job
from bench.provenance import PeakMemory
from bench.records import base_record
from bench.store import Store
from datasets.base import LoadedData, label_digest
from methods.base import Fitted
from methods.nct.fitted import FittedTree
from methods.prediction import EvalImages, predict


@dataclass(frozen=True)
class Surroundings:
    """Where a run takes place, once it has begun."""

    device: torch.device
    threads: int
    memory: PeakMemory


def digest_of_labels(data: LoadedData) -> str:
    """Digest the labels of all splits."""
    return label_digest({name: part.labels for name, part in data.splits.items()})


def keep_result(
    job: Job,
    fit: Fit,
    data: LoadedData,
    digest: str,
    store: Store,
    where: Surroundings,
    keep_model: bool,
) -> dict[str, Any]:
    """Evaluate what a fit left, and store the run; `digest` is that of all labels."""
    fitted = fit.fitted
    predictions, metrics = predict_splits(fitted, data)
    facts = dict(fitted.facts)
    record = {
        **base_record(job),
        "status": "done",
        "selection": facts.pop("selection", None),
        "stages": fit.stages,
        "peak_memory_bytes": where.memory.read(),
        "energy_kwh": fit.energy_kwh,
        "device": device_name(where.device),
        "threads": where.threads,
        "label_digest": digest,
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
    model = dict(fitted.module.state_dict()) if keep_model else None
    store.write(record, history, predictions, partition, model)
    store.forget_work(job.run_id)
    (store.audits / f"{job.run_id}.jsonl").unlink(missing_ok=True)
    return record


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
