"""The tables of depth: metrics and proxies by iteration, and the choices of both rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from report_records import jobs, record

from bench.paper.depth import depth_choice
from bench.reporting import ReportInput
from bench.reporting.table import Cell, Table


def test_tables_read_each_iteration(
    full_report: dict[str, Table], cells_of: Callable[..., list[Cell]]
) -> None:
    def mean(label: str, **key: str) -> float | None:
        return cells_of(full_report[label], "measured", dataset="umnist", **key)[0].mean

    assert mean("depth_ablation", metric="wga", variant="iteration 1") == 44.0
    assert mean("depth_ablation", metric="avg", variant="iteration 3") == 95.0
    for (metric, variant), expected in {
        ("pwga2_predicted", "iteration 3"): 0.77,
        ("pwga2_routed", "iteration 2"): 0.68,
        ("pwga2_predicted", "iteration 3, last epoch"): 0.57,
        ("pwga2_routed", "iteration 2, last epoch"): 0.48,
    }.items():
        found = mean("depth_diagnostics", metric=metric, variant=variant)
        assert found == pytest.approx(expected)
    assert mean("pwga_corr", metric="spearman_test") == 0.5
    assert mean("pwga_corr", metric="spearman_val") == 0.6


def test_the_best_iteration_is_marked_of_worst_and_average_apart(
    full_report: dict[str, Table],
) -> None:
    rows = {row.header: row.cells for row in full_report["depth_ablation"].rows}
    best = [False, False, True, True, False, False]
    assert [cell.best for cell in rows["UMNIST", "measured"]] == best
    assert [cell.best for cell in rows["ISIC (Non-Patch)", "measured"]] == best


def test_choices_are_counted_by_both_rules(paper_input: Callable[..., ReportInput]) -> None:
    table = depth_choice(paper_input(*(record(job, 95.0) for job in jobs("nct", "umnist", 3))))
    rows = {row.header[1]: row for row in table.rows if row.header[0] == "UMNIST"}
    assert [cell.mean for cell in rows["measured, rule"].cells] == [0, 3, 0]
    assert [cell.mean for cell in rows["measured, highest"].cells] == [0, 0, 3]
    assert [cell.mean for cell in rows["paper"].cells] == [0, 2, 3]
    elsewhere = {row.header[1]: row for row in table.rows if row.header[0] == "CMNIST"}
    assert {cell.reason for cell in elsewhere["measured, rule"].cells} == {"not run"}
    assert elsewhere["paper"].cells[0].mean is not None
