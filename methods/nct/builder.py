"""NCT: neural classification trees.

Paper: Garg et al., Discovering Latent Groups for Robust Classification; the authors' code was not
    available. Supervision: none (T no, V no), and the partition is visible at inference (I yes).
Deviations: none known from the text. Where it is silent or contradicts itself, these readings are
    taken: phi of a linear head is a linear layer of its own; the decay factor divides the
    rates once per iteration; optimiser, schedule and patience are new in each phase and the best
    checkpoint of phase 2 is the iteration's; pWGA_2 groups by routed label; samples are routed on
    augmented images; on CMNIST no phase stops early and the rate is constant. Resampling begins in
    iteration 1. From iteration 2 on every head, easy or hard, has a batch-norm before phi, which
    siblings share and which has no gain and shift of its own, since phi's linear layer has both,
    and one after phi's ReLU and dropout. The BCE is the mean over the active nodes; the weight of a
    sample's node multiplies the auxiliary loss of its parents too. The pseudo-AUROC is our
    definition. docs/protocol.md has the reasons.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from methods.backbones import backbone_for, build_backbone
from methods.base import Context, Fitted, Method, NetworkSpec, Selected, Supervision, register
from methods.nct.config import NctConfig, PwgaGroups, Strategy
from methods.nct.depth import Proxy, choose_depth, pseudo_auroc, pseudo_wga, tolerance
from methods.nct.routing import predicted_leaves, route
from methods.nct.tree import FittedTree, Heads, Tree
from methods.prediction import EvalImages, evaluation_mode, mixed_precision, predict_with
from methods.presets import preset_config
from methods.selection import Selection
from methods.training import Batch, Sampler, Training, isolated_randomness, shuffled


def node_bce(logits: Tensor, labels: Tensor, active: Tensor) -> Tensor:
    """Return each sample's mean BCE over the active nodes, against the one-hot of its node."""
    target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    each = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (each * active).sum(dim=1) / active.sum()


class NodeLoss(nn.Module):
    """Weighted node BCE of the last level, and of the level above as auxiliary loss.

    In phase 1 everything above the last level is frozen: it runs without gradients, and the
    auxiliary loss, a constant there, is left out.
    """

    labels: Tensor
    weights: Tensor

    def __init__(self, labels: Tensor, weights: Tensor, aux_weight: float, frozen: bool) -> None:
        super().__init__()
        self.aux_weight = aux_weight
        self.frozen = frozen
        self.register_buffer("labels", labels, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of one batch."""
        assert isinstance(model, Tree)
        outputs = model.logits(batch.images, frozen=self.frozen)
        return torch.mean(self.per_sample(model, outputs, self.labels[batch.index]))

    def per_sample(self, model: Tree, outputs: list[Tensor], labels: Tensor) -> Tensor:
        """Compute the weighted loss of each sample from the logits of every level."""
        loss = node_bce(outputs[-1], labels, model.leaves.active)
        if len(outputs) > 1 and not self.frozen and self.aux_weight > 0:
            parents = model.levels[-2]
            assert isinstance(parents, Heads)
            loss = loss + self.aux_weight * node_bce(outputs[-2], labels // 2, parents.active)
        return loss * self.weights[labels]


def node_weights(counts: Tensor, cap: float) -> Tensor:
    """Weight each node by N / (K n_j), at most `cap`.

    Nodes without samples (merged, or never filled) take no part, here and in sampling: they get 0
    and count neither in K nor in the mean.
    """
    filled = counts > 0
    total, nodes = counts.sum(), filled.sum()
    weights = total / (nodes * counts.clamp(min=1)).double()
    return torch.where(filled, weights.clamp(max=cap), 0.0).float()


def node_size(counts: Tensor, strategy: Strategy) -> int | None:
    """Return the samples each node gives to an epoch; None where every sample is used."""
    filled = counts[counts > 0]
    if strategy == "downsample":
        return int(filled.min())
    if strategy == "geomean":
        return max(1, round(float(filled.double().log().mean().exp())))
    return None


def node_sampler(labels: Tensor, counts: Tensor, strategy: Strategy) -> Sampler:
    """Draw an epoch: the same number from each node, fresh every time, in random order."""
    size = node_size(counts, strategy)
    if size is None:
        return shuffled(len(labels))
    members = [(labels == node).nonzero()[:, 0] for node in (counts > 0).nonzero()[:, 0]]

    def draw(epoch: int, generator: torch.Generator) -> Tensor:
        device = generator.device
        parts = []
        for own in members:
            if len(own) >= size:
                pick = torch.randperm(len(own), generator=generator, device=device)[:size]
            else:
                pick = torch.randint(len(own), (size,), generator=generator, device=device)
            parts.append(own.to(device)[pick])
        everything = torch.cat(parts)
        return everything[torch.randperm(len(everything), generator=generator, device=device)]

    return draw


class CachedParents:
    """Predicts as `predict_with` does, to the last bit, but runs backbone and parents only once.

    To be used for one tree and one split, as long as nothing above the last level is trained: in
    phase 1, whose epochs are so short that most of a validation pass would compute again what the
    one before it has computed.
    """

    def __init__(self) -> None:
        self.features: list[Tensor] = []  # what the leaves read, batch by batch

    def __call__(self, model: nn.Module, images: EvalImages) -> Tensor:
        """Compute the leaf logits of a split."""
        assert isinstance(model, Tree)
        leaves = model.leaves
        device = next(leaves.parameters()).device
        with torch.no_grad(), evaluation_mode(model), mixed_precision(device):
            self.features = self.features or [model.parent_features(batch)[0] for batch in images]
            outputs = [leaves.masked(leaves(state)[1]).float() for state in self.features]
        return torch.cat(outputs).cpu()


@dataclass
class Iteration:
    """What one iteration left behind."""

    tree: Tree
    last_epoch: Tree  # the same with the weights of the last epoch, kept or not
    labels: Tensor
    selected: Selected
    facts: dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """One phase of an iteration: which epoch of it is the best, and the tree after its last."""

    phase: int
    selected: Selected
    last_epoch: Tree


@dataclass
class TreeBuilder:
    """Grows one tree on one task."""

    task: Task
    config: NctConfig
    ctx: Context
    done: list[Iteration] = field(default_factory=list)
    proxies: dict[int, Proxy] = field(default_factory=dict)
    first_val: Tensor | None = None  # what iteration 1 predicts of the validation images

    def run(self) -> FittedTree:
        """Grow level by level until the depth rule or the configuration says stop."""
        with isolated_randomness(self.ctx.seed("nct", "backbone"), self.ctx.device):
            backbone = backbone_for(self.task)
        tree = Tree(backbone, len(self.task.classes))
        choice = choose_depth({}, self.config.z)
        labels, counts = (
            self.task.train.y,
            torch.bincount(self.task.train.y, minlength=len(self.task.classes)),
        )
        merged: tuple[int, ...] = ()
        for t in range(1, self.config.iterations + 1):
            if t > 1:
                predicted = predicted_leaves(tree, self.task, self.ctx, self.config.routing_images)
                nodes = len(tree.leaves.active)
                routed = route(labels, predicted, nodes, self.config.min_samples)
                labels, counts, merged = routed.labels, routed.counts, routed.merged
            self._grow(tree, counts)
            self._finish(tree, labels, counts, merged, *self._train(tree, labels, counts))
            choice = choose_depth(self.proxies, self.config.z)
            if choice.stopped and self.config.depth_rule:
                break
        chosen = choice.iteration if self.config.depth_rule else len(self.done)
        facts = {
            "chosen_iteration": chosen,
            "argmax_iteration": choice.argmax_iteration,
            "stop_reason": choice.reason if self.config.depth_rule else "depth rule off",
            "iterations": [iteration.facts for iteration in self.done],
        }
        best = self.done[chosen - 1]
        codes = self.task.codes or self.task.classes
        return FittedTree(
            best.tree,
            codes,
            selection=best.selected,
            details={"nct": facts},
            partition=best.labels,
            snapshots=tuple(
                FittedTree(
                    iteration.tree,
                    codes,
                    partition=iteration.labels,
                    last_epoch=FittedTree(iteration.last_epoch, codes, partition=iteration.labels),
                )
                for iteration in self.done
            ),
        )

    def _grow(self, tree: Tree, counts: Tensor) -> None:
        config = self.config
        with isolated_randomness(self.ctx.seed("nct", "heads", tree.depth), self.ctx.device):
            heads = tree.grow(
                config.hidden, config.dropout, config.heads, config.first_head == "mlp"
            )
        heads.active.copy_(counts > 0)
        tree.to(self.ctx.device)

    def _train(self, tree: Tree, labels: Tensor, counts: Tensor) -> tuple[Trained, Trained]:
        """Train the new level: its heads alone first, then everything.

        Return the phase whose best epoch the tree is left with, and the last phase.
        """
        config, t = self.config, tree.depth
        weighted = config.sampling == "class_weights" and t > 1
        weights = node_weights(counts, config.weight_cap) if weighted else torch.ones(len(counts))
        select = self._selection(tree)
        whole = config.checkpoint == "iteration"
        kept: Trained | None = None
        ended: list[nn.Module] = []
        for phase, epochs in enumerate(config.phase_epochs(t), start=1):
            if epochs == 0:
                continue
            frozen = phase == 1
            earlier = copy.deepcopy(tree.state_dict()) if whole and kept is not None else {}
            selected = Training(
                tree,
                self.task,
                config.phase(t, phase),
                self.ctx,
                name=f"nct-{t}-{phase}",
                sampler=node_sampler(labels, counts, config.sampling),
                objective=self._objective(t, labels, weights, frozen),
                parameters=self._parameters(tree, frozen),
                select=select,
                set_mode=_new_heads_only if frozen else nn.Module.train,
                where={"iteration": t, "phase": phase},
                average=self._average(t),
                predict=CachedParents() if frozen else predict_with,
                at_end=lambda model: ended.append(copy.deepcopy(model)),
            ).run()
            last_epoch = ended[-1]
            assert isinstance(last_epoch, Tree)
            last = Trained(phase, selected, last_epoch)
            better = kept is None or select.better(selected.value, kept.selected.value)
            if better or not whole:
                kept = last
            else:
                tree.load_state_dict(earlier)
        assert kept is not None
        return kept, last

    def _objective(self, t: int, labels: Tensor, weights: Tensor, frozen: bool) -> NodeLoss:
        return NodeLoss(labels, weights, self.config.aux_weight, frozen)

    def _average(self, t: int) -> float:
        """Return the decay of the weights' moving average; 0 is none."""
        return 0.0

    def _parameters(self, tree: Tree, frozen: bool) -> list[dict[str, Any]]:
        backbone_lr, head_lr = self.config.rates(tree.depth)
        if frozen:
            return [{"params": list(tree.leaves.parameters()), "lr": head_lr}]
        return [
            {"params": list(tree.levels.parameters()), "lr": head_lr},
            {"params": list(tree.backbone.parameters()), "lr": backbone_lr},
        ]

    def _selection(self, tree: Tree) -> Selection:
        """Return the validation loss at iteration 1, without a partition; then the proxy."""
        y, t = self.task.val.y, tree.depth
        if t == 1:
            everywhere = torch.ones(tree.classes)
            return Selection(
                "val_loss",
                lambda logits: float(node_bce(logits, y, everywhere).mean()),
                higher_is_better=False,
            )
        return Selection(self._rule(), lambda logits: self._proxy(logits, t).value)

    def _rule(self) -> str:
        """Return the name of the proxy."""
        return "pseudo_auroc" if self.task.metric == "auroc" else "pwga2"

    def _proxy(self, leaf_logits: Tensor, t: int) -> Proxy:
        y = self.task.val.y
        if self.task.metric == "auroc":
            return pseudo_auroc(leaf_logits, y, t)
        return self._pwga(leaf_logits, t, self.config.pwga)

    def _pwga(self, leaf_logits: Tensor, t: int, groups: PwgaGroups) -> Proxy:
        """Compute pWGA_2 in one of its two readings."""
        own = self._routed_val() if groups == "routed" else None
        return pseudo_wga(leaf_logits, self.task.val.y, t, own, self.config.min_group)

    def _routed_val(self) -> Tensor:
        """Route the validation samples by iteration 1: 2 y + [it was wrong].

        What a merged hard child would have got stays a group of its own.
        """
        assert self.first_val is not None
        return 2 * self.task.val.y + (self.first_val != self.task.val.y).long()

    def _val_logits(self, tree: Tree) -> Tensor:
        """Compute the leaf logits of the validation images."""
        self.ctx.count_passes(len(self.task.val))
        return predict_with(tree, EvalImages(self.task.val.images, self.task.eval_transform))

    def _judged(self, tree: Tree) -> tuple[Tree, Proxy, dict[str, Any]]:
        """Return the model that a tree from iteration 2 on is, its proxy, and facts of it."""
        logits = self._val_logits(tree)
        proxy = self._proxy(logits, tree.depth)
        return tree, proxy, {"pwga2": proxy.value, **self._readings(logits, tree.depth)}

    def _readings(self, outputs: Tensor, t: int) -> dict[str, float]:
        return {
            "pwga2_predicted": self._pwga(outputs, t, "predicted").value,
            "pwga2_routed": self._pwga(outputs, t, "routed").value,
        }

    def _finish(
        self,
        tree: Tree,
        labels: Tensor,
        counts: Tensor,
        merged: tuple[int, ...],
        kept: Trained,
        last: Trained,
    ) -> None:
        """Keep the iteration's model and what the depth rule needs to know of it.

        The tree after the last epoch is for diagnostics alone.
        """
        t, model, last_epoch = tree.depth, copy.deepcopy(tree), last.last_epoch
        facts: dict[str, Any] = {
            "t": t,
            "node_counts": counts.tolist(),
            "merged": list(merged),
            "trained": asdict(kept.selected),
            "phase": kept.phase,
            **dict.fromkeys(("pwga2", "pwga2_predicted", "pwga2_routed", "n_worst", "tolerance")),
        }
        assert last.selected.epochs_run is not None
        end: dict[str, Any] = {"phase": last.phase, "epoch": last.selected.epochs_run - 1}
        if t == 1:
            self.first_val = self._val_logits(tree).argmax(dim=1)
        else:
            before = max((proxy.value for proxy in self.proxies.values()), default=None)
            model, proxy, scores = self._judged(model)
            self.proxies[t] = proxy
            facts |= scores | {
                "n_worst": proxy.n_worst,
                "tolerance": None
                if before is None
                else tolerance(before, proxy.n_worst, self.config.z),
            }
            last_epoch, _, scores = self._judged(last_epoch)
            end |= scores
        facts["end"] = end
        self.done.append(Iteration(model, last_epoch, labels, kept.selected, facts))


def _new_heads_only(model: nn.Module) -> None:
    """Train the last level; everything above it stays in evaluation mode."""
    assert isinstance(model, Tree)
    model.eval()
    model.leaves.train()


@register("nct", version=2, config=NctConfig, title="NCT", order=90, reference="Garg et al.")
class Nct(Method):
    """Grow a tree of easy and hard heads."""

    tree = True
    slices = (
        "A slice is a leaf of the tree. A training sample is in the leaf of its class that it was "
        "trained in; every other sample is in the leaf that scores highest, whatever its class, "
        "and is taken for that leaf's class."
    )

    def supervision(self, config: NctConfig) -> Supervision:
        """Return no group access; leaves are visible."""
        return Supervision(interpretable=True)

    def selection_rules(self, config: NctConfig) -> tuple[str, ...]:
        """Return the proxy, which depends on the metric; iteration 1 has none yet."""
        return ("pwga2", "pseudo_auroc") if config.iterations > 1 else ()

    def fit(self, task: Task, config: NctConfig, ctx: Context) -> Fitted:
        """Train iteration by iteration."""
        return TreeBuilder(task, config, ctx).run()

    def load_fitted(
        self, spec: NetworkSpec, config: NctConfig, weights: dict[str, Tensor]
    ) -> Fitted:
        """Grow a tree of the kept depth and fill it."""
        return FittedTree(self._load_tree(spec, config, weights), spec.codes)

    def _load_tree(self, spec: NetworkSpec, config: NctConfig, weights: dict[str, Tensor]) -> Tree:
        tree = Tree(build_backbone(spec.backbone, spec.channels), len(spec.codes))
        depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("levels."))
        for _ in range(depth):
            tree.grow(config.hidden, config.dropout, config.heads, config.first_head == "mlp")
        tree.load_state_dict(weights)
        return tree.eval()

    def search_space(self, trial: Any, task: Task) -> NctConfig:
        """Search the paper's ranges."""
        preset: NctConfig = preset_config(self, task.name)
        return replace(
            preset,
            backbone_lr=trial.suggest_float("backbone_lr", 1e-6, 1e-2, log=True),
            head_lr=trial.suggest_float("head_lr", 1e-6, 1e-2, log=True),
            lr_decay_factor=trial.suggest_float("lr_decay_factor", 1.0, 3.0),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 2.0, log=True),
            hidden=trial.suggest_int("hidden", 16, 128),
            dropout=trial.suggest_float("dropout", 0.0, 0.5),
            phase1_ratio=(
                preset.phase1_ratio[0],
                *(trial.suggest_float(f"phase1_ratio_{t}", 0.0, 0.9) for t in (2, 3)),
            ),
            aux_weight=trial.suggest_float("aux_weight", 0.0, 2.0),
            sampling=trial.suggest_categorical(
                "sampling", ["class_weights", "downsample", "geomean"]
            ),
        )
