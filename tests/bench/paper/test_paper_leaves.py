"""Leaves: capture rates and the calibration of heads are those of the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from report_records import collection, jobs, record

from bench.paper.depth import depth_diagnostics
from bench.paper.leaves import capture_rates, cmnist_calibration, draw_captures
from bench.record import Record
from bench.reporting import ReportInput
from bench.reporting.figure import Drawn, FigureInput
from bench.reporting.table import Cell, Table


def captured(made: Record) -> dict[str, Any]:
    """The captured shares of a made-up record, for a test to change."""
    tree: Any = made.details["nct"]
    capture: dict[str, Any] = tree["iterations"][1]["capture"]
    return capture


def panel(*records: Record) -> Any:
    result = draw_captures(2, FigureInput(tuple(collection(*records).of_kind("published"))))
    assert isinstance(result, Drawn)
    return result.figure.axes[0]


def test_a_star_adds_up_all_leaves_with_a_hard_split(
    full_report: dict[str, Table], cells_of: Callable[..., list[Cell]]
) -> None:
    table = full_report["capture_rates"]
    variant = "iteration 3 digit_8 in 5-9:*H*"
    (rate,) = cells_of(table, "measured", dataset="umnist", variant=variant)
    assert rate.mean == pytest.approx(3 * 100 / 8)  # EH, HE and HH


def test_rates_of_sets_of_groups_take_the_samples_own_class(
    paper_input: Callable[..., ReportInput], cells_of: Callable[..., list[Cell]]
) -> None:
    made = record(jobs("nct", "cmnist")[0], 70.0)
    capture = captured(made)
    for number, group in enumerate(capture):
        own = ("0-1", "2-3", "4-5", "6-7", "8-9")[number // 5]
        capture[group] = {f"{own}:E": 80.0, f"{own}:H": 20.0}
    found = cells_of(capture_rates(paper_input(made)), "measured", dataset="cmnist")
    assert [cell.mean for cell in found[:2]] == [80.0, 20.0]


def test_bars_are_the_shares_of_the_record() -> None:
    made = []
    for job, share in zip(jobs("nct", "umnist", 2), (60.0, 80.0), strict=True):
        made.append(record(job, 90.0))
        captured(made[-1])["digit_8"] = {"5-9:H": share, "5-9:E": 100 - share}
    heights = sorted(round(patch.get_height(), 6) for patch in panel(*made).patches)
    assert heights.count(70.0) == 1 and heights.count(30.0) == 1


def test_cmnist_stacks_conflicting_colours_against_the_aligned() -> None:
    made = record(jobs("nct", "cmnist", 1)[0], 90.0)
    assert made.outcome is not None
    counts = dict(made.test.group_count)
    groups = [group for group in counts if group.startswith("digits_0_1/")]
    for group, share in zip(groups, (100.0, 80.0, 60.0, 40.0, 20.0), strict=True):
        captured(made)[group] = {"0-1:H": share}
    counts[groups[1]] = 300  # a larger group weighs more in the stack
    test = replace(made.test, group_count=counts)
    metrics = {**made.outcome.metrics, "test": test}
    patches = panel(replace(made, outcome=replace(made.outcome, metrics=metrics))).patches
    hard = [p for p in patches if 0.5 < p.get_x() + p.get_width() / 2 < 1.5]
    assert hard[0].get_height() == 100.0
    stack = sum(patch.get_height() for patch in hard[1:])
    assert len(hard) == 5 and stack == pytest.approx((3 * 80 + 60 + 40 + 20) / 6)


def test_spread_is_the_one_within_a_head(
    full_report: dict[str, Table], cells_of: Callable[..., list[Cell]]
) -> None:
    head = {"dataset": "umnist", "variant": "iteration 2 head 3"}
    (logit,) = cells_of(full_report["logit_stats"], "measured", **head)
    assert (logit.mean, logit.std, logit.n) == (3.5, 4.5, 5)
    (unused,) = cells_of(full_report["margins"], "measured", **head)
    assert unused.mean is None and "merged or never chosen" in unused.reason
    head["variant"] += ", last epoch"
    (logit,) = cells_of(full_report["logit_stats"], "measured", **head)
    assert (logit.mean, logit.std, logit.n) == (13.5, 5.5, 5)
    (unused,) = cells_of(full_report["margins"], "measured", **head)
    assert unused.mean is None and "merged or never chosen" in unused.reason


def test_runs_without_their_last_epochs_say_so(
    paper_input: Callable[..., ReportInput], cells_of: Callable[..., list[Cell]]
) -> None:
    made = record(jobs("nct", "cmnist")[0], 70.0)
    tree: Any = made.details["nct"]
    for iteration in tree["iterations"]:
        del iteration["end"]
    given = paper_input(made)
    for table in (cmnist_calibration(given), depth_diagnostics(given)):
        found = cells_of(table, "measured", dataset="cmnist")
        last = [cell for cell in found if cell.key.variant.endswith("last epoch")]
        assert last and {cell.reason for cell in last} == {"recorded from version 2 of NCT on"}
        kept = [cell for cell in found if cell not in last]
        assert kept and all(cell.mean is not None for cell in kept)


def test_heads_of_cmnist_are_summed_up(
    paper_input: Callable[..., ReportInput], cells_of: Callable[..., list[Cell]]
) -> None:
    table = cmnist_calibration(paper_input(record(jobs("nct", "cmnist")[0], 70.0)))
    second, last = (
        {c.key.metric: c.mean for c in cells_of(table, "measured", variant=f"iteration 2{which}")}
        for which in ("", ", last epoch")
    )
    assert last["logit_mean_lowest"] == 10.5 and last["logit_std_average"] == 7.0
    assert second == {
        "logit_mean_lowest": 0.5,
        "logit_mean_highest": 9.5,
        "logit_std_average": 6.0,
        "margin_mean_lowest": 2.0,  # the head that was never chosen is left out
    }
