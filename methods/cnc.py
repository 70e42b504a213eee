"""CnC: Correct-n-Contrast, contrastive learning against the errors of a first model.

Paper: Zhang et al. 2022, Correct-N-Contrast: A Contrastive Approach for Improving Robustness to
    Spurious Correlations; authors' code HazyResearch/correct-n-contrast. Supervision: groups of
    validation only (T no, V yes).
Deviations: training samples are sliced by the first model's predictions, as the paper describes;
    the authors' code slices by clusters of its representation unless told otherwise, which is
    `slice_with = "representation"` here. All roles have the same number of samples, which the
    authors' loss presupposes but their shrinking of the numbers does not keep; a slice without
    correct samples is left out, where theirs would leave no sets at all. Both sides and the
    cross-entropy see an image under one augmentation. The last step of an epoch divides by the
    batch factor even if it has fewer sets. Not reproduced: classifier gradients that are not
    cleared between steps; the last epoch's test score compared with the best validation score (the
    last epoch is validated like the others); stage 1 on 99% of the training data in fixed order;
    the random crop under which CMNIST is evaluated; the authors' `anchor_ratio` of 1 on CMNIST,
    which is 0.1 here on both MNIST sets, with steps of 4 sets instead of 32 so that there are as
    many of them; the constant rate on UMNIST, where it falls along a cosine here.

A slice holds the samples for which the first model gave the same answer. A set has four roles of
equal size, in this order: anchors (a slice's correct samples), positives (the anchors' class, found
in other slices), negatives (the slice's other classes) and easy negatives (the correct samples of
the slice that the first positive is in).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from datasets.errors import BenchError
from methods.backbones import Classifier, FittedClassifier, SingleNetworkMethod, build_classifier
from methods.base import Context, Fitted, Method, Stage, Supervision, register
from methods.clustering import umap_embedding
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.optimisation import TrainConfig
from methods.prediction import EvalImages, predict_with
from methods.presets import preset_config
from methods.selection import WORST_GROUP_RULES, RuleName
from methods.training import Batch, Training

ROLES = 4


@dataclass(frozen=True)
class CncConfig:
    """How both stages are trained; the second by SGD.

    Attributes:
        erm: the first stage.
        slice_with: what tells the slices apart, the first model's `prediction` or clusters of its
            `representation`.
        per_role: anchors, positives, negatives and easy negatives of a set.
        anchor_ratio: share of the anchors that have a set in an epoch.
        temperature: of the contrastive loss.
        contrastive_weight: its share of the loss, each side counted in full; cross-entropy has the
            rest.
        batch_factor: sets of one optimiser step.
        sets_per_forward: how many of them go through the network at once; for speed alone.
        scheduler: `none` keeps the rate, as the authors do; `cosine` lets it fall to zero.
    """

    erm: ErmConfig = field(default_factory=ErmConfig)
    slice_with: Literal["prediction", "representation"] = "prediction"
    epochs: int = 5
    lr: float = 1e-4
    weight_decay: float = 1e-3
    momentum: float = 0.9
    selection: RuleName = "val_wga"
    per_role: int = 17
    anchor_ratio: float = 1.0
    temperature: float = 0.1
    contrastive_weight: float = 0.75
    batch_factor: int = 32
    sets_per_forward: int = 1
    scheduler: Literal["none", "cosine"] = "none"

    def __post_init__(self) -> None:
        require(self.per_role >= 1, f"per_role must be at least 1 but got {self.per_role}")
        require(
            0 < self.anchor_ratio <= 1,
            f"anchor_ratio must be in (0, 1] but got {self.anchor_ratio}",
        )
        require(
            0 < self.temperature < float("inf"),
            f"temperature must be positive but got {self.temperature}",
        )
        require(
            0 <= self.contrastive_weight <= 1,
            f"contrastive_weight must be between 0 and 1 but got {self.contrastive_weight}",
        )
        require(
            self.batch_factor >= 1, f"batch_factor must be at least 1 but got {self.batch_factor}"
        )
        require(
            self.sets_per_forward >= 1 and self.batch_factor % self.sets_per_forward == 0,
            f"sets_per_forward must divide batch_factor ({self.batch_factor}) but got "
            f"{self.sets_per_forward}",
        )
        self.second_stage(self.per_role)  # checks what training in general demands

    def quick(self) -> Self:
        """Cut both stages to a smoke run."""
        return replace(self, epochs=min(self.epochs, 2), erm=self.erm.quick())

    def second_stage(self, per_role: int) -> TrainConfig:
        """Describe the training of the second stage, for sets of that size."""
        return TrainConfig(
            epochs=self.epochs,
            batch_size=self.sets_per_forward * ROLES * per_role,
            lr=self.lr,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            scheduler=self.scheduler,
            selection=self.selection,
        )


class NoAnchors(BenchError):
    """No slice holds a sample of its own class."""

    kind = "no_anchors"


@dataclass(frozen=True)
class Pools:
    """Where the sets of one slice come from, as positions in the training split.

    Attributes:
        others: every sample of another class, wherever it is.
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor
    others: Tensor


def role_pools(y: Tensor, slices: Tensor, classes: int) -> dict[int, Pools]:
    """Collect the pools of every slice that has anchors.

    A slice without errors takes its negatives from all samples of other classes. A class that is
    never misclassified is its own positives; the rule for easy negatives then gives the same class
    once more, as in the authors' code.
    """
    pools = {}
    for own in range(classes):
        inside, mine = slices == own, y == own
        anchors, others = _positions(inside & mine), _positions(~mine)
        if len(anchors):
            positives, negatives = _positions(mine & ~inside), _positions(inside & ~mine)
            pools[own] = Pools(
                anchors,
                positives if len(positives) else _positions(mine),
                negatives if len(negatives) else others,
                others,
            )
    if not pools:
        raise NoAnchors(
            f"the first stage put none of the {len(y)} training samples into the slice of its own "
            "class, so there are no anchors",
            "train a better first stage, with --set cnc.erm.epochs=... or --set cnc.erm.lr=...",
        )
    return pools


def _positions(where: Tensor) -> Tensor:
    return where.nonzero()[:, 0]


class ContrastiveSets:
    """Draws the sets of an epoch; calling it makes it the `Sampler` of a training.

    Attributes:
        per_role: samples of each role, at most as many as the smallest pool of positives or of
            negatives has.
        per_slice: sets of each slice; the slice with the fewest anchors decides.
    """

    def __init__(
        self, y: Tensor, slices: Tensor, classes: int, per_role: int, anchor_ratio: float
    ) -> None:
        self.slices = slices
        self.pools = role_pools(y, slices, classes)
        every = self.pools.values()
        self.per_role = min(per_role, *(min(len(p.positives), len(p.negatives)) for p in every))
        self.per_slice = max(1, round(anchor_ratio * min(len(p.anchors) for p in every)))

    @property
    def per_epoch(self) -> int:
        """Count the sets of an epoch."""
        return self.per_slice * len(self.pools)

    def __call__(self, epoch: int, generator: torch.Generator) -> Tensor:
        """Draw one set of each slice in turn; a set's samples follow one another, role by role."""
        sets = [self._of_slice(own, generator) for own in self.pools]
        return torch.stack(sets, dim=1).flatten()

    def _of_slice(self, own: int, generator: torch.Generator) -> Tensor:
        """Draw the sets of one slice, as (sets, roles, samples)."""
        device, pools = generator.device, self.pools[own]

        def draw(pool: Tensor, rows: int) -> Tensor:
            return pool.to(device)[subsets(len(pool), self.per_role, rows, generator)]

        size, rows = len(pools.anchors), self.per_slice
        first = torch.randperm(size, generator=generator, device=device)[:rows, None]
        # Subsets of offsets, turned until their first member is the anchor that has its turn.
        offsets = subsets(size, self.per_role, rows, generator)
        anchors = pools.anchors.to(device)[(first + offsets - offsets[:, :1]) % size]
        positives = draw(pools.positives, rows)
        negatives = draw(pools.negatives, rows)
        easy = torch.empty_like(positives)
        sources = self.slices.to(device)[positives[:, 0]]
        for source in sources.unique().tolist():
            there = _positions(sources == source)
            # A slice in which nothing is correct has no easy negatives to give.
            pool = self.pools[source].anchors if source in self.pools else pools.others
            easy[there] = draw(pool, len(there))
        return torch.stack([anchors, positives, negatives, easy], dim=1)


def subsets(size: int, count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Draw `count` of `size` things for each row, in random order, all outcomes equally likely.

    Without replacement unless there are too few things. Floyd's algorithm, on all rows at once:
    its cost does not grow with `size`, where shuffling would touch every thing for every row.
    """
    device = generator.device
    if size < count:
        return torch.randint(size, (rows, count), generator=generator, device=device)
    limits = torch.arange(size - count + 1, size + 1, device=device)
    shape = rows, count
    # Single precision has too few values between 0 and 1 to be fair to a large pool.
    share = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    drawn = (share * limits).long()
    for column in range(1, count):
        taken = (drawn[:, :column] == drawn[:, column : column + 1]).any(dim=1)
        drawn[:, column].masked_fill_(taken, size - count + column)
    # So far, which column a member is in depends on the member.
    return drawn.gather(1, torch.rand(shape, generator=generator, device=device).argsort(dim=1))


def supervised_contrast(first: Tensor, positives: Tensor, negatives: Tensor, tau: float) -> Tensor:
    """Contrast one sample of each set (S, D) with its positives and negatives (S, N, D)."""
    others = torch.cat([positives, negatives], dim=1)
    similarity = functional.cosine_similarity(first[:, None], others, dim=2) / tau
    return similarity.logsumexp(dim=1) - similarity[:, : positives.shape[1]].mean(dim=1)


class TwoSidedLoss(nn.Module):
    """Contrast from the first anchor and from the first positive, and cross-entropy on all roles.

    One forward pass serves all three, for the encoder is in evaluation mode: what a sample becomes
    does not depend on those beside it.
    """

    def __init__(self, per_role: int, sets_per_forward: int, temperature: float, weight: float):
        super().__init__()
        self.per_role = per_role
        self.sets_per_forward = sets_per_forward
        self.temperature = temperature
        self.weight = weight

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Average over the sets of a batch.

        The divisor is that of a full batch, so that the last step of an epoch, too, does not depend
        on how many sets share a forward pass.
        """
        assert isinstance(model, Classifier)
        features = model.backbone(batch.images)
        entropy = functional.cross_entropy(model.head(features), batch.y, reduction="none")
        entropy = entropy.view(-1, ROLES * self.per_role).mean(dim=1)
        roles = features.float().view(-1, ROLES, self.per_role, features.shape[1])
        anchors, positives, negatives, easy = roles.unbind(dim=1)
        contrast = supervised_contrast(
            anchors[:, 0], positives, negatives, self.temperature
        ) + supervised_contrast(positives[:, 0], anchors, easy, self.temperature)
        losses = self.weight * contrast + (1 - self.weight) * entropy
        return losses.sum() / self.sets_per_forward


def slices_of(task: Task, model: nn.Module, config: CncConfig, ctx: Context) -> Tensor:
    """Assign every training sample to a class, not always its own, by what a model makes of it."""
    assert isinstance(model, Classifier)
    by_prediction = config.slice_with == "prediction"
    images = EvalImages(task.train.images, task.eval_transform)
    outputs = predict_with(model if by_prediction else model.backbone, images)
    ctx.count_passes(len(task.train))
    if by_prediction:
        return outputs.argmax(dim=1)
    seed = ctx.seed("cnc", "slices") % 2**32
    features = outputs.numpy()
    plane = torch.from_numpy(umap_embedding(features, features[:0], seed)[0])
    return cluster(plane, task.train.y, len(task.classes), seed)


def cluster(points: Tensor, y: Tensor, classes: int, seed: int) -> Tensor:
    """Fit a Gaussian mixture, and name its clusters after the classes they agree with best."""
    from scipy.optimize import linear_sum_assignment
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(classes, n_init=10, random_state=seed)
    found = torch.from_numpy(mixture.fit_predict(points.double().numpy()))
    agreement = torch.bincount(found * classes + y, minlength=classes**2).view(classes, classes)
    names = linear_sum_assignment(agreement.numpy(), maximize=True)[1]
    return torch.from_numpy(names)[found]


def frozen_statistics(model: nn.Module) -> None:
    """Train the head as usual, the encoder with the batch-norm statistics it started with."""
    assert isinstance(model, Classifier)
    model.train()
    model.backbone.eval()


@register("cnc", version=1, config=CncConfig, title="CnC", order=30, reference="Zhang et al. 2022")
class Cnc(SingleNetworkMethod, Method):
    """Pull samples of a class together that a first model told apart."""

    slices = (
        "Slice 1 has the training samples that the first model took for another class, or put into "
        "another class's cluster. Slice 0 is the rest; other samples are in none. That slice 1 is "
        "hard is how it was made."
    )

    def supervision(self, config: CncConfig) -> Supervision:
        """Return access to the validation groups, where the epoch is chosen by them."""
        return Supervision(val_groups=config.selection in WORST_GROUP_RULES)

    def stages(self, config: CncConfig) -> tuple[Stage, ...]:
        """Return the first model."""
        return (erm_stage(config.erm),)

    def fit(self, task: Task, config: CncConfig, ctx: Context) -> Fitted:
        """Slice the training data with ERM, then train a fresh network on contrastive sets."""
        slices = slices_of(task, train_erm(task, config.erm, ctx).module, config, ctx)
        y = task.train.y
        sets = ContrastiveSets(y, slices, len(task.classes), config.per_role, config.anchor_ratio)
        model = build_classifier(task, ctx, "cnc")
        selected = Training(
            model,
            task,
            config.second_stage(sets.per_role),
            ctx,
            name="cnc",
            sampler=sets,
            objective=TwoSidedLoss(
                sets.per_role,
                config.sets_per_forward,
                config.temperature,
                config.contrastive_weight,
            ),
            set_mode=frozen_statistics,
            accumulate=config.batch_factor // config.sets_per_forward,
        ).run()
        errors = slices != y
        details: dict[str, object] = {
            "cnc": {
                "per_role": sets.per_role,
                "sets_per_epoch": sets.per_epoch,
                "errors": int(errors.sum()),
            },
        }
        return FittedClassifier(model, selection=selected, details=details, partition=errors.long())

    def search_space(self, trial: Any, task: Task) -> CncConfig:
        """Search the rates and the loss; the first stage and the sets are the preset's."""
        preset: CncConfig = preset_config(self, task.name)
        return replace(
            preset,
            lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
            weight_decay=trial.suggest_float("weight_decay", 1e-5, 1.0, log=True),
            temperature=trial.suggest_float("temperature", 0.02, 0.5, log=True),
            contrastive_weight=trial.suggest_float("contrastive_weight", 0.25, 0.95),
        )
