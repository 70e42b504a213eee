"""The terminal shows validation figures of development seeds, and test figures of the others."""

from __future__ import annotations

from typing import Any

import pytest
from report_records import collection, jobs, record

from bench.commands.results import print_results
from bench.development import FIRST_DEVELOPMENT_SEED
from bench.grid import Seen
from bench.plan import NOWHERE, Request, expand
from bench.progress import outcome
from bench.report.html import run_row
from bench.store import Store

GROUPS = {"supervision": {"val_groups": True}}
METRICS = {"val": {"wga": 61.0, "avg": 71.0}, "test": {"wga": 62.0, "avg": 72.0}}


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (4, "WGA 62.0, average 72.0"),
        (FIRST_DEVELOPMENT_SEED - 1, "WGA 62.0, average 72.0"),
        (FIRST_DEVELOPMENT_SEED, "validation WGA 61.0, average 71.0"),
    ],
)
def test_a_run_ends_with_the_figures_of_its_split(seed: int, text: str) -> None:
    assert outcome({**GROUPS, "status": "done", "seed": seed, "metrics": METRICS}) == text


def test_worst_groups_are_not_shown_where_the_tier_has_no_validation_groups() -> None:
    done = {"status": "done", "metrics": METRICS, "supervision": {"val_groups": False}}
    done["selection"] = {"rule": "pwga2", "value": 0.81}
    assert outcome({**done, "seed": 100}) == "validation selection 0.81, average 71.0"
    assert outcome({**done, "seed": 0}) == "WGA 62.0, average 72.0"
    for nothing in ({}, {"rule": "last", "value": None}):
        done["selection"] = nothing
        assert outcome({**done, "seed": 100}) == "validation average 71.0"


def test_aurocs_too() -> None:
    metrics = {"val": {"auroc": 0.9, "auroc_nonpatch": 0.7}, "test": {"auroc": 0.8}}
    done = {**GROUPS, "status": "done", "metrics": metrics}
    assert outcome({**done, "seed": 100}) == "validation AUROC 0.900, non-patch 0.700"
    assert outcome({**done, "seed": 0}) == "AUROC 0.800"


def test_the_table_of_a_run_shows_no_test_figure_of_a_development_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = [*jobs("erm", "umnist", 1), *expand(Request(("erm",), ("umnist",), (100,), NOWHERE))]
    done = {**GROUPS, "status": "done", "metrics": METRICS}
    seen = {job.run_id: Seen("done", {**done, "seed": job.seed}) for job in both}
    print_results(both, Store(NOWHERE), seen)
    test, validation = capsys.readouterr().out.split("Validation set")
    assert "Test set" in test and "62.0" in test and "72.0" in test
    assert "61.0" in validation and "71.0" in validation
    assert not any(figure in validation for figure in ("62.0", "72.0"))
    assert not any(figure in test for figure in ("61.0", "71.0"))


def test_the_list_of_runs_shows_none_either() -> None:
    published = record(jobs("erm", "umnist", 1)[0], 62.0)
    (job,) = expand(Request(("erm",), ("umnist",), (100,), NOWHERE))
    shown: dict[int, Any] = {}
    for run in collection(published, record(job, 62.0)).runs:
        row = run_row(run)
        shown[row["seed"]] = (row["worst"], row["average"], row["kind"])
    assert shown == {0: (62.0, 64.0, "published"), 100: (None, None, "left out")}
