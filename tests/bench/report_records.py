"""Records as the store would hold them, made up: for tests of the report that train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.job import NO_DATA, Job, Request, expand
from bench.provenance import Environment, GitState, Provenance
from bench.record import Cost, Failure, Metrics, Outcome, Record, StageCost, Status, Unreadable
from bench.reporting import Reference, ReportInput
from bench.reporting.collection import Collection, VariantSpec, collect
from bench.store import Store
from datasets.base import Facts
from datasets.catalogue import get_dataset

CLEAN = GitState("0" * 40, False)
DIRTY = GitState("0" * 40, True)
MACHINE = Environment(processor="made up", libraries={"torch": "2.0"})
AUROCS = ("auroc", "auroc_nonpatch", "auroc_histopath")


@cache
def jobs(method: str, dataset: str, seeds: int = 5) -> tuple[Job, ...]:
    """Jobs of a method's preset, seeds from 0 on."""
    return tuple(expand(Request((method,), (dataset,), tuple(range(seeds)), NO_DATA)))


def changed_jobs(method: str, dataset: str, seeds: Sequence[int], **settings: str) -> list[Job]:
    """Jobs with settings of the method changed by hand."""
    overrides = {f"{method}.{name}": value for name, value in settings.items()}
    return expand(Request((method,), (dataset,), tuple(seeds), NO_DATA, overrides=overrides))


def record(
    job: Job,
    wga: float,
    *,
    run_id: str = "",
    git: GitState = CLEAN,
    stages: Sequence[StageCost] | None = None,
    details: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """A finished run of a job whose worst group comes to `wga`.

    `changes` are of fields of the job, whose identity and id stay as they are.
    """
    if details is None:
        details = {"nct": tree(job, (wga - 50.0, wga, wga - 1.0))} if job.method == "nct" else {}
    return Record(
        job=replace(job, **changes),
        status=Status.DONE,
        provenance=Provenance(
            command=job.command(), device="cpu", threads=1, environment=MACHINE, git=git
        ),
        cost=Cost(tuple(made_up_stages(job) if stages is None else stages), 500_000_000),
        outcome=Outcome({split: metrics(job, wga) for split in ("val", "test")}),
        details=details,
        stored_id=run_id or job.run_id,
    )


def failed(job: Job, kind: str, message: str = "", *, run_id: str = "", **changes: Any) -> Record:
    """A run of a job that failed."""
    return replace(
        record(job, 0.0, run_id=run_id, stages=(), details={}, **changes),
        status=Status.FAILED,
        outcome=None,
        failure=Failure(kind, message),
    )


def facts_of(dataset: str) -> Facts:
    """The constants of a dataset's usual protocol."""
    found = get_dataset(dataset)
    return found.facts(found.config_type())


def metrics(job: Job, wga: float) -> Metrics:
    """The metrics of a split whose worst group comes to `wga`."""
    values = {"wga": wga, "avg": wga + 2.0, "avg_train_weighted": wga + 3.0}
    if job.dataset == "isic":
        values |= dict.fromkeys(AUROCS, wga / 100)
    groups = facts_of(job.dataset).groups
    return Metrics(values, dict.fromkeys(groups, wga), dict.fromkeys(groups, 100))


def stage(name: str, key: str, seconds: float, *, reused: bool = False, **more: Any) -> StageCost:
    """What a stage took."""
    values = {"cpu_seconds": seconds / 2, "image_passes": 9, "git": CLEAN, **more}
    return StageCost(name, key, seconds, 0.0 if reused else seconds, reused=reused, **values)


def made_up_stages(job: Job) -> list[StageCost]:
    """A first stage that another run had made, and the fit itself."""
    return [
        stage("erm", f"{job.dataset} {job.seed}", 60.0, reused=True),
        stage("fit", job.run_id, 30.0),
    ]


def tree(job: Job, worst: tuple[float, ...]) -> dict[str, Any]:
    """What a tree notes: one iteration for each worst-group figure; iteration 2 is chosen."""
    facts = facts_of(job.dataset)
    iterations = []
    for t, wga in enumerate(worst, start=1):
        routes = [""] if t == 1 else ["E", "H"] if t == 2 else ["EE", "EH", "HE", "HH"]
        leaves = [f"{code}:{route}" if route else code for code in facts.codes for route in routes]
        test = {"wga": wga, "avg": wga + 2.0}
        if job.dataset == "isic":
            test |= dict.fromkeys(AUROCS, wga / 100)
        count = len(leaves)
        iterations.append(
            {
                "t": t,
                "leaves": leaves,
                "test": test,
                "node_counts": [*(100 + j for j in range(count - 1)), 0 if t > 1 else 100],
                "merged": [count - 1] if t > 1 else [],
                "makeup": makeup(facts, leaves),
                "phase": 2,
                "pwga2": 0.7 - 0.01 * t if t > 1 else None,
                "pwga2_predicted": 0.8 - 0.01 * t,
                "pwga2_routed": 0.7 - 0.01 * t,
                "logit_mean": [0.5 + j for j in range(count)],
                "logit_std": [1.5 + j for j in range(count)],
                # The last leaf was never chosen.
                "margin_mean": [*(2.0 + j for j in range(count - 1)), None],
                "margin_std": [*(1.0 for _ in range(count - 1)), None],
                "capture": {
                    group: {leaf: 100.0 / count for leaf in leaves} for group in facts.groups
                },
                "end": {
                    "phase": 2,
                    "epoch": 3,
                    "leaves": leaves,
                    "test": test,
                    "pwga2": 0.5 - 0.01 * t if t > 1 else None,
                    "pwga2_predicted": 0.6 - 0.01 * t,
                    "pwga2_routed": 0.5 - 0.01 * t,
                    "logit_mean": [10.5 + j for j in range(count)],
                    "logit_std": [2.5 + j for j in range(count)],
                    "margin_mean": [*(3.0 + j for j in range(count - 1)), None],
                    "margin_std": [*(2.0 for _ in range(count - 1)), None],
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
    """10 training samples of every group in each leaf of its class."""
    per_class = len(facts.groups) / len(facts.classes)
    return {
        leaf: {
            group: 10
            for g, group in enumerate(facts.groups)
            if facts.codes[min(int(g / per_class), len(facts.classes) - 1)] == leaf.split(":")[0]
        }
        for leaf in leaves
    }


class MadeUpStore(Store):
    """A store of records that were never written."""

    def __init__(self, folder: Path, records: Sequence[Record | Unreadable]) -> None:
        super().__init__(folder.parent)
        self.runs, self.made_up = folder, records

    def read_all(self) -> Iterator[Record | Unreadable]:
        yield from self.made_up


def collection(
    *records: Record | Unreadable,
    folder: Path = Path("runs"),
    variants: Sequence[VariantSpec] = (),
) -> Collection:
    """Classify made-up records by what today's code publishes."""
    return collect(MadeUpStore(folder, records), variants)


def given(
    runs: Collection, reference: Reference | None = None, data_root: Path = Path("no-data")
) -> ReportInput:
    """What a table is made from."""
    return ReportInput(runs, data_root, reference or Reference())
