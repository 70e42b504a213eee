"""The table of C: what was chosen, and whether the grid ended there; records of both versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from report_records import jobs, record

from bench.paper.retraining import retraining
from bench.record import Record
from bench.reporting import ReportInput

MakeInput = Callable[..., ReportInput]


def retrained(method: str, *told: dict[str, Any]) -> list[Record]:
    made = jobs(method, "cmnist", len(told))
    return [
        record(job, 50.0, details={"retraining": own}) for job, own in zip(made, told, strict=True)
    ]


def test_ends_of_the_grid_are_counted_and_say_whether_they_are_open(
    paper_input: MakeInput,
) -> None:
    told = (
        {"penalty": 1.0, "penalty_edge": None, "penalty_open": False},
        {"penalty": 33.3, "penalty_edge": "largest", "penalty_open": False},
        {"penalty": 111.0, "penalty_edge": "largest", "penalty_open": True},
    )
    (row,) = retraining(paper_input(*retrained("dfr", *told))).rows
    grid, chosen, at_end, still_open = row.cells
    assert row.header == ("DFR", "CMNIST")
    assert grid.label == "0.01 to 10, 7 values"
    assert chosen.label == "111 (1), 33.3 (1), 1 (1)"
    assert (at_end.mean, still_open.mean, still_open.note) == (2.0, 1.0, "of 3")
    assert len(chosen.run_ids) == 3


def test_a_record_without_the_ends_is_open_at_both(paper_input: MakeInput) -> None:
    told = [{"penalty": value} for value in (10.0, 10.0, 0.01, 0.3)]
    (row,) = retraining(paper_input(*retrained("dfr", *told))).rows
    assert row.cells[1].label == "10 (2), 0.3 (1), 0.01 (1)"
    assert [cell.mean for cell in row.cells[2:]] == [3.0, 3.0]


def test_methods_without_such_a_layer_have_no_row(paper_input: MakeInput) -> None:
    made = [record(job, 50.0) for job in jobs("erm", "cmnist", 2)]
    assert retraining(paper_input(*made)).rows == ()
