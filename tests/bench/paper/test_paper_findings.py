"""Sentences about the paper's method: made from the runs at hand, absent where those are absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from report_records import jobs, record

from bench import paper
from bench.job import NO_DATA
from bench.paper.campaigns import CAMPAIGNS, campaign_cells
from bench.paper.findings import (
    CONTROL,
    WHAT_IT_IS,
    against_usual,
    biased_validation,
    findings,
)
from bench.record import Record
from bench.reporting import ReportInput
from bench.reporting.leaderboard import Finding, leaderboard

MakeInput = Callable[..., ReportInput]
SPREAD = (-0.5, 0.0, 0.5)


def main_runs(dataset: str, **wga: float) -> list[Record]:
    return [
        record(job, value + SPREAD[job.seed])
        for method, value in wga.items()
        for job in jobs(method, dataset, 3)
    ]


def control_runs(wga: Mapping[str, float]) -> list[Record]:
    """The runs of the control on biased validation; the balanced ones are main runs."""
    made = []
    for cell in campaign_cells(CONTROL, CONTROL.datasets, NO_DATA):
        if not cell.is_default and cell.method in wga:
            made += [record(job, wga[cell.method]) for job in cell.jobs]
    return made


def said(given: ReportInput) -> dict[str, str]:
    found: list[Finding] = findings(given, leaderboard(given))
    return {one.lead: one.text for one in found}


def test_nothing_is_said_without_runs(paper_input: MakeInput) -> None:
    assert findings(paper_input(), ()) == []


def test_where_the_method_wins_and_where_it_loses(paper_input: MakeInput) -> None:
    own = {"umnist": (88.0, 90.0, 91.0), "cmnist": (70.0, 70.5, 71.0)}
    usual, plus = {"umnist": 95.0, "cmnist": 0.0}, {"umnist": 90.0, "cmnist": 80.0}
    made = []
    for dataset, values in own.items():
        made += [record(job, values[job.seed]) for job in jobs("nct", dataset, 3)]
        made += [record(job, usual[dataset]) for job in jobs("erm", dataset, 3)]
        made += [record(job, plus[dataset]) for job in jobs("nct_plus", dataset, 3)]
    assert said(paper_input(*made))["NCT against ERM"] == (
        "NCT, a tree grown from a network's own mistakes, beats ERM by 70.5 points on CMNIST and "
        "loses to ERM by 5.3 points on UMNIST. NCT+, a variant made here: +0.3 on UMNIST (seeds "
        "cannot tell) and +9.5 on CMNIST."
    )


@pytest.mark.parametrize(
    ("nct", "expected"),
    [
        ((80.0, 81.0, 83.0), "beats ERM by 21.3 points on UMNIST."),
        ((40.0, 41.0, 43.0), "loses to ERM by 18.7 points on UMNIST."),
        ((50.0, 60.0, 71.0), "is within seed noise of ERM (0.3 points on UMNIST)."),
    ],
)
def test_a_difference_is_judged_by_its_interval(
    paper_input: MakeInput, nct: tuple[float, ...], expected: str
) -> None:
    made = [record(job, nct[job.seed]) for job in jobs("nct", "umnist", 3)]
    made += [record(job, 60.0) for job in jobs("erm", "umnist", 3)]
    (found,) = against_usual(leaderboard(paper_input(*made)))
    assert found.text == f"NCT, {WHAT_IT_IS}, {expected}" and found.table == "paired_tests"


def test_what_fails_when_validation_is_biased(paper_input: MakeInput) -> None:
    balanced = main_runs("cmnist", nct=71.0, nct_plus=85.0, groupdro=77.0, jtt=75.0, erm=1.0)
    biased = control_runs({"nct": 0.0, "nct_plus": 0.0, "groupdro": 70.0, "jtt": 5.0, "erm": 0.0})
    (found,) = biased_validation(paper_input(*balanced, *biased))
    assert found.lead == "Biased validation (CMNIST)" and found.table == CONTROL.table
    assert found.text == (
        "Where validation is as biased as training (seeds: 3), 3 of 4 worst groups collapse: NCT "
        "from 71.0 to 0.0, NCT+ from 85.0 to 0.0 and JTT from 75.0 to 5.0. Best: Group DRO from "
        "77.0 to 70.0. "
        f"The other {len(CONTROL.methods) - 5} methods were not run there yet."
    )


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (60.0, "no worst group collapses; NCT from 71.0 to 60.0 is the lowest."),
        (3.0, "every worst group collapses: NCT from 71.0 to 3.0."),
    ],
)
def test_one_method_alone_under_biased_validation(
    paper_input: MakeInput, after: float, expected: str
) -> None:
    made = [*main_runs("cmnist", nct=71.0), *control_runs({"nct": after})]
    (found,) = biased_validation(paper_input(*made))
    assert expected in found.text


def test_the_control_is_not_mentioned_before_it_is_run(paper_input: MakeInput) -> None:
    assert biased_validation(paper_input(*main_runs("cmnist", nct=71.0))) == []


def test_every_topic_and_link_names_tables(empty_report: Mapping[str, object]) -> None:
    outline = paper.outline()
    named = [label for labels in outline.topics.values() for label in labels]
    assert len(named) == len(set(named))
    assert set(named) - {"extended_results"} <= empty_report.keys()
    assert set(outline.links) <= empty_report.keys()
    apart = {"smoke_runs", "left_out"}
    assert empty_report.keys() - set(named) <= apart
    assert CAMPAIGNS["control-validation"].table in named
