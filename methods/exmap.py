"""ExMap: clusters of relevance heatmaps, and the last layer retrained on data balanced over them.

Paper: Chakraborty, Sletten and Kampffmeyer 2024, ExMap: Leveraging Explainability Heatmaps for
    Unsupervised Group Robustness to Spurious Correlations; authors' code rwchakra/exmap.
    Supervision: none (T no, V no).
Deviations: every draw is seeded by the run, and a run retrains once (20 fits averaged), where the
    authors repeat that five times on one checkpoint. Eigenvectors come from Lanczos iterations
    instead of LOBPCG, and those of the graph's separate parts are computed directly. Classes too
    small to cluster stay whole. Networks start from this suite's ImageNet weights (the authors' are
    torchvision's second set). More than two classes: the relevance is that of the predicted one of
    them all, and the layer is fitted one class against the rest. liblinear's objective is fitted to
    the optimum, and a penalty at the end of its grid compared with others beyond it, as for DFR. On
    ISIC the penalty is chosen by the worst pair's AUROC. On rows of features there are no pixels to
    explain: the heatmap is the relevance of each feature. The authors explain ResNets; here the
    same rules serve MobileNetV2, EfficientNet-Lite and their like (timm's EfficientNet without
    gates). Networks with other parts have no rules here: their heatmap is gradient times input,
    which is the propagation with gamma 0 where a network has only ReLUs and no biases, and `gamma`
    has no effect. The run's details name which it was (`relevance`).
Version 2: that fit; version 1 had liblinear stop at 1e-2, as DFR's had (docs/protocol.md).

Heatmaps are made by layer-wise relevance propagation with zennit: a prediction's relevance, 1, is
handed down layer by layer, at each in proportion to what the inputs contributed to the output; in
convolutions the contributions that agree with the output's sign count `1 + gamma` times. They are
clustered by a graph of the nearest neighbours, its normalised Laplacian with the number of clusters
chosen by the largest eigengap, and the assignment by pivoted QR of Damle, Minden and Ying (Simple,
direct and efficient multi-way spectral clustering).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from datasets.base import Task
from datasets.config import require
from datasets.transforms import Transform
from methods.backbones import (
    Backbone,
    Classifier,
    FittedClassifier,
    LeNet,
    Pool,
    SingleNetworkMethod,
    Standardise,
    WholeImageConv,
)
from methods.base import Context, Fitted, Method, Stage, StageResult, register
from methods.clustering import ClusterConfig, fit_clusters, umap_embedding
from methods.erm import ErmConfig, erm_stage, train_erm
from methods.prediction import EvalImages
from methods.presets import preset_config
from methods.retraining import RetrainConfig, retrain_head
from methods.torchvision_shim import declare_missing_operators, import_timm

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]

STAGE_VERSION = 1
SAVE_EVERY = 64  # batches of heatmaps, which are 20 minutes of a CPU's work on a ResNet-50
MIN_UMAP_SAMPLES = 12  # that UMAP can lay out
MIN_SPECTRAL_SAMPLES = 4  # a gap after the second eigenvalue needs three of them
EXTRA_EIGENVALUES = 3  # computed beyond the largest number of clusters; the gap needs one
RULE = "held_out_worst_pseudo_group"
BATCH_PIXELS = 8 * 224**2  # 8 images of side 224 and 512 of side 28, as the authors of ExMap take
FEWER = 4  # times fewer in networks they do not have: a MobileNet keeps 40 MB an image of side 96
EPSILON = 1e-6
LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.ReLU, nn.ReLU6, nn.Flatten, nn.Identity),
    *(WholeImageConv, Pool, Standardise, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)
"""Layers with a rule, or whose gradient hands relevance down as it should be."""


@dataclass(frozen=True)
class HeatmapConfig:
    """What the clusters depend on: the first model, its heatmaps, and how they are clustered.

    Attributes:
        erm: the first model, whose last layer is retrained.
        gamma: how much more the contributions count that agree with a convolution's output.
        heatmap_side: side to which larger heatmaps are reduced; 0 keeps them as they are.
        variant: `global` clusters all of validation, `local` each class by itself.
        clusterer: `spectral`, with the number of clusters chosen by the eigengap, or `kmeans`, on
            heatmaps laid out in the plane by UMAP.
        max_clusters: the most that the eigengap may choose; k-means makes this many.
    """

    erm: ErmConfig = field(default_factory=ErmConfig)
    gamma: float = 4.0
    heatmap_side: int = 0
    variant: Literal["global", "local"] = "global"
    clusterer: Literal["spectral", "kmeans"] = "spectral"
    max_clusters: int = 10

    def __post_init__(self) -> None:
        require(0 <= self.gamma < float("inf"), f"gamma cannot be negative but got {self.gamma}")
        require(
            self.heatmap_side >= 0, f"heatmap_side cannot be negative but got {self.heatmap_side}"
        )
        require(
            self.max_clusters >= 2, f"max_clusters must be at least 2 but got {self.max_clusters}"
        )


@dataclass(frozen=True)
class ExMapConfig(RetrainConfig, HeatmapConfig):
    """ExMap's knobs: the clusters, and the retraining of the last layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        HeatmapConfig.__post_init__(self)  # the retraining's checks do not lead on to it

    def quick(self) -> ExMapConfig:
        """Cut to a smoke run."""
        return replace(
            self, erm=self.erm.quick(), splits=min(self.splits, 1), retrains=min(self.retrains, 3)
        )


def heatmaps(network: Classifier, images: EvalImages, gamma: float, side: int) -> Iterator[Tensor]:
    """Yield the heatmaps of each batch, one flat row an image, largest absolute value 1.

    Channels are kept. Heatmaps larger than `side` are made smaller; 0 leaves all as they are.
    """
    ruled = has_rules(network)
    model = canonical_form(network) if ruled else frozen_copy(network)
    for batch in images:
        maps = relevance(model, batch, gamma) if ruled else gradient_times_input(model, batch)
        if 0 < side < maps.shape[-1]:
            maps = functional.interpolate(maps, size=(side, side), mode="bilinear")
        rows = maps.flatten(start_dim=1).cpu()
        largest = rows.abs().amax(dim=1, keepdim=True)
        yield rows / torch.where(largest > 0, largest, 1.0)  # nothing was relevant: all zeros


def heatmap_batch_size(network: nn.Module, transform: Transform) -> int:
    """Choose how many images to explain at once; each needs many times its own memory."""
    mobile = import_timm().models.efficientnet.EfficientNet
    known = has_rules(network) and not any(isinstance(p, mobile) for p in network.modules())
    return max(1, BATCH_PIXELS // (1 if known else FEWER) // transform.pixels)


def relevance(model: nn.Module, images: Tensor, gamma: float) -> Tensor:
    """Trace the predicted class of each image back to its pixels, in a network's canonical form."""
    declare_missing_operators()  # zennit imports torchvision
    from zennit.attribution import Gradient
    from zennit.composites import LayerMapComposite, layer_map_base
    from zennit.rules import Epsilon, Gamma, Norm, Pass
    from zennit.types import Convolution

    rules = [
        *layer_map_base(EPSILON),
        (Convolution, Gamma(gamma, EPSILON)),
        (nn.Linear, Epsilon(EPSILON)),
        (Sum, Norm(EPSILON)),
        (Standardise, Pass()),  # it changes the unit of a number and not whose number it is
    ]
    with torch.enable_grad(), Gradient(model, LayerMapComposite(rules)) as explain:
        found: Tensor = explain(images, _predicted)[1]
    return found.detach()


def gradient_times_input(model: nn.Module, images: Tensor) -> Tensor:
    """Return how much each pixel adds to the logit of the class predicted, to first order."""
    images = images.detach().requires_grad_()
    with torch.enable_grad():
        logits: Tensor = model(images)
        found = torch.autograd.grad(logits.amax(dim=1).sum(), images)[0]
    return (found * images).detach()


def _predicted(logits: Tensor) -> Tensor:
    return functional.one_hot(logits.argmax(dim=1), logits.shape[1]).to(logits)


class Sum(nn.Module):
    """Adds two tensors, as a layer of its own so that a rule can take hold of the addition."""

    def forward(self, pair: Tensor) -> Tensor:
        """Sum over the last dimension."""
        return pair.sum(dim=-1)


class Residual(nn.Module):
    """A residual block of timm's, which adds its two paths within its own forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        layers = dict(block.named_children())  # in the order they are applied, but for two
        self.shortcut = layers.pop("downsample", nn.Identity())
        last = next((name for name in ("act3", "act2") if name in layers), None)
        self.act = layers.pop(last) if last else nn.Identity()
        self.branch = nn.Sequential(*layers.values())
        self.add = Sum()

    def forward(self, x: Tensor) -> Tensor:
        """Join the paths and apply the last activation."""
        pair = torch.stack([self.shortcut(x), self.branch(x)], dim=-1)
        joined: Tensor = self.act(self.add(pair))
        return joined


def _timm_blocks() -> tuple[type[nn.Module], ...]:
    """Return timm's blocks that add their input to their output within their own forward.

    The last four do so only where their `has_skip` says it.
    """
    models = import_timm().models
    resnet, mobile = models.resnet, models._efficientnet_blocks
    return (
        *(resnet.BasicBlock, resnet.Bottleneck),
        *(mobile.ConvBnAct, mobile.DepthwiseSeparableConv),
        *(mobile.InvertedResidual, mobile.EdgeResidual),
    )


def has_rules(network: nn.Module) -> bool:
    """Return whether every part of a network has a relevance rule."""
    timm = import_timm()
    ours = (nn.Sequential, Classifier, Backbone, LeNet)
    theirs = (timm.models.resnet.ResNet, timm.models.efficientnet.EfficientNet, *_timm_blocks())
    layers = timm.layers
    inside = layers.BatchNormAct2d, layers.Conv2dSame, layers.DropPath, layers.SelectAdaptivePool2d
    known = {*LAYERS, *ours, *theirs, *inside}
    return all(type(part) in known for part in network.modules())


def frozen_copy(network: nn.Module) -> nn.Module:
    """Copy a network for evaluation, without gradients of its weights."""
    return copy.deepcopy(network).eval().requires_grad_(False)


def canonical_form(network: nn.Module) -> nn.Module:
    """Copy a network with rules into a form that computes the same, each step of it a layer.

    Batch norms become part of the convolutions before them, and additions become layers.
    """
    from zennit.canonizers import SequentialMergeBatchNorm

    model = frozen_copy(network)
    _replace(model, import_timm().layers.BatchNormAct2d, _norm_and_activation)
    for merge in SequentialMergeBatchNorm().apply(model):
        merge.batch_norm.eps = 0.0  # so that what is left of it is the identity exactly
    _replace(model, _timm_blocks(), _block)
    return model


def _replace(model: nn.Module, kinds: Any, replacement: Callable[[Any], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, kinds):
                setattr(parent, name, replacement(child))


def _norm_and_activation(both: Any) -> nn.Module:
    norm = nn.BatchNorm2d(both.num_features, eps=both.eps)
    norm.load_state_dict(both.state_dict())
    act = both.act
    if hasattr(act, "inplace"):
        act.inplace = False  # rules still need what it is given
    return nn.Sequential(norm.to(both.weight.device).eval().requires_grad_(False), act)


def _block(block: Any) -> nn.Module:
    return Residual(block) if getattr(block, "has_skip", True) else nn.Sequential(*block.children())


@dataclass(frozen=True)
class Clustering:
    """What was found: a cluster for each sample, and how many were looked for.

    Attributes:
        eigenvalues: of the graph's Laplacian, the smallest ones; none where there is no graph.
    """

    labels: Ints
    count: int
    eigenvalues: tuple[float, ...] = ()


def spectral_clusters(points: Floats, most: int, rng: np.random.Generator) -> Clustering:
    """Cluster points into 2 to `most` clusters; fewer than four points are one cluster."""
    if len(points) < MIN_SPECTRAL_SAMPLES:
        return Clustering(np.zeros(len(points), np.int64), 1)
    graph = neighbour_graph(points)
    wanted = min(most + EXTRA_EIGENVALUES, len(points) - 1)
    values, vectors = smallest_eigenpairs(graph, wanted, rng)
    count = eigengap(values, most)
    labels = assign_clusters(vectors[:, :count])
    return Clustering(labels, count, tuple(values.tolist()))


def neighbours_of(samples: int) -> int:
    """Return how many neighbours a sample has in the graph, itself included."""
    return max(2, int(np.log(samples)))


def neighbour_graph(points: Floats) -> Any:
    """Connect each point to its nearest neighbours: weight 1 where both are each other's, else 1/2.

    The graph is a sparse matrix.
    """
    from sklearn.neighbors import kneighbors_graph

    graph = kneighbors_graph(points, neighbours_of(len(points)), include_self=True)
    return 0.5 * (graph + graph.T)


def smallest_eigenpairs(graph: Any, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Find the smallest eigenvalues of a graph's normalised Laplacian, and vectors of them.

    Each part of the graph that is cut off from the rest adds an eigenvalue 0. Iterative solvers
    miss repeated eigenvalues, but these have known eigenvectors, so only the others are searched.
    Vectors are scaled so that they are constant within such a part, as clustering wants them.
    """
    from scipy.sparse.csgraph import connected_components, laplacian
    from scipy.sparse.linalg import LinearOperator, eigsh

    matrix, scale = laplacian(graph, normed=True, return_diag=True)
    parts, part = connected_components(graph, directed=False)
    # One vector a part, mixed: where parts outnumber vectors, each still has to tell all apart.
    mixed = np.linalg.qr(rng.standard_normal((parts, min(parts, count))))[0]
    norms = np.sqrt(np.bincount(part, weights=scale**2))
    vectors = (scale / norms[part])[:, None] * mixed[part]
    values = np.zeros(vectors.shape[1])
    if parts < count:
        known = vectors

        def flipped(x: Floats) -> Floats:
            x = x.reshape(-1)
            turned: Floats = 2 * x - matrix @ x - 2 * known @ (known.T @ x)
            return turned

        operator = LinearOperator(matrix.shape, matvec=flipped, dtype=np.float64)
        start = rng.standard_normal(len(scale))
        others, found = eigsh(operator, count - parts, which="LA", v0=start)
        order = np.argsort(-others)
        values = np.concatenate([values, 2 - others[order]])
        vectors = np.hstack([vectors, found[:, order]])
    return values, vectors / scale[:, None]


def eigengap(values: Floats, most: int) -> int:
    """Choose the number of clusters, from 2 to `most`, after which eigenvalues rise the most."""
    gaps = np.diff(values)[1:most]
    return int(gaps.argmax()) + 2


def assign_clusters(vectors: Floats) -> Ints:
    """Assign samples to as many clusters as there are vectors, one row of them a sample.

    The samples whose rows point in the most different directions stand for the clusters; each
    sample goes where the rotation that takes those to the axes puts most of it.
    """
    from scipy.linalg import polar, qr

    pivots = qr(vectors.T, mode="r", pivoting=True)[1][: vectors.shape[1]]
    rotation = polar(vectors[pivots].T)[0]
    clusters: Ints = np.abs(vectors @ rotation).argmax(axis=1)
    return clusters


def explain(network: Classifier, task: Task, config: HeatmapConfig, ctx: Context) -> Tensor:
    """Compute the heatmaps of validation, a row an image, from the last checkpoint on."""
    saved = ctx.restore("heatmaps")
    rows: list[Tensor] = [saved["rows"].cpu()] if saved is not None else []
    done, total = sum(map(len, rows)), len(task.val)
    if done < total:
        rest = task.val.images.subset(torch.arange(done, total))
        size = heatmap_batch_size(network, task.eval_transform)
        images = EvalImages(rest, task.eval_transform, size)
        maps = heatmaps(network, images, config.gamma, config.heatmap_side)
        for number, batch in enumerate(maps, start=1):
            rows.append(batch)
            done += len(batch)
            ctx.count_passes(len(batch))
            if number % SAVE_EVERY == 0 or done == total:
                rows = [torch.cat(rows)]
                ctx.save("heatmaps", {"rows": rows[0]})
                ctx.report(stage=f"exmap-heatmaps {done}/{total}")
    return rows[0]


def cluster(points: Floats, config: HeatmapConfig, seed: int) -> Clustering:
    """Cluster some heatmaps; the result is the same for any number of threads."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    with threadpool_limits(1):
        if config.clusterer == "spectral":
            return spectral_clusters(points, config.max_clusters, np.random.default_rng(seed))
        if len(points) < max(MIN_UMAP_SAMPLES, config.max_clusters):
            return Clustering(np.zeros(len(points), np.int64), 1)
        neighbours = neighbours_of(len(points))
        plane = umap_embedding(points, points[:0], seed, neighbours=neighbours)[0]
        model = fit_clusters(plane, config.max_clusters, ClusterConfig("kmeans"), seed)
        return Clustering(model.labels_.astype(np.int64), config.max_clusters)


def cluster_stage(config: ExMapConfig) -> Stage:
    """Return the stage that makes the heatmaps and clusters them."""
    own = HeatmapConfig(**{knob.name: getattr(config, knob.name) for knob in fields(HeatmapConfig)})
    return Stage("exmap-clusters", own, STAGE_VERSION)


def find_clusters(
    network: Classifier, task: Task, config: ExMapConfig, ctx: Context
) -> StageResult:
    """Cluster the heatmaps of validation, all at once or class by class."""
    stage = cluster_stage(config)
    own: HeatmapConfig = stage.config

    def compute(task: Task, ctx: Context) -> StageResult:
        points = explain(network, task, own, ctx).numpy()
        ctx.report(stage="exmap-clusters")
        y = task.val.y
        parts: list[Any] = [slice(None)]
        if own.variant == "local":
            parts = [y == label for label in range(len(task.classes))]
        clusters, found = torch.zeros_like(y), []
        for number, part in enumerate(parts):
            seed = ctx.seed("exmap", "clusters", number) % 2**32  # all that NumPy takes
            found.append(cluster(points[part], own, seed))
            clusters[part] = torch.from_numpy(found[-1].labels)
        facts = {
            "relevance": "propagation" if has_rules(network) else "gradient times input",
            "clusters": [one.count for one in found],
            "cluster_sizes": [np.bincount(one.labels).tolist() for one in found],
            "eigenvalues": [list(one.eigenvalues) for one in found],
        }
        return StageResult({"clusters": clusters}, facts)

    return ctx.stage(stage, task, compute)


@register(
    "exmap",
    version=2,
    config=ExMapConfig,
    title="ExMap",
    order=80,
    reference="Chakraborty et al. 2024",
)
class ExMap(SingleNetworkMethod, Method):
    """Keep ERM's features; fit the last layer again on what its explanations tell apart."""

    slices = (
        "A slice is a pseudo-group: a cluster, within a class, of what a first model looked at in "
        "validation samples. The last layer was fitted on them; other samples are in none."
    )

    def fits_on_validation(self, config: ExMapConfig) -> bool:
        """Return that the last layer is fitted there."""
        return True

    def stages(self, config: ExMapConfig) -> tuple[Stage, ...]:
        """Return the first model, and the clusters of its heatmaps."""
        return erm_stage(config.erm), cluster_stage(config)

    def fit(self, task: Task, config: ExMapConfig, ctx: Context) -> Fitted:
        """Train by ERM, cluster its heatmaps of validation, retrain over class x cluster."""
        network = train_erm(task, config.erm, ctx).module
        assert isinstance(network, Classifier)
        found = find_clusters(network, task, config, ctx)
        clusters = found.tensors["clusters"]
        groups = task.val.y * (clusters.max() + 1) + clusters
        selected, details = retrain_head(network, task, groups, None, config, ctx)
        return FittedClassifier(
            network,
            selection=replace(selected, rule=RULE),
            details={**details, "exmap": found.facts},
            partition=groups,
            partition_split="val",
        )

    def search_space(self, trial: Any, task: Task) -> ExMapConfig:
        """Search what is clustered; the penalty is chosen within the fit."""
        preset: ExMapConfig = preset_config(self, task.name)
        return replace(
            preset,
            gamma=trial.suggest_float("gamma", 0.25, 16.0, log=True),
            variant=trial.suggest_categorical("variant", ["global", "local"]),
        )
