"""The tables of the protocol: data counted again, transforms and presets beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.paper.numbers import paper_rows
from bench.paper.protocol import PAPER_PARAMETERS, count_data, same_value
from bench.reporting.table import Cell, Table


def test_counts_without_data_are_the_expected_ones(
    tmp_path: Path,
    digits_root: Path,
    empty_report: dict[str, Table],
    cells_of: Callable[..., list[Cell]],
) -> None:
    for root in (tmp_path, digits_root):
        counted = count_data(root)
        assert {own.source for own in counted.values()} == {"expected"}
        assert counted["umnist"].splits["train"] == 43_542
    assert "only a stand-in" in count_data(digits_root)["umnist"].reason
    sizes = cells_of(empty_report["dataset_summary"], "expected", metric="samples")
    reported = cells_of(empty_report["dataset_summary"], "paper", metric="samples")
    assert [cell.mean for cell in sizes] == [cell.mean for cell in reported]


def test_counts_of_real_data_are_counted_again(mnist_root: Path) -> None:
    counted = count_data(mnist_root)["cmnist"]
    assert counted.source == "measured"
    assert sum(counted.groups["train"]) == counted.splits["train"] == 54_000


def test_presets_are_compared_with_the_papers_table(
    empty_report: dict[str, Table], cells_of: Callable[..., list[Cell]]
) -> None:
    table = empty_report["hyperparams"]
    assert set(PAPER_PARAMETERS) == {row["parameter"] for row in paper_rows("hyperparams")}
    here = {(c.key.dataset, c.key.variant): c for c in cells_of(table, "measured")}
    for cell in cells_of(table, "paper"):
        own = here[cell.key.dataset, cell.key.variant]
        assert (own.note == "differs") == (not same_value(own.label, cell.label))


def test_texts_are_compared_by_value() -> None:
    assert same_value("2.7e-5", "0.000027") and same_value("Plateau", "plateau")
    assert not same_value("0.1", "0.2") and not same_value("0.1", "none")


def test_transforms_are_written_in_the_papers_shorthand(empty_report: dict[str, Table]) -> None:
    rows = {
        row.header: [cell.label for cell in row.cells] for row in empty_report["preprocessing"].rows
    }
    resolution, train, evaluation, normalisation = rows["Waterbirds", "here"]
    assert resolution == "224" and normalisation == "ImageNet"
    assert train.startswith("RRC(224)") and train.endswith("HFlip")
    assert evaluation.endswith("-> CC 224")
    assert rows["UMNIST", "here"][1].endswith("no flip")
