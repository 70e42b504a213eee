"""Following every reference from an object, in search of labels and images that must not be there.

Hidden arrays are looked for by content, in any number format, whole or one-hot, also as a part of
something larger: a copy is as good as the original to a method that cheats.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datasets.base import BackboneSpec, LoadedData, Task

PROJECT = ("bench", "methods", "datasets")
FORMATS = ("i1", "i2", "i4", "i8", "f2", "f4", "f8")
HOOKS = ("test_firewall", "reference_walk", "conftest")
"""Modules of the tests themselves: their hooks hold the secrets, and are no way round anything."""


@dataclass
class Secrets:
    """Byte patterns that must not be reachable, each with a name for the message."""

    patterns: dict[bytes, str] = field(default_factory=dict)
    fewest: int = sys.maxsize  # numbers in the shortest of them

    def add_labels(self, name: str, labels: Tensor) -> None:
        numbers = labels.numpy()
        one_hot = np.eye(int(numbers.max()) + 1, dtype=np.int64)[numbers]
        for kind in FORMATS:
            self.patterns[numbers.astype(kind).tobytes()] = name
            self.patterns[one_hot.astype(kind).tobytes()] = f"{name}, one-hot"
        self.fewest = min(self.fewest, len(numbers))

    def add_images(self, name: str, batch: Tensor) -> None:
        """Add single images, in both memory layouts."""
        for image in batch[:: max(1, len(batch) // 3)]:
            for layout in (image, image.permute(1, 2, 0)):
                self.patterns[layout.contiguous().numpy().tobytes()] = name

    def within(self, content: bytes) -> Iterator[str]:
        for pattern, name in self.patterns.items():
            if len(pattern) <= len(content) and pattern in content:
                yield name


def task_of(data: LoadedData, train_groups: bool = False, val_groups: bool = False) -> Task:
    """Show a dataset as a tier may see it."""
    spec = BackboneSpec(data.facts.backbone)
    return data.task(spec, train_groups=train_groups, val_groups=val_groups)


def secrets_of(data: LoadedData, *, train_groups: bool, val_groups: bool) -> Secrets:
    """Collect what a method of that tier must not see of a dataset."""
    granted = {"train": train_groups, "val": val_groups, "test": False}
    secrets = Secrets()
    for split, part in data.splits.items():
        labels = part.labels
        known = [labels.y, *([labels.groups] if granted[split] else [])]
        groupings = {"groups": labels.groups, **labels.alternates}
        for name, values in groupings.items():
            if not any(torch.equal(values, seen) for seen in known):
                secrets.add_labels(f"{name} of {split}", values)
    test = data.splits["test"]
    batch = test.images.batch(torch.arange(len(test)))
    secrets.add_images("test images", batch.pixels)
    secrets.add_images("test images, transformed", data.facts.eval_transform(batch))
    secrets.add_labels("classes of test", test.labels.y)
    return secrets


def walk(roots: Iterable[Any], secrets: Secrets, project: Iterable[str] = ()) -> set[str]:
    """Name every secret within reach, and the kind of object it was found in."""
    inside = (*PROJECT, *project)
    foreign = {id(vars(m)) for m in list(sys.modules.values()) if _foreign_module(m, inside)}
    seen: dict[int, Any] = {}  # objects are kept, so that no id is used twice
    contents: set[tuple[int, int]] = set()
    found: set[str] = set()
    waiting = [*roots]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or id(thing) in foreign or _foreign_module(thing, inside):
            continue
        seen[id(thing)] = thing
        for content in _contents(thing, secrets.fewest, contents):
            found |= {f"{name} in a {type(thing).__name__}" for name in secrets.within(content)}
        waiting.extend(_references(thing, inside))
    return found


def _foreign_module(thing: Any, inside: tuple[str, ...]) -> bool:
    return isinstance(thing, types.ModuleType) and thing.__name__.split(".")[0] not in inside


def _contents(thing: Any, fewest: int, known: set[tuple[int, int]]) -> Iterator[bytes]:
    """Give the bytes behind an object, a tensor's whole storage included."""
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) not in known:
            known.add((storage.data_ptr(), storage.nbytes()))
            yield torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
    elif isinstance(thing, np.ndarray) and thing.dtype != object:
        yield thing.tobytes()
    elif isinstance(thing, bytes | bytearray | memoryview):
        yield bytes(thing)
    elif isinstance(thing, list | tuple | dict) and len(thing) >= fewest:
        values = list(thing.values()) if isinstance(thing, dict) else thing
        if all(isinstance(value, int | float) for value in values):
            yield np.array(values, dtype=np.float64).tobytes()


def _references(thing: Any, inside: tuple[str, ...]) -> list[Any]:
    if isinstance(thing, types.FunctionType) and thing.__module__ in HOOKS:
        return []
    if isinstance(thing, type) and thing.__module__.split(".")[0] not in inside:
        return []
    if isinstance(thing, Tensor):
        return [thing._base, thing.grad if thing.is_leaf else None, *gc.get_referents(thing)]
    if isinstance(thing, np.ndarray):
        return [thing.base, *(thing.ravel() if thing.dtype == object else ())]
    return gc.get_referents(thing)
