"""Frozen features: what a network with fixed weights makes of a dataset's images, computed once.

With `backbone.frozen=true` images go through the network before the task is built, and methods
train a head on what comes out, as they do on a table of features. The work is shared by all
methods, seeds and runs on the same images, network, weights and evaluation transform, by a name
that is a digest of these. The network sees images and no label. A file of rows appears when it is
complete and is checked by its checksum; what a killed process left is continued.

A model of such a run is the network and the head together (`OnFeatures`), and takes images.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench import numerics
from bench.job import Job
from bench.process import CpuClock, peak_memory_bytes
from bench.provenance import GitState, environment, git_state
from bench.record import StageCost, code_of, read_part, to_plain
from bench.store import Store
from datasets.base import BackboneSpec, Facts, LabelledSplit, LoadedData
from datasets.config import as_plain
from datasets.dataset import Progress
from datasets.errors import BenchError
from datasets.features import FeatureRows, MappedRows, RowTransform
from datasets.files import (
    RESULTS,
    Damaged,
    FileFacts,
    StorageError,
    append_line,
    atomic_folder,
    digest,
    read_checked,
    read_lines,
    set_aside,
    storage_errors,
    with_checksum,
)
from datasets.lock import Lock
from datasets.pixels import pixel_digest
from datasets.resident import batches
from methods.backbones import build_backbone
from methods.base import Fitted
from methods.prediction import EvalImages, batch_size_for, predict

VERSION = 1  # of the features: raised when they come out differently
STAGE = "features"  # what records call the cost of making them
ROWS, DESCRIPTION, JOURNAL = "rows.f32", "features.json", "journal.jsonl"
TOGETHER = 64  # images that go through the network at once: activations take many times their size
NOTED_EVERY = 16  # batches after which what is done so far survives a kill
NUMBER_BYTES = 4


def identity_of(job: Job, data: LoadedData, split: str) -> dict[str, object]:
    """Return all that the features of a split depend on."""
    part, look, backbone = data.splits[split], data.facts.eval_transform, job.config.backbone
    ids = hashlib.sha256(part.labels.ids.numpy().astype("<i8").tobytes()).hexdigest()
    return {
        "version": VERSION,
        "data": job.fingerprint,
        "split": split,
        "samples": ids[:16],
        "pixels": pixel_digest({split: part}),
        "network": backbone["name"],
        "weights": backbone["weights_sha256"],
        "channels": data.facts.channels,
        "transform": {"cut": type(look.cut).__name__, **as_plain(look)},
        "numerics": numerics.in_effect()["choice"],
    }


def on_features(
    job: Job,
    data: LoadedData,
    store: Store,
    *,
    device: torch.device,
    progress: Progress,
    not_before: float = 0.0,
) -> tuple[LoadedData, StageCost]:
    """Return the data with features in the place of images, and what these took.

    Args:
        job: whose network is frozen.
        data: the splits that are wanted, with their images.
        store: where features are kept.
        device: where the network runs.
        progress: is told how far the work has come.
        not_before: features older than this are made again.
    """
    found = {}
    for split in data.splits:
        found[split] = _features_of(job, data, split, store, device, progress, not_before)
    length = next(iter(found.values())).length
    splits = {
        split: LabelledSplit(data.splits[split].labels, one.rows()) for split, one in found.items()
    }
    cost = _cost(job, list(found.values()))
    return replace(data, facts=row_facts(data.facts, length), splits=splits), cost


def row_facts(facts: Facts, length: int) -> Facts:
    """Return the facts of a dataset whose images were turned into rows of that length."""
    look = RowTransform(length=length)
    return replace(facts, channels=length, train_transform=look, eval_transform=look)


def features_in_memory(network: nn.Module, data: LoadedData) -> LoadedData:
    """Return data with features in the place of images; nothing is kept on disk."""
    splits = {}
    for name, part in data.splits.items():
        images = EvalImages(part.images, data.facts.eval_transform, TOGETHER)
        splits[name] = LabelledSplit(part.labels, FeatureRows(predict(network, images)))
    length = next(iter(splits.values())).images.batch(torch.tensor([0])).pixels.shape[1]
    return replace(data, facts=row_facts(data.facts, length), splits=splits)


@dataclass(frozen=True)
class Features:
    """The features of a split on disk, and what they took."""

    path: Path
    count: int
    length: int
    facts: Mapping[str, Any]

    def rows(self) -> MappedRows:
        """Open them."""
        return MappedRows(self.path / ROWS, self.count, self.length)

    @staticmethod
    def read(path: Path) -> Features:
        """Read the description and check the rows; raise `Damaged` if they are not as written."""
        facts = read_checked(path / DESCRIPTION)
        try:
            read_part(FileFacts, facts["file"]).check(path / ROWS)
            return Features(path, int(facts["count"]), int(facts["length"]), facts)
        except (LookupError, TypeError, ValueError) as error:
            raise Damaged(f"{type(error).__name__}: {error}") from error


def _features_of(
    job: Job,
    data: LoadedData,
    split: str,
    store: Store,
    device: torch.device,
    progress: Progress,
    not_before: float,
) -> Features:
    """Return the features of a split, which are made unless they are there."""
    identity = identity_of(job, data, split)
    path = store.features / f"{job.dataset}-{split}-{digest(identity)}"
    stored = _stored(path, not_before, progress, None)
    if stored is None:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        progress(f"features of {job.dataset} {split}", 0, len(data.splits[split]))
        with Lock(path.with_name(f"{path.name}.lock")).hold(wait=True) as lock:
            stored = _stored(path, not_before, progress, store)
            if stored is None:
                _extract(job, data, split, path, identity, device, progress, lock)
                stored = Features.read(path)
    return stored


def _stored(
    path: Path, not_before: float, progress: Progress, damaged_to: Store | None
) -> Features | None:
    """Return stored features if they are whole and new enough; who may, sets damaged ones aside."""
    if not path.exists():
        return None
    try:
        stored = Features.read(path)
        return stored if (path / DESCRIPTION).stat().st_mtime >= not_before else None
    except (Damaged, OSError) as error:
        if damaged_to is not None:
            place = set_aside(path, damaged_to.damaged, str(error))
            progress(f"{path.name} is damaged ({error}): made again, see {place}", 0, 1)
        return None


def _extract(
    job: Job,
    data: LoadedData,
    split: str,
    path: Path,
    identity: Mapping[str, object],
    device: torch.device,
    progress: Progress,
    lock: Lock,
) -> None:
    """Run a split through the network, from where a killed process left it."""
    part, look = data.splits[split], data.facts.eval_transform
    network = build_backbone(job.network(), data.facts.channels).eval().to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    work = path.with_name(f"{path.name}.work")
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    done = _Journal.open(work, network.dim, code_of(job))
    _check_room(work, (len(part) - done.count) * network.dim * NUMBER_BYTES)
    images = part.images.to(device)
    size = min(TOGETHER, batch_size_for(look, part.images))
    # Of nothing, `split` makes one empty part: a process may be killed after its last batch.
    wanted = [own for own in torch.arange(done.count, len(part)).split(size) if len(own)]
    began, before, threads = CpuClock.now(), done.spent, torch.get_num_threads()
    with storage_errors(work), (work / ROWS).open("ab") as sink, torch.no_grad():
        for number, batch in enumerate(batches(images, wanted), start=1):
            seen = look(batch).contiguous(memory_format=torch.channels_last)
            rows = network(seen).float().cpu()
            if not bool(torch.isfinite(rows).all()):
                raise BenchError(
                    f"the features of {job.dataset} by {job.network().name} are not all finite",
                    "check the weights file and how it wants images (backbone.input)",
                )
            done.add(sink, np.ascontiguousarray(rows.numpy()))
            if number % NOTED_EVERY == 0 or done.count == len(part):
                lock.check()  # the file of that name may be another process's by now
                done.note(sink, before + CpuClock.now() - began)
                progress(f"features of {job.dataset} {split}", done.count, len(part))
    if (work / ROWS).stat().st_size != len(part) * network.dim * NUMBER_BYTES:
        raise Damaged(f"another process wrote to {work / ROWS} as well", "run again")
    spent = before + CpuClock.now() - began
    description = {
        "identity": identity,
        "count": len(part),
        "length": network.dim,
        "file": vars(FileFacts.of(work / ROWS)),
        "computed_by": job.run_id,
        "seconds": spent.wall,
        "cpu_seconds": spent.cpu,
        "image_passes": len(part),
        "threads": threads,
        "peak_memory_bytes": peak_memory_bytes(device),
        "git": vars(git_state()),
        "code": code_of(job),
        "environment": to_plain(environment()),
    }
    with atomic_folder(path) as draft:
        os.replace(work / ROWS, draft / ROWS)
        (draft / DESCRIPTION).write_text(with_checksum(description))
    shutil.rmtree(work, ignore_errors=True)


@dataclass
class _Journal:
    """How far a file of rows has come, so that a killed extraction can go on."""

    folder: Path
    length: int
    code: str
    count: int = 0
    checksum: int = 0
    spent: CpuClock = field(default_factory=CpuClock)

    @staticmethod
    def open(folder: Path, length: int, code: str) -> _Journal:
        """Find the last entry that the file agrees with, and cut off what came after it.

        What other code began starts again.
        """
        file, noted = folder / ROWS, read_lines(folder / JOURNAL)
        whole = file.stat().st_size if file.is_file() else 0
        for entry in reversed(noted):
            size = entry["count"] * length * NUMBER_BYTES
            same = (entry["length"], entry["code"]) == (length, code) and size <= whole
            if same and _checksum(file, size) == entry["checksum"]:
                with file.open("r+b") as rows:
                    rows.truncate(size)
                spent = CpuClock(entry["seconds"], entry["cpu_seconds"])
                return _Journal(folder, length, code, entry["count"], entry["checksum"], spent)
        for path in (file, folder / JOURNAL):
            path.unlink(missing_ok=True)
        return _Journal(folder, length, code)

    def add(self, sink: Any, rows: np.ndarray) -> None:
        """Append rows to the file."""
        content = rows.tobytes()
        sink.write(content)
        self.count += len(rows)
        self.checksum = zlib.crc32(content, self.checksum)

    def note(self, sink: Any, spent: CpuClock) -> None:
        """Make sure that what was written so far survives, and note it."""
        sink.flush()
        os.fsync(sink.fileno())
        entry = {name: getattr(self, name) for name in ("count", "length", "code", "checksum")}
        times = {"seconds": spent.wall, "cpu_seconds": spent.cpu}
        append_line(self.folder / JOURNAL, {**entry, **times})


def _checksum(file: Path, size: int) -> int:
    found, left = 0, size
    with file.open("rb") as source:
        while left > 0 and (block := source.read(min(left, 2**24))):
            found, left = zlib.crc32(block, found), left - len(block)
    return found


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"features need {needed / 1e6:,.0f} MB in {folder.parent}, and {free / 1e6:,.0f} MB "
            "are free",
            RESULTS.if_full,
        )


def _cost(job: Job, found: Sequence[Features]) -> StageCost:
    """Return what the features of the splits took together, in the run that made them or not."""
    made = [one.facts for one in found if one.facts["computed_by"] == job.run_id]
    every, first = [one.facts for one in found], found[0].facts
    cpu = [one["cpu_seconds"] for one in every]
    return StageCost(
        name=STAGE,
        key=digest(sorted(one.path.name for one in found)),
        seconds_standalone=sum(one["seconds"] for one in every),
        seconds_marginal=sum(one["seconds"] for one in made),
        cpu_seconds=None if None in cpu else sum(cpu),
        image_passes=sum(one["image_passes"] for one in every),
        reused=not made,
        git=read_part(GitState, first["git"]),
        code=first.get("code"),
    )


class OnFeatures(Fitted):
    """A head that was trained on the features of a frozen network, and that network before it."""

    def __init__(self, network: nn.Module, head: Fitted) -> None:
        module = nn.ModuleDict({"network": network, "head": head.module})
        super().__init__(
            module,
            selection=head.selection,
            details=head.details,
            partition=head.partition,
            partition_split=head.partition_split,
        )
        self.val_partition = head.val_partition
        self.network = network
        self.head = head

    def features(self, images: Tensor) -> Tensor:
        """Return the rows that the head takes."""
        rows: Tensor = self.network(images)
        return rows[:, :, None, None]

    def logits(self, images: Tensor) -> Tensor:
        """Score the classes of a batch of transformed images."""
        return self.head.logits(self.features(images))

    def leaf(self, images: Tensor) -> Tensor | None:
        """Return the latent group of each image, where the method has one at inference."""
        return self.head.leaf(self.features(images))

    def leaf_logits(self, images: Tensor) -> Tensor | None:
        """Score every latent group of a batch, where there are any."""
        return self.head.leaf_logits(self.features(images))

    def level_logits(self, images: Tensor) -> Tensor | None:
        """Score the nodes of every level of a tree, where there is one."""
        return self.head.level_logits(self.features(images))

    def leaf_names(self) -> tuple[str, ...]:
        """Return the names of the latent groups that `leaf` numbers."""
        return self.head.leaf_names()


def with_network(head: Fitted, network: BackboneSpec, channels: int) -> OnFeatures:
    """Return a model that takes images, of the frozen network and the head on its features."""
    body = build_backbone(network, channels).eval()
    return OnFeatures(body.to(next(head.module.parameters()).device), head)


def split_weights(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the network and those of the head."""
    parts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, value in weights.items():
        part, _, rest = name.partition(".")
        parts[part == "head"][rest] = value
    return parts
