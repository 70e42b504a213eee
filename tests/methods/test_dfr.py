"""DFR: what it retrains, on what, and with which knowledge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.context import RunContext
from datasets.base import GroupLabelsHidden, Task
from methods.backbones import Classifier
from methods.base import METHODS, Selected, Supervision, load_methods
from methods.dfr import Dfr, DfrConfig
from methods.erm import ErmConfig, train_erm
from methods.metrics import worst_group_metric
from methods.presets import preset_config
from methods.retraining import Samples, Standardiser, average_layer, extract_features

MakeContext = Callable[..., RunContext]
CONFIG = DfrConfig(
    penalties=(1.0, 0.1), splits=2, retrains=3, min_group=2, erm=ErmConfig(epochs=2, lr=0.01)
)
load_methods()


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_only_the_last_layer_changes(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        before = train_erm(selecting_task, CONFIG.erm, make_context()).module.state_dict()
        after = Dfr().fit(selecting_task, CONFIG, make_context()).module.state_dict()
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {"head.weight", "head.bias"}

    def test_head_is_the_average_over_true_groups(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Features standardised as in training, groups those of validation."""
        drawn: list[np.random.Generator] = []

        def noted(*arguments: Any) -> Any:
            drawn.append(np.random.Generator(np.random.PCG64()))
            drawn[-1].bit_generator.state = arguments[5].bit_generator.state
            return average_layer(*arguments)

        monkeypatch.setattr("methods.retraining.average_layer", noted)
        ctx = make_context()
        fitted = Dfr().fit(selecting_task, CONFIG, ctx)
        network, val = train_erm(selecting_task, CONFIG.erm, ctx).module, selecting_task.val
        assert isinstance(network, Classifier) and isinstance(fitted.module, Classifier)
        features = [
            extract_features(network, split, selecting_task, ctx)
            for split in (selecting_task.train, val)
        ]
        penalty = fitted.details["retraining"]["penalty"]
        scale = Standardiser.of(features[0])
        layer = average_layer(
            Samples(features[1], val.y.numpy(), 2),
            *(val.groups.numpy(), CONFIG, penalty, scale, drawn[0]),
        )
        head: list[Tensor] = [part.detach().double() for part in fitted.module.head.parameters()]
        np.testing.assert_allclose(head[0], layer.weights, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(head[1], layer.intercepts, rtol=1e-5, atol=1e-7)

    def test_facts(self, selecting_task: Task, make_context: MakeContext) -> None:
        ctx = make_context()
        fitted = Dfr().fit(selecting_task, CONFIG, ctx)
        assert fitted.selection == Selected("held_out_worst_group", fitted.selection.value)
        assert 0 <= fitted.selection.value <= 100
        facts = fitted.details["retraining"]
        tried = [penalty for penalty, _ in facts["penalty_scores"]]
        assert facts["penalty"] in tried and {*CONFIG.penalties} <= {*tried}
        assert dict(facts["penalty_scores"])[facts["penalty"]] == fitted.selection.value
        assert {*facts["penalty_widened"]} == {*tried} - {*CONFIG.penalties}
        inside = min(CONFIG.penalties) < facts["penalty"] < max(CONFIG.penalties)
        assert (facts["penalty_edge"] is None) == inside
        assert facts["penalty_open"] in (False, True)
        assert (facts["solver"], facts["violation"] < 1e-6) == ("proximal_newton", True)
        assert facts["group_sizes"] == selecting_task.val.groups.bincount().tolist()
        assert [stage.name for stage in ctx.stage_costs] == ["erm"]
        assert ctx.account.image_passes == 100  # features of both splits

    def test_every_fit_of_the_layer_is_progress(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        monkeypatch.setattr(
            RunContext, "report", lambda ctx, **progress: told.append(str(progress["stage"]))
        )
        fitted = Dfr().fit(selecting_task, CONFIG, make_context())
        tried = fitted.details["retraining"]["penalty_scores"]
        own = [line for line in told if line.startswith("retraining: C = ")]
        assert len(own) == CONFIG.splits * len(tried) + CONFIG.retrains
        assert own[-1].endswith(f"fit {CONFIG.retrains}/{CONFIG.retrains}")

    def test_robust_to_the_true_groups(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        fitted = Dfr().fit(selecting_task, CONFIG, make_context())
        val = selecting_task.val
        batch = val.images.batch(torch.arange(len(val)))
        with torch.no_grad():
            logits = fitted.logits(selecting_task.eval_transform(batch))
        assert worst_group_metric(logits, val.y, val.groups, "wga") > 60

    def test_needs_the_validation_groups_alone(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        assert Dfr().supervision(CONFIG) == Supervision(val_groups=True)
        with pytest.raises(GroupLabelsHidden, match="val split"):
            Dfr().fit(toy_task, CONFIG, make_context())


@pytest.mark.parametrize(
    ("dataset", "largest", "smallest"),
    [
        ("waterbirds", 1.0, 0.01),
        ("celeba", 3.0, 0.003),
        ("isic", 3.0, 0.003),
        ("umnist", 3.0, 0.003),
        ("cmnist", 10.0, 0.01),
    ],
)
def test_recipes(dataset: str, largest: float, smallest: float) -> None:
    config = preset_config(METHODS["dfr"], dataset)
    assert (max(config.penalties), min(config.penalties)) == (largest, smallest)
    assert (config.splits, config.retrains, config.min_group) == (5, 20, 6)
    if dataset in ("waterbirds", "celeba"):
        decay, epochs, batch = {"waterbirds": (1e-3, 100, 32), "celeba": (1e-4, 50, 128)}[dataset]
        assert config.erm == ErmConfig(epochs, batch, "sgd", 1e-3, decay, 0.9, selection="last")
    else:
        assert config.erm == preset_config(METHODS["erm"], dataset)
