"""`bench show RUN`: one run in full."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from bench.cli.arguments import find_named_run
from bench.cli.output import log, print_json, print_table
from bench.record import Record, to_plain
from datasets.files import Damaged

SHOWN_EPOCHS = 10


def run(arguments: Namespace) -> None:
    """Print a record."""
    found, title = find_named_run(arguments)
    record = found.record
    if arguments.json:
        print_json(record.to_json())
        return
    print_table(title, ("", ""), _facts(record))
    if record.outcome is None:
        return
    print_table("Metrics", ("", "val", "test"), _metrics(record))
    try:
        history = found.store.history(record.run_id)
    except Damaged as error:  # of an earlier version, whose records have no checksums
        log(error.message)
        return
    if history is not None:
        last = history.tail(SHOWN_EPOCHS)
        shown = last.map(lambda value: f"{value:.4g}" if isinstance(value, float) else value)
        print_table("Last epochs", [*map(str, shown.columns)], shown.to_numpy().tolist())


def _facts(record: Record) -> list[tuple[str, object]]:
    """Return what the run was, what it took, and why it failed if it did."""
    job, git, plugin = record.job, record.provenance.git, record.provenance.plugin
    harness = "harness " if plugin else ""  # the commit is not that of a plug-in
    rows: list[tuple[str, object]] = [
        ("status", record.status),
        ("command", record.provenance.command),
        ("data", f"{job.dataset} ({job.protocol}), {job.fingerprint}"),
        ("kind of data", job.data_kind),
        (f"{harness}commit", f"{git.commit}{' with changes' if git.dirty else ''}"),
        ("code", record.provenance.code),
        ("method", _listed(job.config.method)),
        ("dataset", _listed(job.config.dataset)),
        ("backbone", _listed(job.config.backbone)),
    ]
    if plugin is not None:
        rows.append(("plug-in", _listed(to_plain(plugin))))
    if record.failure is not None:
        return [*rows, *to_plain(record.failure).items()]
    if record.selection is not None:
        rows.append(("selection", _listed(to_plain(record.selection))))
    for stage in record.cost.stages:
        note = " (reused)" if stage.reused else ""
        rows.append((f"stage {stage.name}", f"{stage.seconds_standalone:.1f} s{note}"))
    if record.cost.audit is not None:
        looks, seconds = record.cost.audit.looks, record.cost.audit.cpu_seconds
        rows.append(("audit", f"{looks} looks, {seconds:.1f} CPU-s, not counted above"))
    return rows


def _metrics(record: Record) -> list[tuple[str, str, str]]:
    """Return the numbers of both splits: the metrics, then the accuracy of every group."""
    val, test = record.val, record.test
    found = [(name, val.get(name), value) for name, value in test.values.items()]
    rows = [row for row in found if row[2] is not None]
    for group, value in test.group_accuracy.items():
        title = f"{group} ({test.group_count.get(group, 0)})"
        rows.append((title, val.group_accuracy.get(group), value))
    return [(title, _number(on_val), _number(on_test)) for title, on_val, on_test in rows]


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
