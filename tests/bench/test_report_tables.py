"""The report's tables: what they show of a store that is empty, partial, or full."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pandas as pd
import paper_tex
import pytest
from report_records import collection, jobs, record, variant_jobs
from scipy.stats import ttest_1samp

from bench.campaigns import CAMPAIGNS, campaign_cells
from bench.plan import NOWHERE
from bench.report.cells import About, Cell
from bench.report.collection import collect
from bench.report.latex import table_source
from bench.report.paper import paper_rows
from bench.report.recount import recount
from bench.report.table import FIELDS, Row, Table
from bench.report.tables import all_tables
from bench.report.tables.ablations import aux_sweep
from bench.report.tables.class_calibration import class_calibration
from bench.report.tables.depth import depth_choice
from bench.report.tables.main_results import difference, main_differences, main_results
from bench.report.tables.plus import plus_controls, plus_parts
from bench.report.tables.settings import SHOWN, same
from bench.report.tables.timing import training_time
from bench.report.tables.uncertainty import paired_tests
from bench.store import Store

LABELS = {
    *("main_results", "dataset_summary", "group_distributions", "preprocessing", "hyperparams"),
    *("logit_stats", "margins", "training_time", "depth_ablation", "depth_diagnostics"),
    *("pwga_corr", "ablation_trainable", "abl_split", "abl_minsamples", "aux_sweep"),
}


@pytest.fixture(scope="module")
def empty_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    root = tmp_path_factory.mktemp("no-data")
    return {table.label: table for table in all_tables(collection(), root)}


@pytest.fixture(scope="module")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    """Five seeds of NCT and ERM on two datasets, and one ablation's variant."""
    root = tmp_path_factory.mktemp("no-data")
    made = [
        record(job, wga + job.seed)
        for dataset in ("umnist", "isic")
        for method, wga in (("nct", 92.0), ("erm", 90.0))
        for job in jobs(method, dataset)
    ]
    made += [record(j, 60.0) for j in variant_jobs("ablation-scope", "scope=head_only", "umnist")]
    return {table.label: table for table in all_tables(collection(*made), root)}


def cells(table: Table, source: str, **about: str) -> list[Cell]:
    return [
        cell
        for cell in table.cells()
        if cell.source == source and all(getattr(cell.about, k) == v for k, v in about.items())
    ]


def test_the_fifteen_tables_of_the_paper_are_there(empty_report: dict[str, Table]) -> None:
    assert {label for label, table in empty_report.items() if table.in_paper} == LABELS


def test_every_table_says_what_its_numbers_mean(empty_report: dict[str, Table]) -> None:
    for table in empty_report.values():
        assert table.caption and table.uncertainty and table.selection


@pytest.mark.parametrize("kind", ["empty_report", "full_report"])
def test_no_cell_is_empty_without_a_reason(kind: str, request: pytest.FixtureRequest) -> None:
    for table in request.getfixturevalue(kind).values():
        for cell in table.cells():
            assert cell.mean is not None or cell.label or cell.reason, (table.label, cell.about)


def numbers_of_the_paper(tex: str) -> dict[tuple[str, int], tuple[str, str, bool]]:
    """Read mean, spread and mark of the shaded rows of a main table rendered here."""
    found = {}
    method = ""
    for line in tex.splitlines():
        parts = [part.strip() for part in line.removesuffix(r"\\").split("&")]
        if len(parts) != 16:
            continue
        method = parts[0].removeprefix(r"\rowcolor{gray!12}").strip() or method
        if parts[4] != "paper":
            continue
        for place, text in enumerate(parts[5:]):
            number = re.match(r"(?:\\textbf\{)?([\d.]+)", text)
            if number:
                spread = re.search(r"pm\$([\d.]+)", text)
                mark = "^{*}" in text
                found[method, place] = (number[1], spread[1] if spread else "", mark)
    return found


def test_the_papers_main_table_is_regenerated_cell_by_cell() -> None:
    """From `results/paper` alone, through the LaTeX rendering, against the paper's own source."""
    found = numbers_of_the_paper(table_source(main_results(collection())))
    names = {name: title.removesuffix(" (Ours)") for title, name in paper_tex.METHODS.items()}
    expected = {
        (names[row["method"]], paper_tex.MAIN.index((row["dataset"], row["metric"]))): (
            row["mean"],
            row["std"],
            row["sourced"] == "1",
        )
        for row in paper_tex.main_results(paper_tex.source())
    }
    assert len(found) == 95
    assert found == expected


def test_measured_cells_average_the_published_seeds(full_report: dict[str, Table]) -> None:
    (cell,) = cells(
        full_report["main_results"], "measured", method="nct", dataset="umnist", metric="wga"
    )
    assert (cell.mean, cell.n, len(cell.run_ids)) == (94.0, 5, 5)
    assert cell.std == pytest.approx(1.5811388)
    assert cell.ci_low is not None and cell.ci_high is not None
    assert cell.ci_low < 94.0 < cell.ci_high
    assert cell.best  # of its tier, before ERM


def test_the_main_table_says_where_it_was_measured(
    full_report: dict[str, Table], empty_report: dict[str, Table]
) -> None:
    assert "made up, 1 thread, torch 2.0 (20 runs)" in full_report["main_results"].notes[-1]
    assert empty_report["main_results"].notes[-1] == "Nothing was measured yet."


def test_tiers_come_from_what_methods_declare(empty_report: dict[str, Table]) -> None:
    marks = {row.header[0]: row.header[1:4] for row in empty_report["main_results"].rows}
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
    about = About("nct", "umnist", "wga")
    found = difference(
        Cell("measured", about, mean=measured[0], std=measured[1], n=5),
        Cell("paper", about, mean=paper[0], std=paper[1]),
    )
    assert found.note == verdict
    assert found.mean == pytest.approx(measured[0] - paper[0])


def test_a_cell_that_was_not_run_has_a_verdict_too() -> None:
    table = main_differences(collection())
    assert {cell.reason for cell in table.cells()} == {
        "not run",
        "not run; not in the paper either",
    }


def test_stand_in_and_quick_runs_stay_in_a_section_of_their_own() -> None:
    job = jobs("nct", "umnist")[0]
    runs = collection(
        record(job, 11.0, standin=True, protocol="paper-standin-600-0"),
        record(jobs("erm", "umnist")[0], 22.0, quick=True),
    )
    tables = {table.label: table for table in all_tables(runs, Path("nowhere"))}
    shown = {cell.mean for cell in tables["trials"].cells()}
    assert {11.0, 22.0} <= shown
    for label, table in tables.items():
        if label != "trials":
            assert not {run.run_id for run in runs.runs} & {
                run_id for cell in table.cells() for run_id in cell.run_ids
            }, label
    assert all("stand-in" in r.header[2] or "quick" in r.header[2] for r in tables["trials"].rows)


def test_an_ablation_shows_both_selections_beside_the_paper(
    full_report: dict[str, Table],
) -> None:
    table = full_report["ablation_trainable"]
    rows = {row.header: row for row in table.rows if row.header[0].startswith("UMNIST")}
    better = rows["UMNIST (WGA)", "measured, better of 2 and 3 (test-selected)"]
    assert [cell.mean for cell in better.cells] == [94.0, 60.0, None]
    assert [cell.n for cell in better.cells] == [5, 3, None]
    assert better.cells[2].reason == "not run"
    paper = rows["UMNIST (WGA)", "paper"]
    assert [cell.mean for cell in paper.cells] == [93.7, 57.6, 90.1]
    assert "test-selected" in table.selection


def test_tree_tables_read_the_records(full_report: dict[str, Table]) -> None:
    def first(label: str, **about: str) -> Cell:
        return cells(full_report[label], "measured", dataset="umnist", **about)[0]

    logit = first("logit_stats", variant="iteration 2 head 3")
    assert (logit.mean, logit.std, logit.n) == (3.5, 4.5, 5)  # the spread within the head
    unused = first("margins", variant="iteration 2 head 3")
    assert unused.mean is None and "merged or never chosen" in unused.reason
    assert first("depth_ablation", metric="wga", variant="iteration 1").mean == 44.0
    assert first("depth_diagnostics", metric="pwga2", variant="iteration 3").mean == (
        pytest.approx(0.77)
    )
    assert first("pwga_corr", metric="spearman_test").mean == 0.5
    assert first("training_time", method="nct").mean == 1.5  # both stages in full, in minutes
    rate = first("capture_rates", variant="iteration 3 digit_8 in 5-9:H*")
    assert rate.mean == pytest.approx(2 * 100 / 8)


def test_methods_together_cost_less_than_one_by_one() -> None:
    """Two methods of 60 + 30 s share the first minute; seeds that one lacks are left out."""
    made = [record(job, 90.0) for job in (*jobs("jtt", "umnist", 2), *jobs("dfr", "umnist", 3))]
    alone = record(jobs("erm", "cmnist", 1)[0], 1.0)
    table = training_time(collection(*made, alone))
    found = {(c.about.dataset, c.about.variant): c for c in cells(table, "measured", method="all")}
    assert found["umnist", "standalone"].mean == pytest.approx(3.0)
    assert found["umnist", "shared"].mean == pytest.approx(2.0)
    for way in ("standalone", "shared"):
        assert (found["umnist", way].n, found["umnist", way].note) == (2, "2 methods")
        assert len(found["umnist", way].run_ids) == 4
        assert found["cmnist", way].mean == pytest.approx(1.5)
        assert found["isic", way].reason == "not run"
    assert "training_time,all,umnist,minutes,shared,2.0," in table.to_csv()
    apart = training_time(
        collection(
            record(jobs("jtt", "umnist", 2)[1], 9.0), record(jobs("erm", "umnist", 1)[0], 9.0)
        )
    )
    assert {c.reason for c in cells(apart, "measured", method="all", dataset="umnist")} == {
        "no seed that every method has"
    }


def test_capture_rates_of_unions_take_the_samples_own_class() -> None:
    job = jobs("nct", "cmnist")[0]
    made = record(job, 70.0)
    second = made["nct"]["iterations"][1]
    for number, group in enumerate(second["capture"]):
        own = ("0-1", "2-3", "4-5", "6-7", "8-9")[number // 5]
        second["capture"][group] = {f"{own}:E": 80.0, f"{own}:H": 20.0}
    tables = {t.label: t for t in all_tables(collection(made), Path("nowhere"))}
    found = cells(tables["capture_rates"], "measured", dataset="cmnist")
    assert [cell.mean for cell in found[:2]] == [80.0, 20.0]


def test_depth_choices_are_counted_by_both_rules() -> None:
    table = depth_choice(collection(*(record(job, 95.0) for job in jobs("nct", "umnist", 3))))
    rows = {row.header[1]: row for row in table.rows if row.header[0] == "UMNIST"}
    assert [cell.mean for cell in rows["measured, rule"].cells] == [0, 3, 0]
    assert [cell.mean for cell in rows["measured, highest"].cells] == [0, 0, 3]
    assert [cell.mean for cell in rows["paper"].cells] == [0, 2, 3]


def test_paired_tests_compare_methods_that_share_seeds(full_report: dict[str, Table]) -> None:
    table = full_report["paired_tests"]
    assert [row.header[0] for row in table.rows] == ["ERM minus NCT"]
    by_dataset = {cell.about.dataset: cell for cell in table.cells()}
    assert by_dataset["umnist"].mean == -2.0
    assert by_dataset["umnist"].note == "not testable"  # the made-up gap is the same every time
    assert by_dataset["waterbirds"].reason == "no shared seeds"
    assert paired_tests(collection()).rows == ()


def test_presets_are_compared_with_the_papers_table(empty_report: dict[str, Table]) -> None:
    table = empty_report["hyperparams"]
    assert set(SHOWN) == {row["parameter"] for row in paper_rows("hyperparams")}
    own = {(c.about.dataset, c.about.variant): c for c in cells(table, "measured")}
    for cell in cells(table, "paper"):
        here = own[cell.about.dataset, cell.about.variant]
        assert (here.note == "differs") == (not same(here.label, cell.label))


def test_counts_without_data_are_the_expected_ones(
    tmp_path: Path, digits_root: Path, empty_report: dict[str, Table]
) -> None:
    for root in (tmp_path, digits_root):
        counted = recount(root)
        assert {own.source for own in counted.values()} == {"expected"}
        assert counted["umnist"].splits["train"] == 43_542
    assert "only a stand-in" in recount(digits_root)["umnist"].reason
    sizes = cells(empty_report["dataset_summary"], "expected", metric="samples")
    told = cells(empty_report["dataset_summary"], "paper", metric="samples")
    assert [cell.mean for cell in sizes] == [cell.mean for cell in told]


def test_counts_of_real_data_are_counted_again(mnist_root: Path) -> None:
    counted = recount(mnist_root)["cmnist"]
    assert counted.source == "measured"
    assert sum(counted.groups["train"]) == counted.splits["train"] == 54_000


def test_a_tables_csv_has_the_contracts_columns(full_report: dict[str, Table]) -> None:
    table = full_report["main_results"]
    rows = list(csv.DictReader(table.to_csv().splitlines()))
    assert tuple(rows[0]) == FIELDS
    assert len(rows) == sum(len(row.cells) for row in table.rows)
    found = [
        r for r in rows if (r["method"], r["dataset"], r["metric"]) == ("nct", "umnist", "wga")
    ]
    assert [row["source"] for row in found] == ["measured", "paper"]
    assert float(found[0]["mean"]) == 94.0
    assert len(found[0]["run_ids"].split()) == 5


def test_the_runs_of_this_repository_render(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    runs = collect(Store(results))
    assert runs.runs
    tables = {table.label: table for table in all_tables(runs, tmp_path)}
    assert set(tables) >= LABELS
    assert any(cell.run_ids for table in tables.values() for cell in table.cells())


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Table("x", "", "", ("a",), (), (Row(("a", "b"), ()),), "", "")


def test_a_variant_made_here_is_a_row_that_says_so() -> None:
    made = [record(job, 95.0) for job in jobs("nct_plus", "umnist")]
    runs = collection(*made, *(record(job, 92.0) for job in jobs("nct", "umnist")))
    table = main_results(runs)
    own = [row for row in table.rows if row.header[0].startswith("NCT+")]
    assert [(row.header[0], row.source) for row in own] == [("NCT+ (not in the paper)", "measured")]
    assert own[0].section == "No group labels"
    assert any("NCT+" in note and "validation class labels" in note for note in table.notes)
    (cell,) = [c for c in own[0].cells if c.about.dataset == "umnist" and c.about.metric == "wga"]
    assert cell.mean == 95.0 and cell.best
    names = [row.header[0] for row in main_differences(runs).rows]
    assert "NCT" in names and not any(name.startswith("NCT+") for name in names)


def test_paired_differences_have_an_interval() -> None:
    ours = [record(job, 90.0 + job.seed) for job in jobs("nct", "umnist")]
    theirs = [record(job, 95.0 + 0.5 * job.seed) for job in jobs("nct_plus", "umnist")]
    table = paired_tests(collection(*ours, *theirs))
    (cell,) = [c for c in table.cells() if c.about.dataset == "umnist" and c.mean is not None]
    # Differences -5, -4.5, ... -3: mean -4, standard error 0.3536, t(4) = 2.776.
    assert cell.mean == pytest.approx(-4.0)
    assert (cell.ci_low, cell.ci_high) == (
        pytest.approx(-4.982, abs=1e-3),
        pytest.approx(-3.018, abs=1e-3),
    )


def test_classes_are_calibrated_from_stored_scores(tmp_path: Path) -> None:
    """Class 1 scores 2 too low everywhere; group 2 is made of the images which that costs."""
    y = [0, 0, 0, 0, 1, 1, 1, 1] * 5
    lead = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0] * 5
    group = [0, 0, 0, 0, 1, 1, 2, 2] * 5
    first = [own if label == 0 else -own for own, label in zip(lead, y, strict=True)]
    rows = {"y": y, "group": group, "score_0": [value + 2.0 for value in first]}
    parts = [pd.DataFrame({**rows, "score_1": 0.0, "split": split}) for split in ("val", "test")]
    made = record(jobs("erm", "umnist")[0], 0.0)
    (tmp_path / made["run_id"]).mkdir()
    pd.concat(parts).to_parquet(tmp_path / made["run_id"] / "predictions.parquet")
    runs = collection(made, folder=tmp_path)
    cells = [c for c in class_calibration(runs).cells() if c.mean is not None]
    assert [(c.about.variant, c.mean) for c in cells] == [("calibrated", 100.0), ("gain", 100.0)]


def test_controls_pair_the_variant_with_nct_on_the_same_data() -> None:
    made = []
    for cell in campaign_cells(CAMPAIGNS["plus-controls"], ("cmnist",), NOWHERE):
        if "biased_val" in cell.variant.name:
            for job in cell.jobs[: 3 if cell.method == "nct" else 2]:
                gain = (2.0 + job.seed) if cell.method == "nct_plus" else 0.0
                made.append(record(job, 70.0 + job.seed + gain))
    published, cnc, biased = plus_controls(collection(*made)).rows
    assert {cell.reason for row in (published, cnc) for cell in row.cells} == {
        "not run",
        "no shared seeds",
    }
    plain, plus, gain = biased.cells
    assert (plain.mean, plain.n, plus.mean, plus.n) == (71.0, 3, 73.0, 2)
    assert (gain.mean, gain.n, gain.text()) == (2.5, 2, "+2.5")  # of seeds 0 and 1: 2 and 3
    low, high = ttest_1samp([2.0, 3.0], 0).confidence_interval(0.95)
    assert (gain.ci_low, gain.ci_high) == pytest.approx((low, high))
    assert set(gain.run_ids) == {one["run_id"] for one in made if one["seed"] < 2}
    assert f"95%: {low:+.1f} to {high:+.1f}" == gain.note


def test_a_gain_that_is_the_same_on_every_seed_has_no_interval() -> None:
    cells = campaign_cells(CAMPAIGNS["plus-controls"], ("cmnist",), NOWHERE)
    made = [record(job, 0.0) for cell in cells if cell.is_default for job in cell.jobs]
    gain = plus_controls(collection(*made)).rows[0].cells[-1]
    assert (gain.mean, gain.n, gain.ci_low) == (0.0, 5, None)
    assert gain.note == "the same on every seed"


def test_parts_are_compared_with_the_whole_on_the_same_seeds() -> None:
    made = []
    for cell in campaign_cells(CAMPAIGNS["plus-parts"], ("cmnist",), NOWHERE):
        if cell.is_default or cell.variant.name == "nct_plus.mixup=0.0":
            less = 0.0 if cell.is_default else 4.0
            made += [record(job, 80.0 + job.seed - less * job.seed) for job in cell.jobs]
    table = plus_parts(collection(*made))
    assert [column.group for column in table.columns] == ["CMNIST (WGA)"] * 2
    by_part = {row.header[0]: row.cells for row in table.rows}
    whole, itself = by_part["All parts"]
    assert (whole.mean, whole.n, itself.text()) == (82.0, 5, "-")
    mean, difference = by_part["No mixup"]
    # The sweep has seeds 0, 1 and 2: 80, 77 and 74 against 80, 81 and 82.
    assert (mean.mean, mean.n, difference.mean, difference.n) == (77.0, 3, -4.0, 3)
    assert difference.text() == "-4.0"
    assert {cell.reason for cell in by_part["No averaging"]} == {"not run", "no shared seeds"}


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    assert Cell("measured", mean=-0.02, signed=True).text() == "+0.0"
    assert Cell("measured", mean=-0.02).text() == "0.0"
    assert Cell("measured", mean=-0.06, signed=True).text() == "-0.1"


@pytest.mark.parametrize(("ours", "word"), [(61.2, "within"), (80.0, "above"), (40.0, "below")])
def test_ablations_are_judged_as_the_paper_selects(ours: float, word: str) -> None:
    """The paper has 61.2 +- 16.0 at a weight of 0.5."""
    swept = variant_jobs("ablation-aux", "aux_weight=0.5", "cmnist")
    made = [record(job, ours) for job in swept]
    notes = {
        row.header[1]: cell.note
        for row in aux_sweep(collection(*made)).rows
        for cell in row.cells
        if cell.mean is not None and cell.source == "measured"
    }
    assert notes == {
        "measured, better of 2 and 3 (test-selected)": word,
        "measured, depth rule": "",
    }
