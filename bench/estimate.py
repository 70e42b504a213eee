"""What a run that was not made yet should cost: image passes times a short measurement.

The passes follow from a method's configuration by one rule for all methods: every epoch goes once
through training and validation images, a stage or fit without epochs goes through them once. How
far a method's fit is from that (JTT repeats its errors, CnC draws sets, a tree stops early) shows
in finished runs of it on other data; the most of them is taken. The network's speed at the
resolution is measured for a few seconds, on this machine, and kept in the user's cache.

It is an estimate. Transforms, evaluation and clustering are not in it, nor what makes a machine
slower when several runs share it.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from bench.cost import StageSeconds
from bench.job import Job
from bench.record import Record
from datasets.catalogue import get_dataset
from datasets.config import coerce
from datasets.dataset import QUICK_SIZES
from datasets.errors import BenchError
from datasets.fetch import data_root_in_use
from datasets.files import StorageError, atomic_file
from methods.base import get_method

if TYPE_CHECKING:
    import torch

FIT = "fit"  # the name of what a run does beside its stages
FEATURES = "features"  # that of computing the features of a frozen network
MEASURED_SECONDS = 2.0
MOST_STEPS = 20
BATCH, SMALL_BATCH, GPU_BATCH = 4, 64, 64  # small networks are slower in small batches


@dataclass(frozen=True)
class Speed:
    """Seconds of one image, to train on and to evaluate, and how many features it has then."""

    train: float
    evaluate: float
    features: int


@dataclass(frozen=True)
class Network:
    """What a measurement is of."""

    name: str
    channels: int
    resolution: int  # 0 for rows of features
    device: str
    threads: int
    columns: int = 0  # where they are not as many as the rows


Measure = Callable[[Network], Speed]


def estimated_seconds(
    jobs: Sequence[Job],
    records: Iterable[Record],
    threads: Callable[[Job], int],
    measure: Measure | None = None,
    device: str = "cpu",
) -> dict[str, StageSeconds]:
    """Return, by run id, the estimated seconds of each stage of jobs, where they can be told.

    Args:
        jobs: those whose cost is not known.
        records: finished runs of any data.
        threads: how many a job has for the network that its images go through.
        measure: returns a network's speed; by default it is measured, or was on this machine.
        device: what runs use.
    """
    measure = measure or kept_speed
    factors = fit_factors(records) if jobs else {}
    found: dict[str, StageSeconds] = {}
    kinds: dict[str, StageSeconds | None] = {}
    for job in jobs:
        kind = str((job.method, job.dataset, job.fingerprint, job.quick, job.config))
        if kind not in kinds:
            factor = factors.get(job.method, 1.0)
            kinds[kind] = _seconds(job, factor, threads(job), measure, device.partition(":")[0])
        if (seconds := kinds[kind]) is not None:
            found[job.run_id] = seconds
    return found


def epochs_of(method: str, config: Any) -> dict[str, float]:
    """Return how often each stage, and the fit itself, goes through the data; by the rule above."""
    stages = get_method(method).stages(config)
    passes = {stage.name: _epochs(stage.config) for stage in stages}
    return {**passes, FIT: 0.0 if method in passes else _epochs(config)}


def _epochs(config: Any) -> float:
    """Return the epochs of a config: a number, or one for each of several iterations."""
    epochs = getattr(config, "epochs", 1)
    if not isinstance(epochs, tuple):
        return float(epochs)
    count = getattr(config, "iterations", len(epochs))
    return float(sum(epochs[min(number, len(epochs) - 1)] for number in range(count)))


def fit_factors(records: Iterable[Record]) -> dict[str, float]:
    """Return by how much the fits of finished runs exceed the rule: the most over datasets."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for record in records:
        job = record.job
        try:
            counts = _counts(job)
            ruled = epochs_of(job.method, job.method_config())[FIT] * sum(counts[:2])
        except BenchError:  # of a method, dataset or setting that is no more
            continue
        passes = sum(s.image_passes for s in record.cost.stages if s.name == FIT)
        if record.done and ruled and passes and not job.quick:
            ratios.setdefault((job.method, job.dataset), []).append(passes / ruled)
    factors: dict[str, float] = {}
    for (method, _), own in ratios.items():
        factors[method] = max(factors.get(method, 0.0), statistics.fmean(own))
    return factors


def _counts(job: Job) -> tuple[int, ...]:
    """Return the number of images of each split, zeros where the protocol does not say."""
    root = data_root_in_use()
    return _counts_of(job.dataset, job.dataset_config(), job.quick, job.standin, root)


@cache
def _counts_of(name: str, config: Any, quick: bool, standin: bool, root: Path) -> tuple[int, ...]:
    dataset = get_dataset(name)
    counts = {} if standin else dataset.facts(config).counts
    found = None if counts else dataset.locate(root)
    if found is not None:
        counts = {split: len(own) for split, own in dataset.labels(found.folder, config).items()}
    most = QUICK_SIZES if quick else counts
    return tuple(min(counts.get(split, 0), most.get(split, 0)) for split in QUICK_SIZES)


def _seconds(
    job: Job, factor: float, threads: int, measure: Measure, device: str
) -> StageSeconds | None:
    """Return the estimated seconds of a job's stages; none where they cannot be told."""
    train, val, test = _counts(job)
    if not train:
        return None
    facts = get_dataset(job.dataset).facts(job.dataset_config())
    look, backbone = facts.eval_transform, job.config.backbone
    shape = (0, 0) if facts.rows else (look.resolution, look.columns)
    network = Network(
        str(backbone["name"]), facts.channels, shape[0], device, threads, columns=shape[1]
    )
    try:
        speed, shared = measure(network), {}
        if backbone.get("frozen"):
            shared = {FEATURES: (train + val + test) * speed.evaluate}
            head = Network(str(backbone.get("head", "linear")), speed.features, 0, device, 1)
            speed = measure(head)
    except (BenchError, RuntimeError, ValueError):  # the run itself will say what is wrong
        return None
    epoch = train * speed.train + val * speed.evaluate
    passes = epochs_of(job.method, job.method_config())
    passes[FIT] *= factor
    return shared | {name: epochs * epoch for name, epochs in passes.items()}


def kept_speed(network: Network) -> Speed:
    """Return a network's speed on this machine; it is measured once and kept."""
    import torch

    from bench.provenance import environment

    known = environment()
    hardware = torch.cuda.get_device_name() if network.device == "cuda" else known.processor
    key = f"{hardware}, torch {torch.__version__}: {json.dumps(asdict(network))}"
    path = Path(platformdirs.user_cache_dir("nct-bench")) / "speed.json"
    kept = _read(path)
    if key not in kept:
        kept[key] = measured_speed(network)
        content = {name: asdict(speed) for name, speed in {**_read(path), **kept}.items()}
        with contextlib.suppress(StorageError), atomic_file(path) as draft:
            draft.write_text(json.dumps(content, indent=1))
    return kept[key]


def _read(path: Path) -> dict[str, Speed]:
    try:
        content = json.loads(path.read_text())
        return {key: coerce(value, Speed, "speed") for key, value in content.items()}
    except (OSError, ValueError, AttributeError, BenchError):  # not there, or of another version
        return {}


def measured_speed(network: Network) -> Speed:
    """Train and evaluate a network on random numbers for a few seconds."""
    import torch

    from datasets.base import BackboneSpec
    from methods.backbones import SMALL_NETWORKS, build_backbone

    before = torch.get_num_threads()
    torch.set_num_threads(network.threads)
    try:
        device = torch.device(network.device)
        small = network.name in SMALL_NETWORKS
        count = SMALL_BATCH if small else GPU_BATCH if device.type == "cuda" else BATCH
        with torch.random.fork_rng():
            body = build_backbone(BackboneSpec(network.name), network.channels)
            model = torch.nn.Sequential(body, torch.nn.Linear(body.dim, 2)).to(device)
            rows, columns = network.resolution, network.columns or network.resolution
            shape = (network.channels, rows, columns) if rows else (network.channels,)
            images = torch.rand(count, *shape, device=device)
        if rows:
            images = images.contiguous(memory_format=torch.channels_last)
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def forward() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
                value: torch.Tensor = model(images).float().square().mean()
                return value

        def step() -> None:
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        train = _each(step, device) / count
        model.eval()
        with torch.no_grad():
            evaluate = _each(forward, device) / count
        return Speed(train, evaluate, body.dim)
    finally:
        torch.set_num_threads(before)


def _each(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of some work, after a first time that warms up.

    On a processor those that its threads were busy: what else runs there now will not always.
    """
    import torch

    def clock() -> float:
        if device.type != "cuda":
            return time.process_time() / torch.get_num_threads()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    took: list[float] = []
    began = time.perf_counter()
    work()
    while not took or (time.perf_counter() - began < MEASURED_SECONDS and len(took) < MOST_STEPS):
        start = clock()
        work()
        took.append(clock() - start)
    return statistics.median(took)
