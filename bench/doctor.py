"""Whether this machine is in order, in less than a minute: what a run needs, tried beforehand.

Each check is a function that returns findings; one that raises is a finding itself. Nothing is
fetched, decoded or written, but for a file that tries whether a folder can be written to.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench import check_datasets_package
from bench.launch.scheduler import find_cluster
from bench.process import available_cores
from datasets.catalogue import load_datasets
from datasets.dataset import Dataset
from datasets.errors import BenchError
from datasets.fetch import get_command
from datasets.photos import PhotoDataset
from datasets.weights_source import find_weights

if TYPE_CHECKING:
    import torch

Level = Literal["ok", "warn", "fail"]
OK: Level = "ok"
WARN: Level = "warn"
FAIL: Level = "fail"

STEPS = 3  # of training, compared between processor and GPU
LOSS_TOLERANCE = 0.02  # relative: what TF32 and another order of sums may make of a few steps
FEW_BYTES, VERY_FEW_BYTES = 10 * 2**30, 2**30  # free on a disk
FEW_MEMORY = 2 * 2**30


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it if anything is wrong."""

    check: str
    level: Level
    text: str
    remedy: str = ""

    def line(self) -> str:
        """Return it as it is printed."""
        remedy = f"\n{'':16}-> {self.remedy}" if self.remedy else ""
        return f"{self.level:5} {self.check:9} {self.text}{remedy}"


def examine(data_root: Path, results: Path) -> Iterator[Finding]:
    """Check everything, one thing after the other."""
    checks: dict[str, Callable[[], Sequence[Finding]]] = {
        "python": check_python,
        "datasets": check_packages,
        "torch": check_torch,
        "machine": check_machine,
        "data": lambda: check_data(data_root),
        "weights": lambda: check_weights(data_root),
        "disk": lambda: check_disk({"data root": data_root, "results": results}),
        "slurm": check_slurm,
    }
    for name, check in checks.items():
        try:
            yield from check()
        except BenchError as error:
            yield Finding(name, FAIL, error.message, error.remedy)
        except Exception as error:  # whatever a broken installation may raise
            text = f"{type(error).__name__}: {error}"
            yield Finding(name, FAIL, text, "install nct-bench again, in an environment of its own")


def check_python() -> list[Finding]:
    """Return which Python and which environment this is."""
    name = f"Python {sys.version.split()[0]}, {sys.prefix}"
    if sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ:
        return [Finding("python", OK, name)]
    remedy = "python3 -m venv .venv keeps other packages from getting in the way"
    return [Finding("python", WARN, f"{name}: no virtual environment", remedy)]


def check_packages() -> list[Finding]:
    """Return whether another package called `datasets` is found, or installed beside ours."""
    try:
        check_datasets_package()
    except ImportError as clash:
        text, _, remedy = str(clash).partition("\n  -> ")
        return [Finding("datasets", FAIL, text, remedy)]
    try:
        other = distribution("datasets")
    except PackageNotFoundError:
        return [Finding("datasets", OK, "our package 'datasets' is found, and no other is there")]
    return [
        Finding(
            "datasets",
            WARN,
            f"Hugging Face's datasets {other.version} is installed in the same environment; ours "
            "is found from here, theirs may be from another folder",
            "give nct-bench a virtual environment of its own",
        )
    ]


def check_torch() -> list[Finding]:
    """Train a small network for a few steps: on the processor, and on each GPU the same."""
    import torch

    began = time.perf_counter()
    expected = train_steps(torch.device("cpu"))
    took = 1000 * (time.perf_counter() - began)
    version = f"torch {torch.__version__}"
    if not all(map(_is_finite, expected)) or expected[-1] >= expected[0]:
        text = f"{version}: training on the processor does not work, the losses are {expected}"
        return [Finding("torch", FAIL, text, "install torch again")]
    findings = [Finding("torch", OK, f"{version}: {STEPS} steps on the processor, {took:.0f} ms")]
    if not torch.cuda.is_available():
        return [*findings, _without_gpu(torch.version.cuda)]
    for number in range(torch.cuda.device_count()):
        findings.append(compare_steps(torch.device("cuda", number), expected))
    return findings


def _without_gpu(built_for: str | None) -> Finding:
    """Return what it means that torch sees no GPU."""
    if shutil.which("nvidia-smi") is None:
        return Finding("gpu", OK, "none: runs use the processor, which suits the MNIST sets")
    if built_for is None:
        text = "there is an NVIDIA driver, but torch is built for processors only"
        return Finding("gpu", FAIL, text, "install torch built for CUDA (pytorch.org has how)")
    return Finding(
        "gpu",
        FAIL,
        f"there is an NVIDIA driver, but torch, built for CUDA {built_for}, finds no GPU",
        "compare with nvidia-smi; a driver that is too old, CUDA_VISIBLE_DEVICES, or no GPU in "
        "this job",
    )


def compare_steps(device: torch.device, expected: Sequence[float]) -> Finding:
    """Return whether training on a device goes as it did on the processor."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    remedy = "try another driver or torch; without --device, runs would use this GPU"
    try:
        began = time.perf_counter()
        found = train_steps(device)
        took = 1000 * (time.perf_counter() - began)
    except RuntimeError as error:
        return Finding("gpu", FAIL, f"{name}: training fails: {error}", remedy)
    apart = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    if not all(_is_finite(loss) for loss in found) or max(apart) > LOSS_TOLERANCE:
        text = f"{name}: losses of {_losses(found)} where the processor has {_losses(expected)}"
        return Finding("gpu", FAIL, text, remedy)
    text = f"{name}: {STEPS} steps as on the processor, {took:.0f} ms"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return Finding("gpu", WARN, f"{text}; it has no bfloat16, so training is slow", remedy)
    return Finding("gpu", OK, text)


def train_steps(device: torch.device) -> list[float]:
    """Return the losses of a few steps of a small network on the same numbers everywhere."""
    import torch
    from torch import nn
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 2))
    images = torch.rand(64, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(2, (64,), generator=generator).to(device)
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _losses(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def check_machine() -> list[Finding]:
    """Return how many cores and how much memory runs find."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    told = f", OMP_NUM_THREADS={threads}" if threads else ""
    cores = f"{available_cores()} cores{told}"
    free = _free_memory()
    if free is None:
        return [Finding("machine", OK, cores)]
    text = f"{cores}, {free / 2**30:.1f} GB of memory free"
    if free >= FEW_MEMORY:
        return [Finding("machine", OK, text)]
    return [Finding("machine", WARN, text, "end other programs, or run with --workers 1")]


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return None


def check_data(root: Path) -> list[Finding]:
    """Check the labels of what is on disk, and whether its images are there."""
    findings, absent = [], []
    for name, dataset in load_datasets().items():
        found = dataset.locate(root)
        if found is None:
            absent.append(name)
            continue
        try:
            findings.append(_check_dataset(dataset, root))
        except BenchError as error:
            findings.append(Finding("data", FAIL, error.message, error.remedy))
    if absent:
        text = f"not on disk: {', '.join(absent)} (looked in {root})"
        commands = "; ".join(dict.fromkeys(get_command(name, root) for name in absent))
        findings.append(Finding("data", WARN, text, commands))
    return findings


def _check_dataset(dataset: Dataset, root: Path) -> Finding:
    """Check a dataset that is there, under its default settings."""
    config: Any = dataset.config_type()
    facts, found, labels = dataset.check(root, config)
    name = f"{dataset.name} ({facts.protocol})"
    total = sum(map(len, labels.values()))
    if gone := sum(map(len, dataset.absent(found.folder, config).values())):
        return Finding(
            "data",
            FAIL,
            f"{name}: {gone:,} of {total:,} images are missing in {found.folder}",
            f"python -m bench data verify {dataset.name} lists them; "
            f"{dataset.if_missing(found.folder)}",
        )
    kind = {"release": "", "standin": ", a stand-in"}.get(found.data_kind, f", {found.data_kind}")
    text = f"{name}: {total:,} images{kind}, labels as they should be"
    if isinstance(dataset, PhotoDataset) and not facts.rows:
        needed = dataset.undecoded_bytes(found.folder, config)
        free = shutil.disk_usage(found.folder).free
        if needed > free:
            sizes = f"{needed / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free"
            remedy = "free disk space, move the data root, or run at a smaller resolution"
            return Finding("data", FAIL, f"{text}; decoded they need {sizes}", remedy)
        text += f"; {needed / 1e9:.1f} GB are still to be decoded" if needed else ", decoded"
    return Finding("data", OK, text)


def check_weights(root: Path) -> list[Finding]:
    """Return whether ResNet-50's ImageNet weights are there and whole."""
    found = find_weights(root)
    if found is not None:
        return [Finding("weights", OK, f"ImageNet weights: {found}")]
    text = "no ImageNet weights, from which the photo sets start"
    remedy = f"{get_command('weights', root)}, or --set backbone.weights=FILE"
    return [Finding("weights", WARN, text, remedy)]


def check_disk(folders: dict[str, Path]) -> list[Finding]:
    """Return whether folders can be written to, and how much room is left."""
    findings = []
    for what, folder in folders.items():
        place = folder.absolute()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        text = f"{what} {folder}: {free / 1e9:.1f} GB free"
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            closed = f"{what} {folder} cannot be written to: {error.strerror}"
            option = "--data-root" if what == "data root" else "--results"
            level: Level = WARN if what == "data root" else FAIL  # shared data may be read alone
            findings.append(Finding("disk", level, closed, f"choose another folder with {option}"))
            continue
        remedy = "free disk space; python -m bench clean shows what runs left"
        if free < VERY_FEW_BYTES:
            findings.append(Finding("disk", FAIL, text, remedy))
        elif free < FEW_BYTES:
            findings.append(Finding("disk", WARN, text, remedy))
        else:
            findings.append(Finding("disk", OK, text))
    return findings


def check_slurm() -> list[Finding]:
    """Return whether SLURM answers, where it is installed."""
    cluster = find_cluster()
    if cluster is not None:
        text = f"cluster {cluster.name} answers; arrays of up to {cluster.largest_array:,} tasks"
        return [Finding("slurm", OK, text)]
    if shutil.which("scontrol") is None:
        return [Finding("slurm", OK, "not on this machine: --cluster works on a login node")]
    remedy = "scontrol show config says why; runs without --cluster do not need it"
    return [Finding("slurm", WARN, "SLURM is installed but does not answer", remedy)]
