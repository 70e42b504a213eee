"""What `bench demo` runs: every method on small synthetic photographs and digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.job import Job, Request, expand, overrides_without
from datasets import standins
from datasets.catalogue import get_dataset
from methods.base import load_methods


@dataclass(frozen=True)
class DemoData:
    """Stand-in data of the demo: how many training images, and what every run on it sets."""

    standin: str
    size: int
    datasets: tuple[str, ...]
    settings: Mapping[str, str]


FASTER = {"cnc.anchor_ratio": "0.1"}  # else a few hundred images take minutes
# The preset fine-tunes an ImageNet network; from scratch its rates would not move a thing.
FROM_SCRATCH = {"backbone_lr": "1e-3", "head_lr": "1e-3", "batch_size": "16", "min_samples": "4"}
SMALL = {
    **{"backbone.name": "resnet10t", "backbone.pretrained": "false", "waterbirds.resolution": "64"},
    **{f"nct.{knob}": value for knob, value in FROM_SCRATCH.items()},
    **{f"nct_plus.{knob}": value for knob, value in FROM_SCRATCH.items()},
}

PHOTOS = DemoData("waterbirds", 160, ("waterbirds",), SMALL | FASTER)
DIGITS = DemoData("mnist", 1500, ("umnist", "cmnist"), FASTER)
DEMO = (PHOTOS, DIGITS)  # photographs take longest


def write_standins(root: Path, log: Callable[[str], None]) -> None:
    """Write what is not there yet: the same demo goes on where it was stopped."""
    for data in DEMO:
        found = get_dataset(data.datasets[0]).locate(root)
        if found is None or found.marker is None or found.marker.size != data.size:
            log(f"writing stand-in images for {', '.join(data.datasets)} ...")
            standins.write(data.standin, root, size=data.size)


def demo_jobs(data_root: Path) -> list[Job]:
    """Return a smoke run of every registered method on every dataset of the demo."""
    methods = tuple(load_methods())
    jobs = []
    for data in DEMO:
        owners = {key.split(".")[0] for key in data.settings}
        settings = overrides_without(data.settings, owners - {*methods, *data.datasets, "backbone"})
        jobs += expand(
            Request(methods, data.datasets, (0,), data_root, overrides=settings, quick=True)
        )
    return jobs
