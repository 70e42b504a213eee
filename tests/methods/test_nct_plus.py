"""NCT+: NCT to the last bit with its switches off, what each switch does, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor, nn

from bench.context import RunContext
from bench.job import Request, expand
from bench.record import Status
from bench.runner import RunOptions, load_data, run_job
from datasets.base import Split, Task
from datasets.errors import UsageError
from datasets.standins import write
from methods.backbones import Backbone
from methods.base import NetworkSpec
from methods.metrics import class_scores
from methods.nct.builder import Nct, NodeLoss
from methods.nct.config import NctConfig
from methods.nct.depth import cell_wga, pseudo_wga
from methods.nct.plus import (
    CalibratedTree,
    Calibration,
    CalibrationData,
    MixedNodeLoss,
    NctPlus,
    PlusConfig,
    class_logsumexp,
    fit_calibration,
    sibling_mixture,
)
from methods.nct.tree import FittedTree, Tree
from methods.prediction import EvalImages, predict, predict_with
from methods.training import Batch

MakeContext = Callable[..., RunContext]
SHARED: dict[str, Any] = {
    "hidden": 4,
    "head_lr": 0.02,
    "backbone_lr": 0.02,
    "batch_size": 16,
    "epochs": (1, 4, 4),
    "phase1_ratio": (0.0, 0.5, 0.25),
    "patience": 0,
    "phase2_patience": 0,
    "min_samples": 0,
}
OFF = PlusConfig(**SHARED, calibration="none", proxy="pwga2", ema=0.0, mixup=0.0)
ON = PlusConfig(**SHARED, mixup=0.5)
INF = float("inf")


@pytest.fixture(autouse=True)
def small_backbone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A linear backbone with a batch-norm for the toy's 8 x 8 images, which no LeNet could take."""
    if "toy_task" not in request.fixturenames:
        return

    def build(spec: object, channels: int) -> Backbone:
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        return Backbone(body, 8)

    monkeypatch.setattr("methods.nct.builder.backbone_for", lambda task: build(task, task.channels))


def fit(task: Task, config: NctConfig, ctx: RunContext) -> FittedTree:
    method = NctPlus() if isinstance(config, PlusConfig) else Nct()
    fitted = method.fit(task, config, ctx)
    assert isinstance(fitted, FittedTree)
    return fitted


def val_outputs(fitted: FittedTree, task: Task) -> Tensor:
    return predict_with(fitted.tree, EvalImages(task.val.images, task.eval_transform))


def rows(ctx: RunContext) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in r.items() if k not in ("seconds", "record")}
        for r in ctx.account.history()
    ]


def with_labels(task: Task, y: Tensor) -> Task:
    """The task with other validation labels."""
    return replace(task, val=Split("val", task.val.images, y, task.val.ids, None))


class TestSwitches:
    def test_all_off_is_nct_to_the_last_bit(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        ours, theirs = make_context("plus"), make_context("nct")
        plus, plain = fit(toy_task, OFF, ours), fit(toy_task, NctConfig(**SHARED), theirs)
        assert torch.equal(val_outputs(plus, toy_task), val_outputs(plain, toy_task))
        assert plus.selection == plain.selection
        assert plus.details == plain.details
        assert rows(ours) == rows(theirs)

    def test_first_iteration_is_always_ncts(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        ours, theirs = (
            fit(toy_task, config, make_context(name)).snapshots[:2]
            for name, config in (("plus", ON), ("nct", NctConfig(**SHARED)))
        )
        for name, value in theirs[0].module.state_dict().items():
            assert torch.equal(value, ours[0].module.state_dict()[name])
        assert torch.equal(ours[1].partition, theirs[1].partition)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "change", [{"ema": 0.9}, {"mixup": 0.5}, {"calibration": "validation"}], ids=str
    )
    def test_each_changes_the_model(
        self, toy_task: Task, make_context: MakeContext, change: dict[str, Any]
    ) -> None:
        plain = fit(toy_task, OFF, make_context("off"))
        other = fit(toy_task, replace(OFF, **change), make_context("on"))
        assert not torch.equal(val_outputs(plain, toy_task), val_outputs(other, toy_task))

    def test_proxy_changes_what_the_epochs_are_judged_by(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        fitted = fit(toy_task, replace(OFF, proxy="cell", head_lr=1e-3), make_context())
        first, second = fitted.snapshots[:2]
        y = toy_task.val.y
        guess = val_outputs(first, toy_task).argmax(1)  # type: ignore[arg-type]
        outputs = val_outputs(second, toy_task)  # type: ignore[arg-type]
        noted = fitted.details["nct"]["iterations"][1]
        expected = cell_wga(outputs, y, guess, 2, 5, 10.0)
        assert noted["trained"]["rule"] == "cell_pwga"
        assert noted["cell_pwga"] == noted["trained"]["value"] == expected.value
        assert noted["n_worst"] == expected.n_worst
        assert noted["pwga2"] != noted["cell_pwga"]

    @pytest.mark.parametrize(
        ("knob", "value"),
        [("ema", 1.0), ("mixup", 1.5), ("penalty", 0.0), ("cell_smallest", 0), ("cell_prior", -1)],
    )
    def test_senseless_values_are_refused(self, knob: str, value: float) -> None:
        with pytest.raises(UsageError, match=knob):
            replace(OFF, **{knob: value})


class TestCalibrationData:
    """Which labels a calibration is made from."""

    def calibrated(self, task: Task, ctx: RunContext, data: Any) -> CalibratedTree:
        config = replace(OFF, calibration=data, iterations=2, scope="head_only", epochs=(1, 1))
        tree = fit(task, config, ctx).tree
        assert isinstance(tree, CalibratedTree)
        return tree

    def test_all_of_validation(self, toy_task: Task, make_context: MakeContext) -> None:
        tree = self.calibrated(toy_task, make_context(), "validation").eval()
        val = EvalImages(toy_task.val.images, toy_task.eval_transform)
        raw = predict_with(tree, val)
        plain = predict(lambda images: Tree.forward(tree, images), val)
        expected = fit_calibration(plain, toy_task.val.y, 2, OFF.penalty)
        assert torch.equal(tree.calibration.bias, expected.bias)
        assert torch.equal(raw, expected(plain))

    @pytest.mark.parametrize("data", ["half", "train"])
    def test_other_labels_do_not_enter(
        self, toy_task: Task, make_context: MakeContext, data: str
    ) -> None:
        """One epoch, so that there is nothing to select: only the calibration could tell."""
        first = self.calibrated(toy_task, make_context("first"), data)
        count = len(toy_task.val)
        seed = make_context("seed").seed("nct", "halves")
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        judges = drawn[count // 2 :] if data == "half" else drawn
        y = toy_task.val.y.clone()
        y[judges] = 1 - y[judges]
        second = self.calibrated(with_labels(toy_task, y), make_context("second"), data)
        assert torch.equal(first.calibration.bias, second.calibration.bias)
        y[drawn[0]] = 1 - y[drawn[0]]
        if data == "half":
            third = self.calibrated(with_labels(toy_task, y), make_context("third"), data)
            assert not torch.equal(first.calibration.bias, third.calibration.bias)

    def test_the_grown_tree_stays_raw(self, toy_task: Task, make_context: MakeContext) -> None:
        """Calibration moves no weight and no routing: the next iteration is the same with it."""
        config = replace(OFF, depth_rule=False, scope="head_only", epochs=(1, 1))
        plain = fit(toy_task, config, make_context("plain"))
        other = fit(toy_task, replace(config, calibration="validation"), make_context("other"))
        for before, after in zip(plain.snapshots, other.snapshots, strict=True):
            assert torch.equal(before.partition, after.partition)  # type: ignore[arg-type]
            for name, value in before.module.state_dict().items():
                assert torch.equal(value, after.module.state_dict()[name])


class Killed(BaseException):
    """What ends a process between two epochs."""


class TestLastEpochs:
    """The trees after an iteration's last epoch, which a run hands over for diagnostics."""

    @pytest.mark.parametrize("calibration", ["validation", "train"])
    def test_are_calibrated_by_themselves(
        self, toy_task: Task, make_context: MakeContext, calibration: CalibrationData
    ) -> None:
        fitted = fit(toy_task, replace(ON, calibration=calibration), make_context())
        for noted, snapshot in zip(
            fitted.details["nct"]["iterations"][1:], fitted.snapshots[1:], strict=True
        ):
            end = snapshot.last_epoch
            assert isinstance(end, FittedTree) and isinstance(end.tree, CalibratedTree)
            assert end.tree.calibration.bias.tolist() == noted["end"]["calibration"]["bias"]
            if calibration == "validation":  # the epochs are compared as they are recorded
                assert noted["end"]["cell_pwga"] <= noted["cell_pwga"] == noted["trained"]["value"]
            outputs = val_outputs(end, toy_task)
            assert (
                noted["end"]["pwga2_predicted"]
                == pseudo_wga(outputs, toy_task.val.y, noted["t"]).value
            )

    @pytest.mark.parametrize(("stage", "done"), [("nct-2-1", 2), ("nct-2-2", 1), ("nct-3-2", 3)])
    def test_of_a_resumed_run_are_the_same(
        self, toy_task: Task, make_context: MakeContext, stage: str, done: int
    ) -> None:
        def run(name: str, fatal: bool = False) -> FittedTree:
            ctx = make_context(name)
            save = ctx.save

            def save_or_die(stage_name: str, state: dict[str, Any]) -> None:
                save(stage_name, state)
                if fatal and (stage_name, state["progress"][0]) == (stage, done):
                    raise Killed

            ctx.save = save_or_die  # type: ignore[method-assign]
            return fit(toy_task, replace(ON, depth_rule=False), ctx)

        whole = run("whole")
        with pytest.raises(Killed):
            run("stopped", fatal=True)
        resumed = run("stopped")
        assert resumed.details == whole.details
        for one, other in zip(whole.snapshots, resumed.snapshots, strict=True):
            assert one.last_epoch is not None and other.last_epoch is not None
            ours, theirs = (end.module.state_dict() for end in (one.last_epoch, other.last_epoch))
            assert all(torch.equal(theirs[name], value) for name, value in ours.items())


class TestCells:
    """Two classes; cells (class, first prediction) in the order 00, 01, 10, 11."""

    FIRST = torch.tensor([0] * 8 + [1] * 2 + [0] * 6 + [1] * 4)
    Y = torch.tensor([0] * 10 + [1] * 10)

    def outputs(self, wrong: list[int]) -> Tensor:
        pred = self.Y.clone()
        pred[wrong] = 1 - pred[wrong]
        logits = torch.zeros(20, 4)
        logits[torch.arange(20), 2 * pred + 1] = 1.0  # by the hard leaf of the class
        return logits

    def test_worst_cell_drawn_to_the_average(self) -> None:
        wrong = [0, 10, 11, 12]  # 7 of 8, 2 of 2, 3 of 6, 4 of 4: 16 of 20
        plain = cell_wga(self.outputs(wrong), self.Y, self.FIRST, 2, 1, 0.0)
        assert (plain.value, plain.n_worst) == (pytest.approx(0.5), 6)
        drawn = cell_wga(self.outputs(wrong), self.Y, self.FIRST, 2, 1, 10.0)
        assert drawn.value == pytest.approx((3 + 10 * 0.8) / 16)

    def test_small_cells_do_not_count(self) -> None:
        wrong = [8, 9, 10]  # 8 of 8, 0 of 2, 5 of 6, 4 of 4
        assert cell_wga(self.outputs(wrong), self.Y, self.FIRST, 2, 2, 0.0).value == 0.0
        counted = cell_wga(self.outputs(wrong), self.Y, self.FIRST, 2, 5, 0.0)
        assert (counted.value, counted.n_worst) == (pytest.approx(5 / 6), 6)

    def test_no_cell_at_all(self) -> None:
        assert cell_wga(self.outputs([]), self.Y, self.FIRST, 2, 9, 10.0).n_worst == 0


class TestMixing:
    def test_partners_are_siblings(self) -> None:
        torch.manual_seed(0)
        labels = torch.tensor([0, 1, 1, 2, 3, 5, 5])
        for _ in range(20):
            partner, own = sibling_mixture(labels, 1.0)
            mixed = own < 1
            assert mixed.tolist() == [True] * 5 + [False] * 2  # node 5 has no sibling here
            assert torch.equal(labels[partner][mixed], labels[mixed] ^ 1)

    def test_share(self) -> None:
        torch.manual_seed(0)
        labels = torch.arange(2000) % 2
        _, own = sibling_mixture(labels, 0.3)
        assert float((own < 1).double().mean()) == pytest.approx(0.3, abs=0.04)
        assert float(own[own < 1].mean()) == pytest.approx(0.5, abs=0.05)

    def test_loss_mixes_images_and_labels_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        tree = Tree(Backbone(nn.Sequential(nn.Flatten(), nn.Linear(4, 8)), 8), 2)
        for _ in range(2):
            tree.grow(4, 0.0, "asymmetric", False)
        tree.eval()
        labels, weights = torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0])
        images = torch.randn(4, 1, 2, 2)
        partner, own = torch.tensor([1, 0, 3, 2]), torch.tensor([0.25, 1.0, 0.5, 0.0])
        monkeypatch.setattr(
            "methods.nct.plus.sibling_mixture", lambda labels, share: (partner, own)
        )
        loss = MixedNodeLoss(labels, weights, 1.0, False, 0.5)(
            tree, Batch(images, labels // 2, torch.arange(4))
        )
        plain = NodeLoss(labels, weights, 1.0, False)
        expected = 0.0
        for i in range(4):
            share, other = float(own[i]), int(partner[i])
            image = (share * images[i] + (1 - share) * images[other])[None]
            for part, node in ((share, i), (1 - share, other)):
                batch = Batch(image, labels[node, None] // 2, torch.tensor([node]))
                expected += part * float(plain(tree, batch).detach()) / 4
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def leaves(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of three classes with two leaves each, of which the hard ones are far too low."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=generator)
    hard = torch.randint(2, (count,), generator=generator)
    logits = torch.randn(count, 6, generator=generator)
    logits[torch.arange(count), 2 * y + hard] += 3.0
    logits[:, ::2] += 4.0
    return logits, y


def accuracy(outputs: Tensor, y: Tensor) -> float:
    return float((class_scores(outputs, 3).argmax(1) == y).double().mean())


@pytest.mark.parametrize("merged", [(), (3,)])
@pytest.mark.parametrize("penalty", [1e-4, 1e-2])
def test_is_the_optimum_that_another_solver_finds(penalty: float, merged: tuple[int]) -> None:
    logits, y = leaves(200)
    logits[:, list(merged)] = -INF
    kept = [leaf for leaf in range(6) if leaf not in merged]
    values, truth = logits.double().numpy(), y.numpy()

    def loss(parameters: np.ndarray) -> float:
        bias, log_scale = parameters[:6], parameters[6]
        scores = np.stack(
            [
                logsumexp(
                    np.exp(log_scale) * values[:, own] + bias[own],
                    axis=1,
                )
                for own in ([leaf for leaf in kept if leaf // 2 == c] for c in range(3))
            ],
            axis=1,
        )
        right = scores[np.arange(len(truth)), truth]
        size = (parameters**2).sum()
        return float((logsumexp(scores, axis=1) - right).mean() + penalty * size)

    found = fit_calibration(logits, y, 3, penalty)
    ours = np.append(found.bias.double().numpy(), float(found.scale.double().log()))
    theirs = minimize(loss, np.zeros(7), method="BFGS", options={"gtol": 1e-8})
    assert loss(ours) == pytest.approx(theirs.fun, abs=1e-6)
    np.testing.assert_allclose(ours, theirs.x, atol=0.02)
    assert all(ours[leaf] == 0 for leaf in merged)


def test_a_class_with_one_leaf_needs_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report calibrates a hundred runs so; the slow sum over one leaf is the leaf, exactly."""
    logits, bias = torch.randn(50, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    logits[0, 1] = -torch.inf
    scale = torch.tensor(1.7, dtype=torch.float64)
    expected = (scale * logits + bias).view(50, 3, 1).logsumexp(dim=2)
    monkeypatch.setattr(torch.Tensor, "logsumexp", None)
    assert torch.equal(class_logsumexp(logits, bias, scale, 3), expected)


def test_lifts_leaves_that_were_too_low() -> None:
    logits, y = leaves(2000)
    calibration = fit_calibration(logits, y, 3, 1e-4)
    easy, hard = calibration.bias.view(3, 2).unbind(dim=1)
    assert bool((hard > easy + 1.0).all())
    fresh, truth = leaves(2000, seed=1)
    assert accuracy(calibration(fresh), truth) > accuracy(fresh, truth) + 0.1


def test_class_comes_first_and_then_the_raw_leaf() -> None:
    """Raw, leaf 0 wins. Calibrated, class 1 does, and there by leaf 3; but leaf 2 is raw higher."""
    calibration = Calibration(torch.tensor([0.0, 0.0, 0.0, 9.0]), torch.tensor(1.0), 2)
    raw = torch.tensor([[5.0, 1.0, 3.0, 2.0]])
    outputs = calibration(raw)
    assert int(raw.argmax()) == 0
    assert int((raw + calibration.bias).argmax()) == 3
    assert int(outputs.argmax()) == 2


def test_outputs_by_hand() -> None:
    calibration = Calibration(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor(2.0), 2)
    outputs = calibration(torch.tensor([[0.0, 0.5, 2.0, -INF]]))
    first = np.log(np.exp(1.0) + np.exp(1.0))  # 2 * 0 + 1 and 2 * 0.5 + 0
    assert outputs[0, :3].tolist() == pytest.approx([first - 0.5, first, 4.0])
    assert float(outputs[0, 3]) == -INF
    assert class_scores(outputs, 2)[0].tolist() == pytest.approx([first, 4.0])


def test_ends_where_the_classes_are_told_apart_without_an_error() -> None:
    y = torch.arange(40) % 2
    found = fit_calibration(8.0 * torch.eye(2)[y].repeat_interleave(2, dim=1), y, 2, 1e-4)
    assert bool(found.bias.isfinite().all())
    assert 0 < float(found.scale) < 100


def test_calibrated_tree_is_the_tree_and_then_the_calibration() -> None:
    torch.manual_seed(0)
    tree = Tree(Backbone(nn.Linear(4, 8), 8), 2)
    for _ in range(2):
        tree.grow(4, 0.0, "asymmetric", False)
    tree.leaves.active[3] = False
    tree.eval()
    calibration = Calibration(torch.randn(4), torch.tensor(0.7), 2)
    images = torch.randn(5, 4)
    calibrated = CalibratedTree(tree, calibration)
    assert torch.equal(calibrated(images), calibration(tree(images)))
    assert calibrated.depth == 2
    assert set(calibrated.state_dict()) - set(tree.state_dict()) == {
        "calibration.bias",
        "calibration.scale",
    }


def test_kept_model_predicts_as_the_run_did(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write("mnist", root, size=300)
    (job,) = expand(Request(("nct_plus",), ("cmnist",), (100,), root, quick=True))
    options = RunOptions(root, tmp_path, keep_models=True, isolate=False)
    record = run_job(job, options, lambda progress: None)
    assert record.status is Status.DONE, record.failure
    assert "bias" in record.details["nct"]["iterations"][1]["calibration"]
    data = load_data(job, root)
    spec = NetworkSpec(job.backbone(), data.facts.channels, data.facts.codes)
    weights = load_file(tmp_path / "runs" / job.run_id / "model.safetensors")
    fitted = NctPlus().load_fitted(spec, job.method_config(), weights)
    assert isinstance(fitted, FittedTree)
    assert isinstance(fitted.tree, CalibratedTree) == (fitted.tree.depth > 1)
    assert len(fitted.leaf_names()) == len(fitted.tree.leaves.active)
    val = EvalImages(data.splits["val"].images, data.facts.eval_transform)
    kept = pd.read_parquet(tmp_path / "runs" / job.run_id / "predictions.parquet")
    kept = kept[kept["split"] == "val"]
    assert predict(fitted.logits, val).argmax(1).tolist() == kept["pred"].tolist()
    assert predict(fitted.leaf, val).long().tolist() == kept["leaf"].tolist()
