"""The tables of any report: what they show of a store that is empty, partial, or full."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from report_records import changed_jobs, collection, failed, given, jobs, record, stage

from bench.provenance import Environment
from bench.record import Metrics, Unreadable
from bench.reporting import GENERIC_TABLES, Collection, Reference
from bench.reporting.comparisons import paired_tests, training_time, worst_group_uncertainty
from bench.reporting.external import external_results
from bench.reporting.main_table import (
    difference,
    left_out,
    main_differences,
    main_results,
    smoke_runs,
)
from bench.reporting.table import (
    CSV_COLUMNS,
    OVER_SAMPLES,
    OVER_SEEDS,
    WELCH,
    Cell,
    CellKey,
    Row,
    Table,
    mark_best,
    paired_rows,
)
from bench.scoring import Evaluation
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


def test_the_main_table_says_how_many_seeds_it_shows() -> None:
    def notes(seeds: int) -> tuple[str, ...]:
        made = [record(job, 90.0) for job in jobs("nct", "umnist", seeds)]
        made += [record(job, 90.0) for job in (*jobs("erm", "umnist"), *jobs("erm", "isic"))]
        return main_results(given(collection(*made))).notes

    assert "Seeds: n = 5 in every measured cell." in notes(5)
    assert "Seeds: n = 5 in every measured cell, but for NCT on UMNIST (n = 10)." in notes(11)


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
    assert not table.in_paper and len(table.notes) == 3


def test_methods_outside_the_main_table_leave_it_as_it_is() -> None:
    """Their runs are in the store and in no figure, time or row of the paper's own tables."""
    main = [*jobs("erm", "umnist", 2), *jobs("nct", "umnist", 2)]
    without = given(collection(*(record(job, 90.0) for job in main)))
    rest = jobs("rwg", "umnist", 2)
    beside = given(collection(*(record(job, 90.0) for job in (*main, *rest))))
    assert len(beside.runs.published("rwg", "umnist")) == 2
    assert beside.runs.of_main_table() == without.runs.of_main_table()
    for build in (main_results, training_time, paired_tests):
        assert build(beside).to_csv() == build(without).to_csv()


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


def test_the_main_table_says_how_to_repeat_runs_of_each_arithmetic() -> None:
    made = [record(job, 50.0) for job in jobs("erm", "umnist", 3)]
    assert "all were made with native kernels" in main_results(given(collection(*made))).notes[-1]
    own = made[0].provenance
    environment = replace(own.environment, numerics={"choice": "pinned"})
    made[0] = replace(made[0], provenance=replace(own, environment=environment))
    note = main_results(given(collection(*made))).notes[-1]
    assert "1 repeat exactly on every x86 processor with AVX2" in note
    assert "2 were made with native kernels" in note and "--numerics native" in note
    made[1:] = [replace(one, provenance=replace(own, device="cuda")) for one in made[1:]]
    note = main_results(given(collection(*made))).notes[-1]
    assert "1 repeat" in note and "native" not in note


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
        ((93.0, 1.0, 5), (93.5, 0.6, 5), "agrees"),
        ((94.9, 1.0, 5), (93.5, 0.6, 5), "higher"),
        ((92.1, 1.0, 5), (93.5, 0.6, 5), "lower"),
        ((94.9, 1.0, 5), (93.5, 0.6, None), "agrees"),  # of three seeds, as is assumed
        ((94.9, 1.0, 2), (93.5, 0.6, 5), "cannot tell"),  # two seeds leave all open
        ((70.0, 9.0, 5), (77.0, 9.0, 5), "cannot tell"),  # nor do many help wide spreads
        ((92.8, 1.0, 5), (93.5, None, None), "cannot tell"),
        ((12.8, None, 1), (93.5, 0.6, 5), "cannot tell"),
        ((0.04, 0.0, 5), (0.0, 0.0, 5), "agrees"),  # a paper rounds its means
        ((0.06, 0.0, 5), (0.0, 0.0, 5), "higher"),
    ],
)
def test_a_difference_gets_a_verdict(
    measured: tuple[float, float | None, int],
    paper: tuple[float, float | None, int | None],
    verdict: str,
) -> None:
    key = CellKey("nct", "umnist", "wga")
    ours = Cell("measured", key, mean=measured[0], std=measured[1], n=measured[2])
    found = difference(ours, Cell("paper", key, mean=paper[0], std=paper[1], n=paper[2]))
    assert found.note == verdict
    assert found.mean == pytest.approx(measured[0] - paper[0])


def test_a_verdict_on_aurocs_has_a_margin_of_its_own() -> None:
    key = CellKey("nct", "isic", "auroc")
    ours = Cell("measured", key, mean=0.95, std=0.03, n=5)
    found = difference(ours, Cell("paper", key, mean=0.95, std=0.03, n=5, digits=3))
    assert found.ci_low is not None and found.ci_high is not None
    assert 0.02 < found.ci_high - 0.0005 < 0.05  # far below 5, and far above what is useful
    assert (found.note, found.interval) == ("cannot tell", WELCH)


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
    table = training_time(given(collection(*made, alone), reference))
    found = {
        (c.key.dataset, c.key.metric, bool(c.key.variant)): c
        for c in cells(table, "measured", method="all")
    }
    by_itself, shared = (found["umnist", "cpu_seconds", divided] for divided in (False, True))
    assert (by_itself.mean, shared.mean) == (90.0, 60.0)  # a processor's second is two here
    assert (by_itself.n, by_itself.note, len(by_itself.run_ids)) == (2, "2 methods", 4)
    assert found["umnist", "minutes", False].mean == pytest.approx(3.0)
    assert found["cmnist", "cpu_seconds", True].mean == 45.0
    (jtt,) = cells(
        table, "measured", method="jtt", dataset="umnist", metric="cpu_seconds", variant=""
    )
    assert (jtt.mean, jtt.n, jtt.digits) == (45.0, 2, 0)
    (own,) = cells(
        table, "measured", method="jtt", dataset="umnist", variant="shared stages divided"
    )
    assert own.mean == 30.0
    assert not any(row.header[0] == "ISIC" for row in table.rows)
    assert "training_time,all,umnist,minutes,,3.0," in table.to_csv()
    apart = (record(jobs("jtt", "umnist", 2)[1], 9.0), record(jobs("erm", "umnist", 1)[0], 9.0))
    table = training_time(given(collection(*apart)))
    assert {c.reason for c in cells(table, "measured", method="all", dataset="umnist")} == {
        "no seed that every method has"
    }


def test_times_stand_beside_those_of_a_paper(full: dict[str, Table]) -> None:
    table = full["training_time"]
    ours = {c.key.metric: c for c in cells(table, "measured", method="erm", dataset="umnist")}
    assert ours["minutes"].mean == 1.5  # both stages in full
    assert ours["million_image_passes"].mean == pytest.approx(18e-6)
    (told,) = cells(table, "paper", method="erm", dataset="umnist")
    assert told.mean == 7.5
    assert {c.reason for c in cells(table, "paper", method="nct")} == {"not in the paper"}
    titles = [row.header[1] for row in table.rows if row.header[0] == "UMNIST"]
    assert len(titles) == 11 and {"Group DRO", "NCT+", "All of them"} < set(titles)
    assert table.notes[0] == "Minutes on another machine."


def test_the_least_of_a_dataset_is_marked() -> None:
    made = [
        record(jobs(method, "umnist", 1)[0], 90.0, stages=[stage("fit", method, seconds)])
        for method, seconds in (("erm", 10.0), ("nct", 20.0))
    ]
    table = training_time(given(collection(*made)))
    marked = {(c.key.method, c.key.metric) for c in table.cells() if c.best}
    assert ("erm", "cpu_seconds") in marked and ("nct", "cpu_seconds") not in marked


def test_times_of_two_kinds_of_machines_are_not_averaged() -> None:
    slow = [record(job, 90.0) for job in jobs("erm", "umnist", 2)]
    other = record(jobs("erm", "umnist", 3)[2], 90.0)
    elsewhere = replace(other.provenance, environment=Environment(processor="other"))
    table = training_time(given(collection(*slow, replace(other, provenance=elsewhere))))
    (cell,) = cells(table, "measured", method="erm", metric="minutes")
    assert cell.n == 2
    assert any(
        "UMNIST: made up, 1 thread, without 1 on other machines" in note for note in table.notes
    )


def test_methods_are_compared_with_the_baselines_alone(full: dict[str, Table]) -> None:
    table = full["paired_tests"]
    assert [(row.section, row.header[0]) for row in table.rows] == [("Minus NCT", "ERM")]
    by_dataset = {cell.key.dataset: cell for cell in table.cells()}
    assert by_dataset["umnist"].mean == -2.0
    assert by_dataset["umnist"].note == "the same on every seed"
    assert len(by_dataset["umnist"].run_ids) == 10
    assert by_dataset["isic"].digits == 3
    assert by_dataset["waterbirds"].reason == "no shared seeds"
    assert "(overall AUROC for ISIC, else worst-group accuracy)" in table.caption
    assert paired_tests(given(EMPTY)).rows == ()


def test_paired_differences_have_an_interval(reference: Reference) -> None:
    ours = [record(job, 90.0 + job.seed) for job in jobs("nct", "umnist")]
    theirs = [record(job, 95.0 + 0.5 * job.seed) for job in jobs("nct_plus", "umnist")]
    table = paired_tests(given(collection(*ours, *theirs), reference))
    (cell,) = [c for c in table.cells() if c.key.dataset == "umnist" and c.mean is not None]
    # Differences 5, 4.5, ... 3: mean 4, standard error 0.3536, t(4) = 2.776.
    assert (cell.key.method, cell.mean) == ("nct_plus", pytest.approx(4.0))
    assert (cell.ci_low, cell.ci_high) == pytest.approx((3.018, 4.982), abs=1e-3)
    assert (cell.text(), cell.note) == ("+4.0 (+3.0 to +5.0)", "p < 0.001")


def test_worst_groups_have_intervals_over_seeds_and_over_samples(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frame = pd.DataFrame({"id": range(200), "split": "test", "y": 0, "group": [0, 1] * 100})
    made = [record(job, 80.0 + job.seed) for job in jobs("erm", "umnist", 2)]
    for one in made:
        wrong = (frame["group"] == 1) & (frame["id"] % 10 == 1)
        store.write(one, predictions=frame.assign(pred=wrong.astype(int)))
    table = worst_group_uncertainty(given(collection(*made, folder=store.runs)))
    by_seed, by_sample = cells(table, "measured", method="erm", dataset="umnist")
    assert (by_seed.mean, by_seed.interval) == (80.5, OVER_SEEDS)
    # Two seeds, 1 apart: a standard error of 0.5 and a t-quantile of 12.7.
    assert (by_seed.ci_low, by_seed.ci_high) == pytest.approx((74.147, 86.853), abs=1e-3)
    assert by_sample.interval == OVER_SAMPLES and OVER_SAMPLES in by_sample.details()
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


def test_predictions_made_elsewhere_stand_above_runs_on_the_same_data(
    reference: Reference,
) -> None:
    own = [
        *jobs("erm", "umnist", 2),
        *changed_jobs("erm", "umnist", (0,), lr="0.5"),
        *changed_jobs("erm", "umnist", (100,)),
    ]
    runs = [
        *collection(*(record(job, 90.0 + job.seed) for job in jobs("nct", "umnist"))).runs,
        *collection(*(record(job, 50.0) for job in jobs("erm", "isic"))).runs,
        *collection(*(record(job, 80.0, data_kind="own") for job in own)).runs,
    ]
    protocol = own[0].protocol

    def made(name: str, kind: str, split: str = "test") -> Evaluation:
        words = ("umnist", protocol, kind, split, 3, Metrics({"wga": 70.0}), {"wga": (60.0, 75.0)})
        return Evaluation(name, *words, torch.ones(3, dtype=torch.bool))  # type: ignore[arg-type]

    given_all = replace(
        given(Collection(tuple(runs)), reference),
        external=[made("mine", "release"), made("other", "own"), made("third", "standin", "val")],
    )
    table = external_results(given_all)
    assert [(row.header[-2:], row.cells[0].mean, row.cells[0].n) for row in table.rows] == [
        (("mine", "external"), 70.0, None),
        (("NCT", "measured"), 92.0, 5),
        (("other", "external"), 70.0, None),
        (("ERM, preset paper", "measured"), 80.0, 2),
        (("ERM, preset paper, erm.lr=0.5", "measured"), 80.0, 1),
        (("third", "external"), 70.0, None),
    ]
    first = table.rows[0].cells[0]
    assert (first.ci_low, first.ci_high, first.source) == (60.0, 75.0, "external")
    assert "bootstrap over samples" in first.interval
    assert not external_results(given(EMPTY, reference)).rows
