"""The ablation tables: what each reads from a tree, both selections, and NCT+ with its controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_records import jobs, record
from scipy.stats import ttest_1samp

from bench.job import NO_DATA
from bench.paper.ablations import (
    DATASETS,
    TERMINAL_COLUMNS,
    class_calibration,
    metric_at,
    plus_controls,
    plus_parts,
    repeats_preset,
    selected_by_rule,
    selected_on_test,
)
from bench.paper.campaigns import CAMPAIGNS, campaign_cells
from bench.paper.trees import TreeIteration, TreeRecord
from bench.record import Metrics
from bench.reporting import ReportInput
from bench.reporting.table import Cell, Table

MakeInput = Callable[..., ReportInput]


def tree(*worst: float, chosen: int) -> TreeRecord:
    iterations = tuple(
        TreeIteration(t, (), (), test=Metrics({"wga": wga})) for t, wga in enumerate(worst, start=1)
    )
    return TreeRecord(chosen, chosen, "made up", iterations)


def test_an_ablation_knows_which_value_was_chosen_on_test() -> None:
    grown = tree(9.0, 70.0, 60.0, chosen=3)
    assert selected_on_test(grown) == 70.0
    assert selected_by_rule(grown) == 60.0
    assert [read(grown) for read in TERMINAL_COLUMNS.values()] == [70.0, 60.0, 60.0, 70.0]
    shallow = tree(9.0, chosen=1)
    assert (selected_on_test(shallow), selected_by_rule(shallow)) == (None, 9.0)


def test_a_ranked_dataset_is_judged_by_its_overall_auroc() -> None:
    grown = tree(1.0, 1.0, chosen=2)
    ranked = replace(grown.iterations[1], test=Metrics({"wga": 1.0, "auroc": 0.9}))
    grown = replace(grown, iterations=(grown.iterations[0], ranked))
    assert (metric_at(grown, 2), metric_at(grown, 3)) == (0.9, None)


def test_an_ablation_shows_both_selections_beside_the_paper(full_report: dict[str, Table]) -> None:
    table = full_report["ablation_trainable"]
    rows = {row.header: row for row in table.rows if row.header[0].startswith("UMNIST")}
    better = rows["UMNIST (WGA)", "measured, better of 2 and 3 (test-selected)"]
    assert [cell.mean for cell in better.cells] == [94.0, 60.0, None]
    assert [cell.n for cell in better.cells] == [5, 3, None]
    assert better.cells[2].reason == "not run"
    assert [cell.best for cell in better.cells] == [True, False, False]
    # The paper's default column is the depth rule's, its others are chosen on test.
    rule = rows["UMNIST (WGA)", "measured, depth rule"]
    assert [cell.note for cell in better.cells] == ["", "cannot tell", ""]
    assert [bool(cell.note) for cell in rule.cells] == [True, False, False]
    paper = rows["UMNIST (WGA)", "paper"]
    assert [cell.mean for cell in paper.cells] == [93.7, 57.6, 90.1]
    assert [cell.n for cell in paper.cells] == [5, 3, 3]  # the default is the main runs, there too
    assert "test-selected" in table.selection


@pytest.mark.parametrize("name", [n for n in CAMPAIGNS if n.startswith("ablation-")])
def test_one_column_of_an_ablation_is_the_preset(name: str) -> None:
    """The same columns as by the runs' identity."""
    for dataset in DATASETS:
        cells = campaign_cells(CAMPAIGNS[name], (dataset,), NO_DATA)
        own = [repeats_preset(cell.variant, dataset) for cell in cells]
        assert own == [cell.is_default for cell in cells]
        assert sum(own) == 1


def test_merging_is_compared_at_each_iteration_on_three_seeds(
    full_report: dict[str, Table], cells_of: Callable[..., list[Cell]]
) -> None:
    (cell,) = cells_of(
        full_report["abl_minsamples"],
        "measured",
        dataset="umnist",
        variant="min_samples=20 iteration 3",
    )
    assert (cell.mean, cell.n) == (92.0, 3)  # 92, 93 and 94, each less 1


def test_parts_are_compared_with_the_whole_on_the_same_seeds(paper_input: MakeInput) -> None:
    made = []
    for cell in campaign_cells(CAMPAIGNS["plus-parts"], ("cmnist",), NO_DATA):
        if cell.is_default or cell.variant.name == "nct_plus.mixup=0.0":
            less = 0.0 if cell.is_default else 4.0
            made += [record(job, 80.0 + job.seed - less * job.seed) for job in cell.jobs]
    table = plus_parts(paper_input(*made))
    assert [column.group for column in table.columns] == ["CMNIST (WGA)"] * 2
    by_part = {row.header[0]: row.cells for row in table.rows}
    whole, itself = by_part["All parts"]
    assert (whole.mean, whole.n, itself.text()) == (82.0, 5, "-")
    mean, difference = by_part["No mixup"]
    # The sweep has seeds 0, 1 and 2: 80, 77 and 74 against 80, 81 and 82.
    assert (mean.mean, mean.n, difference.mean, difference.n) == (77.0, 3, -4.0, 3)
    assert difference.text() == "-4.0"


def test_controls_pair_the_variant_with_nct_on_the_same_data(paper_input: MakeInput) -> None:
    made = []
    for cell in campaign_cells(CAMPAIGNS["plus-controls"], ("cmnist",), NO_DATA):
        if "biased_val" in cell.variant.name:
            for job in cell.jobs[: 3 if cell.method == "nct" else 2]:
                gain = (2.0 + job.seed) if cell.method == "nct_plus" else 0.0
                made.append(record(job, 70.0 + job.seed + gain))
    published, cnc, biased = plus_controls(paper_input(*made)).rows
    assert {cell.reason for row in (published, cnc) for cell in row.cells} == {
        "not run",
        "no shared seeds",
    }
    plain, plus, gained = biased.cells
    assert (plain.mean, plain.n, plus.mean, plus.n) == (71.0, 3, 73.0, 2)
    assert (gained.mean, gained.n, gained.text()) == (2.5, 2, "+2.5")  # of seeds 0 and 1: 2 and 3
    low, high = ttest_1samp([2.0, 3.0], 0).confidence_interval(0.95)
    assert (gained.ci_low, gained.ci_high) == pytest.approx((low, high))
    assert set(gained.run_ids) == {one.run_id for one in made if one.job.seed < 2}
    assert f"95%: {low:+.1f} to {high:+.1f}" == gained.note


def test_a_gain_that_is_the_same_on_every_seed_has_no_interval(paper_input: MakeInput) -> None:
    cells = campaign_cells(CAMPAIGNS["plus-controls"], ("cmnist",), NO_DATA)
    made = [record(job, 0.0) for cell in cells if cell.is_default for job in cell.jobs]
    gain = plus_controls(paper_input(*made)).rows[0].cells[-1]
    assert (gain.mean, gain.n, gain.ci_low) == (0.0, 5, None)
    assert gain.note == "the same on every seed"


def test_classes_are_calibrated_from_stored_scores(paper_input: MakeInput, tmp_path: Path) -> None:
    """Class 1 scores 2 too low everywhere; group 2 is made of the images which that costs."""
    y = [0, 0, 0, 0, 1, 1, 1, 1] * 5
    lead = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0] * 5
    group = [0, 0, 0, 0, 1, 1, 2, 2] * 5
    first = [own if label == 0 else -own for own, label in zip(lead, y, strict=True)]
    rows = {"y": y, "group": group, "score_0": [value + 2.0 for value in first]}
    parts = [pd.DataFrame({**rows, "score_1": 0.0, "split": split}) for split in ("val", "test")]
    made = record(jobs("erm", "umnist")[0], 0.0)
    (tmp_path / made.run_id).mkdir()
    pd.concat(parts).to_parquet(tmp_path / made.run_id / "predictions.parquet")
    cells = class_calibration(paper_input(made, folder=tmp_path)).cells()
    shown = [(cell.key.variant, cell.mean) for cell in cells if cell.mean is not None]
    assert shown == [("calibrated", 100.0), ("gain", 100.0)]


def test_runs_without_scores_are_not_calibrated(paper_input: MakeInput, tmp_path: Path) -> None:
    made = record(jobs("erm", "umnist")[0], 0.0)
    cells = class_calibration(paper_input(made, folder=tmp_path)).cells()
    (reasons,) = [{c.reason} for c in cells if c.key.method == "erm" and c.key.dataset == "umnist"][
        :1
    ]
    assert reasons == {"no scores kept"}
