"""What an ablation reads from a run: the metric at each iteration, and two ways to choose one.

The paper's ablation tables take, for each seed, the better of iterations 2 and 3 on test. That is
a choice made on test data, and is labelled so wherever it is shown; the depth rule's own value,
which is what the method would return, stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEST_SELECTED = "better of iterations 2 and 3 (test-selected, as published)"
DEPTH_RULE = "iteration chosen by the depth rule"


def ablation_metric(record: Mapping[str, Any]) -> str:
    """Name the metric of the ablation tables: overall AUROC where there is one, else WGA."""
    return "auroc" if "auroc" in record["metrics"]["test"] else "wga"


def at_iteration(record: Mapping[str, Any], iteration: int) -> float | None:
    """Give the test metric at the end of an iteration, if the run came that far."""
    for entry in record["nct"]["iterations"]:
        if entry["t"] == iteration:
            return float(entry["test"][ablation_metric(record)])
    return None


def selected_on_test(record: Mapping[str, Any]) -> float | None:
    """Give the better of iterations 2 and 3, chosen on test as the paper does."""
    reached = [value for t in (2, 3) if (value := at_iteration(record, t)) is not None]
    return max(reached, default=None)


def selected_by_rule(record: Mapping[str, Any]) -> float | None:
    """Give the iteration that the method itself chose, without looking at test."""
    return at_iteration(record, record["nct"]["chosen_iteration"])
