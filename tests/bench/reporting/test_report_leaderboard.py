"""The first screen: boards in order, axes that hold what they show, sentences from the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_records import collection, given, jobs, record

from bench.reporting import Limits, Reference, build, choose_tables
from bench.reporting.collection import ReportInput
from bench.reporting.html import Guide, html_page
from bench.reporting.leaderboard import (
    Board,
    Entry,
    Scale,
    datasets_without_runs,
    in_words,
    leaderboard,
    leaders,
)
from bench.reporting.main_table import Tier, main_results
from bench.reporting.table import Cell, CellKey
from datasets.errors import UsageError


def made(**wga: float) -> ReportInput:
    """Three seeds of methods on UMNIST, two points apart."""
    return given(
        collection(
            *(
                record(job, value + 2.0 * job.seed)
                for method, value in wga.items()
                for job in jobs(method, "umnist", 3)
            )
        )
    )


def entry(mean: float, low: float | None = None, high: float | None = None) -> Entry:
    cell = Cell("measured", mean=mean, ci_low=low, ci_high=high)
    return Entry(Tier("erm", "", ("no", "no", "no")), cell)


def test_methods_stand_in_the_order_of_their_worst_groups(reference: Reference) -> None:
    shown = replace(made(erm=80.0, nct=90.0, dfr=85.0), reference=reference)
    (board,) = leaderboard(shown)
    assert [one.title for one in board.entries] == ["NCT", "DFR", "ERM"]
    assert [one.labels for one in board.entries] == [2, 1, 2]
    nct = board.entry("nct")
    assert nct is not None and nct.paper is not None and nct.paper.mean == 93.5
    assert board.entries[0].mean == 92.0 and board.seeds == "3 seeds" and board.unit == "%"
    assert "JTT" in board.not_run and board.text(nct) == "92.0%"
    assert board.entry("erm") == board.entries[2] and board.entries[2].paper is None


def test_a_board_has_the_numbers_of_the_main_table() -> None:
    shown = made(erm=80.0, nct=90.0)
    (board,) = leaderboard(shown)
    cells = {c.key: c for c in main_results(shown).cells() if c.mean is not None}
    for one in board.entries:
        assert cells[one.cell.key].text() == one.cell.text()


@pytest.mark.parametrize(
    ("entries", "top", "low", "high", "digits"),
    [
        ([entry(0.0, 0.0, 0.0), entry(85.7, 83.1, 88.4)], 100.0, 0.0, 100.0, 0),
        ([entry(92.5, 90.7, 94.3), entry(98.8, 98.6, 99.0)], 100.0, 90.0, 100.0, 0),
        ([entry(0.812, 0.801, 0.823), entry(0.87)], 1.0, 0.8, 0.88, 2),
        ([entry(100.0)], 100.0, 98.0, 100.0, 1),
        ([entry(50.0, 0.0, 100.0), entry(60.0)], 100.0, 40.0, 70.0, 0),  # a wild interval is cut
    ],
)
def test_an_axis_holds_every_mean(
    entries: list[Entry], top: float, low: float, high: float, digits: int
) -> None:
    scale = Scale.over(entries, top)
    assert (scale.low, scale.high, scale.digits) == (low, high, digits)
    assert len(scale.ticks) <= 7
    for one in entries:
        assert scale.low <= one.mean <= scale.high
        assert 0.0 <= scale.at(one.mean) <= 100.0
    assert scale.at(scale.low - 1e9) == 0.0 and scale.at(1e9) == 100.0


def test_stand_in_runs_are_shown_only_where_nothing_else_is() -> None:
    smoke = [
        record(job, 50.0, standin=True, run_id=f"smoke-{job.seed}")
        for job in jobs("erm", "cmnist", 2)
    ]
    (board,) = leaderboard(given(collection(*smoke)))
    assert board.mark == "stand-in data" and board.title == "CMNIST"
    assert leaders(given(collection(*smoke)), (board,)) == []  # it is no result
    both = given(collection(*smoke, record(jobs("erm", "umnist", 1)[0], 90.0)))
    assert [(one.title, one.mark) for one in leaderboard(both)] == [("UMNIST", "")]


def test_own_data_has_its_board_and_a_metric_that_it_has() -> None:
    job = jobs("erm", "umnist", 1)[0]
    mine = record(job, 70.0, data_kind="own", run_id="mine-s0")
    assert mine.outcome is not None
    metrics = {
        split: replace(one, values={"avg": 80.0, "worst_class": 60.0})
        for split, one in mine.outcome.metrics.items()
    }
    (board,) = leaderboard(
        given(collection(replace(mine, outcome=replace(mine.outcome, metrics=metrics))))
    )
    assert board.mark == "own data" and board.metric == "worst-class accuracy"
    assert board.entries[0].mean == 60.0


def test_findings_say_who_leads_and_who_cannot_be_told_from_it() -> None:
    shown = made(erm=60.0, dfr=90.0, groupdro=91.0)
    (found,) = leaders(shown, leaderboard(shown))
    assert found.lead == "UMNIST" and found.table == "main_results"
    assert found.text == "Group DRO is first with 93.0%. ERM is last, 62.0%."
    values = {"dfr": (89.0, 93.0, 92.0), "groupdro": (91.0, 91.5, 93.0), "george": (70.0,) * 3}
    close = given(
        collection(
            *(
                record(job, own[job.seed])
                for method, own in {**values, "erm": (60.0,) * 3}.items()
                for job in jobs(method, "umnist", 3)
            )
        )
    )
    (found,) = leaders(close, leaderboard(close))
    assert "first with 91.8%, though seeds do not separate it from DFR." in found.text
    assert "Without group labels GEORGE is first, 70.0%." in found.text


def test_titles_in_a_sentence() -> None:
    assert in_words(["A"]) == "A" and in_words(["A", "B", "C"]) == "A, B and C"


def test_datasets_without_runs_are_one_line() -> None:
    shown = made(erm=60.0)
    lacking = datasets_without_runs(shown)
    assert "UMNIST" not in lacking and "Waterbirds" in lacking
    page = html_page(shown, [], [], Guide(leaderboard(shown)))
    assert f"No runs yet: {', '.join(lacking)}." in page
    limited = replace(shown, limits=Limits(datasets=("umnist",)))
    assert datasets_without_runs(limited) == []
    quick = given(collection(*(record(job, 60.0, quick=True) for job in jobs("erm", "umnist", 1))))
    page = html_page(quick, [], [], Guide(leaderboard(quick)))
    assert "UMNIST" in page and "UMNIST" not in page.split("No runs yet: ")[1].split("</p>")[0]
    board = page.split('<section class="board"')[1].split("</section>")[0]
    assert "95% interval" not in board and "paper" not in board  # one seed, and no result


def test_limits_hold_for_boards_tables_and_runs(tmp_path: Any) -> None:
    full = made(erm=60.0, nct=90.0, dfr=80.0)
    only = replace(full, limits=Limits(("nct", "erm"), ("umnist",)))
    (board,) = leaderboard(only.limited())
    assert [one.title for one in board.entries] == ["NCT", "ERM"]
    assert {run.job.method for run in only.limited().runs.runs} == {"nct", "erm"}
    table = only.limits.of_table(main_results(only))
    assert {row.header[0] for row in table.rows} == {"NCT", "ERM"}
    assert {column.group for column in table.columns} == {"UMNIST"}
    assert Limits().of_table(main_results(full)) == main_results(full)
    page = build(tmp_path, only, (main_results,), (), ("svg",)).read_text()
    assert "dfr-umnist" not in page and "nct-umnist" in page


def test_tables_are_chosen_by_the_names_of_their_files() -> None:
    def other(given: ReportInput) -> Any:
        return replace(main_results(given), label="another")

    assert choose_tables((main_results, other), (), Reference()) == (main_results, other)
    assert choose_tables((main_results, other), ("another",), Reference()) == (other,)
    with pytest.raises(UsageError) as refused:
        choose_tables((main_results, other), ("main_result",), Reference())
    assert "main_results" in refused.value.message


def test_a_hostile_finding_and_title_are_text() -> None:
    shown = made(erm=60.0)
    (board,) = leaderboard(shown)
    hostile = "<img src=x onerror=alert(1)>"
    page = html_page(shown, [], [], Guide((replace(board, title=hostile, mark=hostile),)))
    assert hostile not in page and "&lt;img src=x" in page
    assert 'id="board--img-src-x-onerror-alert-1--"' in page


def test_an_entry_without_an_interval_has_a_dot_alone() -> None:
    shown = given(collection(record(jobs("erm", "umnist", 1)[0], 80.0)))
    (board,) = leaderboard(shown)
    assert isinstance(board, Board) and board.entries[0].cell.ci_low is None
    page = html_page(shown, [], [], Guide((board,)))
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    assert 'class="reach' not in body and '<circle class="t2"' in body
    assert CellKey().digits == 1
