"""Where a run belongs: only what the contract allows reaches a paper table."""

from __future__ import annotations

from typing import Any

import pytest
from report_records import collection, jobs, record, variant_jobs

from bench.report.collection import Kind

DIRTY = {"commit": "0" * 40, "dirty": True}


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, "published", ""),
        ({"standin": True}, "trial", "stand-in data"),
        ({"quick": True}, "trial", "quick run"),
        ({"preset": "mine"}, "left out", "preset mine"),
        ({"git": DIRTY}, "left out", "code with uncommitted changes, or of no known commit"),
        ({"git": {"commit": None, "dirty": None}}, "left out", "code with uncommitted changes"),
        (
            {"stages": [{"seconds_standalone": 1.0, "git": DIRTY}]},
            "left out",
            "code with uncommitted changes",
        ),
        ({"run_id": "erm-umnist-s0-old"}, "left out", "an earlier version"),
        ({"run_id": "erm-umnist-s0-x", "seed": 100}, "left out", "development seed"),
        (
            {"run_id": "erm-umnist-s0-y", "overrides": {"erm.lr": "1"}},
            "left out",
            "settings changed by hand",
        ),
        (
            {"status": "failed", "failure": {"kind": "out_of_memory"}},
            "left out",
            "failed (out_of_memory)",
        ),
    ],
)
def test_a_run_is_placed_with_the_reason(changes: dict[str, Any], kind: Kind, reason: str) -> None:
    (run,) = collection(record(jobs("erm", "umnist")[0], 90.0, **changes)).runs
    assert run.kind == kind
    assert run.reason.startswith(reason)
    assert bool(run.reason) == (kind != "published")


def test_a_campaigns_run_stands_in_its_column_alone() -> None:
    job = variant_jobs("ablation-scope", "scope=head_only", "umnist")[0]
    runs = collection(record(job, 60.0))
    assert [run.kind for run in runs.runs] == ["variant"]
    assert len(runs.variant("ablation-scope", "scope=head_only", "umnist")) == 1
    assert runs.published("nct", "umnist") == []
    assert "not run" in runs.absence("nct", "umnist")


def test_a_default_column_holds_the_main_runs() -> None:
    runs = collection(*(record(job, 95.0) for job in jobs("nct", "umnist")))
    assert len(runs.variant("ablation-scope", "scope=standard", "umnist")) == 5
    assert len(runs.variant("ablation-merging", "min_samples=20", "umnist")) == 3


def test_runs_of_another_preset_do_not_mix_with_the_papers() -> None:
    first, second = jobs("erm", "umnist")[:2]
    tuned = record(second, 99.0, preset="tuned")
    assert [r.kind for r in collection(tuned).runs] == ["published"]
    runs = collection(record(first, 90.0), tuned)
    assert [run.kind for run in runs.runs] == ["published", "left out"]
    assert "paper's preset" in runs.runs[1].reason


def test_absence_names_what_became_of_the_runs() -> None:
    first, second = jobs("erm", "umnist")[:2]
    failed = {"status": "failed", "failure": {"kind": "data"}}
    runs = collection(record(first, 0.0, **failed), record(second, 1.0, standin=True))
    assert runs.absence("erm", "umnist") == (
        "no run that may stand here (1 failed (data), 1 stand-in data)"
    )
    assert runs.absence("jtt", "umnist") == "not run"
