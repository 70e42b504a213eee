"""ExMap: clusters of relevance heatmaps, and the last layer retrained on data balanced over them.

Paper: Chakraborty, Sletten and Kampffmeyer 2024, ExMap: Leveraging Explainability Heatmaps for
    Unsupervised Group Robustness to Spurious Correlations; authors' code rwchakra/exmap.
    Supervision: none (T no, V no).
Deviations: every draw is seeded by the run, and a run retrains once (20 fits averaged), where the
    authors repeat that five times on one checkpoint. Eigenvectors come from Lanczos iterations
    instead of LOBPCG, and those of the graph's separate parts are computed directly. Classes too
    small to cluster stay whole. Networks start from this suite's ImageNet weights (the authors' are
    torchvision's second set). More than two classes: the relevance is that of the predicted one of
    them all, and the layer is fitted one class against the rest. liblinear stops at a tolerance of
    1e-2 instead of 1e-4. On ISIC the penalty is chosen by the worst pair's AUROC.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from datasets.base import Task
from methods.backbones import Classifier
from methods.base import Context, Fitted, Method, StageResult, register
from methods.classifier import FittedClassifier, PlainNetwork
from methods.clustering import ClusterConfig, fit_clusters
from methods.erm import ErmConfig, train_erm
from methods.optimisation import demand
from methods.prediction import EvalImages
from methods.presets import preset_config
from methods.relevance import batch_size_for, heatmaps
from methods.retraining import RetrainConfig, retrain_head
from methods.spectral import Clustering, Floats, neighbours_of, spectral_clusters

STAGE_VERSION = 1
SAVE_EVERY = 64  # batches of heatmaps, which are 20 minutes of a CPU's work on a ResNet-50
FEWEST = 12  # samples that UMAP can lay out
RULE = "held_out_worst_pseudo_group"


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
        demand(0 <= self.gamma < float("inf"), f"gamma cannot be negative but got {self.gamma}")
        demand(
            self.heatmap_side >= 0, f"heatmap_side cannot be negative but got {self.heatmap_side}"
        )
        demand(
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


def explain(network: Classifier, task: Task, config: HeatmapConfig, ctx: Context) -> Tensor:
    """Compute the heatmaps of validation, a row an image, from the last checkpoint on."""
    saved = ctx.restore("heatmaps")
    rows: list[Tensor] = [saved["rows"].cpu()] if saved is not None else []
    done, total = sum(map(len, rows)), len(task.val)
    if done < total:
        rest = task.val.images.subset(torch.arange(done, total))
        images = EvalImages(rest, task.eval_transform, batch_size_for(task.eval_transform))
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
        if len(points) < max(FEWEST, config.max_clusters):
            return Clustering(np.zeros(len(points), np.int64), 1)
        from umap import UMAP

        layout = UMAP(n_neighbors=neighbours_of(len(points)), random_state=seed, n_jobs=1)
        plane = layout.fit_transform(points).astype(np.float64)
        model = fit_clusters(plane, config.max_clusters, ClusterConfig("kmeans"), seed)
        return Clustering(model.labels_.astype(np.int64), config.max_clusters)


def find_clusters(
    network: Classifier, task: Task, config: ExMapConfig, ctx: Context
) -> StageResult:
    """Cluster the heatmaps of validation, all at once or class by class."""
    own = HeatmapConfig(**{knob.name: getattr(config, knob.name) for knob in fields(HeatmapConfig)})

    def compute(ctx: Context) -> StageResult:
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
            "clusters": [one.count for one in found],
            "cluster_sizes": [np.bincount(one.labels).tolist() for one in found],
            "eigenvalues": [list(one.eigenvalues) for one in found],
        }
        return StageResult({"clusters": clusters}, facts)

    return ctx.stage("exmap-clusters", own, compute, STAGE_VERSION)


@register("exmap", version=1, config=ExMapConfig)
class ExMap(PlainNetwork, Method):
    """Keep ERM's features; fit the last layer again on what its explanations tell apart."""

    def fit(self, task: Task, config: ExMapConfig, ctx: Context) -> Fitted:
        """Train by ERM, cluster its heatmaps of validation, retrain over class x cluster."""
        network = train_erm(task, config.erm, ctx).module
        assert isinstance(network, Classifier)
        found = find_clusters(network, task, config, ctx)
        clusters = found.tensors["clusters"]
        groups = task.val.y * (clusters.max() + 1) + clusters
        facts = retrain_head(network, task, groups, None, config, ctx)
        facts["selection"]["rule"] = RULE
        facts["exmap"] = found.facts
        fitted = FittedClassifier(network, facts, groups)
        fitted.partition_split = "val"
        return fitted

    def search_space(self, trial: Any, task: Task) -> ExMapConfig:
        """Search what is clustered; the penalty is chosen within the fit."""
        preset: ExMapConfig = preset_config(self, task.name)
        return replace(
            preset,
            gamma=trial.suggest_float("gamma", 0.25, 16.0, log=True),
            variant=trial.suggest_categorical("variant", ["global", "local"]),
        )
