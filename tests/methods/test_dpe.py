"""DPE: distances, the penalty on similarity, even draws, and the average of all prototypes."""

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
from methods.balanced import smallest_subset
from methods.base import Supervision
from methods.dpe import (
    Dpe,
    DpeConfig,
    PrototypeNetwork,
    ValidationFeatures,
    distance_logits,
    fit_prototypes,
    similarity,
    standardised,
)
from methods.erm import ErmConfig
from methods.prediction import EvalImages, predict_with
from methods.selection import Selection

MakeContext = Callable[..., RunContext]
CONFIG = DpeConfig(
    erm=ErmConfig(epochs=2, batch_size=16, lr=0.02), heads=3, epochs=4, batch_size=16
)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def two_clouds(samples: int = 60, length: int = 6) -> ValidationFeatures:
    y = torch.arange(samples) % 2
    features = standardised(some(samples, length) + 3 * functional.one_hot(y, length))
    return ValidationFeatures(features, y, y, 2)


def rule_for(data: ValidationFeatures) -> Selection:
    def right(logits: Tensor) -> float:
        return float((logits.argmax(1) == data.y).double().mean())

    return Selection("right", right, latest_of_equals=True)


def test_logits_are_minus_the_distances_of_unit_vectors() -> None:
    features, prototypes, scale = some(5, 4), some(3, 4, seed=1), torch.tensor([-2.0])
    unit = features / features.norm(dim=1, keepdim=True)
    centres = prototypes / prototypes.norm(dim=1, keepdim=True)
    expected = -2.0 * (unit[:, None] - centres[None]).norm(dim=2)
    torch.testing.assert_close(distance_logits(features, prototypes, scale), expected)
    longer = distance_logits(7 * features, 3 * prototypes, scale)
    torch.testing.assert_close(longer, expected)


def test_each_sample_is_standardised_by_itself() -> None:
    found = standardised(some(4, 9))
    torch.testing.assert_close(found.mean(dim=1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(dim=1, correction=0), torch.ones(4))
    assert standardised(torch.full((1, 5), 3.0)).tolist() == [[0.0] * 5]


def test_similarity_is_the_mean_product_with_earlier_prototypes() -> None:
    mine, earlier = some(2, 5), some(3, 2, 5, seed=1)
    by_class = [sum(float(mine[k] @ earlier[h, k]) for h in range(3)) / 4 / 4 for k in range(2)]
    assert float(similarity(mine, earlier)) == pytest.approx(abs(sum(by_class) / 2), rel=1e-5)


def test_the_penalty_falls_from_the_third_head_on() -> None:
    config = DpeConfig(diversity=100.0, diversity_decay=0.5)
    assert [config.penalty_of(head) for head in range(4)] == [100.0, 100.0, 100 / 1.5, 50.0]


class TestPrototypes:
    def fit(self, make_context: MakeContext, earlier: Tensor, **changes: Any) -> Tensor:
        data = two_clouds()
        config = replace(CONFIG, **{"lr": 1e-3, "epochs": 40, **changes})
        return fit_prototypes(data, earlier, config, rule_for(data), make_context())[0]

    def test_they_tell_the_classes_apart(self, make_context: MakeContext) -> None:
        data = two_clouds()
        found = self.fit(make_context, torch.empty(0, 2, 6))
        assert rule_for(data).score(distance_logits(data.features, found, torch.ones(1))) > 0.9

    def test_the_first_knows_no_penalty_and_the_next_turns_away(
        self, make_context: MakeContext
    ) -> None:
        none = torch.empty(0, 2, 6)
        first = self.fit(make_context, none, diversity=0.0)
        assert torch.equal(first, self.fit(make_context, none, diversity=3.0))
        free = self.fit(make_context, first[None], diversity=0.0)
        bound = self.fit(make_context, first[None], diversity=3.0)
        assert float(similarity(bound, first[None])) < float(similarity(free, first[None]))

    def test_each_has_another_draw_and_another_start(self, make_context: MakeContext) -> None:
        first = self.fit(make_context, torch.empty(0, 2, 6), diversity=0.0)
        second = self.fit(make_context, first[None], diversity=0.0)
        assert not torch.allclose(first, second)


def test_probabilities_are_averaged() -> None:
    prototypes, scales, features = some(3, 2, 4), torch.tensor([1.0, 2.0, 0.5]), some(5, 4, seed=2)
    network = PrototypeNetwork(torch.nn.Identity(), prototypes, scales)  # type: ignore[arg-type]
    each = [distance_logits(features, prototypes[h], scales[h]).softmax(1) for h in range(3)]
    torch.testing.assert_close(network.scores(features).exp(), sum(each) / 3)


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_classes_are_fitted_on_and_no_group_is_read(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        ctx = make_context()
        fitted = Dpe().fit(toy_task, CONFIG, ctx)
        assert isinstance(fitted.module, PrototypeNetwork)
        assert fitted.module.prototypes.shape == (3, 2, 8)
        assert fitted.details["dpe"] == {"subset": 40}  # both classes have 20 of 40 samples
        assert fitted.selection is not None and fitted.selection.rule == "val_worst_class"
        assert [stage.name for stage in ctx.stage_costs] == ["erm"]

    def test_each_prototype_has_an_even_draw_and_what_is_kept_is_what_was_chosen(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[Tensor] = []
        given: list[tuple[Tensor, Selection]] = []

        def even(cells: Tensor, generator: torch.Generator) -> Tensor:
            drawn.append(smallest_subset(cells, generator))
            assert torch.equal(cells, task.val.y)
            return drawn[-1]

        def noted(data: Any, earlier: Tensor, config: Any, rule: Selection, ctx: Any) -> Any:
            given.append((data.features, rule))
            return fit_prototypes(data, earlier, config, rule, ctx)

        monkeypatch.setattr("methods.dpe.smallest_subset", even)
        monkeypatch.setattr("methods.dpe.fit_prototypes", noted)
        val = toy_task.val
        y = (val.ids % 5 > 0).long()  # 8 of 40 are 0
        uneven = type(val)("val", val.images, y, val.ids, None)
        task = replace(toy_task, val=uneven)
        fitted = Dpe().fit(task, CONFIG, make_context())
        assert [len(own) for own in drawn] == [16, 16, 16]
        assert not torch.equal(drawn[0].sort().values, drawn[1].sort().values)
        features, rule = given[0]
        assert rule.latest_of_equals
        network, images = fitted.module, EvalImages(task.val.images, task.eval_transform)
        assert isinstance(network, PrototypeNetwork)
        raw = predict_with(network.backbone, images)
        torch.testing.assert_close(features, standardised(raw))
        outputs = predict_with(network, images)
        torch.testing.assert_close(outputs, network.scores(features))
        assert fitted.selection is not None
        assert fitted.selection.value == pytest.approx(rule.score(outputs))

    def test_with_groups_these_are_balanced(
        self, toy_task: Task, selecting_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, balance="groups", selection="val_wga")
        with pytest.raises(GroupLabelsHidden):
            Dpe().fit(toy_task, config, make_context("hidden"))
        fitted = Dpe().fit(selecting_task, config, make_context("granted"))
        smallest = int(torch.bincount(selecting_task.val.groups).min())
        assert fitted.details["dpe"] == {"subset": 4 * smallest}


def test_tiers() -> None:
    assert Dpe().supervision(CONFIG) == Supervision()
    for change in ({"balance": "groups"}, {"selection": "val_wga"}):
        assert Dpe().supervision(replace(CONFIG, **change)) == Supervision(val_groups=True)


@pytest.mark.parametrize("wrong", [{"heads": 0}, {"scale": 0.0}, {"diversity": -1.0}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
