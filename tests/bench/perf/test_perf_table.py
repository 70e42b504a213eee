"""What is shown and kept of measurements."""

from __future__ import annotations

import pytest

from bench.cli import perf as command
from bench.cost import MeanCost
from bench.perf import measure
from bench.perf.measure import EAGER_LIMIT, Row
from bench.provenance import Environment


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("", "unknown"),
    ],
)
def test_file_is_named_by_hardware(
    processor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Environment(processor=processor, libraries={"torch": "2"})
    monkeypatch.setattr(measure, "environment", lambda: known)
    monkeypatch.setattr(measure, "available_cores", lambda: 2)
    assert measure.machine_info().file_name == f"{name}-2-cores-1-thread.csv"


def test_a_case_is_named_once_and_small_numbers_keep_a_digit() -> None:
    rows = [Row("x", EAGER_LIMIT, 1234.5, 3.26, 0.052, 1.0), Row("x", "ours", 99.0, 3.0, 0.0, 0.9)]
    assert command.cells(rows) == [
        ("x", EAGER_LIMIT, "1,234", "5%", "1.00", "3.3"),
        ("", "ours", "99.0", "0%", "0.90", "3.0"),
    ]


def test_costs_of_stored_runs() -> None:
    known = MeanCost("erm", "umnist", 2, image_passes=2000, seconds=30.0, cpu_seconds=20.0)
    unknown = MeanCost("erm", "cmnist", 1, image_passes=2e6, seconds=3000.0, cpu_seconds=None)
    assert command.cost_cells([known, unknown]) == [
        ("erm", "umnist", 2, "0.00", "30", "20", "100"),
        ("erm", "cmnist", 1, "2.00", "3,000", "-", "-"),
    ]
