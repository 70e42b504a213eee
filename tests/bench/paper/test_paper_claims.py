"""The claims of the paper: the sentences against its source, each measure by hand, each verdict."""

from __future__ import annotations

import copy
import csv
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import paper_tex
import pytest
from report_records import facts_of, jobs, record

from bench.job import NO_DATA
from bench.paper import evidence
from bench.paper.campaigns import CAMPAIGNS, SWEEP_POINTS, campaign_cells, sweep_variant
from bench.paper.claims import (
    FAILS,
    HOLDS,
    MEASURES,
    REASONS,
    UNMEASURED,
    UNTESTABLE,
    Rule,
    claims,
    claims_sweep,
)
from bench.paper.numbers import paper_rows
from bench.record import Record
from bench.reporting import ReportInput
from bench.reporting.collection import Run
from bench.reporting.table import CSV_COLUMNS, Row, Table

MakeInput = Callable[..., ReportInput]
COUNTED = {"depth_rule_2": "4-1", "depth_rule_3": "3-2"}  # of five seeds, where others say a number
DERIVED = {("logits_overlap", "cmnist"): 4.00 / (0.63 + 1.21)}


def test_every_claim_stands_in_the_paper() -> None:
    tex = paper_tex.source()
    prose = " ".join(tex.split())
    for row in paper_rows("claims"):
        value, quote = row["value"], " ".join(row["quote"].split())
        if row["table"]:
            body = paper_tex.body(row["table"], tex)
            for number in re.findall(r"\d*\.\d+", quote):
                assert re.search(rf"(?<![\d.])[-+]?{re.escape(number)}(?!\d)", body), row
            assert float(value) == pytest.approx(eval(quote), abs=0.006), row
            continue
        assert quote in prose, row
        if row["id"] in COUNTED:
            assert float(value) == 20 * int(COUNTED[row["id"]][0]) and COUNTED[row["id"]] in quote
        elif (row["id"], row["dataset"]) in DERIVED:
            assert float(value) == pytest.approx(DERIVED[row["id"], row["dataset"]], abs=0.006)
        elif value and row["id"] != "merging":  # whose number is that of "only on Waterbirds"
            assert value.removesuffix(".0") in quote, row


def test_every_claim_is_measured_or_says_why_not_and_none_comes_twice() -> None:
    rows = [(row["id"], row["dataset"]) for row in paper_rows("claims")]
    assert len(set(rows)) == len(rows) > 60
    assert {name for name, _ in rows} == MEASURES.keys() | REASONS.keys()
    assert not MEASURES.keys() & REASONS.keys()


@pytest.mark.parametrize(
    ("rule", "low", "high", "verdict"),
    [
        (Rule(low=50), 51, 60, HOLDS),
        (Rule(low=50), 40, 49, FAILS),
        (Rule(low=50), 45, 55, UNTESTABLE),
        (Rule(high=5), 1, 4, HOLDS),
        (Rule(high=5), 6, 7, FAILS),
        (Rule(-5, 5), -4, 4, HOLDS),
        (Rule(-5, 5), -6, 4, UNTESTABLE),
        (Rule(-5, 5), 6, 9, FAILS),
        (Rule(low=0), 0, 0, FAILS),
        (Rule(low=0, lenient=True), -3, 2, HOLDS),
        (Rule(low=0, lenient=True), -3, -1, FAILS),
        (Rule(0, 0, lenient=True), -3, 2, HOLDS),
        (Rule(0, 0, lenient=True), 1, 2, FAILS),
    ],
)
def test_a_verdict_follows_from_the_interval(
    rule: Rule, low: float, high: float, verdict: str
) -> None:
    found, why = rule.verdict((low + high) / 2, low, high)
    assert found == verdict
    assert bool(why) == (verdict == UNTESTABLE)


def test_one_run_gives_no_verdict_but_on_what_is_no_estimate() -> None:
    assert Rule(low=50).verdict(99.0, None, None) == (UNTESTABLE, "one run has no interval")
    assert Rule(low=50, by_mean=True).verdict(99.0, None, None) == (HOLDS, "")
    assert Rule(high=0, by_mean=True).verdict(20.0, None, None) == (FAILS, "")


def test_rules_are_written_out() -> None:
    assert Rule(low=50).text("%") == "above 50%"
    assert Rule(high=2).text(" points") == "at most 2 points"
    assert Rule(-5, 5).text(" points") == "between -5 points and 5 points"
    assert Rule(low=0, lenient=True).text("") == "above 0, or not shown to be otherwise"
    assert "not shown to differ" in Rule(0, 0, lenient=True).text("")


def rows_of(table: Table) -> dict[tuple[str, str], Row]:
    """Rows by claim and dataset."""
    return {(row.cells[0].key.metric, row.cells[0].key.dataset): row for row in table.rows}


def grown(dataset: str, change: Callable[[int, Any], None], seeds: int = 3) -> list[Record]:
    """Runs whose trees are the made-up ones, changed by seed."""
    made = []
    for job in jobs("nct", dataset, seeds):
        one = record(job, 80.0 + job.seed)
        details = copy.deepcopy(one.details)
        change(job.seed, details["nct"])
        made.append(record(job, 80.0 + job.seed, details=details))
    return made


def test_an_empty_store_has_nothing_measured_but_what_is_computed(paper_input: MakeInput) -> None:
    found = rows_of(claims(paper_input()))
    for (name, _), row in found.items():
        _, ours, verdict, rule = row.cells
        assert verdict.label in (HOLDS, FAILS, UNTESTABLE, UNMEASURED) and rule.label
        if name in REASONS:
            assert (verdict.label, verdict.reason) == (UNTESTABLE, REASONS[name])
        elif ours.mean is None:
            assert verdict.label == UNMEASURED and ours.reason and "not run" in ours.reason
    computed = {(n, d): row.cells[1].mean for (n, d), row in found.items() if row.cells[1].note}
    shares = [v for (n, _), v in computed.items() if n == "phase1_share"]
    assert shares == pytest.approx([0.02, 0.28, 0.16, 0.73, 32.92], abs=0.006)
    assert computed["enrichment_theory", "waterbirds"] == pytest.approx(32.4, abs=0.05)
    assert computed["gap", ""] == pytest.approx(0.0, abs=0.3)  # nothing of the 14.6 points
    verdicts = {key: found[key].cells[2].label for key in computed}
    assert verdicts["phase1_share", "cmnist"] == verdicts["gap", ""] == FAILS
    assert verdicts["phase1_share", "umnist"] == HOLDS


def test_a_claim_is_judged_by_the_runs_of_both_methods_on_shared_seeds(
    paper_input: MakeInput,
) -> None:
    ours = [record(job, 90.0 + 0.1 * job.seed) for job in jobs("nct", "umnist", 4)]
    theirs = [record(job, 95.0 + 0.2 * job.seed) for job in jobs("erm", "umnist", 3)]
    row = rows_of(claims(paper_input(*ours, *theirs)))["over_erm", "umnist"]
    paper, here, verdict, rule = row.cells
    assert (paper.mean, here.n) == (-0.2, 3)
    assert here.mean == pytest.approx(-5.1)
    assert set(here.run_ids) == {one.run_id for one in (*ours, *theirs)}
    assert verdict.label == FAILS and "above 0 points" in rule.label
    assert "95%: -5" in here.note


def test_the_csv_has_a_row_a_claim_that_needs_no_paper_beside_it(paper_input: MakeInput) -> None:
    made = [record(job, 90.0 + job.seed) for job in jobs("nct", "umnist")]
    table = claims(paper_input(*made))
    rows = list(csv.DictReader(table.to_csv().splitlines()))
    assert len(rows) == len(table.rows) == len(paper_rows("claims"))
    assert {*CSV_COLUMNS, "claim", "where", "paper", "verdict", "holds_if"} == set(rows[0])
    (first,) = [r for r in rows if (r["metric"], r["dataset"]) == ("first_knows", "umnist")]
    assert (first["paper"], first["mean"], first["n"]) == ("80.8", "42.0", "5")
    assert first["verdict"] in (FAILS, UNTESTABLE)
    assert first["holds_if"] == "worst group at iteration 1: above 50%"
    assert len(first["run_ids"].split()) == 5
    for row in rows:
        assert row["claim"].endswith(".") and row["where"] and row["holds_if"]
        assert row["mean"] or row["reason"], row
        if row["verdict"] in (UNTESTABLE, UNMEASURED):
            assert row["reason"], row


def test_descent_is_compared_at_the_last_iteration(paper_input: MakeInput) -> None:
    def descend(seed: int, tree: Any) -> None:
        for entry in tree["iterations"][1:]:
            entry["greedy"] = {
                "test": {"wga": entry["test"]["wga"] - 2.0 - 0.1 * seed * entry["t"]}
            }

    table = claims(paper_input(*grown("cmnist", descend)))
    row = rows_of(table)["no_compounding", "cmnist"]
    assert row.cells[1].mean == pytest.approx(2.3) and row.cells[2].label == HOLDS
    plain = claims(paper_input(*grown("cmnist", lambda seed, tree: None)))
    row = rows_of(plain)["no_compounding", "cmnist"]
    assert (row.cells[2].label, row.cells[2].reason) == (UNMEASURED, evidence.NOT_RECORDED)


def test_logits_by_group_tell_class_from_colour(paper_input: MakeInput) -> None:
    """Easy leaves score 1 for their class and 3 for their colour, hard ones the other way round."""
    facts = facts_of("cmnist")

    def note(seed: int, tree: Any) -> None:
        logits = {}
        for place, group in enumerate(facts.groups):
            y, colour = divmod(place, 5)
            logits[group] = [
                (3.0 if child else 1.0) * (y == c) + (1.0 if child else 3.0) * (colour == c) - 7.0
                for c in range(5)
                for child in (0, 1)
            ]
            logits[group][3] = None  # a merged leaf
        tree["iterations"][1]["group_logits"] = logits

    found = rows_of(claims(paper_input(*grown("cmnist", note))))
    hard, easy = (
        found[f"{name}", "cmnist"].cells for name in ("hard_reads_class", "easy_reads_cue")
    )
    assert (hard[1].mean, hard[2].label) == (pytest.approx(75.0), HOLDS)
    assert (easy[1].mean, easy[2].label) == (pytest.approx(25.0), HOLDS)


def one_run(paper_input: MakeInput, dataset: str, change: Callable[[Any], None]) -> Run:
    """A single run with a changed tree."""
    made = grown(dataset, lambda seed, tree: change(tree), 1)
    (run,) = paper_input(*made).runs.published("nct", dataset)
    return run


def test_what_hard_leaves_hold_is_counted_in_images(paper_input: MakeInput) -> None:
    def capture(tree: Any) -> None:
        shares = tree["iterations"][1]["capture"]
        shares["digits_0_4"] = {"0-4:E": 96.0, "5-9:H": 4.0}
        shares["digits_5_9_not_8"] = {"5-9:E": 88.0, "5-9:H": 12.0}
        shares["digit_8"] = {"5-9:H": 64.0, "5-9:E": 36.0}

    run = one_run(paper_input, "umnist", capture)  # 100 test images a group
    assert evidence.hard_purity(run) == pytest.approx(100 * 64 / 80)
    assert evidence.smallest_leaf(run) == 0.0  # 0-4:H has none


def test_colours_of_a_stack_and_hard_leaves_by_class(paper_input: MakeInput) -> None:
    facts = facts_of("cmnist")

    def capture(tree: Any) -> None:
        for place, group in enumerate(facts.groups):
            y, colour = divmod(place, 5)
            code = facts.codes[y]
            # One colour of each class is captured half as often as the other three.
            share = 0.0 if y == colour else 40.0 if colour == (y + 1) % 5 else 80.0
            own = {f"{code}:H": share, f"{code}:E": 100.0 - share}
            tree["iterations"][1]["capture"][group] = own

    run = one_run(paper_input, "cmnist", capture)
    spread = evidence.at(2, evidence.colour_spread)(run)
    assert spread == pytest.approx(100 * (80 - 40) / 280)
    assert evidence.hard_purity(run) == pytest.approx(100.0)


def test_routing_is_counted_on_training_images(paper_input: MakeInput) -> None:
    def route(tree: Any) -> None:
        entry = tree["iterations"][1]
        entry["makeup"] = {
            "0-1:E": {"digits_0_1/red": 900, "digits_0_1/green": 20},
            "0-1:H": {"digits_0_1/red": 30, "digits_0_1/green": 10},
            "2-3:H": {"digits_2_3/red": 30},
            "2-3:E": {"digits_2_3/yellow_green": 1000},
        }

    run = one_run(paper_input, "cmnist", route)

    def read(measure: Any) -> float | None:
        return evidence.at(2, measure)(run)

    assert read(evidence.routing_recall) == pytest.approx(100 * 40 / 60)
    assert read(evidence.routing_purity) == pytest.approx(100 * 40 / 70)
    assert read(partial(evidence.routing_purity, leaves="0-1:")) == pytest.approx(25.0)
    assert read(evidence.enriched) == pytest.approx(40 / 70 / (60 / 1990))


def test_the_last_epoch_is_preferred_where_a_run_has_it(paper_input: MakeInput) -> None:
    def end(tree: Any) -> None:
        entry = tree["iterations"][1]
        entry |= {"margin_mean": [2.0, None], "logit_mean": [0.0, 2.0], "logit_std": [1.0, 3.0]}
        entry["end"] = {"margin_mean": [5.0, 4.0]}

    run = one_run(paper_input, "umnist", end)
    assert evidence.after_last_epoch(2, evidence.smallest_margin)(run) == 4.0
    assert evidence.after_last_epoch(2, evidence.overlap)(run) == 1.0


def test_the_sweep_is_a_table_and_two_claims(paper_input: MakeInput) -> None:
    cells = campaign_cells(CAMPAIGNS["claims-sweep"], ["cmnist"], NO_DATA)
    runs = [job for cell in cells for job in cell.jobs]
    assert len({job.run_id for job in runs}) == len(runs) == 36
    assert all(job.protocol.startswith("nominal") for job in runs)
    assert len({job.fingerprint for job in runs}) == len(SWEEP_POINTS)
    wanted = {sweep_variant("0.05", 1, 4).name, sweep_variant("0.05", 20, 0).name}
    made = [record(job, 70.0 + job.seed) for job in runs if job.variant in wanted]
    given = paper_input(*made)
    assert len(given.runs.of_kind("variant")) == 6
    measured = [cell for cell in claims_sweep(given).cells() if cell.mean is not None]
    assert len(measured) == 2 * 4 and {cell.n for cell in measured} == {3}
    rows = rows_of(claims(given))
    easy, unequal = (rows[name, "cmnist"].cells for name in ("easy_minority", "imbalance"))
    assert easy[1].mean == 50.0 and easy[2].label == FAILS  # made up: half of each group
    assert unequal[1].mean == 80.0 and unequal[2].label == FAILS  # four of five groups a leaf
    assert rows["imbalance_amplifies", "cmnist"].cells[2].label == UNMEASURED


def test_wilsons_bound_is_the_usual_one() -> None:
    from scipy.stats import binomtest

    (row,) = [
        row
        for row in paper_rows("depth_diagnostics")
        if (row["dataset"], row["iteration"]) == ("cmnist", "2")
    ]
    p, n = float(row["mean"]), 600
    hits = round(p * n)
    low = binomtest(hits, n).proportion_ci(0.95, "wilson").low
    wald = 1.96 * math.sqrt(p * (1 - p) / n)
    excess = evidence.wilson_excess(None, "").values[0]  # type: ignore[arg-type]
    assert excess == pytest.approx(100 * (wald / (hits / n - low) - 1), abs=0.3)
