"""EIIL: the cached gradient, the inference against its closed form, the groups it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from official_eiil import official_assignment
from torch import Tensor
from torch.nn import functional

from bench.context import RunContext
from datasets.base import Task
from datasets.errors import UsageError
from methods.eiil import (
    Eiil,
    EiilConfig,
    InferenceConfig,
    OneEnvironment,
    infer_environments,
    scale_gradients,
)
from methods.erm import ErmConfig
from methods.groupdro import train_groupdro

MakeContext = Callable[..., RunContext]
INFERENCE = InferenceConfig(ErmConfig(), "adam", steps=3_000, lr=1e-3, eps=1e-8)
CONFIG = EiilConfig(
    epochs=2, batch_size=16, lr=0.02, erm=ErmConfig(epochs=1, lr=0.003), inference_steps=2_000
)


def some_logits(samples: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=generator)
    y = torch.randint(0, classes, (samples,), generator=generator)
    return logits, y


class TestGradients:
    @pytest.mark.parametrize("classes", [2, 5])
    def test_equal_autograds(self, classes: int) -> None:
        logits, y = some_logits(50, classes)
        found = scale_gradients(logits, y)
        for i in range(50):
            scale = torch.ones((), dtype=torch.double, requires_grad=True)
            functional.cross_entropy(scale * logits[i].double(), y[i]).backward()
            assert scale.grad is not None
            assert float(found[i]) == pytest.approx(float(scale.grad), abs=1e-9)

    def test_two_classes_positive_means_wrong(self) -> None:
        logits, y = some_logits(200, 2)
        assert torch.equal(scale_gradients(logits, y) > 0, logits.argmax(1) != y)

    def test_five_classes_positive_implies_wrong_but_not_conversely(self) -> None:
        logits, y = some_logits(500, 5)
        positive, wrong = scale_gradients(logits, y) > 0, logits.argmax(1) != y
        assert not (positive & ~wrong).any()
        assert (wrong & ~positive).any()


class TestInference:
    @pytest.mark.parametrize("classes", [2, 5])
    def test_split_is_the_sign_of_the_gradient(self, classes: int) -> None:
        gradients = scale_gradients(*some_logits(300, classes))
        start = torch.randn(300, generator=torch.Generator().manual_seed(1))
        split = infer_environments(gradients, start, replace(INFERENCE, steps=10_000)).bool()
        sign = gradients > 0
        same = max((split == sign).double().mean(), (split != sign).double().mean())
        assert float(same) == 1.0
        closed = replace(INFERENCE, inference="closed_form")
        assert torch.equal(infer_environments(gradients, start, closed).bool(), sign)

    def test_steps_are_adams_on_the_penalty(self) -> None:
        """Against autograd through the two environments' losses, as the authors compute them."""
        logits, y = some_logits(40, 3)
        start = torch.randn(40, generator=torch.Generator().manual_seed(2))
        config = replace(INFERENCE, steps=200, lr=0.05)
        split = infer_environments(scale_gradients(logits, y), start, config)
        weights = official_assignment(logits, y, start, config.steps, config.lr)
        assert torch.equal(split.bool(), weights > 0)
        assert not torch.equal(split.bool(), start > 0), "no step led anywhere"

    def test_small_gradients_are_lost_below_adams_epsilon(self) -> None:
        """Many samples and confident logits: the default leaves samples where they began."""
        logits, y = some_logits(20_000, 2)
        gradients = scale_gradients(8 * logits, y)
        start = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
        sign = gradients > 0
        agreement = []
        for eps in (1e-8, 1e-16):
            split = infer_environments(gradients, start, replace(INFERENCE, eps=eps)).bool()
            same = float((split == sign).double().mean())
            agreement.append(max(same, 1 - same))
        assert agreement[0] < agreement[1]


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_groups_are_environment_by_class(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[Tensor] = []

        def noted(task: Task, groups: Tensor, *rest: Any) -> Any:
            seen.append(groups)
            return train_groupdro(task, groups, *rest)

        monkeypatch.setattr("methods.eiil.train_groupdro", noted)
        fitted = Eiil().fit(selecting_task, CONFIG, make_context())
        assert fitted.partition is not None
        assert torch.equal(seen[0] % 2, selecting_task.train.y)
        assert torch.equal(seen[0] // 2, fitted.partition)
        facts = fitted.details["eiil"]
        assert facts["inference"] == "adam"
        assert facts["agreement_with_closed_form"] > 0.9
        assert facts["environment_sizes"] == torch.bincount(fitted.partition).tolist()

    def test_record_says_which_inference_ran(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, inference="closed_form")
        facts = Eiil().fit(selecting_task, config, make_context()).details["eiil"]
        assert (facts["inference"], facts["agreement_with_closed_form"]) == ("closed_form", 1.0)

    def test_reference_model_is_the_shared_erm_stage(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        ctx = make_context()
        Eiil().fit(selecting_task, CONFIG, ctx)
        assert [stage.name for stage in ctx.stage_costs] == ["erm", "eiil-environments"]

    def test_one_environment_is_a_failure_that_says_why(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def one(*arguments: Any) -> tuple[Tensor, float]:
            return torch.zeros(60, dtype=torch.long), 1.0

        monkeypatch.setattr("methods.eiil.find_environments", one)
        with pytest.raises(OneEnvironment, match="one environment") as caught:
            Eiil().fit(selecting_task, CONFIG, make_context())
        assert "eiil.erm.epochs" in caught.value.remedy


def test_quick_shortens_the_reference_too() -> None:
    quick = replace(CONFIG, epochs=50, erm=ErmConfig(epochs=9)).quick()
    assert (quick.epochs, quick.erm.epochs, quick.inference_steps) == (2, 2, 100)


@pytest.mark.parametrize("knob", ["inference_steps", "inference_lr", "inference_eps"])
def test_wrong_values_are_refused(knob: str) -> None:
    with pytest.raises(UsageError, match=knob):
        replace(CONFIG, **{knob: 0})
