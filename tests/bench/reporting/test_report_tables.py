"""The tables of any report: what they show of a store that is empty, partial, or full."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest
from report_records import collection, failed, given, jobs, record

from bench.record import Unreadable
from bench.reporting import GENERIC_TABLES, Reference
from bench.reporting.comparisons import paired_tests, training_time, worst_group_uncertainty
from bench.reporting.main_table import (
    difference,
    left_out,
    main_differences,
    main_results,
    smoke_runs,
)
from bench.reporting.table import (
    CSV_COLUMNS,
    Cell,
    CellKey,
    Row,
    Table,
    mark_best,
    paired_rows,
)
from bench.store import Store

EMPTY = collection()


@pytest.fixture(scope="module")
def full(reference: Reference) -> dict[str, Table]:
    """Five seeds of NCT and ERM on two datasets."""
    made = [
        record(job, wga + job.seed)
        for dataset in ("umnist", "isic")
        for method, wga in (("nct", 92.0), ("erm", 90.0))
        for job in jobs(method, dataset)
    ]
    everything = given(collection(*made), reference)
    return {table.label: table for table in (build(everything) for build in GENERIC_TABLES)}


def cells(table: Table, source: str, **key: str) -> list[Cell]:
    return [
        cell
        for cell in table.cells()
        if cell.source == source and all(getattr(cell.key, k) == v for k, v in key.items())
    ]


@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("build", [*GENERIC_TABLES, main_differences])
def test_an_empty_store_gives_every_table_with_reasons(
    build: object, with_reference: bool, reference: Reference
) -> None:
    assert callable(build)
    table = build(given(EMPTY, reference if with_reference else None))
    assert table.caption and table.uncertainty and table.selection
    for cell in table.cells():
        assert cell.mean is not None or cell.label or cell.reason, (table.label, cell.key)
        assert with_reference or cell.source == "measured"


def test_no_cell_of_a_full_report_is_empty_without_a_reason(full: dict[str, Table]) -> None:
    for table in full.values():
        for cell in table.cells():
            assert cell.mean is not None or cell.label or cell.reason, (table.label, cell.key)


def test_measured_cells_average_the_published_seeds(full: dict[str, Table]) -> None:
    (cell,) = cells(full["main_results"], "measured", method="nct", dataset="umnist", metric="wga")
    assert (cell.mean, cell.n, len(cell.run_ids)) == (94.0, 5, 5)
    assert cell.std == pytest.approx(1.5811388)
    assert cell.ci_low is not None and cell.ci_high is not None
    assert cell.ci_low < 94.0 < cell.ci_high
    assert cell.best  # of its tier, before ERM


def test_a_papers_rows_stand_below_the_measured_ones(full: dict[str, Table]) -> None:
    table = full["main_results"]
    (told,) = cells(table, "paper", method="nct", dataset="umnist", metric="wga")
    assert (told.mean, told.std, told.from_other_paper) == (93.5, 0.6, True)
    (other,) = cells(table, "paper", method="erm", dataset="umnist", metric="wga")
    assert other.reason == "not adapted to this dataset in the paper"
    headers = [(row.header[0], row.source) for row in table.rows]
    assert headers.index(("NCT", "paper")) == headers.index(("NCT", "measured")) + 1
    assert ("Group DRO (not in the paper)", "measured") in headers
    assert ("Group DRO (not in the paper)", "paper") not in headers
    assert "the made-up paper's own numbers" in table.notes[0]
    assert "A note of the paper." in table.notes


def test_without_a_paper_only_measured_rows_stand() -> None:
    table = main_results(given(EMPTY))
    assert {row.source for row in table.rows} == {"measured"}
    assert not any("paper" in row.header[0] for row in table.rows)
    assert not table.in_paper and len(table.notes) == 2


def test_a_method_that_only_the_paper_has_is_listed() -> None:
    table = main_results(given(EMPTY, Reference(methods=("nct", "elsewhere"))))
    row = table.rows[-1]
    assert (row.header[0], row.section, row.source) == (
        "elsewhere",
        "Not implemented here",
        "paper",
    )
    assert row.header[1:4] == ("", "", "")


def test_the_main_table_says_where_it_was_measured(full: dict[str, Table]) -> None:
    assert "made up, 1 thread, torch 2.0 (20 runs)" in full["main_results"].notes[-1]
    assert main_results(given(EMPTY)).notes[-1] == "Nothing was measured yet."


def test_columns_and_caption_follow_the_metrics_of_the_datasets() -> None:
    table = main_results(given(EMPTY))
    columns = [(column.group, column.title) for column in table.columns]
    assert ("UMNIST", "WGA") in columns and ("UMNIST", "Avg") in columns
    assert ("ISIC (AUROC)", "Non-Patch") in columns
    assert "(AUROC for ISIC)" in table.caption


def test_tiers_come_from_what_methods_declare() -> None:
    marks = {row.header[0]: row.header[1:4] for row in main_results(given(EMPTY)).rows}
    assert marks["Group DRO"] == ("yes", "yes", "no")
    assert marks["JTT"] == ("no", "yes", "no")
    assert marks["NCT"] == ("no", "no", "yes")


@pytest.mark.parametrize(
    ("measured", "paper", "verdict"),
    [
        ((93.0, 1.0), (93.5, 0.6), "within"),
        ((94.2, 1.0), (93.5, 0.6), "above"),
        ((92.8, 1.0), (93.5, 0.6), "below"),
        ((92.8, 1.0), (93.5, None), "within"),
        ((92.8, None), (93.5, None), "no spread to compare with"),
    ],
)
def test_a_difference_gets_a_verdict(
    measured: tuple[float, float | None], paper: tuple[float, float | None], verdict: str
) -> None:
    key = CellKey("nct", "umnist", "wga")
    found = difference(
        Cell("measured", key, mean=measured[0], std=measured[1], n=5),
        Cell("paper", key, mean=paper[0], std=paper[1]),
    )
    assert found.note == verdict
    assert found.mean == pytest.approx(measured[0] - paper[0])


def test_a_cell_that_was_not_run_has_a_verdict_too(reference: Reference) -> None:
    table = main_differences(given(EMPTY, reference))
    assert [row.header[0] for row in table.rows] == ["ERM", "NCT"]
    assert {cell.reason for cell in table.cells()} == {
        "not run",
        "not run; not in the paper either",
    }


def test_the_best_is_marked_where_there_is_a_choice() -> None:
    one, two, same = (Cell("measured", mean=mean) for mean in (1.0, 2.0, 2.01))
    none = Cell("measured", reason="not run")
    assert [cell.best for cell in mark_best([one, none, two, same])] == [False, False, True, True]
    assert not any(cell.best for cell in mark_best([one, none]))
    assert all(cell.best for cell in mark_best([two, same]))
    assert not any(cell.best for cell in mark_best([two, same], mark_ties=False))


def test_rows_of_a_paper_are_named_as_such() -> None:
    ours, theirs = Cell("measured", mean=1.0), Cell("paper", mean=2.0)
    rows = paired_rows(("a",), {"measured, twice": [ours]}, [theirs], "s")
    assert [(row.header, row.section, row.source) for row in rows] == [
        (("a", "measured, twice"), "s", "measured"),
        (("a", "paper"), "s", "paper"),
    ]
    assert len(paired_rows(("a",), {"measured": [ours]}, [], "s")) == 1


def test_stand_in_and_quick_runs_stay_in_a_section_of_their_own(reference: Reference) -> None:
    runs = collection(
        record(jobs("nct", "umnist")[0], 11.0, standin=True, protocol="paper-standin-600-0"),
        record(jobs("erm", "umnist")[0], 22.0, quick=True),
    )
    tables = [build(given(runs, reference)) for build in GENERIC_TABLES]
    apart = smoke_runs(given(runs))
    assert {11.0, 22.0} <= {cell.mean for cell in apart.cells()}
    assert all("stand-in" in row.header[2] or "quick" in row.header[2] for row in apart.rows)
    for table in tables:
        if table.label != "smoke_runs":
            assert not {run.run_id for run in runs.runs} & {
                run_id for cell in table.cells() for run_id in cell.run_ids
            }, table.label


def test_what_is_left_out_is_counted_by_reason() -> None:
    first, second, third = jobs("erm", "umnist", 3)
    broken = Unreadable("some-run", Path("record.json"), "damaged")
    runs = collection(failed(first, "data"), failed(second, "data"), record(third, 1.0), broken)
    table = left_out(given(runs))
    found = {(row.header[2], cell.mean): cell.run_ids for row in table.rows for cell in row.cells}
    assert found["failed (data)", 2.0] == (first.run_id, second.run_id)
    assert found["it cannot be read: damaged", 1.0] == ("some-run",)
    assert len(found) == 2


def test_methods_together_cost_less_than_one_by_one(reference: Reference) -> None:
    """Two methods of 60 + 30 s share the first minute; seeds that one lacks are left out."""
    made = [record(job, 90.0) for job in (*jobs("jtt", "umnist", 2), *jobs("dfr", "umnist", 3))]
    alone = record(jobs("erm", "cmnist", 1)[0], 1.0)
    uncounted = record(jobs("nct_plus", "umnist", 1)[0], 1.0)
    table = training_time(given(collection(*made, alone, uncounted), reference))
    found = {(c.key.dataset, c.key.variant): c for c in cells(table, "measured", method="all")}
    assert found["umnist", "standalone"].mean == pytest.approx(3.0)
    assert found["umnist", "shared"].mean == pytest.approx(2.0)
    for way in ("standalone", "shared"):
        assert (found["umnist", way].n, found["umnist", way].note) == (2, "2 methods")
        assert len(found["umnist", way].run_ids) == 4
        assert found["cmnist", way].mean == pytest.approx(1.5)
        assert found["isic", way].reason == "not run"
    assert "training_time,all,umnist,minutes,shared,2.0," in table.to_csv()
    apart = training_time(
        given(
            collection(
                record(jobs("jtt", "umnist", 2)[1], 9.0), record(jobs("erm", "umnist", 1)[0], 9.0)
            )
        )
    )
    assert {c.reason for c in cells(apart, "measured", method="all", dataset="umnist")} == {
        "no seed that every method has"
    }


def test_times_stand_beside_those_of_a_paper(full: dict[str, Table]) -> None:
    table = full["training_time"]
    (ours,) = cells(table, "measured", method="erm", dataset="umnist")
    assert ours.mean == 1.5  # both stages in full, in minutes
    (told,) = cells(table, "paper", method="erm", dataset="umnist")
    assert told.mean == 7.5
    assert {c.reason for c in cells(table, "paper", method="nct")} == {"not in the paper"}
    titles = {row.header[0] for row in table.rows}
    assert "Group DRO" in titles and "NCT+" not in titles
    assert table.notes[0] == "Minutes on another machine."


def test_paired_tests_compare_methods_that_share_seeds(full: dict[str, Table]) -> None:
    table = full["paired_tests"]
    assert [row.header[0] for row in table.rows] == ["ERM minus NCT"]
    by_dataset = {cell.key.dataset: cell for cell in table.cells()}
    assert by_dataset["umnist"].mean == -2.0
    assert by_dataset["umnist"].note == "not testable"  # the made-up gap is the same every time
    assert by_dataset["isic"].digits == 3
    assert by_dataset["waterbirds"].reason == "no shared seeds"
    assert "(overall AUROC for ISIC, else worst-group accuracy)" in table.caption
    assert paired_tests(given(EMPTY)).rows == ()


def test_paired_differences_have_an_interval() -> None:
    ours = [record(job, 90.0 + job.seed) for job in jobs("nct", "umnist")]
    theirs = [record(job, 95.0 + 0.5 * job.seed) for job in jobs("nct_plus", "umnist")]
    table = paired_tests(given(collection(*ours, *theirs)))
    (cell,) = [c for c in table.cells() if c.key.dataset == "umnist" and c.mean is not None]
    # Differences -5, -4.5, ... -3: mean -4, standard error 0.3536, t(4) = 2.776.
    assert cell.mean == pytest.approx(-4.0)
    assert (cell.ci_low, cell.ci_high) == (
        pytest.approx(-4.982, abs=1e-3),
        pytest.approx(-3.018, abs=1e-3),
    )


def test_worst_groups_have_intervals_over_seeds_and_over_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frame = pd.DataFrame({"id": range(200), "split": "test", "y": 0, "group": [0, 1] * 100})
    made = [record(job, 80.0 + job.seed) for job in jobs("erm", "umnist", 2)]
    for one in made:
        wrong = (frame["group"] == 1) & (frame["id"] % 10 == 1)
        store.write(one, predictions=frame.assign(pred=wrong.astype(int)))
    table = worst_group_uncertainty(given(collection(*made, folder=store.runs)))
    by_seed, by_sample = cells(table, "measured", method="erm", dataset="umnist")
    assert (by_seed.mean, by_seed.ci_low, by_seed.ci_high) == (80.5, 80.0, 81.0)
    assert by_sample.ci_low is not None and by_sample.ci_high is not None
    assert by_sample.ci_low < 80.0 < by_sample.ci_high  # 20 of 100 samples are wrong
    assert by_sample.label == f"{by_sample.ci_low:.1f} to {by_sample.ci_high:.1f}"
    bare = worst_group_uncertainty(given(collection(*made)))
    reasons = [cell.reason for cell in cells(bare, "measured", method="erm", dataset="umnist")]
    assert reasons == ["", "no predictions kept"]


def test_a_tables_csv_has_the_contracts_columns(full: dict[str, Table]) -> None:
    table = full["main_results"]
    rows = list(csv.DictReader(table.to_csv().splitlines()))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert len(rows) == sum(len(row.cells) for row in table.rows)
    found = [
        r for r in rows if (r["method"], r["dataset"], r["metric"]) == ("nct", "umnist", "wga")
    ]
    assert [row["source"] for row in found] == ["measured", "paper"]
    assert float(found[0]["mean"]) == 94.0
    assert len(found[0]["run_ids"].split()) == 5


def test_a_spreadsheet_takes_no_text_for_a_formula() -> None:
    key = CellKey(method="=cmd|' /C calc'!A0", dataset="@x")
    row = dict(zip(CSV_COLUMNS, Cell("measured", key, reason="-1+1").csv_row("t"), strict=True))
    assert all(str(row[name]).startswith("'") for name in ("method", "dataset", "reason"))


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Table("x", "", "", ("a",), (), (Row(("a", "b"), ()),), "", "")


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    assert Cell("measured", mean=-0.02, signed=True).text() == "+0.0"
    assert Cell("measured", mean=-0.02).text() == "0.0"
    assert Cell("measured", mean=-0.06, signed=True).text() == "-0.1"
