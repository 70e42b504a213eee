"""`bench campaign`: carry out the runs behind one of the paper's tables, and print it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

from bench.api import Grid, run_jobs, survey
from bench.cli import output
from bench.cli.arguments import expand_jobs, launch_options
from bench.cli.output import log, mean_and_spread
from bench.cli.plan import print_plan
from bench.cost import Timing, by_cell, timings
from bench.job import parse_names, parse_overrides, parse_seeds, shown_split
from bench.paper import campaigns
from bench.paper.ablations import TERMINAL_COLUMNS
from bench.paper.campaigns import Campaign, CampaignCell
from bench.paper.trees import TreeRecord
from bench.reporting.names import headline_exceptions
from bench.store import Store
from datasets.catalogue import get_dataset, load_datasets
from datasets.errors import UsageError
from methods.base import get_method

TIME_COLUMNS: Mapping[str, tuple[Callable[[Timing], float | None], int]] = {
    "minutes, stand-alone": (lambda timing: timing.minutes_standalone, 1),
    "minutes, marginal": (lambda timing: timing.minutes_marginal, 1),
    "processor minutes": (lambda timing: timing.cpu_minutes, 1),
    "image passes (millions)": (lambda timing: timing.image_passes / 1e6, 2),
    "peak memory (GB)": (lambda timing: timing.peak_memory_gb, 2),
    "energy (kWh)": (lambda timing: timing.energy_kwh, 4),
}
"""What is shown of a timing, and its digits."""


def run(arguments: Namespace) -> int:
    """Carry out a campaign, or show what it would cost."""
    how = launch_options(arguments)
    campaign = campaigns.get_campaign(arguments.name)
    # Runs of every method and dataset, to check names and values and what is on disk.
    seeds, arguments.seeds = arguments.seeds, arguments.seeds or "1"
    arguments.methods, arguments.preset = campaign.rows(), "paper"
    named = bool(campaign.datasets) or "all" not in parse_names(arguments.datasets, ("all",))
    arguments.datasets = _included(campaign, arguments.datasets)
    checked, skipped = expand_jobs(arguments, need_data=not arguments.plan, explicit=named)
    cells = campaigns.campaign_cells(
        campaign,
        [*dict.fromkeys(job.dataset for job in checked)],
        arguments.data_root,
        parse_seeds(seeds) if seeds else None,
        quick=arguments.quick,
        overrides=parse_overrides(arguments.set),
    )
    jobs, store = campaigns.campaign_jobs(cells), Store(arguments.results)
    if arguments.plan:
        print_plan(survey(jobs, store, skipped, expected=True), as_json=arguments.json)
        return 0
    grid = run_jobs(jobs, arguments.data_root, store, how, skipped=skipped)
    if arguments.json:
        output.print_json(grid.to_json())
    else:
        _print(campaign, cells, grid)
    return output.print_failures(grid)


def _included(campaign: Campaign, datasets: str) -> str:
    """Leave out the datasets that the campaign is not about, before any of them is looked for."""
    known = tuple(load_datasets())
    names = [get_dataset(name).name for name in parse_names(datasets, known)]
    included = ",".join(filter(campaign.includes, names))
    if not included:
        about = [name for name in known if campaign.includes(name)]
        raise UsageError(
            f"campaign {campaign.name} has no runs on {', '.join(names)}",
            f"it is about {', '.join(about)}: --datasets {','.join(about)}",
        )
    return included


def _print(campaign: Campaign, cells: Sequence[CampaignCell], grid: Grid) -> None:
    """Print the campaign's table; development seeds apart, without their test figures."""
    if campaign.name == "timing":
        _print_times(timings(grid.store, grid.records()))
    elif len(campaign.variants) == 1 or not all(get_method(m).tree for m in campaign.rows()):
        output.print_results(grid.jobs, grid.statuses)
    else:
        developed = [job for job in grid.jobs if shown_split(job.seed) == "val"]
        output.print_results(developed, grid.statuses)
        _print_variants(campaign, cells, grid)


def _print_variants(campaign: Campaign, cells: Sequence[CampaignCell], grid: Grid) -> None:
    rows = []
    for cell in cells:
        if not (own := [job for job in cell.jobs if shown_split(job.seed) == "test"]):
            continue
        found = [grid.statuses[job.run_id].record for job in own]
        done = [record for record in found if record is not None and record.done]
        trees = [tree for record in done if (tree := TreeRecord.of(record)) is not None]
        labels = own[0].labels
        dataset = cell.dataset + (f" ({', '.join(labels)})" if labels else "")
        variant = cell.variant.title + (" (default)" if cell.is_default else "")
        figures = ([read(tree) for tree in trees] for read in TERMINAL_COLUMNS.values())
        runs = f"{len(done)} of {len(own)}"
        rows.append((cell.method, dataset, variant, runs, *map(mean_and_spread, figures)))
    if rows:
        others = [f"{dataset}: {metric}" for dataset, metric in headline_exceptions().items()]
        title = f"{campaign.name}: test WGA" + (f" ({', '.join(others)})" if others else "")
        columns = ("method", "dataset", "variant", "runs", *TERMINAL_COLUMNS)
        output.print_table(title, columns, rows)


def _print_times(found: Sequence[Timing]) -> None:
    rows = []
    for cell, group in by_cell(found).items():
        read = (([value(t) for t in group], digits) for value, digits in TIME_COLUMNS.values())
        rows.append((*cell, len(group), *(mean_and_spread(*values) for values in read)))
    columns = ("method", "dataset", "runs", *TIME_COLUMNS)
    output.print_table("Training time without warm-up and audit", columns, rows)
    for hardware in sorted({timing.hardware for timing in found}):
        log(f"on {hardware}")
