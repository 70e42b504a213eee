"""Correct-n-Contrast: slices, role sets, the loss by hand, and both stages together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from official_cnc import official_step
from torch import Tensor, nn

import methods.cnc
import methods.erm
from bench.context import RunContext
from datasets.base import BackboneSpec, LoadedData, Task
from datasets.catalogue import get_dataset, load_datasets
from datasets.errors import UsageError
from methods.backbones import Backbone, Classifier, build_backbone
from methods.base import METHODS, load_methods
from methods.clustering import umap_embedding
from methods.cnc import (
    ROLES,
    Cnc,
    CncConfig,
    ContrastiveSets,
    NoAnchors,
    TwoSidedLoss,
    cluster,
    frozen_statistics,
    slices_of,
    subsets,
    supervised_contrast,
)
from methods.erm import ErmConfig, train_erm
from methods.presets import preset_config
from methods.training import Batch, Training

MakeContext = Callable[..., RunContext]
load_methods()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_classifier(dim: int = 6, classes: int = 2, inputs: int = 64, seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    layers = nn.Flatten(), nn.Linear(inputs, dim), nn.BatchNorm1d(dim), nn.Tanh()
    return Classifier(Backbone(nn.Sequential(*layers), dim), classes)


def world(size: int = 400, classes: int = 3, errors: float = 0.3) -> tuple[Tensor, Tensor]:
    """Classes, and slices that differ from them here and there."""
    y = torch.randint(classes, (size,), generator=generator(1))
    shift = torch.randint(1, classes, (size,), generator=generator(2))
    wrong = torch.rand(size, generator=generator(3)) < errors
    return y, torch.where(wrong, (y + shift) % classes, y)


def drawn(sets: ContrastiveSets, seed: int = 0) -> list[list[list[int]]]:
    """The sets of an epoch as plain numbers: set, role, sample."""
    flat = sets(0, generator(seed))
    assert flat.dtype == torch.int64 and flat.ndim == 1
    plain: list[list[list[int]]] = flat.view(-1, ROLES, sets.per_role).tolist()
    return plain


class TestLoss:
    def test_contrast_is_the_double_loop(self) -> None:
        size, dim, tau = 3, 5, 0.3
        z = torch.randn(4, size, dim, generator=generator(), dtype=torch.float64)
        anchors, positives, negatives, easy = z

        def similarity(a: Tensor, b: Tensor) -> float:
            dot = sum(float(u) * float(v) for u, v in zip(a, b, strict=True))
            return dot / math.sqrt(float(a @ a)) / math.sqrt(float(b @ b))

        def side(first: Tensor, wanted: Tensor, unwanted: Tensor) -> float:
            total = 0.0
            for p in wanted:
                below = sum(math.exp(similarity(first, n) / tau) for n in unwanted)
                below += sum(math.exp(similarity(first, q) / tau) for q in wanted)
                total -= similarity(first, p) / tau - math.log(below)
            return total / len(wanted)

        for first, wanted, unwanted in (
            (anchors[0], positives, negatives),
            (positives[0], anchors, easy),
        ):
            found = supervised_contrast(first[None], wanted[None], unwanted[None], tau)
            assert found.shape == (1,)
            assert float(found) == pytest.approx(side(first, wanted, unwanted), rel=1e-12)

    @pytest.fixture
    def batch(self) -> Batch:
        """Eight sets of three per role, of flat images."""
        count = 8 * ROLES * 3
        images = torch.randn(count, 7, generator=generator(4))
        return Batch(
            images, torch.randint(2, (count,), generator=generator(5)), torch.arange(count)
        )

    def test_one_forward_has_the_gradients_of_many(self, batch: Batch) -> None:
        model, n, tau, weight = tiny_classifier(inputs=7).eval(), 3, 0.2, 0.75
        found = self.gradients(model, TwoSidedLoss(n, 1, tau, weight), [self.part(batch, 0, 1)])
        model.zero_grad()
        images, y = batch.images[: ROLES * n], batch.y[: ROLES * n]
        a, p, u, e = images.split(n)
        for first, wanted, unwanted in ((a, p, u), (p, a, e)):
            z = [model.backbone(part) for part in (first[:1], wanted, unwanted)]
            (weight * supervised_contrast(z[0], z[1][None], z[2][None], tau).sum()).backward()
        for part, labels in zip(images.split(5), y.split(5), strict=True):  # in uneven chunks
            entropy = nn.functional.cross_entropy(model(part), labels, reduction="sum")
            ((1 - weight) * entropy / len(y)).backward()
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)
            assert ours.abs().sum() > 0

    @pytest.mark.parametrize("dataset", ["umnist", "cmnist"])
    def test_a_step_is_the_official_one(self, dataset: str) -> None:
        """The preset's step of several sets on its own network: equal losses, equal gradients."""
        config: CncConfig = preset_config(METHODS["cnc"], dataset)
        known = get_dataset(dataset)
        facts = known.facts(known.config_type())
        n, sets, at_once = config.per_role, config.batch_factor, config.sets_per_forward
        torch.manual_seed(0)
        backbone = build_backbone(BackboneSpec(facts.backbone), facts.channels)
        model = Classifier(backbone, len(facts.classes)).eval()
        images = torch.randn(sets * ROLES * n, facts.channels, 32, 32, generator=generator(1))
        y = torch.randint(len(facts.classes), (len(images),), generator=generator(2))
        knobs = config.temperature, config.contrastive_weight
        expected = official_step(model, images, y, n, *knobs, 32, generator(3))
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        index = torch.arange(len(images))
        loss_of, total = TwoSidedLoss(n, at_once, *knobs), 0.0
        for part in index.split(at_once * ROLES * n):
            loss = loss_of(model, Batch(images[part], y[part], part)) * at_once / sets
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(expected, rel=1e-5)
        assert len(gradients) == len(list(model.parameters()))
        for theirs, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-3, atol=1e-5)

    @pytest.mark.parametrize("sets", [8, 6, 3])
    def test_sets_per_forward_does_not_change_gradients(self, batch: Batch, sets: int) -> None:
        """An epoch's last forward pass may have fewer sets than the others."""
        model = tiny_classifier(inputs=7).eval()
        every = []
        for at_once in (1, 4, 8):
            parts = [
                self.part(batch, start, min(start + at_once, sets))
                for start in range(0, sets, at_once)
            ]
            loss = TwoSidedLoss(3, at_once, 0.1, 0.75)
            every.append(self.gradients(model, loss, parts, divide=8 // at_once))
        for other in every[1:]:
            for one, another in zip(every[0], other, strict=True):
                torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-6)

    @staticmethod
    def part(batch: Batch, start: int, stop: int) -> Batch:
        rows = slice(start * ROLES * 3, stop * ROLES * 3)
        return Batch(batch.images[rows], batch.y[rows], batch.index[rows])

    @staticmethod
    def gradients(
        model: nn.Module, loss: nn.Module, parts: list[Batch], divide: int = 1
    ) -> list[Tensor]:
        model.zero_grad()
        for part in parts:
            (loss(model, part) / divide).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class TestSubsets:
    def test_every_outcome_is_equally_likely(self) -> None:
        """Order included, since the first of a role is contrasted with the others."""
        found = subsets(5, 3, 60_000, generator())
        codes = found @ torch.tensor([25, 5, 1])
        counts = codes.unique(return_counts=True)[1]
        assert len(counts) == 5 * 4 * 3
        assert (counts - 1000).abs().max() < 5 * math.sqrt(1000)

    @pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 7), (40, 17), (100_000, 32)])
    def test_without_replacement(self, size: int, count: int) -> None:
        found = subsets(size, count, 300, generator())
        assert found.shape == (300, count)
        assert found.min() >= 0 and found.max() < size
        assert all(len(set(row)) == count for row in found.tolist())

    def test_with_replacement_where_there_are_too_few(self) -> None:
        found = subsets(2, 5, 300, generator())
        assert found.shape == (300, 5)
        assert set(found.flatten().tolist()) == {0, 1}


class TestRoles:
    def test_relations_hold_in_every_set(self) -> None:
        y, slices = world()
        sets = ContrastiveSets(y, slices, 3, per_role=5, anchor_ratio=1.0)
        seen = drawn(sets)
        assert sets.per_role == 5 and len(seen) == sets.per_epoch
        for anchors, positives, negatives, easy in seen:
            own = int(slices[anchors[0]])
            assert all(y[i] == slices[i] == own for i in anchors)
            assert all(y[i] == own and slices[i] != own for i in positives)
            assert all(slices[i] == own and y[i] != own for i in negatives)
            source = int(slices[positives[0]])
            assert all(y[i] == slices[i] == source for i in easy)
            for role in (anchors, positives, negatives, easy):
                assert len(set(role)) == 5

    def test_slices_take_turns_and_the_smallest_decides(self) -> None:
        y, slices = world()
        correct = [int(((y == c) & (slices == c)).sum()) for c in range(3)]
        assert len(set(correct)) > 1
        sets = ContrastiveSets(y, slices, 3, per_role=2, anchor_ratio=1.0)
        first = [anchors[0] for anchors, *_ in drawn(sets)]
        assert slices[first].tolist() == [0, 1, 2] * min(correct)
        assert len(set(first)) == len(first), "an anchor had two turns"

    def test_anchor_ratio_keeps_that_share(self) -> None:
        y, slices = world()
        smallest = min(int(((y == c) & (slices == c)).sum()) for c in range(3))
        sets = ContrastiveSets(y, slices, 3, per_role=2, anchor_ratio=0.1)
        assert sets.per_slice == round(0.1 * smallest)
        assert len(drawn(sets)) == sets.per_epoch == 3 * sets.per_slice
        assert ContrastiveSets(y, slices, 3, 2, anchor_ratio=1e-6).per_epoch == 3

    def test_counts_shrink_equally(self) -> None:
        """Class 1 is misclassified four times, and slice 1 holds nine errors."""
        y = torch.tensor([0] * 50 + [1] * 50)
        slices = y.clone()
        slices[:9], slices[50:54] = 1, 0
        sets = ContrastiveSets(y, slices, 2, per_role=17, anchor_ratio=1.0)
        assert sets.per_role == 4
        assert all(len(role) == 4 for roles in drawn(sets) for role in roles)

    def test_replacement_where_a_pool_is_too_small(self) -> None:
        """Errors abound, but slice 1 has two correct samples only."""
        y = torch.tensor([0] * 30 + [1] * 22)
        slices = torch.tensor([0] * 20 + [1] * 10 + [0] * 20 + [1] * 2)
        sets = ContrastiveSets(y, slices, 2, per_role=6, anchor_ratio=1.0)
        assert sets.per_role == 6 and sets.per_epoch == 4
        for anchors, positives, negatives, easy in drawn(sets):
            own = int(y[anchors[0]])
            few, many = (anchors, easy) if own == 1 else (easy, anchors)
            assert set(few) <= {50, 51}
            assert len(set(many)) == len(set(positives)) == len(set(negatives)) == 6

    def test_slice_without_errors_takes_other_classes(self) -> None:
        y = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
        slices = y.clone()
        slices[20:25] = 1  # slice 0 has no errors, slice 1 has five of class 2
        sets = ContrastiveSets(y, slices, 3, per_role=5, anchor_ratio=1.0)
        outside = set()
        for anchors, _, negatives, _ in drawn(sets):
            own = int(y[anchors[0]])
            assert all(y[i] != own for i in negatives)
            if own == 1:
                assert set(negatives) == {20, 21, 22, 23, 24}
            else:
                outside |= {(own, int(y[i])) for i in negatives}
        assert outside == {(0, 1), (0, 2), (2, 0), (2, 1)}

    def test_class_never_misclassified_is_its_own_positives(self) -> None:
        y = torch.tensor([0] * 10 + [1] * 10)
        slices = y.clone()
        slices[:6] = 1
        sets = ContrastiveSets(y, slices, 2, per_role=4, anchor_ratio=1.0)
        for anchors, positives, _, easy in drawn(sets):
            own = int(y[anchors[0]])
            assert all(y[i] == own for i in positives)
            if own == 0:
                assert set(positives) <= set(range(6))
            assert all(y[i] == slices[i] == slices[positives[0]] for i in easy)

    def test_a_first_stage_without_errors_still_gives_sets(self) -> None:
        y = torch.arange(40) % 2
        sets = ContrastiveSets(y, y, 2, per_role=3, anchor_ratio=1.0)
        assert sets.per_role == 3
        for anchors, positives, negatives, _ in drawn(sets):
            own = int(y[anchors[0]])
            assert {int(y[i]) for i in anchors + positives} == {own}
            assert {int(y[i]) for i in negatives} == {1 - own}

    def test_slice_without_correct_samples_is_left_out(self) -> None:
        """All of slice 2 is of class 0, which thus has its positives there."""
        y = torch.tensor([0] * 20 + [1] * 10 + [2] * 10)
        slices = torch.tensor([0] * 10 + [2] * 10 + [1] * 10 + [0] * 5 + [1] * 5)
        sets = ContrastiveSets(y, slices, 3, per_role=4, anchor_ratio=1.0)
        assert set(sets.pools) == {0, 1}
        for anchors, positives, _, easy in drawn(sets):
            assert slices[anchors[0]] in (0, 1)
            if slices[anchors[0]] == 0:
                assert all(slices[i] == 2 for i in positives)
                assert all(y[i] != 0 for i in easy)

    def test_no_anchors_anywhere(self) -> None:
        y = torch.arange(12) % 2
        with pytest.raises(NoAnchors, match="none of the 12 training samples") as raised:
            ContrastiveSets(y, 1 - y, 2, per_role=3, anchor_ratio=1.0)
        assert "cnc.erm.epochs" in raised.value.remedy
        assert raised.value.kind == "no_anchors"

    def test_the_generator_alone_decides(self) -> None:
        y, slices = world()
        sets = ContrastiveSets(y, slices, 3, per_role=5, anchor_ratio=0.5)
        torch.manual_seed(0)
        first = drawn(sets, seed=0)
        torch.manual_seed(1)
        assert drawn(sets, seed=0) == first
        assert drawn(sets, seed=1) != first


class TestSlices:
    def test_clusters_are_named_after_their_classes(self) -> None:
        planted = torch.arange(300) % 3
        corners = torch.tensor([[0.0, 0.0], [20.0, 0.0], [0.0, 20.0]])
        points = corners[planted] + torch.randn(300, 2, generator=generator())
        y = (planted + 1) % 3
        y[:30] = (y[:30] + 1) % 3  # a tenth of the samples look like another class
        found = cluster(points, y, 3, seed=0)
        assert torch.equal(found, (planted + 1) % 3)

    @pytest.mark.slow  # with UMAP
    @pytest.mark.xdist_group("umap")
    def test_representation_recovers_planted_clusters(self) -> None:
        planted = torch.arange(240) % 3
        corners = 30 * torch.eye(3, 12)
        features = corners[planted] + torch.randn(240, 12, generator=generator())
        plane, _ = umap_embedding(features.numpy(), features[:0].numpy(), seed=5)
        assert plane.shape == (240, 2)
        assert torch.equal(cluster(torch.from_numpy(plane), planted, 3, seed=5), planted)

    @pytest.mark.parametrize("slice_with", ["prediction", "representation"])
    def test_model_is_asked_in_evaluation_mode_about_clean_images(
        self,
        v_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        slice_with: Any,
    ) -> None:
        model, seen = tiny_classifier(), []
        for part in model.modules():
            part.train()
        monkeypatch.setattr(
            methods.cnc,
            "umap_embedding",
            lambda features, others, seed: (seen.append(features) or features[:, :2], others),
        )
        ctx = make_context()
        found = slices_of(v_task, model, CncConfig(slice_with=slice_with), ctx)
        assert ctx.account.image_passes == len(v_task.train)
        images = v_task.train.images.batch(torch.arange(60)).pixels.float() / 255
        features = model.eval().backbone((images - 0.5) / 0.25)
        if slice_with == "prediction":
            assert torch.equal(found, model.head(features).argmax(dim=1))
        else:
            torch.testing.assert_close(torch.from_numpy(seen[0]), features)
            assert found.shape == (60,) and found.unique().tolist() == [0, 1]


@pytest.fixture
def v_task(toy_data: LoadedData) -> Task:
    return toy_data.task(BackboneSpec("lenet4"), train_groups=False, val_groups=True)


class TestFit:
    CONFIG = CncConfig(
        erm=ErmConfig(epochs=1, batch_size=16, lr=0.01),
        epochs=3,
        lr=0.01,
        per_role=3,
        batch_factor=4,
        sets_per_forward=2,
    )

    @pytest.fixture(autouse=True)
    def small_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The toy images are too small for a LeNet."""
        for module, seed in ((methods.erm, 0), (methods.cnc, 1)):
            monkeypatch.setattr(
                module, "build_classifier", lambda *_, s=seed: tiny_classifier(seed=s)
            )

    def test_record_of_a_fit(self, v_task: Task, make_context: MakeContext) -> None:
        ctx = make_context()
        fitted = Cnc().fit(v_task, self.CONFIG, ctx)
        erm = train_erm(v_task, self.CONFIG.erm, make_context("other"))
        wrong = slices_of(v_task, erm.module, self.CONFIG, make_context("third")) != v_task.train.y
        assert 0 < wrong.sum() < 30
        assert fitted.partition is not None
        assert torch.equal(fitted.partition, wrong.long())
        sets = ContrastiveSets(
            v_task.train.y, torch.where(wrong, 1 - v_task.train.y, v_task.train.y), 2, 3, 1.0
        )
        assert fitted.details["cnc"] == {
            "per_role": sets.per_role,
            "sets_per_epoch": sets.per_epoch,
            "errors": int(wrong.sum()),
        }
        assert fitted.selection.rule == "val_wga"
        assert fitted.selection.epochs_run == 3
        images = 3 * (sets.per_epoch * ROLES * sets.per_role + len(v_task.val)) + len(v_task.train)
        assert ctx.account.image_passes == images

    def test_statistics_stay_and_gains_move(self, v_task: Task, make_context: MakeContext) -> None:
        start = tiny_classifier(seed=1)
        fitted = Cnc().fit(v_task, self.CONFIG, make_context())
        before, after = start.state_dict(), fitted.module.state_dict()
        for name, moved in (
            *(("running_mean", False), ("running_var", False), ("num_batches_tracked", False)),
            *(("weight", True), ("bias", True)),
        ):
            norm = f"backbone.body.2.{name}"
            assert torch.equal(before[norm], after[norm]) != moved, name

    def test_head_trains_beside_a_still_encoder(self) -> None:
        model = tiny_classifier().eval()
        frozen_statistics(model)
        assert model.head.training
        assert not any(part.training for part in model.backbone.modules())

    def test_sets_per_forward_does_not_change_the_fit(
        self, v_task: Task, make_context: MakeContext
    ) -> None:
        """The toy images are flipped and shifted at random, so augmentation is switched off."""
        task = replace(v_task, train_transform=v_task.eval_transform)
        weights = [
            Cnc().fit(task, replace(self.CONFIG, sets_per_forward=k), make_context(f"{k}")).module
            for k in (1, 4)
        ]
        for one, another in zip(weights[0].parameters(), weights[1].parameters(), strict=True):
            torch.testing.assert_close(one, another, rtol=1e-3, atol=1e-5)

    def test_every_batch_is_whole_sets(
        self, v_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainings = []
        run = Training.run
        monkeypatch.setattr(Training, "run", lambda self: trainings.append(self) or run(self))
        Cnc().fit(v_task, self.CONFIG, make_context())
        second = trainings[-1]
        assert isinstance(second.objective, TwoSidedLoss)
        assert second.config.batch_size == 2 * ROLES * second.objective.per_role
        assert second.accumulate == 2
        assert (second.config.optimizer, second.config.momentum) == ("sgd", 0.9)

    def test_hopeless_first_stage(
        self, v_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(methods.cnc, "slices_of", lambda task, *_: 1 - task.train.y)
        with pytest.raises(NoAnchors, match="no anchors"):
            Cnc().fit(v_task, self.CONFIG, make_context())


class TestConfig:
    @pytest.mark.parametrize(
        ("knobs", "message"),
        [
            ({"per_role": 0}, "per_role must be at least 1 but got 0"),
            ({"anchor_ratio": 0.0}, r"anchor_ratio must be in \(0, 1\] but got 0.0"),
            ({"anchor_ratio": 1.5}, r"anchor_ratio must be in \(0, 1\] but got 1.5"),
            ({"temperature": 0.0}, "temperature must be positive but got 0.0"),
            ({"contrastive_weight": 1.1}, "contrastive_weight must be between 0 and 1 but got 1.1"),
            ({"batch_factor": 0}, "batch_factor must be at least 1 but got 0"),
            ({"sets_per_forward": 5}, r"must divide batch_factor \(32\) but got 5"),
            ({"lr": -1.0}, "lr must be positive but got -1.0"),
        ],
    )
    def test_refusals(self, knobs: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            CncConfig(**knobs)

    @pytest.mark.parametrize("dataset", load_datasets())
    def test_first_stage_is_the_one_of_erm(self, dataset: str) -> None:
        """So that both methods share it, in a smoke run as well.

        On UMNIST that one hardly errs, so the first stage is a short one of its own; Dominoes has
        UMNIST's recipes.
        """
        config, erm = (preset_config(METHODS[name], dataset) for name in ("cnc", "erm"))
        assert (config.erm == erm) == (dataset not in ("umnist", "dominoes"))
        assert config.quick().erm == config.erm.quick()
        assert config.quick().epochs == 2 < config.epochs

    @pytest.mark.parametrize(
        ("dataset", "recipe"),
        [
            ("waterbirds", (17, 0.1, 1.0, 32, 1e-4, 1e-3, 5)),
            ("celeba", (64, 0.05, 0.1, 32, 1e-5, 1e-1, 15)),
            ("cmnist", (32, 0.05, 0.1, 4, 1e-3, 1e-4, 6)),
            ("umnist", (17, 0.1, 0.1, 4, 3e-2, 1e-4, 10)),
            ("isic", (17, 0.1, 1.0, 32, 1e-4, 1e-3, 5)),
        ],
    )
    def test_recipe(self, dataset: str, recipe: tuple[float, ...]) -> None:
        """The table of the recipes, written out a second time: a slip in one of them shows."""
        c = preset_config(METHODS["cnc"], dataset)
        sets = c.per_role, c.temperature, c.anchor_ratio, c.batch_factor
        assert (*sets, c.lr, c.weight_decay, c.epochs) == recipe
        assert (c.contrastive_weight, c.momentum) == (0.75, 0.9)
        assert c.second_stage(2).scheduler == ("cosine" if dataset == "umnist" else "none")
