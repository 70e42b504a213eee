"""EVaLS: the samples it fits on, its penalised last layers, and the environments that choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from bench.context import RunContext
from datasets.base import GroupLabelsHidden, Task
from datasets.errors import UsageError
from methods.afr import Head
from methods.base import Supervision
from methods.erm import ErmConfig, train_erm
from methods.evals import Evals, EvalsConfig, environment_rule, extremes, fit_heads
from methods.prediction import EvalImages, predict_with
from methods.selection import Selection, selection
from methods.self import halve

MakeContext = Callable[..., RunContext]
CONFIG = EvalsConfig(
    erm=ErmConfig(epochs=2, batch_size=16, lr=0.02),
    counts=(3, 5),
    l1=(0.0, 0.1),
    epochs=3,
    batch_size=8,
    inference_steps=200,
)


def some(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_the_highest_and_the_lowest_losses_of_each_class_are_taken() -> None:
    losses = torch.tensor([0.1, 0.9, 0.5, 0.7, 3.0, 2.0, 4.0, 1.0])
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    assert extremes(losses, y, 1).tolist() == [1, 0, 6, 7]
    assert sorted(extremes(losses, y, 2).tolist()) == list(range(8))
    assert torch.bincount(y[extremes(losses, y, 3)]).tolist() == [6, 6]
    assert torch.bincount(y[extremes(losses, y, 9)]).tolist() == [8, 8]  # each twice, no more


def test_fits_side_by_side_are_those_of_adam_one_by_one() -> None:
    """The rate is halved after 85% of the epochs."""
    features, y = some(20, 4), torch.arange(20) % 3
    start, config = Head(some(3, 4, 1), some(1, 3, 2)[0]), replace(CONFIG, epochs=7, lr=0.05)
    *_, both = fit_heads(features, y, start, config, torch.Generator().manual_seed(5))
    for number, l1 in enumerate(CONFIG.l1):
        weight, bias = (part.clone().requires_grad_() for part in (start.weight, start.bias))
        solver = torch.optim.Adam([weight, bias], lr=config.lr, weight_decay=config.weight_decay)
        generator = torch.Generator().manual_seed(5)
        for epoch in range(config.epochs):
            solver.param_groups[0]["lr"] = config.lr / (2 if epoch == 6 else 1)
            for index in torch.randperm(20, generator=generator).split(8):
                solver.zero_grad()
                loss = functional.cross_entropy(features[index] @ weight.T + bias, y[index])
                (loss + l1 * (weight.abs().sum() + bias.abs().sum())).backward()
                solver.step()
        torch.testing.assert_close(both.weight[number], weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(both.bias[number], bias.detach(), rtol=1e-4, atol=1e-5)


def test_two_classes_have_right_and_wrong_as_their_environments() -> None:
    """For two classes EIIL's split is by the model's errors, so the worst is found among them."""
    y = torch.arange(40) % 2
    wrong = torch.arange(40) < 10
    logits = 3.0 * functional.one_hot(torch.where(wrong, 1 - y, y), 2).float()
    config = replace(CONFIG, inference_steps=2000)
    rule, sizes = environment_rule(logits, y, "wga", config, some(40, 1)[:, 0])
    assert sorted(sizes) == [10, 30]
    assert rule.score(logits) == 0.0 and rule.score(-logits) == 0.0


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_no_group_is_read_and_what_was_chosen_is_said(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        ctx = make_context()
        fitted = Evals().fit(toy_task, CONFIG, ctx)
        facts: Any = fitted.details["evals"]
        assert facts["count"] in CONFIG.counts and facts["l1"] in CONFIG.l1
        assert sum(facts["environment_sizes"]) == facts["chosen_on"] == 20
        assert facts["one_environment"] == (min(facts["environment_sizes"]) == 0)
        assert fitted.selection is not None and fitted.selection.rule == "worst_environment"
        assert [stage.name for stage in ctx.stage_costs] == ["erm"]

    def test_with_group_labels_these_choose(
        self, toy_task: Task, selecting_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, selection="val_wga")
        with pytest.raises(GroupLabelsHidden):
            Evals().fit(toy_task, config, make_context("hidden"))
        fitted = Evals().fit(selecting_task, config, make_context("granted"))
        assert fitted.selection is not None and fitted.selection.rule == "val_wga"
        assert "environment_sizes" not in fitted.details["evals"]

    @pytest.mark.parametrize("labelled", [False, True])
    def test_extremes_of_one_half_are_fitted_on_and_the_other_half_chooses(
        self,
        selecting_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        labelled: bool,
    ) -> None:
        rules: list[tuple[Tensor, Tensor, Selection]] = []
        sizes: list[int] = []

        def inferred(logits: Tensor, y: Tensor, *rest: Any) -> Any:
            rule, found = environment_rule(logits, y, *rest)
            rules.append((logits, y, rule))
            return rule, found

        def fits(features: Tensor, y: Tensor, *rest: Any) -> Any:
            sizes.append(len(y))
            return fit_heads(features, y, *rest)

        monkeypatch.setattr("methods.evals.environment_rule", inferred)
        monkeypatch.setattr("methods.evals.fit_heads", fits)
        ctx, val = make_context(), selecting_task.val
        config = replace(CONFIG, selection="val_wga") if labelled else CONFIG
        fitted = Evals().fit(selecting_task, config, ctx)
        assert sizes == [2 * 2 * 3, 2 * 2 * 5]
        generator = torch.Generator().manual_seed(ctx.seed("evals", "halves"))
        other = val.subset(halve(len(val), generator)[1])
        images = EvalImages(other.images, selecting_task.eval_transform)
        rule = selection("val_wga", replace(selecting_task, val=other))
        if not labelled:
            (logits, y, rule) = rules[0]
            erm = train_erm(selecting_task, config.erm, ctx).module
            torch.testing.assert_close(logits, predict_with(erm, images))
            assert torch.equal(y, other.y)
        assert fitted.selection is not None
        outputs = predict_with(fitted.module, images)
        assert fitted.selection.value == pytest.approx(rule.score(outputs))

    def test_classes_can_choose(self, toy_task: Task, make_context: MakeContext) -> None:
        config = replace(CONFIG, selection="val_worst_class")
        fitted = Evals().fit(toy_task, config, make_context())
        assert fitted.selection is not None and fitted.selection.rule == "val_worst_class"
        assert "environment_sizes" not in fitted.details["evals"]

    def test_one_environment_is_reported(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "methods.evals.infer_environments", lambda gradients, *rest: gradients.long() * 0
        )
        facts: Any = Evals().fit(toy_task, CONFIG, make_context()).details["evals"]
        assert facts["one_environment"] and facts["environment_sizes"] == [20, 0]


def test_tiers() -> None:
    assert Evals().supervision(CONFIG) == Supervision()
    labelled = replace(CONFIG, selection="val_wga")
    assert Evals().supervision(labelled) == Supervision(val_groups=True)


@pytest.mark.parametrize("wrong", [{"counts": (0,)}, {"l1": (-1.0,)}, {"lr": 0.0}, {"epochs": 0}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
