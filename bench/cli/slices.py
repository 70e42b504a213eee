"""`bench slices RUN`: which part of the data a run fails on, as a page and a table."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from bench.api import find_run
from bench.cli.arguments import find_named_run, store_to_read
from bench.cli.output import log, print_json, print_table
from bench.reporting.slices_html import gap, p_value, percent, slices_page
from bench.slice_report import SPLIT_WORDS, SliceReport, slice_report
from bench.slices import describe, table
from datasets.files import atomic_file

SHOWN = 12  # slices in the terminal


def run(arguments: Namespace) -> None:
    """Write the page and the table, and print the worst slices; or list the samples of one."""
    found, title = find_named_run(arguments)
    by = None
    if arguments.by is not None:
        other = find_run(arguments.by, store_to_read(arguments).root)
        by = other.record, other.store
    where = found.record, found.store, arguments.data_root
    report = slice_report(*where, arguments.split, by, arguments.judge)
    if arguments.export is not None:
        name, file = arguments.export
        _export(report, name, Path(file))
        return
    out: Path = arguments.out or Path("slices") / found.record.run_id
    out.mkdir(parents=True, exist_ok=True)
    page, csv = out / "index.html", out / "slices.csv"
    with atomic_file(page) as draft:
        draft.write_text(slices_page(report), "utf-8")
    with atomic_file(csv) as draft:
        table(report.analysis).to_csv(draft, index=False)
    if arguments.json:
        print_json({**report.to_json(), "page": str(page), "csv": str(csv)})
        return
    _print(report, title)
    log(f"{page} has the pictures and everything else, {csv} the figures")


def _print(report: SliceReport, title: str) -> None:
    """Print the slices, the worst first, and what is not known."""
    found = report.analysis
    rows = []
    for one in found.slices[:SHOWN]:
        own = one.accuracy
        tested, beside = (one.own, one.own) if found.by_first else (own, one.again)
        rows.append(
            (
                one.name,
                own.size if own else one.sizes.get(found.split, 0),
                percent(own.share) if own else "-",
                gap(own) if own else "-",
                p_value(tested.p_holm if tested else None),
                gap(beside) if beside else "-",
                "; ".join(map(describe, one.leading_traits())),
            )
        )
    split = SPLIT_WORDS[found.split]
    columns = ("slice", split, "right", "than the rest", "by chance", "on test", "what it is")
    if found.by_first:
        judged = ("first model right", "than the rest", "by chance, this run", "in this run")
        columns = (*columns[:2], *judged, columns[-1])
    whose = f" of {report.owner.run_id}" if report.owner else ""
    print_table(f"{title}: slices{whose}, the worst first", columns, rows)
    if len(found.slices) > SHOWN:
        log(f"and {len(found.slices) - SHOWN} more")
    if report.no_accuracy:
        log(report.no_accuracy)
    elif found.by_first:
        still = ", ".join(one.name for one in found.still_worse) or "no slice"
        log(f"in this run's own model {still} is worse than the rest by more than chance")
    elif found.worst is None:
        log("no slice is worse than the rest by more than chance")


def _export(report: SliceReport, name: str, file: Path) -> None:
    """Write the samples of a slice: a CSV with what is known of each, or else a line a sample."""
    one = report.find(name)
    members = report.members(one)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as draft:
        if file.suffix == ".csv":
            members.to_csv(draft, index=False)
        else:
            lines = members["file" if report.files else "id"].astype(str)
            draft.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    what = "files" if report.files else "ids"
    log(f"{len(members):,} {what} of slice {one.name} written to {file}")
