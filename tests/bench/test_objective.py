"""The firewall around tuning: an objective sees what its tier grants, and never test data."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest

from bench.execute import Machine
from bench.objective import TestDataHidden, TrialView, granted_metrics, target
from bench.plan import Request, expand
from bench.trial import TrialData, run_trial
from datasets.base import GroupLabelsHidden
from datasets.errors import UsageError

NONE = {"train_groups": False, "val_groups": False, "interpretable": False}
VAL = {**NONE, "val_groups": True}
BOTH = {**VAL, "train_groups": True}
SECRET = 12.34567


def record(supervision: dict[str, bool], rule: str, value: float | None = 0.8) -> dict[str, Any]:
    hidden = {"wga": SECRET, "avg_train_weighted": SECRET, "group_accuracy": {"a": SECRET}}
    return {
        "supervision": supervision,
        "selection": {"rule": rule, "value": value, "epoch": 3},
        "metrics": {
            "val": {"avg": 90.0, "auroc": 0.9, "auroc_worst_patch_pair": SECRET, **hidden},
            "test": {"avg": SECRET, "wga": SECRET},
        },
    }


@pytest.mark.parametrize("name", ["wga", "avg_train_weighted", "auroc_worst_patch_pair"])
def test_the_objective_of_an_unsupervised_method_cannot_read_groups(name: str) -> None:
    view = TrialView(record(NONE, "pwga2"), "wga")
    with pytest.raises(GroupLabelsHidden):
        view.val(name)


@pytest.mark.parametrize("supervision", [NONE, VAL, BOTH])
def test_no_objective_reads_test_data(supervision: dict[str, bool]) -> None:
    view = TrialView(record(supervision, "val_wga"), "wga")
    with pytest.raises(TestDataHidden):
        _ = view.test


def test_what_is_hidden_is_not_there() -> None:
    view = TrialView(record(NONE, "pwga2"), "wga")
    assert SECRET not in pickle.loads(pickle.dumps(view))._val.values()
    seen, todo = set(), [view]
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
    supervision: dict[str, bool], rule: str, metric: str, name: str, value: float
) -> None:
    found = target(TrialView(record(supervision, rule), metric))
    assert (found.name, found.value) == (name, value)


def test_a_trial_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="pwga2"):
        target(TrialView(record(NONE, "pwga2", None), "wga"))


def test_group_shares_of_training_are_for_those_who_know_them() -> None:
    metrics = record(NONE, "")["metrics"]["val"]
    assert set(granted_metrics(metrics, NONE)) == {"avg", "auroc"}
    assert "avg_train_weighted" not in granted_metrics(metrics, VAL)
    assert granted_metrics(metrics, BOTH) == metrics


@pytest.mark.parametrize("method", ["nct", "jtt"])
def test_a_trial_never_touches_test_images(
    method: str, digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = expand(Request((method,), ("umnist",), (100,), digits_root, quick=True))[0]
    machine = Machine(digits_root, tmp_path)
    data = TrialData.of(job, machine)
    assert set(data.data.splits) == {"train", "val"}
    asked: list[int] = []
    kind = type(data.data.splits["val"].images)
    batch = kind.batch
    monkeypatch.setattr(kind, "batch", lambda self, i: asked.append(id(self)) or batch(self, i))
    done = run_trial(job, data, machine, lambda progress: None)
    assert done["status"] == "done"
    assert asked and set(asked) <= {id(part.images) for part in data.data.splits.values()}
    assert "test" not in done["metrics"]
    assert ("wga" in done["metrics"]["val"]) == (method == "jtt")
    assert not list((tmp_path / "audits").glob("*"))
