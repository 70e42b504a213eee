"""`bench demo`: every method on small synthetic data, and the report of it; nothing is needed.

It shows what the suite does before anybody has fetched a dataset: runs, the store, the page. Its
numbers say nothing about the methods, and everything it makes says so.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from bench.arguments import parse_overrides
from bench.commands import run as running
from bench.commands.common import say
from bench.commands.results import print_results
from bench.plan import Job, Request, expand
from bench.report.collection import collect
from bench.report.render import write_report
from bench.store import Store
from datasets import standins
from datasets.catalogue import get_dataset
from methods.base import load_methods

DIGITS = ("umnist", "cmnist")
DIGITS_SIZE, PHOTOS_SIZE = 1500, 160
FASTER = ("jtt.upweight=5", "cnc.anchor_ratio=0.1")  # else a few hundred images take minutes
PHOTOS = (
    *("backbone.name=resnet10t", "backbone.pretrained=false", "waterbirds.resolution=64"),
    # The preset fine-tunes an ImageNet network; from scratch its rates would not move a thing.
    *(
        f"{method}.{setting}"
        for method in ("nct", "nct_plus")
        for setting in ("backbone_lr=1e-3", "head_lr=1e-3", "batch_size=16", "min_samples=4")
    ),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments; none is needed."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="where data, runs and report go (default: ./demo)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write stand-ins, run what is missing, render the report."""
    out: Path = arguments.out
    say("Demo: synthetic stand-in data and quick settings; its numbers are not results.")
    _write_standins(out / "data")
    words = ("--data-root", str(out / "data"), "--results", str(out / "results"))
    settings = _as_run(*words, "--keep-models", "--workers", str(_cores()))
    jobs = demo_jobs(out / "data")
    content = running.carry_out(jobs, (), settings)
    print_results(jobs, Store(settings.results))
    say("Drawing the report ...")
    runs = collect(Store(settings.results))
    write_report(runs, out / "report", settings.data_root)
    code = running.tell_outcome(content, (), settings)
    page = (out / "report" / "index.html").resolve()
    print(f"Report (stand-in data, not results): {page.as_uri()}")
    return code


def demo_jobs(data_root: Path) -> list[Job]:
    """List every registered method on the photos, which take longest, and on the digits."""
    methods = tuple(load_methods())
    photos = parse_overrides((*PHOTOS, *FASTER))
    requests = (
        Request(methods, ("waterbirds",), (0,), data_root, overrides=photos, quick=True),
        Request(methods, DIGITS, (0,), data_root, overrides=parse_overrides(FASTER), quick=True),
    )
    return [job for request in requests for job in expand(request)]


def _write_standins(root: Path) -> None:
    """Write what is not there yet: the same demo goes on where it was stopped."""
    for name, size in ((DIGITS[0], DIGITS_SIZE), ("waterbirds", PHOTOS_SIZE)):
        found = get_dataset(name).locate(root)
        if found is None or found.marker is None or found.marker.size != size:
            say(f"writing stand-in images for {name} ...")
            standins.write(name, root, size=size)


def _as_run(*words: str) -> argparse.Namespace:
    """Read words as `bench run` would, so that what is not said here has its default."""
    parser = argparse.ArgumentParser()
    running.add(parser)
    return parser.parse_args(words)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
