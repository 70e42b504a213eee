"""Records as the store would hold them, made up: for tests of the report that train nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bench.campaigns import CAMPAIGNS, campaign_cells
from bench.plan import NOWHERE, Job, Request, expand
from bench.report.collection import Collection, campaign_ids, classify, published_ids
from datasets.base import Facts
from datasets.catalogue import DATASETS

CLEAN = {"commit": "0" * 40, "dirty": False}


@cache
def known() -> tuple[set[str], dict[str, Any]]:
    return published_ids(), campaign_ids()


@cache
def jobs(method: str, dataset: str, seeds: int = 5) -> tuple[Job, ...]:
    return tuple(expand(Request((method,), (dataset,), tuple(range(seeds)), NOWHERE)))


@cache
def variant_jobs(campaign: str, variant: str, dataset: str) -> tuple[Job, ...]:
    cells = campaign_cells(CAMPAIGNS[campaign], (dataset,), NOWHERE)
    return next(cell.jobs for cell in cells if cell.variant.name == variant)


def record(job: Job, wga: float, **changes: Any) -> dict[str, Any]:
    """A finished run of a job whose worst group comes to `wga`."""
    metrics: dict[str, Any] = {"wga": wga, "avg": wga + 2.0, "avg_train_weighted": wga + 3.0}
    if job.dataset == "isic":
        metrics |= {name: wga / 100 for name in ("auroc", "auroc_nonpatch", "auroc_histopath")}
    facts = DATASETS[job.dataset].facts(DATASETS[job.dataset].config_type())
    metrics["group_accuracy"] = dict.fromkeys(facts.groups, wga)
    metrics["group_count"] = dict.fromkeys(facts.groups, 100)
    made = {
        "run_id": job.run_id,
        "status": "done",
        "method": job.method,
        "dataset": job.dataset,
        "protocol": job.protocol,
        "standin": job.standin,
        "quick": job.quick,
        "preset": job.preset,
        "overrides": job.overrides,
        "variant": job.variant,
        "config": job.config,
        "seed": job.seed,
        "method_version": job.method_version,
        "data_fingerprint": job.fingerprint,
        "supervision": job.supervision,
        "command": job.command(),
        "git": CLEAN,
        "device": "cpu",
        "threads": 1,
        "peak_memory_bytes": 500_000_000,
        "environment": {"processor": "made up", "libraries": {"torch": "2.0"}},
        "stages": [
            {
                "name": "erm",
                "key": f"{job.dataset} {job.seed}",
                "seconds_standalone": 60.0,
                "seconds_marginal": 0.0,
                "image_passes": 9,
                "reused": True,
                "git": CLEAN,
            },
            {
                "name": "fit",
                "key": job.run_id,
                "seconds_standalone": 30.0,
                "seconds_marginal": 30.0,
                "image_passes": 9,
                "reused": False,
                "git": CLEAN,
            },
        ],
        "metrics": {"val": metrics, "test": metrics},
    }
    if job.method == "nct":
        made["nct"] = tree(job, (wga - 50.0, wga, wga - 1.0))
    return {**made, **changes}


def tree(job: Job, worst: tuple[float, ...]) -> dict[str, Any]:
    """What a tree notes: one iteration for each worst-group figure; iteration 2 is chosen."""
    facts = DATASETS[job.dataset].facts(DATASETS[job.dataset].config_type())
    iterations = []
    for t, wga in enumerate(worst, start=1):
        routes = [""] if t == 1 else ["E", "H"] if t == 2 else ["EE", "EH", "HE", "HH"]
        leaves = [f"{code}:{route}" if route else code for code in facts.codes for route in routes]
        test = {"wga": wga, "avg": wga + 2.0}
        if job.dataset == "isic":
            test |= {name: wga / 100 for name in ("auroc", "auroc_nonpatch", "auroc_histopath")}
        count = len(leaves)
        iterations.append(
            {
                "t": t,
                "leaves": leaves,
                "test": test,
                "node_counts": [*(100 + j for j in range(count - 1)), 0 if t > 1 else 100],
                "merged": [count - 1] if t > 1 else [],
                "makeup": makeup(facts, leaves),
                "pwga2": 0.8 - 0.01 * t if t > 1 else None,
                "pwga2_routed": 0.7 - 0.01 * t,
                "logit_mean": [0.5 + j for j in range(count)],
                "logit_std": [1.5 + j for j in range(count)],
                # The last leaf was never chosen.
                "margin_mean": [*(2.0 + j for j in range(count - 1)), None],
                "margin_std": [*(1.0 for _ in range(count - 1)), None],
                "capture": {
                    group: {leaf: 100.0 / count for leaf in leaves} for group in facts.groups
                },
            }
        )
    return {
        "chosen_iteration": 2,
        "argmax_iteration": 3,
        "stop_reason": "made up",
        "spearman_val": 0.6,
        "spearman_test": 0.5,
        "iterations": iterations,
    }


def makeup(facts: Facts, leaves: list[str]) -> dict[str, dict[str, int]]:
    """Put 10 training samples of every group into each leaf of its class."""
    per_class = len(facts.groups) / len(facts.classes)
    return {
        leaf: {
            group: 10
            for g, group in enumerate(facts.groups)
            if facts.codes[min(int(g / per_class), len(facts.classes) - 1)] == leaf.split(":")[0]
        }
        for leaf in leaves
    }


def collection(*records: dict[str, Any], folder: Path = Path("runs")) -> Collection:
    """Classify made-up records by what today's code publishes."""
    return classify(records, folder, *known())
