"""The firewall around tuning: an objective sees what its tier grants, and never test data."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation import granted_metrics
from bench.job import Request, expand
from bench.record import Metrics, Outcome, Selection, Status, new_record
from bench.runner import RunOptions, run_job
from bench.store import Store
from bench.tuning.source import SPLITS, StudySource, Tuning, objective_value
from datasets.base import Facts
from datasets.catalogue import get_dataset
from methods.base import Supervision
from methods.selection import RULES

NONE = Supervision()
VAL = Supervision(val_groups=True)
BOTH = Supervision(train_groups=True, val_groups=True)
SECRET = 12.34567
HIDDEN = {"wga": SECRET, "avg_train_weighted": SECRET, "auroc_worst_patch_pair": SECRET}
VAL_METRICS = Metrics({"avg": 90.0, "auroc": 0.9, **HIDDEN}, {"a": SECRET}, {"a": 7})


def facts(metric: str) -> Facts:
    dataset = get_dataset("isic" if metric == "auroc" else "umnist")
    return dataset.facts(dataset.config_type())


def objective(
    tier: Supervision, rule: str, metric: str, value: float = 0.8, val: Metrics = VAL_METRICS
) -> tuple[str, float | None]:
    selected = Selection(rule, value, 3)
    return objective_value(selected, granted_metrics(val, tier), tier, facts(metric))


def test_what_is_hidden_is_not_there(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a trial's record had it, no reference would lead from the objective to it."""
    given: list[Any] = []

    def spy(selected: Any, val: Any, tier: Any, facts: Facts) -> tuple[str, float]:
        given.extend((selected, val, tier))
        return "val_avg", 90.0

    monkeypatch.setattr("bench.tuning.source.objective_value", spy)
    metrics = {"val": VAL_METRICS, "test": Metrics({"avg": SECRET, "wga": SECRET})}
    tuning = Tuning("erm", "umnist", digits_root, tmp_path, trials=1, quick=True)
    with StudySource(tuning, print) as source:
        job = source.next()
        assert job is not None
        outcome = Outcome(metrics, Selection("val_avg", 90.0, 3))
        source.finish(job, new_record(job, Status.DONE, outcome=outcome))
        assert source.exhausted
    assert given[1].values == {"avg": 90.0, "auroc": 0.9} and given[2] == NONE
    seen, todo = set(), given
    while todo:
        thing: Any = todo.pop()
        if id(thing) not in seen and not isinstance(thing, type):
            seen.add(id(thing))
            assert not (isinstance(thing, float) and thing == SECRET)
            todo += gc.get_referents(thing)


@pytest.mark.parametrize(
    ("supervision", "rule", "metric", "name", "value"),
    [
        (NONE, "pwga2", "wga", "pwga2", 0.8),  # NCT
        (NONE, "pseudo_auroc", "auroc", "pseudo_auroc", 0.8),  # NCT on ISIC
        (NONE, "worst_cluster", "wga", "worst_cluster", 0.8),  # GEORGE
        (NONE, "val_avg", "wga", "val_avg", 90.0),  # ERM
        (NONE, "last", "wga", "val_avg", 90.0),  # ERM without selection
        (NONE, "val_auroc", "auroc", "val_auroc", 0.9),  # ERM on ISIC
        (VAL, "val_wga", "wga", "val_wga", 0.8),
        (VAL, "val_worst_auroc", "auroc", "val_worst_auroc", 0.8),
        (VAL, "held_out_worst_group", "wga", "held_out_worst_group", 0.8),  # DFR fits on validation
        (VAL, "last", "wga", "val_wga", SECRET),
        (BOTH, "val_avg", "auroc", "val_auroc_worst_patch_pair", SECRET),
    ],
)
def test_each_tier_has_its_objective(
    supervision: Supervision, rule: str, metric: str, name: str, value: float
) -> None:
    assert objective(supervision, rule, metric) == (name, value)


@pytest.mark.parametrize("metric", ["wga", "auroc"])
@pytest.mark.parametrize("rule", [*RULES, "", "pwga2"])
def test_the_objective_of_an_unsupervised_method_reads_no_groups(rule: str, metric: str) -> None:
    _, value = objective(NONE, rule, metric)
    assert value in (90.0, 0.9, 0.8)


def test_nothing_is_made_of_a_trial_without_a_value() -> None:
    assert objective(NONE, "pwga2", "wga", math.nan) == ("pwga2", None)
    hidden = Metrics({"wga": SECRET})
    assert objective(NONE, "last", "wga", val=hidden) == ("val_avg", None)
    assert objective_value(None, Metrics({"avg": 90.0}), NONE, facts("wga")) == ("val_avg", 90.0)


def test_group_shares_of_training_are_for_those_who_know_them() -> None:
    unsupervised = granted_metrics(VAL_METRICS, NONE)
    assert set(unsupervised.values) == {"avg", "auroc"} and not unsupervised.group_accuracy
    assert "avg_train_weighted" not in granted_metrics(VAL_METRICS, VAL).values
    assert granted_metrics(VAL_METRICS, BOTH) == VAL_METRICS


@pytest.mark.parametrize("method", ["nct", "jtt"])
def test_a_trial_never_touches_test_images(
    method: str, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = expand(Request((method,), ("umnist",), (100,), digits_root, quick=True))
    opened: list[set[str]] = []
    kind = type(get_dataset("umnist"))
    images = kind.images

    def counted(self: Any, folder: Path, config: Any, labels: Any, progress: Any) -> Any:
        opened.append(set(labels))
        return images(self, folder, config, labels, progress)

    monkeypatch.setattr(kind, "images", counted)
    options = RunOptions(digits_root, tmp_path, isolate=False)
    done = run_job(replace(job, splits=SPLITS), options, lambda progress: None)
    assert done.status is Status.DONE and done.run_id == job.run_id
    assert opened == [{"train", "val"}]
    assert done.outcome is not None and set(done.outcome.metrics) == {"val"}
    assert ("wga" in done.val.values) == (method == "jtt")
    assert not list((tmp_path / "audits").glob("*"))
    store = Store(tmp_path)
    stored = store.record(job.run_id)
    assert stored == replace(done, stored_id=job.run_id, files=stored.files)
    assert set(stored.files) == {"history.parquet"}
    assert store.predictions(job.run_id) is None
