"""No way leads from what `fit` receives to group labels its tier hides, or to the test split."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from reference_walk import Secrets, secrets_of, task_of, walk
from torch import Tensor, nn

import methods.erm
from bench.audit import start_audit
from bench.execute import load_data
from datasets.base import LoadedData, Task
from methods.backbones import build_classifier
from methods.base import METHODS, Context, Fitted, Method, load_methods
from methods.classifier import FittedClassifier
from methods.erm import ErmConfig
from methods.training import Training

NAMES = tuple(load_methods())
DIGITS = ("umnist", "cmnist")
HIDING_PLACES = (
    *("tensor", "array", "list", "mapping", "one_hot", "bytes"),
    *("view", "closure", "generator", "frame", "global"),
)


class Searching(Method):
    """A method that never searches: the base of the cheats below."""

    def search_space(self, trial: Any, task: Task) -> Any:
        raise NotImplementedError


def watch_fit(
    patch: pytest.MonkeyPatch, name: str, secrets: Secrets, plant: Any = None
) -> list[set[str]]:
    """Walk from everything a fit holds: after the first epoch of each training, and at its end."""
    found: list[set[str]] = []
    kind = type(METHODS[name])
    epoch_of, fit_of = Training._one_epoch, kind.fit
    plugin = (kind.__module__.split(".")[0],)

    def one_epoch(self: Training) -> None:
        epoch_of(self)  # with the audit's look at the model, after which it holds what it kept
        if self.epoch == 1:
            if plant is not None:
                plant(self)
            roots = (self, self.task, self.ctx, *threading.enumerate())
            found.append(walk(roots, secrets, plugin))

    def fit(self: Method, task: Task, config: Any, ctx: Context) -> Fitted:
        fitted = fit_of(self, task, config, ctx)
        found.append(walk((task, ctx, fitted, self, *threading.enumerate()), secrets, plugin))
        return fitted

    patch.setattr(Training, "_one_epoch", one_epoch)
    patch.setattr(kind, "fit", fit)
    return found


def secrets_for(runs: Any, name: str, dataset: str) -> Secrets:
    job = runs.job(name, dataset)
    tier = {key: job.supervision[key] for key in ("train_groups", "val_groups")}
    return secrets_of(load_data(job, runs.data_root), **tier)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dataset", DIGITS)
def test_fit_holds_nothing_its_tier_hides(
    runs: Any, name: str, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watch_fit(monkeypatch, name, secrets_for(runs, name, dataset))
    run = runs.execute(runs.job(name, dataset), "watched")
    assert run.record["status"] == "done"
    assert len(found) >= 1
    assert set().union(*found) == set()


class TestTheWalk:
    """What the walk does not find proves something only if it finds what is there."""

    def test_labels_planted_in_a_running_fit(
        self, runs: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        groups = load_data(runs.job("erm", "umnist"), runs.data_root).splits["val"].labels.groups

        def plant(training: Training) -> None:
            training.ctx.part.rows.append({"leak": groups.to(torch.int16)})

        found = watch_fit(monkeypatch, "erm", secrets_for(runs, "erm", "umnist"), plant)
        runs.execute(runs.job("erm", "umnist"), "planted")
        assert "groups of val in a Tensor" in found[0] or "3group of val in a Tensor" in found[0]

    def test_module_that_keeps_the_images_of_the_audit(self, runs: Any, add_method: Any) -> None:
        class Hoarding(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, images: Tensor) -> Tensor:
                self.last = images
                logits: Tensor = self.inner(images)
                return logits

        class Hoarder(Searching):
            def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
                model = Hoarding(build_classifier(task, ctx, "erm"))
                model.register_forward_hook(lambda module, args, out: seen.append(args[0]))
                Training(model, task, config, ctx).run()
                return FittedClassifier(model, {})

        seen: list[Tensor] = []
        name = add_method(Hoarder, ErmConfig)
        secrets = secrets_for(runs, name, "cmnist")
        with pytest.MonkeyPatch.context() as patch:
            found = watch_fit(patch, name, secrets)
            run = runs.execute(runs.job(name, "cmnist"), "watched")
        assert run.record["status"] == "done"
        assert seen, "the hook never ran"
        assert not found[0], "the audit let the module see test images"

    @pytest.mark.parametrize(
        "hiding_place",
        [
            "tensor",
            "array",
            "list",
            "mapping",
            "one_hot",
            "bytes",
            "view",
            "closure",
            "generator",
            "frame",
            "global",
        ],
    )
    def test_hiding_places(
        self, runs: Any, hiding_place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = load_data(runs.job("erm", "umnist"), runs.data_root)
        labels = data.splits["train"].labels.groups
        secrets = secrets_of(data, train_groups=False, val_groups=False)
        assert walk((task_of(data), methods.erm), secrets) == set()
        if hiding_place == "global":
            monkeypatch.setattr(methods.erm, "_aside", labels, raising=False)
        holder = nn.Module()
        holder.secret = _hidden_in(hiding_place, labels)
        del labels
        assert walk((task_of(data), methods.erm, holder), secrets)


def _hidden_in(place: str, labels: Tensor) -> Any:
    def generator() -> Iterator[Tensor]:
        kept = labels.clone()
        yield kept[:1]

    if place == "generator":
        waiting = generator()
        next(waiting)
        return waiting
    if place == "closure":
        # Functions of this file are hooks to the walk, so the closure is made where it is not.
        scope: dict[str, Any] = {"__name__": "elsewhere"}
        exec("def make(kept):\n    return lambda: kept", scope)
        return scope["make"](labels.float())
    if place == "frame":
        scope = {"__name__": "elsewhere"}
        exec("def fail(kept):\n    raise ValueError", scope)
        try:
            scope["fail"](labels)
        except ValueError as error:
            return error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    return {
        "tensor": labels,
        "array": {"deep": [np.asarray(labels, dtype=np.int8)]},
        "list": labels.tolist(),
        "mapping": dict(enumerate(labels.tolist())),
        "one_hot": nn.functional.one_hot(labels).float(),
        "bytes": b"before" + labels.numpy().astype(np.int16).tobytes() + b"after",
        "view": torch.cat([torch.ones(3, dtype=torch.int64), labels])[:1],
        "global": None,
    }[place]


class TestCheats:
    """Methods that overstep their tier end as failed records."""

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_reading_groups(self, runs: Any, add_method: Any, split: str) -> None:
        class Peeking(Searching):
            def fit(self, task: Task, config: ErmConfig, ctx: Context) -> Fitted:
                getattr(task, split).groups.sum()
                raise AssertionError("it got through")

        record = runs.execute(runs.job(add_method(Peeking, ErmConfig), "umnist"), split).record
        assert record["status"] == "failed"
        assert record["failure"]["kind"] == "group_labels_hidden"
        assert f"{split}_groups=True" in record["failure"]["remedy"]

    def test_selecting_by_groups(self, runs: Any) -> None:
        job = runs.job("erm", "umnist", overrides={"erm.selection": "val_wga"})
        record = runs.execute(job, "cheats").record
        assert record["status"] == "failed"
        assert record["failure"]["kind"] == "group_labels_hidden"


class TestAudit:
    def test_its_numbers_are_kept_but_out_of_reach(
        self, runs: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held: list[Any] = []
        fit_of = methods.erm.Erm.fit

        def fit(self: Method, task: Task, config: Any, ctx: Context) -> Fitted:
            fitted = fit_of(self, task, config, ctx)
            held.extend([*ctx.part.rows, ctx.stage_records, vars(ctx.scope.audit), fitted.facts])
            assert ctx.scope.audit.replies.empty() and ctx.scope.audit.requests.empty()
            return fitted

        monkeypatch.setattr(methods.erm.Erm, "fit", fit)
        run = runs.execute(runs.job("erm", "umnist"), "audited")
        history = pd.read_parquet(run.folder / "history.parquet")
        assert history[["audit_val_wga", "audit_test_wga"]].notna().all(axis=None)
        assert len(held) == len(history) + 3
        assert "selection" in str(held)
        assert "audit_" not in str(held)

    def test_a_failure_brings_no_frames_along(self, data: LoadedData, tmp_path: Path) -> None:
        """The audit's frames hold the data; a method could catch the exception and look."""
        link = start_audit(data, tmp_path, threads=1)

        class Refusing(nn.Module):
            def forward(self, images: Tensor) -> Tensor:
                try:
                    raise KeyError("first")
                except KeyError:
                    raise ValueError("by design")  # noqa: B904

        with pytest.raises(ValueError, match="by design") as caught:
            link.look("run", {}, torch.zeros(len(data.splits["val"]), 5), Refusing())
        link.close()
        frames = [
            frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        ]
        assert "look" in frames and "work" not in frames
        assert caught.value.__context__ is None
        assert "in forward" in caught.value.__notes__[0]
