"""NCT as a whole: phases, rates, depth stops, merging, its record, and resuming inside it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from bench.context import RunContext
from bench.evaluation import describe_snapshots
from bench.job import Job, Request, expand
from bench.runner import RunOptions, load_data, run_job
from datasets.base import LoadedData, Task
from datasets.standins import write
from methods.backbones import Backbone
from methods.nct.builder import FittedTree, Nct, TreeBuilder
from methods.nct.config import NctConfig
from methods.nct.depth import Proxy, choose_depth
from methods.nct.routing import predicted_leaves
from methods.nct.tree import Tree
from methods.prediction import EvalImages, predict_with
from methods.training import Training

MakeContext = Callable[..., RunContext]
TOY = NctConfig(
    hidden=4,
    head_lr=0.02,
    backbone_lr=0.02,
    batch_size=16,
    epochs=(1, 4, 4),
    phase1_ratio=(0.0, 0.5, 0.25),
    patience=0,
    phase2_patience=0,
    min_samples=0,
    depth_rule=False,
)


@pytest.fixture
def small_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear backbone with a batch-norm for the toy's 8 x 8 images, which no LeNet could take."""

    def build(spec: object, channels: int) -> Backbone:
        body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        return Backbone(body, 8)

    monkeypatch.setattr("methods.nct.builder.backbone_for", lambda task: build(task, task.channels))


def fit(task: Task, config: NctConfig, ctx: RunContext) -> FittedTree:
    fitted = Nct().fit(task, config, ctx)
    assert isinstance(fitted, FittedTree)
    return fitted


def epochs_by_stage(ctx: RunContext) -> dict[str, int]:
    return dict(Counter(row["stage"] for row in ctx.account.history()))


def val_logits(tree: Tree, task: Task) -> Tensor:
    return predict_with(tree, EvalImages(task.val.images, task.eval_transform))


def script_proxies(patch: pytest.MonkeyPatch, values: Mapping[int, float]) -> None:
    """Let each iteration have the proxy a test wants, whatever its model says."""
    patch.setattr(TreeBuilder, "_proxy", lambda self, logits, t: Proxy(values[t], 100))


@pytest.mark.usefixtures("small_backbone")
class TestPhases:
    @pytest.mark.parametrize(
        ("scope", "stages"),
        [
            (
                "standard",
                {"nct-1-2": 1, "nct-2-1": 2, "nct-2-2": 2, "nct-3-1": 1, "nct-3-2": 3},
            ),
            ("head_only", {"nct-1-1": 1, "nct-2-1": 4, "nct-3-1": 4}),
            ("full", {"nct-1-2": 1, "nct-2-2": 4, "nct-3-2": 4}),
        ],
    )
    def test_names_and_epochs(
        self, toy_task: Task, make_context: MakeContext, scope: Any, stages: dict[str, int]
    ) -> None:
        ctx = make_context()
        fit(toy_task, replace(TOY, scope=scope), ctx)
        assert epochs_by_stage(ctx) == stages
        for row in ctx.account.history():
            assert row["stage"] == f"nct-{row['iteration']}-{row['phase']}"

    def test_values_by_iteration_repeat_their_last(self) -> None:
        config = replace(TOY, epochs=(1, 10), phase1_ratio=(0.0, 0.5, 0.2))
        assert [config.phase_epochs(t) for t in (1, 2, 3, 4)] == [(0, 1), (5, 5), (2, 8), (2, 8)]

    def test_heads_alone_leave_backbone_and_parents_as_they_were(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        fitted = fit(toy_task, replace(TOY, scope="head_only"), make_context())
        trees = [snapshot.tree.state_dict() for snapshot in fitted.snapshots]
        for earlier, later in pairwise(trees):
            assert all(torch.equal(value, later[name]) for name, value in earlier.items())
        assert trees[-1]["backbone.body.2.num_batches_tracked"] == 0

    def test_phase_two_moves_backbone_and_parents(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        fitted = fit(toy_task, replace(TOY, scope="full"), make_context())
        first, second = (snapshot.tree.state_dict() for snapshot in fitted.snapshots[:2])
        for name in ("backbone.body.1.weight", "levels.0.weight", "levels.0.out_weight"):
            assert not torch.equal(first[name], second[name]), name

    def test_patience_of_zero_never_stops_phase_two(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script_proxies(monkeypatch, {2: 0.5})
        config = replace(TOY, iterations=2, epochs=(1, 14), phase1_ratio=(0.0, 0.5), patience=2)
        stages = {}
        for phase2_patience in (0, 3):
            ctx = make_context(f"patience-{phase2_patience}")
            fit(toy_task, replace(config, phase2_patience=phase2_patience), ctx)
            stages[phase2_patience] = epochs_by_stage(ctx)
        # The proxy never improves: a patience of n ends a phase after 1 + n epochs.
        assert stages[0] == {"nct-1-2": 1, "nct-2-1": 3, "nct-2-2": 7}
        assert stages[3] == {"nct-1-2": 1, "nct-2-1": 3, "nct-2-2": 4}

    @pytest.mark.parametrize("checkpoint", ["phase", "iteration"])
    def test_checkpoint_comes_from_the_last_phase_or_from_both(
        self,
        toy_task: Task,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
        checkpoint: Any,
    ) -> None:
        """The proxy is best in phase 1, whose backbone is still that of iteration 1."""
        # Two epochs a phase, then the kept tree and that of the last epoch.
        calls = iter([0.9, 0.1, 0.3, 0.2, 0.5, 0.4])
        monkeypatch.setattr(TreeBuilder, "_proxy", lambda self, logits, t: Proxy(next(calls), 100))
        config = replace(TOY, iterations=2, checkpoint=checkpoint)
        fitted = fit(toy_task, config, make_context(checkpoint))
        first, second = (snapshot.tree.state_dict() for snapshot in fitted.snapshots)
        unmoved = torch.equal(first["backbone.body.1.weight"], second["backbone.body.1.weight"])
        assert unmoved == (checkpoint == "iteration")
        noted = fitted.details["nct"]["iterations"][1]
        assert noted["trained"]["value"] == (0.9 if checkpoint == "iteration" else 0.3)
        assert (noted["phase"], noted["trained"]["epoch"]) == (1 + (not unmoved), 0)
        assert (noted["pwga2"], noted["end"]["pwga2"]) == (0.5, 0.4)
        assert (noted["end"]["phase"], noted["end"]["epoch"]) == (2, 1)

    def test_phase_two_is_kept_although_phase_one_was_better(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By default, and with the weights of that very epoch."""
        values = iter([0.9, 0.8, 0.1, 0.3, 0.5, 0.5])  # two epochs a phase; kept and last tree
        monkeypatch.setattr(TreeBuilder, "_proxy", lambda self, logits, t: Proxy(next(values), 100))
        saved: dict[str, dict[str, Tensor]] = {}
        keep = RunContext.save

        def save(self: RunContext, name: str, state: dict[str, Any]) -> None:
            epoch = state["progress"][0] - 1
            saved[f"{name}-{epoch}"] = {k: v.clone() for k, v in state["model"].items()}
            keep(self, name, state)

        monkeypatch.setattr(RunContext, "save", save)
        fitted = fit(toy_task, replace(TOY, iterations=2), make_context())
        noted = fitted.details["nct"]["iterations"][1]
        assert (noted["phase"], noted["trained"]["epoch"], noted["trained"]["value"]) == (2, 1, 0.3)
        kept = fitted.tree.state_dict()
        assert all(torch.equal(kept[name], value) for name, value in saved["nct-2-2-1"].items())
        assert any(not torch.equal(kept[n], value) for n, value in saved["nct-2-1-0"].items())

    def test_leaves_after_the_last_epoch_are_described_by_hand(
        self,
        toy_task: Task,
        toy_data: LoadedData,
        make_context: MakeContext,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        falling = iter(range(99, 0, -1))
        monkeypatch.setattr(
            TreeBuilder, "_proxy", lambda self, logits, t: Proxy(next(falling) / 100, 100)
        )
        fitted = fit(toy_task, replace(TOY, iterations=2), make_context())
        ends = [snapshot.last_epoch for snapshot in fitted.snapshots]
        described = describe_snapshots(fitted, toy_data, [])["iterations"]
        assert isinstance(described, list)
        labels = toy_data.splits["test"].labels
        images = EvalImages(toy_data.splits["test"].images, toy_data.facts.eval_transform)
        for noted, end, snapshot in zip(described, ends, fitted.snapshots, strict=True):
            assert isinstance(end, FittedTree) and end.partition is snapshot.partition
            logits, found = predict_with(end.tree, images), noted["end"]
            leaf, top = logits.argmax(1), logits.sort(dim=1, descending=True).values
            for j, name in enumerate(found["leaves"]):
                own = logits[:, j]
                if bool(own.isneginf().all()):  # an empty node
                    assert found["logit_mean"][j] is found["margin_mean"][j] is None
                    continue
                assert found["logit_mean"][j] == pytest.approx(float(own.mean()), rel=1e-5)
                assert found["logit_std"][j] == pytest.approx(float(own.std()), rel=1e-5)
                margins = (top[:, 0] - top[:, 1])[leaf == j]
                if len(margins):
                    mean = pytest.approx(float(margins.mean()), rel=1e-5)
                    assert found["margin_mean"][j] == mean
                for g, group in enumerate(toy_data.facts.groups):
                    share = 100 * float((leaf[labels.groups == g] == j).double().mean())
                    assert found["capture"][group].get(name, 0.0) == pytest.approx(share)
            pred = leaf * 2 // logits.shape[1]
            right = 100 * float((pred == labels.y).double().mean())
            assert found["test"]["avg"] == pytest.approx(right)
        second = described[1]
        assert second["logit_mean"] != second["end"]["logit_mean"]  # the first epoch was kept
        val, y = val_logits(ends[1].tree, toy_task), toy_task.val.y  # type: ignore[union-attr]
        wrong = val_logits(fitted.snapshots[0].tree, toy_task).argmax(1) != y
        accuracies = [
            float((val.argmax(1) // 2 == y)[(y == c) & (wrong == w)].double().mean())
            for c in (0, 1)
            for w in (False, True)
            if ((y == c) & (wrong == w)).any()
        ]
        assert second["end"]["pwga2_routed"] == pytest.approx(min(accuracies))

    def test_routing_sees_the_best_checkpoint(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The proxy falls from the first epoch of each phase on, so that one must be restored."""
        calls: Counter[int] = Counter()

        def falling(self: TreeBuilder, logits: Tensor, t: int) -> Proxy:
            calls[t] += 1
            return Proxy(1 / calls[t], 100)

        monkeypatch.setattr(TreeBuilder, "_proxy", falling)
        seen = []
        original = predicted_leaves

        def noted(tree: Tree, *arguments: Any) -> Tensor:
            seen.append({name: value.clone() for name, value in tree.state_dict().items()})
            return original(tree, *arguments)

        monkeypatch.setattr("methods.nct.builder.predicted_leaves", noted)
        saved: dict[str, list[dict[str, Tensor]]] = {}
        keep = RunContext.save

        def save(self: RunContext, name: str, state: dict[str, Any]) -> None:
            copied = {key: value.clone() for key, value in state["model"].items()}
            saved.setdefault(name, []).append(copied)
            keep(self, name, state)

        monkeypatch.setattr(RunContext, "save", save)
        fit(toy_task, TOY, make_context())
        first_epoch, last_epoch = saved["nct-2-2"]
        assert all(torch.equal(value, first_epoch[name]) for name, value in seen[1].items())
        assert any(not torch.equal(value, last_epoch[name]) for name, value in seen[1].items())


@pytest.mark.usefixtures("small_backbone")
class TestRates:
    CONFIG = replace(
        TOY, head_lr=0.02, backbone_lr=0.008, lr_decay_factor=2.0, scheduler="none", iterations=3
    )

    def test_divided_once_per_iteration(self, toy_task: Task, make_context: MakeContext) -> None:
        ctx = make_context()
        fit(toy_task, self.CONFIG, ctx)
        rates = {(row["iteration"], row["lr"]) for row in ctx.account.history()}
        assert rates == {(1, 0.02), (2, 0.01), (3, 0.005)}

    def test_backbone_has_its_own(self, toy_task: Task, make_context: MakeContext) -> None:
        builder = TreeBuilder(toy_task, self.CONFIG, make_context())
        tree = Tree(Backbone(nn.Linear(4, 8), 8), 2)
        for shrink in (1, 2, 4):
            tree.grow(4, 0.0, "asymmetric", False)
            heads, backbone = builder._parameters(tree, frozen=False)
            assert (heads["lr"], backbone["lr"]) == (0.02 / shrink, 0.008 / shrink)
            assert set(backbone["params"]) == set(tree.backbone.parameters())
            assert set(heads["params"]) == set(tree.levels.parameters())
            (alone,) = builder._parameters(tree, frozen=True)
            assert alone["lr"] == 0.02 / shrink
            assert set(alone["params"]) == set(tree.leaves.parameters())


@pytest.mark.usefixtures("small_backbone")
class TestDepthStop:
    def test_scripted_fall_stops_and_returns_the_best(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script_proxies(monkeypatch, {2: 0.8, 3: 0.9, 4: 0.2, 5: 1.0})
        ctx = make_context()
        fitted = fit(toy_task, replace(TOY, iterations=5, depth_rule=True), ctx)
        facts = fitted.details["nct"]
        assert facts["chosen_iteration"] == facts["argmax_iteration"] == 3
        assert "iteration 4 fell to 0.200" in facts["stop_reason"]
        assert [noted["t"] for noted in facts["iterations"]] == [1, 2, 3, 4]  # 5 was not trained
        assert fitted.tree.depth == 3
        assert fitted.tree is fitted.snapshots[2].tree
        assert fitted.partition is fitted.snapshots[2].partition
        assert fitted.selection is not None
        assert vars(fitted.selection) == facts["iterations"][2]["trained"]

    def test_rule_switched_off_takes_the_deepest(
        self, toy_task: Task, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script_proxies(monkeypatch, {2: 0.8, 3: 0.2, 4: 0.9})
        fitted = fit(toy_task, replace(TOY, iterations=4), make_context())
        facts = fitted.details["nct"]
        assert (facts["chosen_iteration"], facts["argmax_iteration"]) == (4, 4)
        assert facts["stop_reason"] == "depth rule off"
        assert fitted.tree.depth == 4

    def test_untrained_third_iteration_is_not_taken(
        self, toy_task: Task, make_context: MakeContext
    ) -> None:
        """Nothing scripted: the rates of iteration 3 are so small that its heads stay random."""
        config = replace(
            TOY,
            epochs=(2, 20, 1),
            scope="full",
            head_lr=5.0,
            backbone_lr=0.1,
            lr_decay_factor=100.0,
            depth_rule=True,
        )
        facts = fit(toy_task, config, make_context()).details["nct"]
        values = [noted["pwga2"] for noted in facts["iterations"][1:]]
        assert facts["chosen_iteration"] == 2
        assert values[1] < values[0] - facts["iterations"][2]["tolerance"]


@pytest.mark.usefixtures("small_backbone")
class TestSwitches:
    """Each ablation switch changes what is trained, not only the name of the run."""

    @pytest.mark.parametrize(
        "change",
        [
            {"scope": "full"},
            {"scope": "head_only"},
            {"heads": "linear"},
            {"heads": "mlp"},
            {"heads": "reversed"},
            {"first_head": "mlp"},
            {"min_samples": 15},
            {"aux_weight": 0.0},
            {"sampling": "downsample"},
            {"sampling": "class_weights"},
            {"routing_images": "clean"},
            {"lr_decay_factor": 2.0},
        ],
        ids=lambda change: "-".join(map(str, *change.items())),
    )
    def test_changes_the_model(
        self, toy_task: Task, make_context: MakeContext, change: dict[str, Any]
    ) -> None:
        short = replace(TOY, epochs=(1, 2))
        plain = fit(toy_task, short, make_context("plain"))
        other = fit(toy_task, replace(short, **change), make_context("other"))
        assert not torch.equal(val_logits(plain.tree, toy_task), val_logits(other.tree, toy_task))


STANDARD = {
    "nct.epochs": "2,4,4,4",
    "nct.phase1_ratio": "0,0.5",
    "nct.head_lr": "0.005",
    "nct.backbone_lr": "0.005",
    "nct.batch_size": "32",
    "nct.min_samples": "6",
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    write("mnist", root, size=300)
    return root


def job_of(root: Path, dataset: str, **knobs: str) -> Job:
    overrides = STANDARD | {f"nct.{name}": value for name, value in knobs.items()}
    return expand(Request(("nct",), (dataset,), (0,), root, overrides=overrides))[0]


class Run:
    """A finished run on the digits, and what it left on disk."""

    def __init__(self, job: Job, root: Path, results: Path) -> None:
        self.job = job
        self.data = load_data(job, root)
        run_job(job, RunOptions(root, results, isolate=False), lambda progress: None)
        folder = results / "runs" / job.run_id
        self.record = json.loads((folder / "record.json").read_text())
        assert self.record["status"] == "done", self.record["failure"]
        self.predictions = pd.read_parquet(folder / "predictions.parquet")
        self.history = pd.read_parquet(folder / "history.parquet").drop(columns="seconds")

    @property
    def iterations(self) -> list[dict[str, Any]]:
        iterations: list[dict[str, Any]] = self.record["nct"]["iterations"]
        return iterations


@pytest.fixture(
    scope="module",
    params=[
        ("umnist", {"iterations": "3", "min_samples": "10"}),
        ("cmnist", {"iterations": "4", "depth_rule": "false"}),
    ],
    ids=["umnist-depth-3", "cmnist-depth-4"],
)
def run(
    request: pytest.FixtureRequest, digits: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    dataset, knobs = request.param
    return Run(job_of(digits, dataset, **knobs), digits, tmp_path_factory.mktemp("results"))


class TestRecord:
    """The fields of the contract, and that they agree with one another."""

    def test_has_every_field(self, run: Run) -> None:
        nct = run.record["nct"]
        assert set(nct) >= {
            *("chosen_iteration", "argmax_iteration", "stop_reason"),
            *("spearman_val", "spearman_test", "iterations"),
        }
        for noted in run.iterations:
            assert set(noted) >= {
                *("t", "test", "pwga2", "pwga2_routed", "n_worst", "tolerance", "node_counts"),
                *("merged", "capture", "logit_mean", "logit_std", "margin_mean", "margin_std"),
            }
            assert (noted["pwga2"] is None) == (noted["t"] == 1)

    @pytest.mark.filterwarnings("ignore:An input array is constant")
    def test_spearman_is_over_the_epochs_from_iteration_two_on(self, run: Run) -> None:
        later = run.history[run.history["iteration"] >= 2]
        for split in ("val", "test"):
            rho = later["selection"].corr(later[f"audit_{split}_wga"], method="spearman")
            expected = None if math.isnan(rho) else pytest.approx(rho)  # nothing ever moved
            assert run.record["nct"][f"spearman_{split}"] == expected

    def test_nodes_hold_every_training_sample(self, run: Run) -> None:
        classes, size = len(run.data.facts.classes), len(run.data.splits["train"])
        y = run.data.splits["train"].labels.y
        for t, noted in enumerate(run.iterations, start=1):
            counts = torch.tensor(noted["node_counts"])
            assert noted["t"] == t
            assert len(counts) == classes * 2 ** (t - 1)
            assert counts.sum() == size
            by_class = counts.view(classes, -1).sum(dim=1)
            assert torch.equal(by_class, torch.bincount(y, minlength=classes))

    def test_children_share_their_parents_samples(self, run: Run) -> None:
        for above, below in pairwise(run.iterations):
            children = torch.tensor(below["node_counts"]).view(-1, 2)
            assert children.sum(dim=1).tolist() == above["node_counts"]

    def test_both_epochs_are_those_of_the_history(self, run: Run) -> None:
        """What is recorded of the kept and of the last epoch is what was seen when they ended."""
        differ = 0
        for noted in run.iterations:
            rows = run.history[run.history["iteration"] == noted["t"]]
            end = noted["end"]
            assert (end["phase"], end["epoch"]) == tuple(rows[["phase", "epoch"]].iloc[-1])
            for found, phase, epoch in (
                (noted, noted["phase"], noted["trained"]["epoch"]),
                (end, end["phase"], end["epoch"]),
            ):
                ((_, row),) = rows[(rows["phase"] == phase) & (rows["epoch"] == epoch)].iterrows()
                assert found["test"]["wga"] == pytest.approx(row["audit_test_wga"])
                if noted["t"] > 1:
                    assert found["pwga2"] == row["selection"] == found["pwga2_routed"]
            assert noted["phase"] == 2
            assert noted["trained"]["value"] == rows[rows["phase"] == 2]["selection"].agg(
                "min" if noted["t"] == 1 else "max"
            )
            differ += end["logit_mean"] != noted["logit_mean"]
        assert differ

    def test_captures_are_shares_of_each_group(self, run: Run) -> None:
        for noted in run.iterations:
            assert set(noted["capture"]) == set(run.data.facts.groups)
            assert len(noted["leaves"]) == len(noted["node_counts"])
            for group, shares in noted["capture"].items():
                assert set(shares) <= set(noted["leaves"])
                absent = noted["test"]["group_count"][group] == 0
                assert sum(shares.values()) == pytest.approx(0 if absent else 100)

    def test_statistics_are_by_leaf(self, run: Run) -> None:
        for noted in run.iterations:
            filled = [count > 0 for count in noted["node_counts"]]
            for name in ("logit_mean", "logit_std", "margin_mean", "margin_std"):
                assert len(noted[name]) == len(filled)
            assert [value is not None for value in noted["logit_mean"]] == filled
            chosen = {leaf for shares in noted["capture"].values() for leaf in shares}
            with_margin = [
                leaf
                for leaf, value in zip(noted["leaves"], noted["margin_mean"], strict=True)
                if value is not None
            ]
            assert set(with_margin) == chosen
            assert all(value is None or value >= 0 for value in noted["margin_mean"])

    def test_merging_is_seen(self, run: Run) -> None:
        assert any(noted["merged"] for noted in run.iterations)

    def test_merged_leaves_are_odd_empty_and_never_predicted(self, run: Run) -> None:
        for noted in run.iterations:
            chosen = {leaf for shares in noted["capture"].values() for leaf in shares}
            for node in noted["merged"]:
                assert node % 2 == 1
                assert noted["node_counts"][node] == 0
                assert noted["leaves"][node] not in chosen
        counts = run.iterations[run.record["nct"]["chosen_iteration"] - 1]["node_counts"]
        assert all(counts[leaf] > 0 for leaf in run.predictions["leaf"].unique())

    def test_chosen_iteration_is_the_model(self, run: Run) -> None:
        chosen = run.record["nct"]["chosen_iteration"]
        assert run.iterations[chosen - 1]["test"] == run.record["metrics"]["test"]
        table = run.predictions
        assert (table["leaf"] // 2 ** (chosen - 1) == table["pred"]).all()
        test = table[table["split"] == "test"]
        for group, shares in run.iterations[chosen - 1]["capture"].items():
            mine = test[test["group"] == run.data.facts.groups.index(group)]
            names = mine["leaf"].map(dict(enumerate(run.iterations[chosen - 1]["leaves"])))
            assert shares == pytest.approx((100 * names.value_counts(normalize=True)).to_dict())

    def test_makeup_counts_the_training_samples_of_each_leaf(self, run: Run) -> None:
        for noted in run.iterations:
            sizes = [sum(noted["makeup"][leaf].values()) for leaf in noted["leaves"]]
            assert sizes == noted["node_counts"]

    def test_loss_falls_in_every_phase_two(self, run: Run) -> None:
        last = run.history[run.history["phase"] == 2].groupby("iteration")["loss"]
        assert len(last) == len(run.iterations)
        assert (last.last() < last.first()).all()

    def test_every_level_is_trained(self, run: Run) -> None:
        widths = {"umnist": [2, 4, 8], "cmnist": [5, 10, 20, 40]}[run.job.dataset]
        assert [len(noted["node_counts"]) for noted in run.iterations] == widths

    def test_choice_follows_from_the_recorded_proxies(self, run: Run) -> None:
        nct, config = run.record["nct"], run.job.config.method
        proxies = {
            noted["t"]: Proxy(noted["pwga2"], noted["n_worst"]) for noted in run.iterations[1:]
        }
        choice = choose_depth(proxies, config["z"])
        assert nct["argmax_iteration"] == choice.argmax_iteration
        deepest = len(run.iterations)
        assert nct["chosen_iteration"] == (choice.iteration if config["depth_rule"] else deepest)


ABLATIONS = {
    "scope": ("head_only", "full"),
    "heads": ("linear", "mlp", "reversed"),
    "first_head": ("mlp",),
    "min_samples": ("0", "50"),
    "aux_weight": ("0", "2"),
    "sampling": ("class_weights", "downsample"),
    "iterations": ("2", "4"),
    "depth_rule": ("false",),
    "routing_images": ("clean",),
    "pwga": ("predicted",),
    "checkpoint": ("iteration",),
    "min_group": ("5",),
    "z": ("1",),
    "phase2_patience": ("3",),
    "lr_decay_factor": ("3",),
    "weight_cap": ("10",),
}


def test_every_ablation_is_a_run_of_its_own(digits: Path) -> None:
    names = {(): job_of(digits, "umnist").run_id}
    for knob, values in ABLATIONS.items():
        for value in values:
            names[knob, value] = job_of(digits, "umnist", **{knob: value}).run_id
    assert len(set(names.values())) == len(names)


class Killed(BaseException):
    """What no `except Exception` stops, as with Ctrl-C."""


def count_epochs(patch: pytest.MonkeyPatch, fatal: tuple[str, int] | None = None) -> list[str]:
    """Name the stage of every epoch that is trained; end the run after a given one is saved."""
    trained: list[str] = []
    one_epoch, save = Training._one_epoch, RunContext.save

    def noted(self: Training) -> None:
        trained.append(self.name)
        one_epoch(self)

    def fatal_save(self: RunContext, name: str, state: dict[str, Any]) -> None:
        save(self, name, state)
        if fatal == (name, state["progress"][0]):
            raise Killed

    patch.setattr(Training, "_one_epoch", noted)
    patch.setattr(RunContext, "save", fatal_save)
    return trained


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was not killed."""
    job = job_of(digits, "umnist", iterations="3", epochs="1,4,2", depth_rule="false")
    return Run(job, digits, tmp_path_factory.mktemp("whole"))


class TestResume:
    EPOCHS = ("nct-1-2", *["nct-2-1"] * 2, *["nct-2-2"] * 2, "nct-3-1", "nct-3-2")

    @pytest.mark.parametrize(("stage", "done"), [("nct-2-1", 2), ("nct-2-2", 4)])
    def test_killed_inside_iteration_two(
        self, whole: Run, digits: Path, tmp_path: Path, stage: str, done: int
    ) -> None:
        options = RunOptions(digits, tmp_path, isolate=False)
        with pytest.MonkeyPatch.context() as patch:
            before = count_epochs(patch, fatal=(stage, 1))
            with pytest.raises(Killed):
                run_job(whole.job, options, lambda progress: None)
        assert tuple(before) == self.EPOCHS[:done]
        with pytest.MonkeyPatch.context() as patch:
            after = count_epochs(patch)
            resumed = Run(whole.job, digits, tmp_path)
        assert tuple(after) == self.EPOCHS[done:]
        pd.testing.assert_frame_equal(resumed.predictions, whole.predictions, check_exact=True)
        pd.testing.assert_frame_equal(resumed.history, whole.history, check_exact=True)
        assert resumed.record["nct"] == whole.record["nct"]
        assert resumed.record["selection"] == whole.record["selection"]
        passes = [[stage["image_passes"] for stage in r.record["stages"]] for r in (resumed, whole)]
        assert passes[0] == passes[1]
