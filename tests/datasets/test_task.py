"""What a method cannot reach from its Task, by any road Python offers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from datasets import standins
from datasets.base import (
    BackboneSpec,
    GroupLabelsHidden,
    LoadedData,
    Split,
    Task,
    outline_task,
)
from datasets.catalogue import get_dataset, load_datasets

NAMES = ("umnist", "cmnist", "isic")
"""In memory with extra groupings, in memory with colours, memory-mapped with extra groupings."""
GRANTS = [(False, False), (True, False), (False, True), (True, True)]
BACKBONE = BackboneSpec("lenet5")
HERE_AND_PICKLED: list[Callable[[Task], Task]] = [
    lambda task: task,
    lambda task: pickle.loads(pickle.dumps(task)),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedData]:
    root = tmp_path_factory.mktemp("firewall")
    for name in NAMES:
        standins.write(name, root, size=400 if name != "isic" else 60)
    datasets = {name: get_dataset(name) for name in NAMES}
    return {name: dataset.load(root, dataset.config_type()) for name, dataset in datasets.items()}


def task_of(data: LoadedData, train: bool = False, val: bool = False) -> Task:
    return data.task(BACKBONE, train_groups=train, val_groups=val)


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_there_exactly_where_granted(loaded: dict[str, LoadedData], name: str) -> None:
    data = loaded[name]
    for grants in GRANTS:
        for sent in HERE_AND_PICKLED:
            assert_granted(sent(task_of(data, *grants)), data, grants)


def assert_granted(task: Task, data: LoadedData, grants: tuple[bool, bool]) -> None:
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


def test_attributes_lead_nowhere(loaded: dict[str, LoadedData]) -> None:
    task = task_of(loaded["umnist"])
    for split in (task.train, task.val):
        assert not hasattr(split, "__dict__")
        with pytest.raises(TypeError):
            vars(split)
        names = {attribute for attribute in dir(split) if not attribute.startswith("__")}
        assert names == {"_granted", "_name", "groups", "ids", "images", "narrowed", "subset", "y"}
        assert object.__getattribute__(split, "_granted") is None
    assert not hasattr(task, "__dict__")
    assert not any("test" in attribute for attribute in dir(task))
    for attribute in ("splits", "labels", "extra_groupings", "data", "facts"):
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


def contents(values: list[object]) -> set[bytes]:
    return {as_bytes(part) for value in values if (part := whole_storage(value)) is not None}


def secrets_of(data: LoadedData, grants: tuple[bool, bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything the harness holds and this tier must not see."""
    granted = dict(zip(("train", "val"), grants, strict=True))
    for split, part in data.splits.items():
        visible = [part.labels.y] if split != "test" else []
        visible += [part.labels.groups] if granted.get(split) else []
        hidden = {"groups": part.labels.groups, **part.labels.extra_groupings}
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


def assert_hidden(start: object, data: LoadedData, grants: tuple[bool, bool]) -> None:
    """Find nothing that the tier must not see by any reference from `start`."""
    values = list(reachable(start))
    found = contents(values)
    assert len(found) >= 4, "the walk does find what is there"
    for what, secret in secrets_of(data, grants):
        for kind in {secret.dtype, torch.uint8}:
            needle = as_bytes(secret.to(kind))
            assert not any(needle in hay for hay in found), what
    assert not any(isinstance(value, LoadedData) for value in values)
    others = (data, data.splits, data.splits["test"], data.splits["train"].labels)
    assert not any(value is other for value in values for other in others)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("grants", GRANTS[:1] + GRANTS[2:])
def test_no_reference_leads_to_what_is_hidden(
    loaded: dict[str, LoadedData], name: str, grants: tuple[bool, bool]
) -> None:
    for sent in HERE_AND_PICKLED:
        assert_hidden(sent(task_of(loaded[name], *grants)), loaded[name], grants)


def test_no_copy_leads_to_what_is_hidden(loaded: dict[str, LoadedData]) -> None:
    escapes: list[Callable[[Task], object]] = [
        copy.copy,
        copy.deepcopy,
        dataclasses.asdict,
        dataclasses.astuple,
        lambda task: dataclasses.replace(task, val=task.train),
        lambda task: [getattr(task, field.name) for field in dataclasses.fields(task)],
        lambda task: [copy.copy(task.train), copy.deepcopy(task.val)],
    ]
    for escape in escapes:
        assert_hidden(escape(task_of(loaded["umnist"])), loaded["umnist"], (False, False))


def test_the_walk_would_find_a_leak(loaded: dict[str, LoadedData]) -> None:
    """The tests above are worth something only if they fail for a view of a larger tensor."""
    groups = loaded["umnist"].splits["train"].labels.groups
    leaking: list[Callable[[], object]] = [
        lambda: {"deep": [types.SimpleNamespace(inside=groups)]},
        lambda: torch.cat([torch.zeros(5, dtype=torch.int64), groups])[:5],
        lambda: groups.numpy().copy()[:3],
    ]
    for leak in leaking:
        assert any(as_bytes(groups) in hay for hay in contents(list(reachable(leak()))))


def test_images_end_where_the_split_ends(loaded: dict[str, LoadedData]) -> None:
    for name in ("umnist", "cmnist"):
        task = task_of(loaded[name])
        for split in (task.train, task.val):
            pixels = split.images.pixels  # type: ignore[attr-defined]
            assert pixels.untyped_storage().nbytes() == pixels.numel()
            with pytest.raises(IndexError):
                split.images.batch(torch.tensor([len(split)]))


def test_each_split_of_photographs_is_a_file_of_its_own(loaded: dict[str, LoadedData]) -> None:
    task = task_of(loaded["isic"])
    paths = {split: Path(getattr(task, split).images.path) for split in ("train", "val")}
    assert len(set(paths.values())) == 2
    test = loaded["isic"].splits["test"].images
    assert Path(test.path) not in paths.values()  # type: ignore[attr-defined]
    with contextlib.suppress(IndexError):
        # Beyond the file's last image there is nothing, in particular not the next split's.
        beyond = task.train.images.batch(torch.tensor([len(task.train)]))
        pytest.fail(f"got {beyond}")


@pytest.mark.parametrize("dataset", ["umnist", "cmnist"])
def test_the_order_of_samples_is_independent_of_groups(mnist_root: Path, dataset: str) -> None:
    known = get_dataset(dataset)
    _, _, labels = known.check(mnist_root, known.config_type())
    for part in labels.values():
        assert torch.equal(part.ids, part.ids.sort().values)
        position = torch.arange(len(part))
        for group in part.groups.unique():
            same_class = part.y == part.y[part.groups == group][0]
            mine = position[part.groups == group]
            others = position[same_class & (part.groups != group)]
            if len(others):
                assert ks_2samp(mine, others).pvalue > 1e-4


@pytest.mark.parametrize("had", GRANTS)
def test_a_narrowed_task_shows_no_more_than_asked_for(
    loaded: dict[str, LoadedData], had: tuple[bool, bool]
) -> None:
    data = loaded["umnist"]
    task = task_of(data, *had)
    for asked in GRANTS:
        if any(wanted and not granted for wanted, granted in zip(asked, had, strict=True)):
            with pytest.raises(GroupLabelsHidden):
                task.narrowed(train_groups=asked[0], val_groups=asked[1])
            continue
        narrow = task.narrowed(train_groups=asked[0], val_groups=asked[1])
        assert_granted(narrow, data, asked)
        assert_hidden(narrow, data, asked)
        assert dataclasses.replace(narrow, train=task.train, val=task.val) == task
    assert_granted(task, data, had)


def test_a_task_in_outline_has_every_name_and_no_sample() -> None:
    for dataset in load_datasets().values():
        facts = dataset.facts(dataset.config_type())
        task = outline_task(facts, BackboneSpec(facts.backbone))
        assert (task.name, task.classes, task.groups) == (facts.name, facts.classes, facts.groups)
        assert (task.metric, task.channels, task.backbone.name) == (
            facts.metric,
            facts.channels,
            facts.backbone,
        )
        assert task.codes == facts.codes and task.train_transform == facts.train_transform
        for split in (task.train, task.val):
            assert len(split) == len(split.images) == len(split.y) == len(split.ids) == 0
            with pytest.raises(GroupLabelsHidden):
                _ = split.groups
        assert pickle.loads(pickle.dumps(task)).name == facts.name
