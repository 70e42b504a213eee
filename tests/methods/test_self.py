"""SELF and CB-LLR: which samples are chosen, what is fitted on which half, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.context import RunContext
from datasets.base import Task
from datasets.errors import UsageError
from methods.afr import Head
from methods.base import Supervision
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.self import (
    CbLlr,
    CbLlrConfig,
    SelfConfig,
    SelfSelective,
    disagreement,
    even_draws,
    fit_head,
    halve,
    highest,
    train_base,
)
from methods.training import Training

MakeContext = Callable[..., RunContext]
BASE = TrainConfig(epochs=10, batch_size=16, lr=0.02, selection="last")
CONFIG = SelfConfig(base=BASE, counts=(4, 100), lrs=(0.01,), steps=5, batch_size=8)
CONTROL = CbLlrConfig(base=BASE, lrs=(0.1,), epochs=10, batch_size=8)


def some(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


class TestScores:
    def test_a_model_does_not_disagree_with_itself(self) -> None:
        """In the authors' first release it was compared with itself: every score was 0."""
        final = some(6, 3)
        assert disagreement(final, final).tolist() == pytest.approx([0.0] * 6, abs=1e-6)

    def test_the_divergence_is_of_the_final_model_from_the_early_one_over_k(self) -> None:
        early, final = some(5, 3, 1), some(5, 3, 2)
        p, q = early.softmax(1), final.softmax(1)
        expected = (p * (p / q).log()).sum(dim=1) / 3
        torch.testing.assert_close(disagreement(early, final), expected)
        assert not torch.allclose(disagreement(final, early), expected)

    def test_choices_are_nested_and_ties_go_to_the_first(self) -> None:
        scores = torch.tensor([0.2, 0.9, 0.5, 0.9, 0.5])
        assert highest(scores, 1).tolist() == [1]
        assert highest(scores, 3).tolist() == [1, 3, 2]
        assert set(highest(scores, 3).tolist()) < set(highest(scores, 4).tolist())
        assert highest(scores, 100).tolist() == [1, 3, 2, 4, 0]


class TestHead:
    def test_no_step_returns_the_base(self) -> None:
        start = Head(some(3, 4), some(1, 3)[0])
        none = torch.zeros(0, 8, dtype=torch.long)
        head = fit_head(some(6, 4), torch.zeros(6, dtype=torch.long), none, start, 0.1, 0.1)
        assert torch.equal(head.weight, start.weight) and torch.equal(head.bias, start.bias)

    def test_steps_are_those_of_sgd_without_momentum(self) -> None:
        features, y = some(20, 4), torch.arange(20) % 3
        layer = nn.Linear(4, 3)
        start = Head(layer.weight.detach().clone(), layer.bias.detach().clone())
        solver = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.01)
        draws = even_draws(y, (15, 8), torch.Generator().manual_seed(1))
        for index in draws:
            solver.zero_grad()
            functional.cross_entropy(layer(features[index]), y[index]).backward()
            solver.step()
        head = fit_head(features, y, draws, start, 0.1, 0.01)
        torch.testing.assert_close(head.weight, layer.weight.detach())
        torch.testing.assert_close(head.bias, layer.bias.detach())

    def test_classes_are_drawn_evenly_and_one_that_is_missing_is_not(self) -> None:
        y = torch.tensor([0] * 90 + [2] * 10)
        draws = y[even_draws(y, (200, 10), torch.Generator().manual_seed(0))]
        assert torch.bincount(draws.flatten(), minlength=3).tolist()[1] == 0
        assert float((draws == 2).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_validation_is_halved_as_the_authors_do() -> None:
    first, second = halve(1199, torch.Generator().manual_seed(0))
    assert (len(first), len(second)) == (599, 600)
    assert len(torch.cat([first, second]).unique()) == 1199


@pytest.mark.usefixtures("small_networks")
class TestFit:
    def test_the_base_model_is_kept_after_a_tenth_a_fifth_and_half_of_its_epochs(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        models = train_base(selecting_task, CONFIG, make_context("ten"))
        assert list(models) == [10, 20, 50, 100]
        for mark, epochs in ((10, 1), (50, 5)):
            shorter = replace(CONFIG, base=replace(BASE, epochs=epochs))
            own = train_base(selecting_task, shorter, make_context(f"{epochs}"))[100]
            assert torch.equal(models[mark].head.weight, own.head.weight)

    def test_the_base_model_meets_the_classes_equally_often(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samplers: list[Any] = []
        run = Training.run

        def noted(self: Training) -> Any:
            samplers.append(self.sampler)
            return run(self)

        monkeypatch.setattr(Training, "run", noted)
        y = selecting_task.train.y
        rare = torch.cat([(y == 0).nonzero()[:4, 0], (y == 1).nonzero()[:, 0]])
        task = replace(selecting_task, train=selecting_task.train.subset(rare))
        train_base(task, CONFIG, make_context())
        drawn = [samplers[0](e, torch.Generator().manual_seed(e)) for e in range(50)]
        assert float(task.train.y[torch.cat(drawn)].double().mean()) == pytest.approx(0.5, abs=0.05)

    def test_one_half_is_fitted_on_and_the_other_chooses(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        val, ctx = selecting_task.val, make_context()
        generator = torch.Generator().manual_seed(ctx.seed("self", "halves"))
        first, second = halve(len(val), generator)
        for method, config in ((SelfSelective(), CONFIG), (CbLlr(), CONTROL)):
            fits = method.prepare(selecting_task, config, ctx)
            assert torch.equal(fits.half.ids, val.ids[first])
            assert torch.equal(fits.held_out_y, val.y[second])
            for part, given in ((first, fits.features), (second, fits.held_out)):
                images = EvalImages(val.subset(part).images, selecting_task.eval_transform)
                torch.testing.assert_close(given, predict_with(fits.network.backbone, images))
            assert fits.rule.score(functional.one_hot(val.y[second], 2).float()) == 100.0
            fitted = method.fit(selecting_task, config, ctx)
            outputs = functional.linear(fits.held_out, *fitted.module.head.parameters())
            assert fitted.selection is not None
            assert fitted.selection.value == fits.rule.score(outputs.detach())

    def test_fine_tuning_begins_at_the_base_models_last_layer(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        ctx = make_context()
        fitted = SelfSelective().fit(selecting_task, replace(CONFIG, lrs=(1e-9,)), ctx)
        base = train_base(selecting_task, CONFIG, ctx)[100]
        torch.testing.assert_close(fitted.module.head.weight, base.head.weight)

    @pytest.mark.parametrize("variant", ["es_disagreement", "dropout_disagreement"])
    def test_another_model_is_what_the_final_one_is_compared_with(
        self,
        selecting_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        variant: Any,
    ) -> None:
        """The other is the target of the divergence, and never the final model itself."""
        given: list[tuple[Tensor, Tensor]] = []

        def noted(target: Tensor, final: Tensor) -> Tensor:
            given.append((target, final))
            return disagreement(target, final)

        monkeypatch.setattr("methods.self.disagreement", noted)
        ctx, config = make_context(), replace(CONFIG, variant=variant)
        SelfSelective().fit(selecting_task, config, ctx)
        fits = SelfSelective().prepare(selecting_task, config, ctx)
        final = functional.linear(fits.features, fits.head.weight, fits.head.bias)
        assert len(given) == 3
        for target, own in given:
            torch.testing.assert_close(own, final)
            assert float(disagreement(target, own).max()) > 0

    @pytest.mark.parametrize("variant", ["misclassification", "es_misclassification"])
    def test_the_highest_losses_are_chosen(
        self,
        selecting_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        variant: Any,
    ) -> None:
        given: list[Tensor] = []

        def noted(scores: Tensor, count: int) -> Tensor:
            given.append(scores)
            return highest(scores, count)

        monkeypatch.setattr("methods.self.highest", noted)
        ctx, config = make_context(), replace(CONFIG, variant=variant, checkpoints=(20,))
        SelfSelective().fit(selecting_task, config, ctx)
        fits = SelfSelective().prepare(selecting_task, config, ctx)
        model = fits.early[20] if variant.startswith("es_") else fits.network
        outputs = predict_with(model, EvalImages(fits.half.images, selecting_task.eval_transform))
        expected = functional.cross_entropy(outputs, fits.half.y, reduction="none")
        torch.testing.assert_close(given[0], expected)

    @pytest.mark.parametrize(
        "variant",
        [
            "es_disagreement",
            "dropout_disagreement",
            "misclassification",
            "es_misclassification",
            "random",
        ],
    )
    def test_every_variant_chooses_fits_and_says_by_what(
        self, selecting_task: Task, make_context: MakeContext, variant: Any
    ) -> None:
        fitted = SelfSelective().fit(
            selecting_task, replace(CONFIG, variant=variant), make_context()
        )
        facts = fitted.details["self"]
        assert facts["variant"] == variant and facts["count"] in (4, 20)
        assert facts["fitted_on"] == facts["chosen_on"] == 20
        assert facts["missing_classes"] in ([], [0], [1])
        assert fitted.selection is not None and fitted.selection.rule == "val_wga"

    def test_disagreement_reads_no_label_of_the_half_it_chooses_from(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chosen: list[list[int]] = []

        def noted(scores: Tensor, count: int) -> Tensor:
            found = highest(scores, count)
            chosen.append(found.tolist())
            return found

        monkeypatch.setattr("methods.self.highest", noted)
        config = replace(CONFIG, counts=(6,))
        SelfSelective().fit(selecting_task, config, make_context("as they are"))
        val = selecting_task.val
        other = type(val)("val", val.images, 1 - val.y, val.ids, val.groups)
        SelfSelective().fit(replace(selecting_task, val=other), config, make_context("permuted"))
        assert chosen[: len(chosen) // 2] == chosen[len(chosen) // 2 :]

    def test_a_count_of_all_is_the_whole_half(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        config = replace(CONFIG, variant="misclassification", counts=(1000,))
        facts = SelfSelective().fit(selecting_task, config, make_context()).details["self"]
        assert facts["count"] == facts["fitted_on"]

    def test_a_class_without_a_chosen_sample_is_named(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """Even draws cannot balance what is not there."""
        found = {}
        for count in (1, 100):
            config = replace(CONFIG, counts=(count,), variant="random")
            fitted = SelfSelective().fit(selecting_task, config, make_context(f"{count}"))
            found[count] = fitted.details["self"]["missing_classes"]
        assert found[1] in ([0], [1]) and found[100] == []

    def test_the_control_shares_the_base_model_and_not_its_last_layer(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        contexts = [make_context("self"), make_context("control")]
        SelfSelective().fit(selecting_task, CONFIG, contexts[0])
        fitted = CbLlr().fit(selecting_task, CONTROL, contexts[1])
        (first,), (second,) = (ctx.stage_costs for ctx in contexts)
        assert first.key == second.key and second.reused
        assert fitted.details["cbllr"]["steps"] == 30
        base = train_base(selecting_task, CONTROL, make_context("again"))[100]
        cosine = functional.cosine_similarity(fitted.module.head.weight, base.head.weight)
        assert cosine.abs().max() < 0.99

    def test_without_validation_groups_both_choose_by_classes(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        for method, config in ((SelfSelective(), CONFIG), (CbLlr(), CONTROL)):
            free = replace(config, selection="val_worst_class")
            fitted = method.fit(toy_task, free, make_context(method.name))
            assert fitted.selection is not None and fitted.selection.rule == "val_worst_class"


def test_tiers() -> None:
    for method, config in ((SelfSelective(), CONFIG), (CbLlr(), CONTROL)):
        assert method.supervision(config) == Supervision(val_groups=True)
        assert method.supervision(replace(config, selection="val_worst_class")) == Supervision()


@pytest.mark.parametrize(
    "wrong",
    [{"counts": (0,)}, {"checkpoints": (30,)}, {"dropouts": (1.0,)}, {"lrs": ()}, {"steps": 0}],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
