"""JTT: which samples are errors, how often they count, and what is selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from datasets.base import Task
from datasets.errors import UsageError
from methods.backbones import Classifier
from methods.jtt import (
    EmptyErrorSet,
    ErrorTrackingCrossEntropy,
    Jtt,
    JttConfig,
    find_errors,
    upsample_errors,
)
from methods.prediction import EvalImages, predict_with
from methods.training import Batch, Training, shuffled

pytestmark = pytest.mark.usefixtures("small_networks")
MakeContext = Callable[..., RunContext]
BuildClassifier = Callable[..., Classifier]
CONFIG = JttConfig(epochs=3, batch_size=16, lr=0.003, identification_epoch=1, upweight=4)


class Fixed(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits


class TestErrorSet:
    def test_ten_rows_by_hand(self) -> None:
        """The wrong samples, not the right ones (a slip in BalancingGroups' first release)."""
        y = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 0, 1])
        predicted = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1, 1])
        loss = ErrorTrackingCrossEntropy(10)
        index = torch.tensor([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
        logits = torch.eye(2)[predicted[index]]
        loss(Fixed(logits), Batch(torch.zeros(10, 1), y[index], index))
        assert loss.wrong.nonzero()[:, 0].tolist() == [1, 4, 8]

    def test_the_last_judgement_counts(self) -> None:
        loss = ErrorTrackingCrossEntropy(2)
        for predicted in ([1, 1], [0, 1]):
            batch = Batch(torch.zeros(2, 1), torch.tensor([0, 0]), torch.arange(2))
            loss(Fixed(torch.eye(2)[torch.tensor(predicted)]), batch)
        assert loss.wrong.tolist() == [False, True]

    def test_during_training_is_what_each_batch_said_in_epoch_t(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: dict[int, bool] = {}
        original = Classifier.forward

        def noted(self: Classifier, images: Tensor) -> Tensor:
            logits = original(self, images)
            noted.last = logits.detach()  # type: ignore[attr-defined]
            return logits

        judge = ErrorTrackingCrossEntropy.forward

        def judged(self: ErrorTrackingCrossEntropy, model: nn.Module, batch: Batch) -> Tensor:
            loss = judge(self, model, batch)
            wrong = noted.last.argmax(1) != batch.y  # type: ignore[attr-defined]
            said.update(zip(batch.index.tolist(), wrong.tolist(), strict=True))
            return loss

        monkeypatch.setattr(Classifier, "forward", noted)
        monkeypatch.setattr(ErrorTrackingCrossEntropy, "forward", judged)
        wrong = find_errors(selecting_task, CONFIG, make_context())
        assert wrong.tolist() == [said[i] for i in range(60)]
        assert 0 < int(wrong.sum()) < 60

    def test_after_epoch_is_the_trained_models_own_mistakes(
        self, selecting_task: Task, make_context: MakeContext, small_networks: BuildClassifier
    ) -> None:
        config = replace(CONFIG, errors="after_epoch")
        wrong = find_errors(selecting_task, config, make_context("one"))
        ctx = make_context("two")
        model = small_networks(selecting_task, ctx, "jtt-identify")
        training = Training(
            model,
            selecting_task,
            replace(config, epochs=2, selection="last"),
            ctx,
            name="jtt-identify",
        )
        training.run()
        clean = predict_with(
            model, EvalImages(selecting_task.train.images, selecting_task.eval_transform)
        )
        assert torch.equal(wrong, clean.argmax(1) != selecting_task.train.y)

    def test_t_counts_from_zero(self, selecting_task: Task, make_context: MakeContext) -> None:
        for t in (0, 2):
            ctx = make_context(f"t{t}")
            find_errors(selecting_task, replace(CONFIG, identification_epoch=t), ctx)
            assert ctx.account.rows[-1]["epoch"] == t

    def test_empty_error_set_is_a_failure_that_says_why(
        self, selecting_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nothing = torch.zeros(60, dtype=torch.bool)
        monkeypatch.setattr("methods.jtt.find_errors", lambda *arguments: nothing)
        with pytest.raises(EmptyErrorSet, match="every training sample right") as caught:
            Jtt().fit(selecting_task, CONFIG, make_context())
        assert "identification_epoch" in caught.value.remedy


class TestCopies:
    wrong = torch.zeros(10, dtype=torch.bool).index_fill(0, torch.tensor([2, 7]), True)

    @pytest.mark.parametrize("upweight", [0, 1, 20])
    def test_error_points_count_one_plus_lambda_times(self, upweight: int) -> None:
        drawn = upsample_errors(10, self.wrong, upweight)(0, torch.Generator().manual_seed(0))
        assert len(drawn) == 10 + 2 * upweight
        expected = torch.ones(10, dtype=torch.long) + upweight * self.wrong
        assert torch.equal(torch.bincount(drawn, minlength=10), expected)

    def test_lambda_zero_is_erm(
        self, selecting_task: Task, make_context: MakeContext, small_networks: BuildClassifier
    ) -> None:
        states = []
        for name, sampler in (
            ("erm", shuffled(60)),
            ("jtt", upsample_errors(60, torch.ones(60, dtype=torch.bool), 0)),
        ):
            ctx = make_context(name)
            model = small_networks(selecting_task, ctx, "net")
            Training(model, selecting_task, CONFIG, ctx, name="net", sampler=sampler).run()
            states.append(model.state_dict())
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())

    def test_method_with_lambda_zero_trains_as_erm_does(
        self, selecting_task: Task, make_context: MakeContext, small_networks: BuildClassifier
    ) -> None:
        fitted = Jtt().fit(selecting_task, replace(CONFIG, upweight=0), make_context("jtt"))
        ctx = make_context("erm")
        model = small_networks(selecting_task, ctx, "jtt")
        Training(model, selecting_task, CONFIG, ctx, name="jtt").run()
        found = fitted.module.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


class TestSecondStage:
    def test_error_set_is_fixed_and_epochs_are_longer(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """Every epoch of the configured number sees the same N + lambda |E| positions."""
        ctx = make_context()
        fitted = Jtt().fit(selecting_task, CONFIG, ctx)
        errors = fitted.details["jtt"]["errors"]
        assert fitted.partition is not None
        assert int(fitted.partition.sum()) == errors > 0
        rows = [row for row in ctx.account.history() if row["stage"] == "jtt"]
        assert len(rows) == CONFIG.epochs
        assert ctx.account.image_passes == CONFIG.epochs * (
            60 + 4 * errors + len(selecting_task.val)
        )

    def test_starts_from_a_fresh_model(
        self,
        selecting_task: Task,
        make_context: MakeContext,
        small_networks: BuildClassifier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        built: dict[str, list[Tensor]] = {}

        def noted(task: Task, ctx: RunContext, name: str) -> Classifier:
            model = small_networks(task, ctx, name)
            built[name] = [value.detach().clone() for value in model.parameters()]
            return model

        monkeypatch.setattr("methods.jtt.build_classifier", noted)
        started = []
        original = Training.run

        def run(self: Training) -> Any:
            started.append([value.detach().clone() for value in self.model.parameters()])
            return original(self)

        monkeypatch.setattr(Training, "run", run)
        Jtt().fit(selecting_task, CONFIG, make_context())
        for found, name in zip(started, ("jtt-identify", "jtt"), strict=True):
            assert all(map(torch.equal, found, built[name]))
        assert not torch.equal(built["jtt"][0], built["jtt-identify"][0])

    def test_selection_watches_the_model_in_training(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """SpuCo's scripts keep asking the first stage's network, so that no epoch ever wins."""
        ctx = make_context()
        fitted = Jtt().fit(selecting_task, replace(CONFIG, epochs=6, lr=0.001), ctx)
        rows = [row for row in ctx.account.history() if row["stage"] == "jtt"]
        values = [row["selection"] for row in rows]
        assert len(set(values)) > 1
        assert fitted.selection.value == max(values)
        assert fitted.selection.epoch == values.index(max(values))

    def test_another_seed_has_a_first_stage_of_its_own(
        self, selecting_task: Task, make_context: MakeContext
    ) -> None:
        """SubpopBench takes the first stage of seed 0 for every seed."""
        sets = [find_errors(selecting_task, CONFIG, make_context(f"s{s}", seed=s)) for s in (0, 1)]
        assert not torch.equal(sets[0], sets[1])


def test_quick_has_few_copies() -> None:
    """With CMNIST's 500 copies a smoke run would pass 400,000 images."""
    quick = replace(CONFIG, epochs=50, identification_epoch=9, upweight=500).quick()
    assert (quick.epochs, quick.identification_epoch, quick.upweight) == (2, 1, 5)
    assert replace(CONFIG, upweight=3).quick().upweight == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"upweight": -1}, "upweight cannot be negative but got -1"),
        ({"identification_epoch": -1}, "identification_epoch cannot be negative"),
    ],
)
def test_wrong_values_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **change)
