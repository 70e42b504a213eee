"""Methods that overstep their tier end as failed records, whatever way they take.

That the process which fits never holds what a tier hides is part of the contract of every method
(`bench.testing`); what a search from inside finds is in `tests/bench/test_fitting.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from bench.record import Record, Status
from bench.runner import RunOptions, run_job
from bench.testing import Runs, found_in_memory, secrets_of
from datasets import standins
from datasets.base import Task
from methods.backbones import FittedClassifier, build_classifier
from methods.base import METHODS, Context, Fitted, Method, load_methods, register
from methods.erm import ErmConfig
from methods.training import Training

SEEN: list[Tensor] = []


class Cheat(Method):
    """A method that is never tuned: the base of the ones below."""

    def search_space(self, trial: Any, task: Task) -> Any:
        raise NotImplementedError


class PeekingAtTrain(Cheat):
    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        task.train.groups.sum()
        raise AssertionError("it got through")


class PeekingAtVal(Cheat):
    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        task.val.groups.sum()
        raise AssertionError("it got through")


class Hoarding(nn.Module):
    """A network that keeps every batch it is shown."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        SEEN.append(images)
        logits: Tensor = self.inner(images)
        return logits


def keep(module: nn.Module, inputs: Any, output: Any) -> None:
    SEEN.append(inputs[0])


class Hoarder(Cheat):
    """Keeps what its network is shown, in the network's forward and by a hook."""

    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        model = Hoarding(build_classifier(task, ctx, "erm"))
        model.register_forward_hook(keep)
        Training(model, task, config, ctx).run()
        shapes = {len(images) for images in SEEN}
        return FittedClassifier(model, details={"hoarder": {"batches": sorted(shapes)}})


class Watcher(Cheat):
    """Watches its network by a hook that is local to the fit, and takes it away at the end."""

    def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
        model, shown = build_classifier(task, ctx, "erm"), []
        watched = model.register_forward_hook(lambda module, images, out: shown.append(len(out)))
        Training(model, task, config, ctx).run()
        watched.remove()
        noted = {"batches": sorted(set(shown)), "process": os.getpid()}
        return FittedClassifier(model, details={"watcher": noted})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("standins")
    standins.write("mnist", root, size=600)
    return Runs(root, tmp_path_factory.mktemp("results"))


@pytest.fixture
def run_cheat(runs: Runs, tmp_path: Path) -> Iterator[Callable[[type[Method]], Record]]:
    """Run a method once, in a process of its own."""
    load_methods()
    added: list[str] = []

    def run(kind: type[Method]) -> Record:
        added.append(kind.__name__.lower())
        register(added[-1], version=1, config=ErmConfig)(kind)
        job = runs.job(added[-1], "umnist")
        return run_job(job, RunOptions(runs.data_root, tmp_path), lambda values: None)

    yield run
    for name in added:
        METHODS.pop(name)


@pytest.mark.parametrize(("kind", "split"), [(PeekingAtTrain, "train"), (PeekingAtVal, "val")])
def test_reading_groups(run_cheat: Any, kind: type[Method], split: str) -> None:
    record = run_cheat(kind)
    assert record.status is Status.FAILED
    assert record.failure.kind == "group_labels_hidden"
    assert f"{split}_groups=True" in record.failure.remedy


def test_selecting_by_groups(runs: Runs, tmp_path: Path) -> None:
    job = runs.job("erm", "umnist", overrides={"erm.selection": "val_wga"})
    record = run_job(job, RunOptions(runs.data_root, tmp_path, isolate=False), lambda v: None)
    assert record.failure is not None and record.failure.kind == "group_labels_hidden"


def test_stage_of_a_higher_tier_is_not_shared(runs: Runs, tmp_path: Path) -> None:
    """A first model chosen by true groups, left by DFR, must not serve a method without them."""
    options = RunOptions(runs.data_root, tmp_path, isolate=False)
    granted = runs.job("dfr", "umnist", overrides={"dfr.erm.selection": "val_wga"})
    assert run_job(granted, options, lambda values: None).done
    hidden = runs.job("exmap", "umnist", overrides={"exmap.erm.selection": "val_wga"})
    record = run_job(hidden, options, lambda values: None)
    assert record.failure is not None and record.failure.kind == "group_labels_hidden"


def test_network_that_keeps_what_it_is_shown(run_cheat: Any, runs: Runs) -> None:
    """The audit runs a copy of the model in another process: the fit never meets a test batch."""
    record = run_cheat(Hoarder)
    assert record.done, record.failure
    sizes = record.details["hoarder"]["batches"]
    assert sizes and 100 not in sizes, "100 is the size of the test split"


def test_hooks_stay_in_the_fit(run_cheat: Any, runs: Runs) -> None:
    """What the audit is shown is the network alone, without what a fit has hung on it."""
    record = run_cheat(Watcher)
    assert record.done, record.failure
    noted = record.details["watcher"]
    assert 100 not in noted["batches"]
    assert noted["process"] != os.getpid(), "the fit has a process of its own"


def test_memory_search_finds_what_is_there(runs: Runs) -> None:
    from bench.runner import load_data

    job = runs.job("erm", "umnist")
    data = load_data(job, runs.data_root)
    hidden, _ = secrets_of(data, job)
    held = data.splits["val"].labels.groups.to(torch.int16).clone()
    found = found_in_memory(os.getpid(), hidden)
    assert len(held) and {"groups of val", "classes of test"} & found


def test_audit_is_kept_and_nothing_of_it_reaches_the_fit(runs: Runs, tmp_path: Path) -> None:
    job = runs.job("erm", "umnist")
    record = run_job(job, RunOptions(runs.data_root, tmp_path), lambda values: None)
    history = pd.read_parquet(tmp_path / "runs" / record.run_id / "history.parquet")
    audited = ["audit_val_wga", "audit_test_wga", "audit_test_worst_class"]
    assert history[audited].notna().all(axis=None)
    stage = next((tmp_path / "stages").glob("erm-*/stage.json"))
    assert "audit_" not in stage.read_text()
