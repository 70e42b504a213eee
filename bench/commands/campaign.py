"""`bench campaign`: carry out the runs behind one of the paper's tables, and print it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.ablation import (
    DEPTH_RULE,
    TEST_SELECTED,
    at_iteration,
    selected_by_rule,
    selected_on_test,
)
from bench.arguments import parse_names, parse_overrides, parse_seeds
from bench.campaigns import CAMPAIGNS, Campaign, Cell, campaign_cells, get_campaign
from bench.commands.common import add_overrides, add_places, print_table, say
from bench.commands.planning import print_plan
from bench.commands.results import mean_and_spread, print_results
from bench.commands.run import (
    add_carrying_out,
    carry_out,
    check_how,
    request_from,
    tell_outcome,
)
from bench.development import shown_split
from bench.grid import Skipped
from bench.plan import Job
from bench.store import Store
from bench.timing import Timing, by_cell, machines, timings
from datasets.catalogue import DATASETS, get_dataset
from datasets.errors import UsageError


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--datasets", default="all", metavar="A,B", help="datasets, or all")
    parser.add_argument("--seeds", metavar="N|A,B", help="instead of the paper's")
    parser.add_argument(
        "--plan", action="store_true", help="show the runs and their cost, and do nothing"
    )
    add_overrides(
        parser,
        "change a setting of the runs it concerns, which keeps them out of the paper's tables",
    )
    parser.add_argument("--quick", action="store_true", help="smoke runs")
    add_carrying_out(parser)
    add_places(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry out a campaign, or show what it would cost."""
    check_how(arguments)
    campaign = get_campaign(arguments.name)
    cells, skipped = _cells(campaign, arguments)
    jobs = list({job.run_id: job for cell in cells for job in cell.jobs}.values())
    if arguments.plan:
        return print_plan(jobs, skipped, arguments)
    content = carry_out(jobs, skipped, arguments)
    if not arguments.json:
        _print(campaign, cells, jobs, Store(arguments.results))
    return tell_outcome(content, skipped, arguments)


def _cells(
    campaign: Campaign, arguments: argparse.Namespace
) -> tuple[list[Cell], Sequence[Skipped]]:
    """Expand the campaign on the datasets that can be run."""
    own = {
        "methods": ",".join(campaign.methods),
        "preset": "paper",
        "seeds": arguments.seeds or "1",
        "datasets": _covered(campaign, arguments.datasets),
    }
    grid = argparse.Namespace(**{**vars(arguments), **own})
    request, skipped = request_from(grid, fetch=not arguments.plan, need_data=not arguments.plan)
    cells = campaign_cells(
        campaign,
        request.datasets,
        request.data_root,
        parse_seeds(arguments.seeds) if arguments.seeds else None,
        quick=arguments.quick,
        overrides=parse_overrides(arguments.overrides),
    )
    return cells, skipped


def _covered(campaign: Campaign, datasets: str) -> str:
    """Leave out the datasets that the campaign is not about, before any of them is looked for."""
    if not campaign.only:
        return datasets
    names = [get_dataset(name).name for name in parse_names(datasets, tuple(DATASETS))]
    covered = ",".join(filter(campaign.covers, names))
    if not covered:
        raise UsageError(
            f"campaign {campaign.name} has no runs on {', '.join(names)}",
            f"it is about {', '.join(campaign.only)}: --datasets {','.join(campaign.only)}",
        )
    return covered


def _print(campaign: Campaign, cells: Sequence[Cell], jobs: Sequence[Job], store: Store) -> None:
    """Print the campaign's table; development seeds apart, without their test figures."""
    if campaign.name == "timing":
        _print_times(timings(store, jobs))
        return
    if len(campaign.variants) == 1:
        print_results(jobs, store)
        return
    developed = [job for job in jobs if shown_split(job.seed) == "val"]
    if developed:
        print_results(developed, store)
    rows = []
    for cell in cells:
        own = [job for job in cell.jobs if shown_split(job.seed) == "test"]
        if not own:
            continue
        found = [store.record(job.run_id) for job in own]
        records = [record for record in found if record is not None and record["status"] == "done"]
        rows.append(
            (
                cell.method,
                cell.dataset + _label(cell),
                cell.variant.title + (" (default)" if cell.is_default else ""),
                f"{len(records)} of {len(own)}",
                *(mean_and_spread([read(record) for record in records]) for _, read in COLUMNS),
            )
        )
    columns = ("method", "dataset", "variant", "runs", *(title for title, _ in COLUMNS))
    if rows:
        print_table(f"{campaign.name}: test WGA (ISIC: overall AUROC)", columns, rows)


def _print_times(found: Sequence[Timing]) -> None:
    rows = [
        (
            method,
            dataset,
            len(group),
            mean_and_spread([t.minutes_standalone for t in group], 1),
            mean_and_spread([t.minutes_marginal for t in group], 1),
            mean_and_spread([t.cpu_minutes for t in group], 1),
            mean_and_spread([t.image_passes / 1e6 for t in group], 2),
            mean_and_spread([t.peak_memory_gb for t in group], 2),
            mean_and_spread([t.energy_kwh for t in group], 4),
        )
        for (method, dataset), group in by_cell(found).items()
    ]
    columns = ("method", "dataset", "runs", "minutes, stand-alone", "minutes, marginal")
    more = ("processor minutes", "image passes (millions)", "peak memory (GB)", "energy (kWh)")
    print_table("Training time without warm-up and audit", (*columns, *more), rows)
    for kind in machines(found):
        say(f"on {kind}")


def _label(cell: Cell) -> str:
    job = cell.jobs[0]
    notes = ["stand-in"] * job.standin + ["quick"] * job.quick
    return f" ({', '.join(notes)})" if notes else ""


def _iteration(number: int) -> Any:
    return lambda record: at_iteration(record, number)


COLUMNS = (
    ("iteration 2", _iteration(2)),
    ("iteration 3", _iteration(3)),
    (DEPTH_RULE, selected_by_rule),
    (TEST_SELECTED, selected_on_test),
)
