"""`bench perf`: how close the loop comes to the network alone, and how far a DataLoader stays."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.cli.output import log, print_json, print_table
from bench.cost import MeanCost, mean_costs
from bench.job import parse_names
from bench.perf import arms
from bench.perf.measure import Row, machine_info, measure_interleaved, summarise, write_csv
from bench.perf.photos import EFFORT
from bench.perf.workload import PHASES, workload_of
from bench.store import Store
from datasets.catalogue import load_datasets
from datasets.errors import UsageError

HEADINGS = ("case", "arm", "images per CPU-second", "spread", "of the limit", "images per second")
COST_HEADINGS = (
    *("method", "dataset", "runs", "image passes (millions)", "seconds", "CPU-seconds"),
    "images per CPU-second",
)


def run(arguments: Namespace) -> None:
    """Measure, print, and keep the numbers."""
    if arguments.repeats < 1:
        few = f"--repeats must be at least 1 but got {arguments.repeats}"
        raise UsageError(few, "e.g. --repeats 5")
    names = parse_names(arguments.datasets, tuple(load_datasets()))
    photos = photos_in(arguments.photos) if arguments.photos is not None else ()
    workloads = [workload_of(name, photos) for name in names]
    cases = [case for workload in workloads for case in arms.cases_of(workload)]
    path = write_csv(arguments.out, [])  # fails before the work, if at all
    rows: list[Row] = []
    for number, case in enumerate(cases, start=1):
        log(f"[{number}/{len(cases)}] {case.name} ...")
        rows += summarise(case, measure_interleaved(case, arguments.repeats))
        write_csv(arguments.out, rows)  # now, for the rest may be interrupted
    costs, known = mean_costs(Store(arguments.results)), machine_info()
    if arguments.json:
        measured, stored = ([asdict(row) for row in found] for found in (rows, costs))
        print_json({"rows": measured, "machine": asdict(known), "stored": stored})
    else:
        title = (
            f"Stand-in images on {known.processor}, {known.cores} cores, "
            f"{known.threads} torch thread, torch {known.torch}, commit {known.commit}"
        )
        print_table(title, HEADINGS, cells(rows))
        for line in step_costs(rows):
            print(line)
        if costs:
            paper = "Stored runs under the paper's settings, stand-alone"
            print_table(paper, COST_HEADINGS, cost_cells(costs))
    log(f"written to {path}")


def photos_in(folder: Path) -> tuple[Path, ...]:
    """Return the first photos of a folder, by name."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise UsageError(f"there are no JPEG files in {folder}", "give a folder of photos")
    return tuple(files[:: max(1, len(files) // EFFORT.split)][: EFFORT.split])


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return rows as they are shown; a case is named once."""
    shown: list[tuple[str, ...]] = []
    last = ""
    for row in rows:
        case, last = row.case if row.case != last else "", row.case
        speeds = (row.images_per_cpu_second, row.images_per_second)
        by_cpu, by_wall = (f"{v:,.0f}" if v >= 100 else f"{v:.1f}" for v in speeds)
        spread, ratio = f"{100 * row.spread:.0f}%", f"{row.ratio:.2f}"
        shown.append((case, row.arm, by_cpu, spread, ratio, by_wall))
    return shown


def step_costs(rows: Sequence[Row]) -> list[str]:
    """Return what a step of a tree costs against one of ERM, for every case that has both."""
    ratios = {(row.case, row.arm): row.ratio for row in rows}
    phase_1, phase_2 = PHASES
    return [
        f"{case}: a step of phase 1 costs {ratio / ratios[case, phase_1]:.2f} of an ERM step, "
        f"one of phase 2 {ratio / ratios[case, phase_2]:.2f}"
        for (case, arm), ratio in ratios.items()
        if arm == arms.ERM
    ]


def cost_cells(costs: Sequence[MeanCost]) -> list[tuple[object, ...]]:
    """Return what stored runs cost, as it is shown."""
    shown: list[tuple[object, ...]] = []
    for cost in costs:
        speeds = (cost.seconds, cost.cpu_seconds, cost.images_per_cpu_second)
        known = ("-" if value is None else f"{value:,.0f}" for value in speeds)
        passes = f"{cost.image_passes / 1e6:.2f}"
        shown.append((cost.method, cost.dataset, cost.runs, passes, *known))
    return shown
