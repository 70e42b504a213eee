"""`bench show RUN`: one run, its numbers first."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping

import pandas as pd

from bench.cli.arguments import find_named_run
from bench.cli.output import METRIC_COLUMNS, job_notes, log, print_json, print_table
from bench.cost import format_seconds
from bench.job import FIRST_DEVELOPMENT_SEED
from bench.record import Record, to_plain
from datasets.catalogue import load_datasets
from datasets.files import Damaged
from methods.base import load_methods

SHOWN_EPOCHS = 10
EPOCH_COLUMNS = {
    "stage": "stage",
    "iteration": "iteration",
    "phase": "phase",
    "epoch": "epoch",
    "loss": "loss",
    "selection": "selects by",
    "audit_val_wga": "val WGA*",
    "audit_test_wga": "test WGA*",
    "seconds": "seconds",
}
"""What is shown of the history. With an asterisk: what the harness saw, and the method did not."""


def run(arguments: Namespace) -> None:
    """Print a record."""
    found, title = find_named_run(arguments)
    record = found.record
    if arguments.json:
        print_json(record.to_json())
        return
    print(f"{title}\n{_headline(record)}")
    if record.outcome is not None:
        print_table("Metrics", ("", "validation", "test"), _metrics(record))
        print_table("Groups, worst first", ("", "images", "validation", "test"), _groups(record))
        _print_history(found.store.history, record.run_id)
    print_table("How it was made", ("", ""), _facts(record))


def _headline(record: Record) -> str:
    """Return in two sentences what the run is and what came of it."""
    job, tier = record.job, record.job.supervision
    method, dataset = load_methods().get(job.method), load_datasets().get(job.dataset)
    name = method.title if method is not None else job.method
    on = dataset.title if dataset is not None else job.dataset
    splits = {"training": tier.train_groups, "validation": tier.val_groups}
    seen = [split for split, granted in splits.items() if granted]
    sees = f"sees the groups of {' and '.join(seen)} images" if seen else "sees no group labels"
    notes = f" ({', '.join(job_notes(job))})" if job_notes(job) else ""
    first = f"{name}, version {job.version}, on {on}{notes}, seed {job.seed}; it {sees}."
    if record.failure is not None:
        return f"{first}\nIt failed: {record.failure.message}\n  -> {record.failure.remedy}"
    if not record.done:
        return f"{first}\nIt is {record.status.value}."
    values, accuracy = record.test.values, record.test.group_accuracy
    parts = []
    if values.get("wga") is not None and accuracy:
        known = {group: value for group, value in accuracy.items() if value is not None}
        worst = min(known, key=lambda group: known[group])
        parts.append(f"worst group {values['wga']:.1f} ({worst})")
    if values.get("auroc") is not None:
        parts.append(f"AUROC {values['auroc']:.3f}")
    if values.get("avg") is not None:
        parts.append(f"average {values['avg']:.1f}")
    took = format_seconds(record.cost.standalone())
    seed = ""
    if job.seed >= FIRST_DEVELOPMENT_SEED:
        seed = " A development seed: settle nothing by its test figures."
    return f"{first}\nOn test images: {', '.join(parts)}. Training took {took}.{seed}"


def _metrics(record: Record) -> list[tuple[str, str, str]]:
    """Return the metrics of both splits."""
    val, test = record.val, record.test
    return [
        (METRIC_COLUMNS.get(name, name), _number(val.get(name)), _number(value))
        for name, value in test.values.items()
        if value is not None
    ]


def _groups(record: Record) -> list[tuple[str, str, str, str]]:
    """Return the accuracy of every group, the lowest on test first."""
    val, test = record.val, record.test
    order = sorted(
        test.group_accuracy.items(), key=lambda entry: 101.0 if entry[1] is None else entry[1]
    )
    return [
        (
            group,
            f"{test.group_count.get(group, 0):,}",
            _number(val.group_accuracy.get(group)),
            _number(value),
        )
        for group, value in order
    ]


def _print_history(read: Callable[[str], pd.DataFrame | None], run_id: str) -> None:
    """Print the last epochs."""
    try:
        history = read(run_id)
    except Damaged as error:  # of an earlier version, whose records have no checksums
        log(error.message)
        return
    if history is None or history.empty:
        return
    last = history.tail(SHOWN_EPOCHS)
    names = [name for name in EPOCH_COLUMNS if name in last and last[name].notna().any()]
    rows = [[_cell(value) for value in row] for row in last[names].to_numpy().tolist()]
    title = f"Last {len(last)} of {len(history)} epochs; * seen by the harness alone"
    print_table(title, [EPOCH_COLUMNS[name] for name in names], rows)


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if pd.isna(value) else f"{value:.4g}"
    return "" if value is None else value


def _facts(record: Record) -> list[tuple[str, object]]:
    """Return what the run was, what it took, and why it failed if it did."""
    job, git, plugin = record.job, record.provenance.git, record.provenance.plugin
    harness = "harness " if plugin else ""  # the commit is not that of a plug-in
    rows: list[tuple[str, object]] = [
        ("status", record.status.value),
        ("command", record.provenance.command),
        ("data", f"{job.dataset} ({job.protocol}), {job.data_kind}, {job.fingerprint}"),
        ("settings from", f"preset {job.preset}{_changed(job.overrides)}"),
        (f"{harness}commit", f"{git.commit}{' with changes' if git.dirty else ''}"),
        ("method", _listed(job.config.method)),
        ("dataset", _listed(job.config.dataset)),
        ("backbone", _listed(job.config.backbone)),
    ]
    if record.provenance.code is not None:
        rows.append(("code", record.provenance.code))
    if plugin is not None:
        rows.append(("plug-in", _listed(to_plain(plugin))))
    if record.failure is not None:
        return [*rows, *to_plain(record.failure).items()]
    if record.selection is not None:
        rows.append(("selection", _listed(to_plain(record.selection))))
    for stage in record.cost.stages:
        note = " (made by an earlier run)" if stage.reused else ""
        rows.append((f"stage {stage.name}", f"{stage.seconds_standalone:.1f} s{note}"))
    if record.cost.audit is not None:
        looks, seconds = record.cost.audit.looks, record.cost.audit.cpu_seconds
        rows.append(("audit", f"{looks} looks, {seconds:.1f} CPU-s, not counted above"))
    return rows


def _changed(overrides: Mapping[str, str]) -> str:
    changed = ", ".join(f"{key}={value}" for key, value in overrides.items())
    return f", changed: {changed}" if changed else ""


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
