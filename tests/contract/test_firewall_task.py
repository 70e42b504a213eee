"""Ways round the Task: attributes, copies, pickles, images and the order of samples."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_walk import secrets_of, task_of, walk
from scipy.stats import ks_2samp

from datasets.base import GroupLabelsHidden, LoadedData
from datasets.catalogue import get_dataset

DIGITS = ("umnist", "cmnist")
TIERS = [(False, False), (False, True), (True, True)]


@pytest.mark.parametrize(("train_groups", "val_groups"), TIERS)
def test_attributes(data: LoadedData, train_groups: bool, val_groups: bool) -> None:
    task = task_of(data, train_groups, val_groups)
    for name, granted in (("train", train_groups), ("val", val_groups)):
        split = getattr(task, name)
        if granted:
            assert torch.equal(split.groups, data.splits[name].labels.groups)
            continue
        with pytest.raises(GroupLabelsHidden, match=f"of the {name} split are hidden"):
            _ = split.groups
        assert not hasattr(split, "labels")
        assert not hasattr(split, "__dict__")
        assert not hasattr(split, "__getitem__")
        shown = [getattr(split, slot) for slot in type(split).__slots__]
        assert not any(value is data.splits[name].labels.groups for value in shown)
    assert not hasattr(task, "test") and not hasattr(task, "__dict__")
    secrets = secrets_of(data, train_groups=train_groups, val_groups=val_groups)
    assert walk((task,), secrets) == set()


def test_granted_labels_are_copies(data: LoadedData) -> None:
    before = data.splits["val"].labels.groups.clone()
    task_of(data, True, True).val.groups.zero_()
    task_of(data, True, True).val.y.zero_()
    assert torch.equal(data.splits["val"].labels.groups, before)
    assert data.splits["val"].labels.y.any()


def test_pickle(data: LoadedData) -> None:
    secrets = secrets_of(data, train_groups=False, val_groups=False)
    assert set(secrets.within(pickle.dumps(task_of(data)))) == set()
    assert any("of train" in s for s in secrets.within(pickle.dumps(task_of(data, True))))
    with pytest.raises(GroupLabelsHidden):
        _ = pickle.loads(pickle.dumps(task_of(data))).train.groups


@pytest.mark.parametrize(
    "escape",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.asdict,
        dataclasses.astuple,
        lambda task: dataclasses.replace(task, val=task.train),
        lambda task: [getattr(task, field.name) for field in dataclasses.fields(task)],
        lambda task: [copy.copy(task.train), copy.deepcopy(task.val)],
    ],
)
def test_copies(data: LoadedData, escape: Any) -> None:
    secrets = secrets_of(data, train_groups=False, val_groups=False)
    assert walk((escape(task_of(data)),), secrets) == set()


def test_images_end_where_the_split_ends(data: LoadedData) -> None:
    task = task_of(data)
    for split in (task.train, task.val):
        pixels = split.images.pixels  # type: ignore[attr-defined]
        assert pixels.untyped_storage().nbytes() == pixels.numel()
        with pytest.raises(IndexError):
            split.images.batch(torch.tensor([len(split)]))


@pytest.mark.parametrize("dataset", DIGITS)
def test_order_says_nothing_about_groups(mnist_root: Path, dataset: str) -> None:
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
