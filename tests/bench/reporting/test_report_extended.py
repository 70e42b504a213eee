"""The extended table: tiers, further rows, ranks, what to try first; and the main table beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from report_records import changed_jobs, collection, given, jobs, record

from bench.record import Record
from bench.reporting import GENERIC_TABLES, Reference
from bench.reporting.collection import FURTHER_ROWS
from bench.reporting.extended import IN_TRAINING, WITHOUT, extended_results
from bench.reporting.html import html_page
from bench.reporting.latex import table_source
from bench.reporting.main_table import TIERS, main_results
from bench.reporting.table import Cell, Table
from datasets.catalogue import load_datasets
from methods.base import METHODS, load_methods
from methods.erm import Erm

ANY = {"nct": [[80.0]]}
SIX = ("waterbirds", "celeba", "umnist", "cmnist", "dominoes", "cmnist_irm")


def runs(method: str, dataset: str, values: Sequence[float]) -> list[Record]:
    """A run a value, seeds from 0 on."""
    made = jobs(method, dataset, len(values))
    return [record(job, value) for job, value in zip(made, values, strict=True)]


def stored(values: Mapping[str, Sequence[Sequence[float]]], datasets: Sequence[str]) -> Table:
    """The table of methods with these values on each of the datasets."""
    made = [
        one
        for method, of_datasets in values.items()
        for dataset, own in zip(datasets, of_datasets, strict=True)
        for one in runs(method, dataset, own)
    ]
    return extended_results(given(collection(*made)))


def row_of(table: Table, title: str) -> tuple[str, Sequence[Cell]]:
    (row,) = [row for row in table.rows if row.header[0] == title]
    return row.section, row.cells


@pytest.fixture
def further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that is outside of the main table and comes in two rows."""
    load_methods()
    own = {"name": "balanced", "title": "Balanced", "extended": True}
    own["further_rows"] = {"by groups": {"selection": "val_wga"}}
    own["supervision"] = METHODS["lff"].supervision.__func__  # type: ignore[attr-defined]
    monkeypatch.setitem(METHODS, "balanced", type("Balanced", (Erm,), own)())


def test_every_method_has_a_row_and_every_dataset_with_runs_columns() -> None:
    table = stored({"nct": [[80.0], [70.0]], "dfr": [[90.0], [60.0]]}, ("cmnist", "dominoes"))
    groups = [name for name, _ in table.groups()]
    assert groups == ["CMNIST", "Dominoes"]
    assert [column.title for column in table.columns] == ["WGA", "Avg"] * 2
    titles = {row.header[0] for row in table.rows}
    assert titles >= {method.title for method in load_methods().values()}
    section, cells = row_of(table, "DFR")
    assert section == TIERS[1] and [cell.mean for cell in cells] == [90.0, 92.0, 60.0, 62.0]
    section, cells = row_of(table, "ERM")
    assert section == WITHOUT and [cell.reason for cell in cells] == ["not run"] * 4


def test_rows_are_marked_by_what_they_use() -> None:
    marks = {row.header[0]: row.header[1:] for row in stored(ANY, ("umnist",)).rows}
    assert marks["Group DRO"] == ("yes", "yes", "no")
    assert marks["JTT"] == ("no", "yes", "no")
    assert marks["DFR"] == ("no", "yes", "yes")
    assert marks["ExMap"] == ("no", "no", "yes")
    assert marks["NCT+"] == ("no", "no", "yes")
    assert marks["NCT"] == marks["ERM"] == ("no", "no", "no")


def test_calibration_on_training_images_is_no_fit_on_validation() -> None:
    plus = load_methods()["nct_plus"]
    fits = {
        kind: plus.fits_on_validation(plus.config_type(calibration=kind))
        for kind in ("none", "train", "half", "validation")
    }
    assert fits == {"none": False, "train": False, "half": True, "validation": True}


@pytest.mark.usefixtures("further")
def test_a_further_row_shows_the_runs_of_its_settings() -> None:
    usual = runs("balanced", "umnist", [70.0, 72.0])
    by_groups = changed_jobs("balanced", "umnist", (0, 1), selection="val_wga")
    found = collection(*usual, *(record(job, 90.0 + job.seed) for job in by_groups))
    columns = [run.variants for run in found.of_kind("variant")]
    assert columns == [((FURTHER_ROWS, "by groups"),)] * 2
    table = extended_results(given(found))
    section, cells = row_of(table, "Balanced")
    assert section == WITHOUT and cells[0].mean == 71.0
    section, cells = row_of(table, "Balanced, by groups")
    assert section == TIERS[1] and cells[0].mean == 90.5 and cells[0].n == 2
    assert cells[0].key.variant == "by groups"
    rows = [line.split(",")[1:5] for line in table.to_csv().splitlines()]
    assert ["balanced", "umnist", "wga", "by groups"] in rows


def test_the_best_of_each_tier_is_marked() -> None:
    values = {"erm": [[60.0]], "nct": [[80.0]], "jtt": [[70.0]]}
    table = stored(values, ("umnist",))
    best = {row.header[0]: row.cells[0].best for row in table.rows if row.cells[0].best}
    assert best == {"NCT": True}


def test_labels_of_training_alone_are_a_tier_of_their_own() -> None:
    sections = [row.section for row in stored(ANY, ("umnist",)).rows]
    assert list(dict.fromkeys(sections)) == [TIERS[0], IN_TRAINING, TIERS[1], WITHOUT]


def test_ranks_are_shown_from_six_datasets_on() -> None:
    high, low = [[80.0]] * 6, [[70.0]] * 6
    mixed = [[90.0]] * 3 + [[60.0]] * 3
    few = stored({"nct": high[:5], "erm": low[:5]}, SIX[:5])
    assert "Mean rank" not in [column.title for column in few.columns]
    assert any("there are 5" in note for note in few.notes)
    table = stored({"nct": high, "erm": low, "jtt": mixed, "dfr": [*high[:5], []]}, SIX)
    assert table.columns[-1].title == "Mean rank"
    ranks = {title: row_of(table, title)[1][-1] for title in ("NCT", "ERM", "JTT", "DFR", "CnC")}
    assert [ranks[title].mean for title in ("NCT", "ERM", "JTT")] == [1.5, 2.5, 2.0]
    assert ranks["DFR"].reason == ranks["CnC"].reason == "no runs on some dataset"
    assert [title for title, cell in ranks.items() if cell.best] == ["NCT"], "the lowest"


def test_equal_figures_share_a_rank() -> None:
    table = stored({name: [[70.0]] * 6 for name in ("nct", "erm", "jtt")}, SIX)
    assert row_of(table, "JTT")[1][-1].mean == 2.0


def advice(values: Mapping[str, Sequence[Sequence[float]]], datasets: Sequence[str]) -> str:
    note = stored(values, datasets).notes[0]
    assert "Rule: of the rows without group labels" in note
    return note


def test_the_advice_follows_the_rule() -> None:
    steady = [[80.0, 80.2], [80.0, 80.2]]
    uneven = [[90.0, 90.2], [60.0, 60.2]]
    note = advice({"nct": steady, "erm": uneven, "jtt": [[99.0], [99.0]]}, ("umnist", "cmnist"))
    # NCT lacks 10 points on one and none on the other, ERM none and 20; JTT uses group labels.
    assert "By these numbers NCT: on average over UMNIST, CMNIST" in note
    assert "by 5.0 points, ERM by 10.0." in note and "JTT" not in note
    assert "The evidence is thin: 2 datasets, of at least 6; all of them of small images." in note


def test_the_advice_says_where_the_lead_is_within_the_noise() -> None:
    close = {"nct": [[80.0, 84.0]] * 2, "erm": [[79.0, 83.0]] * 2}
    assert "a lead of 1.0 points over the next is less than twice its standard" in advice(
        close, ("umnist", "cmnist")
    )
    single = {"nct": [[80.0]] * 2, "erm": [[79.0]] * 2}
    assert "of unknown spread over seeds" in advice(single, ("umnist", "cmnist"))


def test_six_datasets_and_a_clear_lead_are_not_thin() -> None:
    note = advice({"nct": [[80.0, 80.1]] * 6, "erm": [[60.0, 60.1]] * 6}, SIX)
    assert "By these numbers NCT" in note and "thin" not in note


def test_aurocs_count_in_hundredths() -> None:
    """NCT leads by .10 where areas are counted, ERM by 5 points where groups are."""
    made = [record(job, 80.0, dataset="isic") for job in jobs("nct", "isic", 1)]
    made += [record(job, 70.0, dataset="isic") for job in jobs("erm", "isic", 1)]
    made += runs("nct", "umnist", [70.0]) + runs("erm", "umnist", [75.0])
    note = extended_results(given(collection(*made))).notes[0]
    assert "By these numbers NCT" in note and "by 2.5 points, ERM by 5.0" in note


def test_a_method_that_fits_on_validation_is_named_with_the_first_that_does_not() -> None:
    values = {"nct_plus": [[90.0]], "exmap": [[85.0]], "erm": [[70.0]], "nct": [[80.0]]}
    note = advice(values, ("umnist",))
    assert "By these numbers NCT+" in note and "It fits to validation samples (F)" in note
    assert "of the rows that do not, NCT is first (10.0 points short)" in note


def test_without_complete_rows_nothing_is_recommended() -> None:
    assert "Nothing can be said" in advice({}, ())
    assert "Nothing can be said" in advice({"jtt": [[70.0]]}, ("umnist",))
    apart = {"erm": [[70.0], []], "nct": [[], [80.0]]}
    assert "Nothing can be said" in advice(apart, ("umnist", "cmnist"))


def test_a_dataset_that_few_rows_were_run_on_takes_no_part() -> None:
    values = {"erm": [[70.0], []], "nct": [[75.0], []], "george": [[60.0], [99.0]]}
    note = advice(values, ("umnist", "cmnist"))
    assert "By these numbers NCT: on average over UMNIST it falls short" in note


def test_rows_that_lack_runs_on_a_dataset_are_named() -> None:
    values = {"erm": [[70.0], []], "nct": [[75.0], [80.0]], "george": [[60.0], [60.0]]}
    note = advice(values, ("umnist", "cmnist"))
    assert "NCT: on average over UMNIST, CMNIST" in note
    assert "Not compared, for want of runs on some dataset: ERM" in note


def test_the_main_table_and_what_belongs_to_it_stay_as_they_were(reference: Reference) -> None:
    """With runs of methods and on datasets that stand outside of it."""
    inside = [*runs("nct", "umnist", [90.0, 91.0]), *runs("erm", "umnist", [80.0, 81.0])]
    outside = [
        *runs("erm", "dominoes", [10.0]),
        *runs("nct", "cmnist_irm", [20.0]),
        *runs("rwy", "umnist", [99.0, 99.0]),
    ]
    before, after = (given(collection(*made), reference) for made in (inside, [*inside, *outside]))
    for build in GENERIC_TABLES:
        if build is not extended_results:
            assert build(before) == build(after), build
    shown = {name for name, _ in main_results(after).groups()}
    extended = {one.title for one in load_datasets().values() if one.extended}
    assert extended == {"Dominoes", "CMNIST-IRM"} and not shown & extended


def test_it_is_rendered_like_any_table(tmp_path: Path) -> None:
    assert r"\ding{51}" in table_source(stored(ANY, ("dominoes",)))
    for table in (stored(ANY, ("dominoes",)), stored({}, ())):
        assert "Extended results" in table_source(table)
        page = html_page(given(collection()), [table], [])
        assert "Extended results" in page and "which method first?" in page
