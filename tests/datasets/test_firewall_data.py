"""What a method cannot reach from its Task, by any road Python offers."""

from __future__ import annotations

import contextlib
import gc
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datasets import standins
from datasets.base import BackboneSpec, GroupLabelsHidden, LoadedData, Split, Task
from datasets.catalogue import DATASETS

NAMES = ("umnist", "cmnist", "isic")
"""In memory with alternates, in memory with colours, memory-mapped with alternates."""
GRANTS = [(False, False), (True, False), (False, True), (True, True)]
BACKBONE = BackboneSpec("lenet5")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedData]:
    root = tmp_path_factory.mktemp("firewall")
    for name in NAMES:
        standins.write(name, root, size=400 if name != "isic" else 60)
    return {name: DATASETS[name].load(root, DATASETS[name].config_type()) for name in NAMES}


def task_of(data: LoadedData, train: bool, val: bool) -> Task:
    return data.task(BACKBONE, train_groups=train, val_groups=val)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grants", GRANTS)
@pytest.mark.parametrize("travelled", [False, True], ids=["here", "pickled"])
def test_groups_are_there_exactly_where_granted(
    loaded: dict[str, LoadedData], name: str, grants: tuple[bool, bool], travelled: bool
) -> None:
    data = loaded[name]
    task = task_of(data, *grants)
    if travelled:
        task = pickle.loads(pickle.dumps(task))
    for split, granted in zip(("train", "val"), grants, strict=True):
        seen: Split = getattr(task, split)
        labels = data.splits[split].labels
        assert torch.equal(seen.y, labels.y) and torch.equal(seen.ids, labels.ids)
        assert len(seen) == len(seen.images) == len(labels)
        if granted:
            assert torch.equal(seen.groups, labels.groups)
        else:
            with pytest.raises(GroupLabelsHidden, match=f"of the {split} split") as caught:
                _ = seen.groups
            assert f"{split}_groups=True" in caught.value.remedy


def test_a_method_that_writes_to_its_task_changes_nothing_else(
    loaded: dict[str, LoadedData],
) -> None:
    data = loaded["umnist"]
    task = task_of(data, True, True)
    before = data.splits["train"].labels
    y, groups = before.y.clone(), before.groups.clone()
    task.train.y.fill_(1)
    task.train.groups.fill_(2)
    assert torch.equal(data.splits["train"].labels.y, y)
    assert torch.equal(data.splits["train"].labels.groups, groups)


@pytest.mark.parametrize("name", NAMES)
def test_attributes_lead_nowhere(loaded: dict[str, LoadedData], name: str) -> None:
    task = task_of(loaded[name], False, False)
    for split in (task.train, task.val):
        assert not hasattr(split, "__dict__")
        with pytest.raises(TypeError):
            vars(split)
        names = {attribute for attribute in dir(split) if not attribute.startswith("__")}
        assert names == {"_granted", "_name", "groups", "ids", "images", "y"}
        assert object.__getattribute__(split, "_granted") is None
        for slot in Split.__slots__:
            value = getattr(split, slot)
            assert not isinstance(value, LoadedData)
    assert not hasattr(task, "__dict__")
    assert not hasattr(task, "test")
    assert not any("test" in attribute for attribute in dir(task))
    for attribute in ("splits", "labels", "alternates", "data", "facts"):
        assert not hasattr(task, attribute)
        assert not hasattr(task.train, attribute)
    with pytest.raises((AttributeError, TypeError)):
        task.test = 1  # type: ignore[attr-defined]


SKIPPED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def reachable(start: object) -> Iterator[object]:
    """Walk every reference from `start`; classes and code are shared by all and hold no data."""
    seen, waiting = {id(start)}, [start]
    while waiting:
        value = waiting.pop()
        yield value
        # A tensor's Python object hides its storage from the collector, and an array its base.
        further: list[Any] = gc.get_referents(value)
        if isinstance(value, torch.Tensor) and value._base is not None:
            further.append(value._base)
        if isinstance(value, np.ndarray) and value.base is not None:
            further.append(value.base)
        for found in further:
            if id(found) not in seen and not isinstance(found, SKIPPED):
                seen.add(id(found))
                waiting.append(found)


def whole_storage(value: object) -> torch.Tensor | None:
    """All the bytes behind a tensor or an array, also those its view does not show."""
    if isinstance(value, torch.Tensor):
        return torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub" and value.size:
        return torch.from_numpy(np.array(value)).reshape(-1).view(torch.uint8)
    return None


def as_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grants", GRANTS)
@pytest.mark.parametrize("travelled", [False, True], ids=["here", "pickled"])
def test_no_reference_leads_to_what_is_hidden(
    loaded: dict[str, LoadedData], name: str, grants: tuple[bool, bool], travelled: bool
) -> None:
    data = loaded[name]
    task = task_of(data, *grants)
    if travelled:
        task = pickle.loads(pickle.dumps(task))
    secrets = dict(secrets_of(data, grants))
    values = list(reachable(task))
    assert any(value is task.train.y for value in values), "the walk does find what is there"
    assert any(value is task.val.ids for value in values)
    found = {as_bytes(storage) for value in values if (storage := whole_storage(value)) is not None}
    assert len(found) >= 4
    for what, secret in secrets.items():
        for kind in {secret.dtype, torch.uint8}:
            needle = as_bytes(secret.to(kind))
            assert not any(needle in hay for hay in found), what
    assert not any(isinstance(value, LoadedData) for value in values)
    others = (data, data.splits, data.splits["test"], data.splits["train"].labels)
    assert not any(value is other for value in values for other in others)


def secrets_of(data: LoadedData, grants: tuple[bool, bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything the harness holds and this tier must not see."""
    granted = dict(zip(("train", "val"), grants, strict=True))
    for split, part in data.splits.items():
        visible = [part.labels.y] if split != "test" else []
        visible += [part.labels.groups] if granted.get(split) else []
        hidden = {"groups": part.labels.groups, **part.labels.alternates}
        for what, values in hidden.items():
            if not any(torch.equal(values, seen) for seen in visible):
                yield f"{split} {what}", values
    test = data.splits["test"]
    yield "test classes", test.labels.y
    yield "test ids", test.labels.ids
    for position in (0, len(test) // 2, len(test) - 1):
        batch = test.images.batch(torch.tensor([position]))
        yield f"test image {position}", batch.pixels[0].permute(1, 2, 0)
        yield f"test image {position}, channels first", batch.pixels[0]


def test_the_walk_would_find_a_leak(loaded: dict[str, LoadedData]) -> None:
    """The test above is worth something only if it fails for a view of a larger tensor."""
    data = loaded["umnist"]
    groups = data.splits["train"].labels.groups
    leaking: list[Callable[[], object]] = [
        lambda: {"deep": [types.SimpleNamespace(inside=groups)]},
        lambda: torch.cat([torch.zeros(5, dtype=torch.int64), groups])[:5],
        lambda: groups.numpy().copy()[:3],
    ]
    for leak in leaking:
        storages = (whole_storage(value) for value in reachable(leak()))
        found = [as_bytes(storage) for storage in storages if storage is not None]
        assert any(as_bytes(groups) in hay for hay in found)


def test_each_split_of_photographs_is_a_file_of_its_own(
    loaded: dict[str, LoadedData],
) -> None:
    task = task_of(loaded["isic"], False, False)
    paths = {split: Path(getattr(task, split).images.path) for split in ("train", "val")}
    assert len(set(paths.values())) == 2
    test = loaded["isic"].splits["test"].images
    assert Path(test.path) not in paths.values()  # type: ignore[attr-defined]
    with contextlib.suppress(IndexError):
        # Beyond the file's last image there is nothing, in particular not the next split's.
        beyond = task.train.images.batch(torch.tensor([len(task.train)]))
        pytest.fail(f"got {beyond}")
