"""The store as the report sees it: every record read once, and where each run belongs.

A run is published (a paper table may show it), a campaign's variant (its own column of an ablation
may), a trial (stand-in data or a quick run: a section of its own), or left out with the reason.
Records stay in memory; the tables beside them are read when asked for and not kept, so that a
store of thousands of runs fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from bench.campaigns import CAMPAIGNS, campaign_cells
from bench.development import FIRST_DEVELOPMENT_SEED
from bench.plan import NOWHERE, Request, expand
from bench.store import Store
from datasets.catalogue import DATASETS
from datasets.errors import UsageError
from methods.base import load_methods
from methods.presets import PRESETS

Kind = Literal["published", "variant", "trial", "left out"]
VariantKey = tuple[str, str]
"""Campaign, variant."""

FIRST_PRESET = "paper"
PUBLISHED_SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Run:
    """One stored run and where it belongs.

    Attributes:
        reason: why it is a trial or left out.
        variants: the campaign columns it stands in; a published run may stand in some too.
    """

    record: dict[str, Any]
    folder: Path
    kind: Kind
    reason: str = ""
    variants: tuple[VariantKey, ...] = ()

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.record["run_id"])

    def history(self) -> pd.DataFrame | None:
        """Read the history, epoch by epoch; nothing if there is none."""
        return _parquet(self.folder / "history.parquet")

    def predictions(self, columns: list[str] | None = None) -> pd.DataFrame | None:
        """Read the predictions of validation and test samples; nothing if there are none."""
        return _parquet(self.folder / "predictions.parquet", columns)


@dataclass(frozen=True)
class Collection:
    """All runs of a store, classified."""

    runs: tuple[Run, ...] = ()
    by_id: Mapping[str, Run] = field(default_factory=dict)

    def of_kind(self, kind: Kind) -> list[Run]:
        """List the runs of one kind, in the store's order."""
        return [run for run in self.runs if run.kind == kind]

    def published(self, method: str, dataset: str) -> list[Run]:
        """List the runs that a paper table may average, by seed."""
        return self._published.get((method, dataset), [])

    def variant(self, campaign: str, variant: str, dataset: str) -> list[Run]:
        """List the runs of one campaign column on one dataset, by seed."""
        return self._variants.get((campaign, variant, dataset), [])

    def absence(self, method: str, dataset: str) -> str:
        """Say why there is no published number: nothing was run, or what became of the runs."""
        reasons = self._reasons.get((method, dataset))
        if not reasons:
            return "not run"
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
        return f"no run that may stand here ({found})"

    @cached_property
    def _published(self) -> dict[tuple[str, str], list[Run]]:
        grouped: dict[tuple[str, str], list[Run]] = {}
        for run in sorted(self.of_kind("published"), key=_seed):
            grouped.setdefault((run.record["method"], run.record["dataset"]), []).append(run)
        return grouped

    @cached_property
    def _variants(self) -> dict[tuple[str, str, str], list[Run]]:
        grouped: dict[tuple[str, str, str], list[Run]] = {}
        for run in sorted((run for run in self.runs if run.variants), key=_seed):
            for key in run.variants:
                grouped.setdefault((*key, run.record["dataset"]), []).append(run)
        return grouped

    @cached_property
    def _reasons(self) -> dict[tuple[str, str], Counter[str]]:
        counted: dict[tuple[str, str], Counter[str]] = {}
        for run in self.runs:
            if run.kind in ("trial", "left out"):
                key = (run.record["method"], run.record["dataset"])
                counted.setdefault(key, Counter())[run.reason] += 1
        return counted


def collect(store: Store) -> Collection:
    """Read and classify every record of a store."""
    return classify(store.records(), store.runs, published_ids(), campaign_ids())


def classify(
    records: Iterable[dict[str, Any]],
    folder: Path,
    published: set[str],
    campaigns: Mapping[str, tuple[VariantKey, ...]],
) -> Collection:
    """Classify records by what today's code calls a published run and a campaign's.

    Args:
        records: as stored.
        folder: where the runs' folders lie.
        published: ids of the main table's runs.
        campaigns: for the id of each campaign's run, the columns it stands in.
    """
    runs = []
    for record in records:
        run_id = str(record["run_id"])
        kind, reason = _place(record, published, campaigns)
        variants = campaigns.get(run_id, ()) if kind in ("published", "variant") else ()
        runs.append(Run(record, folder / run_id, kind, reason, variants))
    kept = _one_preset(runs)
    return Collection(tuple(kept), {run.run_id: run for run in kept})


def _one_preset(runs: list[Run]) -> list[Run]:
    """Let a cell average runs of one preset only: the paper's where it was run, else another."""
    published = [run.record for run in runs if run.kind == "published"]
    papers = {(r["method"], r["dataset"]) for r in published if r["preset"] == FIRST_PRESET}

    def kept(run: Run) -> Run:
        record = run.record
        shadowed = (record["method"], record["dataset"]) in papers
        if run.kind != "published" or record["preset"] == FIRST_PRESET or not shadowed:
            return run
        reason = f"preset {record['preset']}, where runs of the paper's preset stand"
        return replace(run, kind="left out", reason=reason, variants=())

    return [kept(run) for run in runs]


def published_ids() -> set[str]:
    """Name the runs of the main table: today's methods and presets, every dataset, seeds 0-4."""
    found = set()
    for preset in PRESETS:
        for method in load_methods():
            for dataset in DATASETS:
                request = Request((method,), (dataset,), PUBLISHED_SEEDS, NOWHERE, preset)
                with suppress(UsageError):  # a preset that this method has not got here
                    found |= {job.run_id for job in expand(request)}
    return found


def campaign_ids() -> dict[str, tuple[VariantKey, ...]]:
    """Name the runs of every ablation, each with the columns it stands in.

    A default column is the main runs themselves, so that a published run may stand there too.
    """
    found: dict[str, list[VariantKey]] = {}
    for campaign in CAMPAIGNS.values():
        if len(campaign.variants) > 1:
            for cell in campaign_cells(campaign, tuple(DATASETS), NOWHERE):
                for job in cell.jobs:
                    found.setdefault(job.run_id, []).append((campaign.name, cell.variant.name))
    return {run_id: tuple(columns) for run_id, columns in found.items()}


def _place(
    record: dict[str, Any], published: set[str], campaigns: Mapping[str, tuple[VariantKey, ...]]
) -> tuple[Kind, str]:
    """Say where a run belongs, and unless a paper table may show it, why."""
    if record["status"] != "done":
        failure = record.get("failure", {}).get("kind", "")
        return "left out", f"{record['status']} ({failure})" if failure else str(record["status"])
    if record["standin"]:
        return "trial", "stand-in data"
    if record["quick"]:
        return "trial", "quick run"
    if record.get("stack"):
        return "left out", "seeds stacked into one model"
    if record["preset"] not in ("paper", "tuned"):
        return "left out", f"preset {record['preset']}"
    states = [record["git"], *(stage["git"] for stage in record["stages"])]
    if any(state["dirty"] is not False for state in states):
        return "left out", "code with uncommitted changes, or of no known commit"
    if record["run_id"] in published:
        return "published", ""
    if record["run_id"] in campaigns:
        return "variant", ""
    if record["overrides"]:
        return "left out", "settings changed by hand"
    if record["seed"] not in PUBLISHED_SEEDS:
        developed = record["seed"] >= FIRST_DEVELOPMENT_SEED
        return "left out", "development seed" if developed else "a seed that is not published"
    return "left out", "an earlier version of the method, its preset or its data"


def _seed(run: Run) -> tuple[int, str]:
    return run.record["seed"], run.run_id


def _parquet(path: Path, columns: list[str] | None = None) -> pd.DataFrame | None:
    return pd.read_parquet(path, columns=columns) if path.is_file() else None
