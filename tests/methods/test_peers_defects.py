"""Defects seen in comparable suites, each with a test that fails where it is made again.

Those that concern one method alone stand beside its other tests: JTT's error set of the right
samples (BalancingGroups), JTT's error set drawn anew at each step, as a loss weight, within one
budget for both stages (SubpopBench), the empty error set (JTT's authors' issue 6).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import methods.retraining
from bench.context import RunContext
from datasets.base import Task
from methods.backbones import Classifier
from methods.base import METHODS, Fitted, load_methods
from methods.cnc import ROLES, CncConfig, ContrastiveSets, TwoSidedLoss, frozen_statistics
from methods.dfr import DfrConfig
from methods.eiil import EiilConfig
from methods.erm import ErmConfig
from methods.george import GeorgeConfig
from methods.groupdro import GroupDroConfig, RobustLoss
from methods.jtt import ErrorTrackingCrossEntropy, JttConfig
from methods.metrics import accuracy, worst_group_metric
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.retraining import (
    RetrainConfig,
    Samples,
    Standardiser,
    average_layer,
    balanced_subset,
)
from methods.training import Training

pytestmark = pytest.mark.usefixtures("small_networks")
MakeContext = Callable[..., RunContext]
BuildClassifier = Callable[..., Classifier]
load_methods()

BRIEF = ErmConfig(epochs=1, batch_size=16, lr=0.003)
CONFIGS: dict[str, Any] = {
    "erm": ErmConfig(epochs=5, batch_size=16, lr=0.003),
    "groupdro": GroupDroConfig(epochs=5, batch_size=16, lr=0.003, balanced=True),
    "jtt": JttConfig(epochs=5, batch_size=16, lr=0.001, identification_epoch=1, upweight=4),
    "cnc": CncConfig(erm=BRIEF, epochs=5, lr=0.0005, per_role=3, batch_factor=4, anchor_ratio=0.4),
    "eiil": EiilConfig(epochs=5, batch_size=16, lr=0.003, erm=BRIEF, inference_steps=500),
    "dfr": DfrConfig(erm=BRIEF, splits=1, retrains=3),
    "george": GeorgeConfig(
        epochs=2, batch_size=16, lr=0.003, erm=BRIEF, reduction="none", max_clusters=3, size_floor=2
    ),
}


def fit(name: str, task: Task, ctx: RunContext, **change: Any) -> Fitted:
    return METHODS[name].fit(task, replace(CONFIGS[name], **change), ctx)


def val_logits(fitted: Fitted, task: Task) -> Tensor:
    return predict_with(fitted.module, EvalImages(task.val.images, task.eval_transform))


# SpuCo's JTT scripts: selection asks the first stage's network while the second one trains.
@pytest.mark.parametrize("name", ["erm", "groupdro", "jtt", "cnc", "eiil"])
def test_selected_value_is_that_of_the_returned_model(
    granted_task: Task, make_context: MakeContext, name: str
) -> None:
    ctx = make_context()
    fitted = fit(name, granted_task, ctx)
    logits, val = val_logits(fitted, granted_task), granted_task.val
    score = (
        accuracy(logits.argmax(dim=1), val.y)
        if name == "erm"
        else worst_group_metric(logits, val.y, val.groups, "wga")
    )
    chosen = fitted.selection
    assert chosen is not None and chosen.value == score
    if name != "erm":
        values = [row["selection"] for row in ctx.account.history() if row["stage"] == name]
        assert len(set(values)) > 1, "nothing moved, so that any model would do"
        assert chosen.epoch == values.index(max(values))


class CountReads(TorchDispatchMode):
    """Counts what makes the processor wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        waiting = aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select
        if func.overloadpacket in waiting:
            self.reads += 1
        return func(*args, **(kwargs or {}))


# SpuCo's trainer reads the loss off the device twice a batch.
@pytest.mark.parametrize("name", ["groupdro", "jtt", "cnc"])
def test_no_objective_waits_for_the_device(
    granted_task: Task, make_context: MakeContext, small_networks: BuildClassifier, name: str
) -> None:
    y = granted_task.train.y
    sets = ContrastiveSets(y, torch.where(torch.arange(60) < 20, 1 - y, y), 2, 3, 1.0)

    def reads(parts: int) -> int:
        ctx = make_context(f"{name}-{parts}")
        at_once = sets.per_epoch // parts
        objective: nn.Module = {
            "groupdro": RobustLoss(granted_task.train.groups, torch.eye(4), 0.01, 1.0),
            "jtt": ErrorTrackingCrossEntropy(60),
            "cnc": TwoSidedLoss(3, at_once, 0.1, 0.75),
        }[name]
        size = at_once * ROLES * 3 if name == "cnc" else 60 // parts
        training = Training(
            small_networks(granted_task, ctx, "net"),
            granted_task,
            TrainConfig(epochs=1, batch_size=size, lr=0.01),
            ctx,
            objective=objective,
            sampler=sets if name == "cnc" else None,
            set_mode=frozen_statistics if name == "cnc" else nn.Module.train,
        )
        training._prepare()
        with CountReads() as counter:
            training._steps()
        return counter.reads

    assert reads(parts=1) == reads(parts=10)


# SubpopBench: a flag filled from another one, so that it changes nothing.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("groupdro", {"eta": 1.0}),
        ("groupdro", {"adjustment": 50.0}),
        ("groupdro", {"balanced": False}),
        ("groupdro", {"pairs": True}),
        ("jtt", {"identification_epoch": 0}),
        ("jtt", {"upweight": 9}),
        ("jtt", {"errors": "after_epoch"}),
        ("cnc", {"erm": replace(BRIEF, lr=0.0003)}),
        ("cnc", {"per_role": 2}),
        ("cnc", {"anchor_ratio": 0.8}),
        ("cnc", {"temperature": 0.5}),
        ("cnc", {"contrastive_weight": 0.2}),
        ("cnc", {"batch_factor": 2}),
        ("cnc", {"momentum": 0.5}),
        ("eiil", {"erm": replace(BRIEF, lr=0.0003)}),
        ("eiil", {"eta": 1.0}),
        ("eiil", {"inference_steps": 1}),
        ("eiil", {"inference_lr": 1e-6}),
        ("eiil", {"inference_eps": 1.0}),
        ("dfr", {"penalties": (0.05,)}),
        ("dfr", {"retrains": 2}),
    ],
    ids=lambda part: part if isinstance(part, str) else next(iter(part)),
)
def test_option_changes_the_model(
    granted_task: Task, make_context: MakeContext, name: str, change: dict[str, Any]
) -> None:
    short = {"epochs": 2, "selection": "last"} if name != "dfr" else {}
    plain = fit(name, granted_task, make_context("plain"), **short)
    other = fit(name, granted_task, make_context("other"), **short, **change)
    assert not torch.equal(val_logits(plain, granted_task), val_logits(other, granted_task))


# SubpopBench finds a first stage by replacing text in a folder's name.
@pytest.mark.parametrize(
    ("name", "change", "again"),
    [
        ("jtt", {"upweight": 9}, []),
        ("jtt", {"identification_epoch": 0}, ["jtt-identify"]),
        ("jtt", {"errors": "after_epoch"}, ["jtt-identify"]),
        ("cnc", {"temperature": 0.5}, []),
        ("cnc", {"erm": replace(BRIEF, lr=0.01)}, ["erm"]),
        ("eiil", {"eta": 0.5}, []),
        ("eiil", {"inference_steps": 300}, ["eiil-environments"]),
        ("eiil", {"erm": replace(BRIEF, lr=0.01)}, ["erm", "eiil-environments"]),
        ("dfr", {"retrains": 2}, []),
        ("dfr", {"erm": replace(BRIEF, lr=0.01)}, ["erm"]),
    ],
)
def test_first_stage_is_computed_again_where_it_means_something_else(
    granted_task: Task,
    make_context: MakeContext,
    name: str,
    change: dict[str, Any],
    again: list[str],
) -> None:
    contexts = make_context("one"), make_context("two")
    fit(name, granted_task, contexts[0])
    fit(name, granted_task, contexts[1], **change)
    first, second = ({record.name: record.key for record in ctx.stage_costs} for ctx in contexts)
    assert [stage for stage in second if second[stage] != first.get(stage)] == again


# SpuCo's constructors seed every global generator, so that streams repeat from stage to stage.
@pytest.mark.parametrize("name", CONFIGS)
def test_global_generators_are_left_alone(
    granted_task: Task, make_context: MakeContext, name: str
) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]

    before = states()
    fit(name, granted_task, make_context())
    assert states() == before


def test_stages_of_a_fit_have_streams_of_their_own(
    granted_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no copies, both of JTT's stages shuffle the same 60 samples."""
    orders: list[list[int]] = []
    original = Training.run

    def run(self: Training) -> Any:
        trained = original(self)
        for epoch in range(2):
            generator = self.ctx.generator(self.name, "sample", epoch)
            orders.append(self._draw(epoch, generator).tolist())
        return trained

    monkeypatch.setattr(Training, "run", run)
    fit("jtt", granted_task, make_context(), upweight=0)
    assert [sorted(order) for order in orders] == [list(range(60))] * 4
    assert len({tuple(order) for order in orders}) == 4


class TestDfr:
    GROUPS = np.repeat(np.arange(4), [467, 466, 133, 133])

    # SpuCo fits the last layer on one half of validation, where a balanced set has 66 a group.
    def test_balanced_set_of_waterbirds_is_the_whole_smallest_group(self) -> None:
        chosen = balanced_subset(self.GROUPS, min_group=6, rng=np.random.default_rng(0))
        assert len(set(chosen)) == len(chosen)
        assert np.bincount(self.GROUPS[chosen]).tolist() == [133] * 4

    def test_final_fits_see_all_of_validation(
        self, granted_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def noted(samples: Samples, groups: Any, *rest: Any) -> Any:
            seen.append((len(samples.features), np.bincount(groups).tolist()))
            return average_layer(samples, groups, *rest)

        monkeypatch.setattr(methods.retraining, "average_layer", noted)
        fit("dfr", granted_task, make_context())
        assert seen == [(40, torch.bincount(granted_task.val.groups).tolist())]

    # SubpopBench trains a linear layer by SGD; the authors average 20 sparse liblinear fits.
    def test_layer_is_the_average_of_sparse_fits(self) -> None:
        rng = np.random.default_rng(3)
        y = rng.integers(2, size=120)
        groups = 2 * y + rng.integers(2, size=120)
        features = rng.normal(size=(120, 5)) + y[:, None] * np.array([2.0, 1.0, 0.0, 0.0, 0.0])
        config, scale = RetrainConfig(retrains=20), Standardiser(np.full(5, 0.5), np.full(5, 2.0))
        layer = average_layer(
            Samples(features, y, 2), groups, config, 0.3, scale, np.random.default_rng(7)
        )
        same, fits = np.random.default_rng(7), []
        for _ in range(20):
            chosen = balanced_subset(groups, config.min_group, same)
            seed = int(same.integers(2**31))
            model = LogisticRegression(
                C=0.3, l1_ratio=1.0, solver="liblinear", tol=1e-10, random_state=seed
            ).fit((features[chosen] - 0.5) / 2.0, y[chosen])
            fits.append((model.coef_[0], model.intercept_[0]))
        mean = np.mean([coefficients for coefficients, _ in fits], axis=0)
        intercept = np.mean([value for _, value in fits])
        scores = layer.scores(features)
        margin = scores[:, 1] - scores[:, 0]
        expected = (features - 0.5) / 2.0 @ mean + intercept
        np.testing.assert_allclose(margin, expected, atol=1e-6)
        assert len({tuple(coefficients) for coefficients, _ in fits}) > 1
