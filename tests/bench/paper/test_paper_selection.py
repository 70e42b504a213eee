"""The panel of selection rules on made-up histories, and the control on biased validation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from report_records import jobs, record

from bench.job import NO_DATA, Job
from bench.paper.campaigns import CAMPAIGNS, campaign_cells
from bench.paper.selection import control_validation, draw_selection, selection_panel
from bench.record import Record, Selection
from bench.reporting import ReportInput
from bench.reporting.figure import FigureInput, SkippedFigure, house_style
from bench.reporting.table import Cell, Table
from bench.store import Store

MakeInput = Callable[..., ReportInput]
Row = dict[str, Any]
AUDITS = ("val_wga", "val_avg", "val_worst_class", "test_wga")
READS = {"val_avg": "val_avg", "worst_class": "val_worst_class", "val_wga": "val_wga"}


def epochs(draws: random.Random, count: int, **where: Any) -> list[Row]:
    """Epochs with few different values, so that rules disagree and ties occur."""
    return [
        {
            **{"iteration": None, "phase": None, **where, "epoch": epoch},
            **{"loss": 1.0, "selection": draws.random()},
            **{f"audit_{name}": 10.0 * draws.randrange(8) for name in AUDITS},
        }
        for epoch in range(count)
    ]


def stored(job: Job, rows: list[Row], final: list[Row], epoch: int | None, wga: float) -> Record:
    """A run that kept one epoch of its final training."""
    value = 0.5 if epoch is None else final[epoch]["selection"]
    made = record(job, wga)
    assert made.outcome is not None and all(row in rows for row in final)
    return replace(made, outcome=replace(made.outcome, selection=Selection("rule", value, epoch)))


def first_best(rows: list[Row], name: str) -> float:
    """The test figure of the first epoch at which an audited value is highest."""
    best = rows[0]
    for row in rows[1:]:
        if row[f"audit_{name}"] > best[f"audit_{name}"]:
            best = row
    return float(best["audit_test_wga"])


def expected(final: list[Row], epoch: int) -> dict[str, float]:
    """What each rule gives, recomputed row by row."""
    found = {rule: first_best(final, name) for rule, name in READS.items()}
    found["oracle"] = max(float(row["audit_test_wga"]) for row in final)
    found["last"] = float(final[-1]["audit_test_wga"])
    return found | {"own": float(final[epoch]["audit_test_wga"])}


class Made:
    """Runs in a store with their histories, and what a table makes of them."""

    def __init__(self, folder: Path, paper_input: MakeInput) -> None:
        self.store, self.paper_input = Store(folder), paper_input
        self.records: list[Record] = []

    def add(
        self, job: Job, rows: list[Row], final: list[Row], epoch: int | None, wga: float = 50.0
    ) -> None:
        made = stored(job, rows, final, epoch, wga)
        self.store.write(made, pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"}))
        self.records.append(made)

    def given(self) -> ReportInput:
        return self.paper_input(*self.records, folder=self.store.runs)

    def table(self) -> Table:
        return selection_panel(self.given())

    def row(self, method: str) -> dict[str, Cell]:
        return {c.key.variant: c for c in self.table().cells() if c.key.method == method}


@pytest.fixture
def made(tmp_path: Path, paper_input: MakeInput) -> Made:
    return Made(tmp_path, paper_input)


def test_every_rule_is_that_of_the_final_training(made: Made) -> None:
    draws, by_rule = random.Random(1), []
    for job in jobs("cnc", "cmnist", 3):
        first, final = epochs(draws, 9, stage="erm"), epochs(draws, 12, stage="cnc")
        epoch = draws.randrange(12)
        made.add(job, [*final, *first], final, epoch)
        by_rule.append(expected(final, epoch))
    cells = made.row("cnc")
    assert cells["reported"].mean == 50.0
    for rule in by_rule[0]:
        assert cells[rule].mean == pytest.approx(sum(one[rule] for one in by_rule) / 3), rule
        assert cells[rule].n == 3 and not cells[rule].note
    assert len({cells[rule].mean for rule in by_rule[0]}) > 3  # rules differ


@pytest.mark.parametrize("phase", [1, 2])
def test_a_tree_is_judged_in_the_phase_and_iteration_it_was_kept(made: Made, phase: int) -> None:
    (job,), draws = jobs("nct", "cmnist", 1), random.Random(2)
    parts = {
        (t, p): epochs(draws, 10, stage=f"nct-{t}-{p}", iteration=t, phase=p)
        for t in (1, 2, 3)
        for p in (1, 2)
    }
    final = parts[2, phase]  # the depth rule chose iteration 2
    made.add(job, [row for part in parts.values() for row in part], final, 4)
    cells = made.row("nct")
    assert {rule: cells[rule].mean for rule in expected(final, 4)} == expected(final, 4)


def test_a_model_that_is_no_epoch_of_a_training_has_no_rules(made: Made) -> None:
    (job,), rows = jobs("dfr", "cmnist", 1), epochs(random.Random(3), 5, stage="erm")
    made.add(job, rows, [], None, 44.0)
    reported, *others = made.row("dfr").values()
    assert reported.mean == 44.0
    assert all(cell.mean is None and "not applicable" in cell.reason for cell in others)
    assert {cell.reason for cell in made.row("erm").values()} == {"not run"}


def test_the_worst_class_has_the_seeds_that_audited_it_and_says_how_many(made: Made) -> None:
    draws = random.Random(4)
    for job in jobs("eiil", "cmnist", 3):
        final = epochs(draws, 6, stage="eiil")
        if job.seed:
            final = [{k: v for k, v in row.items() if "worst_class" not in k} for row in final]
        else:
            alone = first_best(final, "val_worst_class")
        made.add(job, final, final, 2)
    cells = made.row("eiil")
    assert (cells["worst_class"].mean, cells["worst_class"].n) == (alone, 1)
    assert cells["worst_class"].note == "1 of 3 seeds" and cells["val_avg"].n == 3
    assert any("worst class" in note for note in made.table().notes)


def thinned(rows: list[Row], every: int) -> list[Row]:
    """Rows of a training at which the audit looked at every n-th epoch and at the last."""
    blank = {f"audit_{name}": None for name in AUDITS}
    seen = [(row["epoch"] + 1) % every == 0 or row is rows[-1] for row in rows]
    return [row if look else {**row, **blank} for row, look in zip(rows, seen, strict=True)]


def test_a_thinned_audit_is_judged_where_it_looked_and_says_so(made: Made) -> None:
    (job,) = jobs("groupdro", "umnist", 1)
    whole = epochs(random.Random(5), 12, stage="groupdro")
    final = thinned(whole, 5)
    made.add(job, final, final, 1, 61.0)
    cells, looked = made.row("groupdro"), [whole[4], whole[9], whole[11]]
    others = expected(looked, 0)
    assert cells["own"].mean == 61.0  # the reported model, at which the audit did not look
    assert all(cells[rule].mean == others[rule] for rule in others if rule != "own")
    assert any(note.startswith("The audit of 1 of 1 runs") for note in made.table().notes)


def test_a_calibrated_tree_is_compared_before_calibration(made: Made) -> None:
    (job,) = jobs("nct_plus", "umnist", 1)
    final = epochs(random.Random(6), 8, stage="nct-1-2", iteration=1, phase=2)
    tree = {"chosen_iteration": 1, "argmax_iteration": 1, "stop_reason": "made up"}
    tree |= {"iterations": [{"t": 1, "leaves": [], "node_counts": [], "calibration": {"scale": 2}}]}
    for rows in (final, thinned(final, 5)):
        made.records.clear()
        one = replace(stored(job, rows, rows, 3, 90.0), details={"nct": tree})
        made.store.write(one, pd.DataFrame(rows).astype({"iteration": "Int64", "phase": "Int64"}))
        made.records.append(one)
        cells = made.row("nct_plus")
        assert cells["reported"].mean == 90.0
        kept = rows[3]["audit_test_wga"]  # not looked at if thinned: then there is no number
        assert cells["own"].mean == kept and cells["oracle"].mean != 90.0


def test_two_sentences_say_who_owes_least_and_most(made: Made) -> None:
    for method, gain in (("jtt", 3.0), ("cnc", -1.0)):
        for job in jobs(method, "umnist", 2):
            places = ((50.0 + gain, 60.0, 70.0), (50.0, 70.0, 60.0))
            final = [
                {**row, "audit_test_wga": test, "audit_val_wga": wga, "audit_val_avg": average}
                for row, (test, wga, average) in zip(
                    epochs(random.Random(7), 2, stage=method), places, strict=True
                )
            ]
            made.add(job, final, final, 0)
    own, groups, *_ = made.table().notes
    assert own.endswith("by -1.0 (CnC) to +3.0 (JTT) points on UMNIST.")
    assert groups.endswith("by -3.0 (JTT) to +1.0 (CnC) points on UMNIST.")


def test_the_figure_shows_gains_over_the_last_epoch(made: Made) -> None:
    (job,) = jobs("cnc", "cmnist", 1)
    final = epochs(random.Random(8), 9, stage="cnc")
    made.add(job, final, final, 3)
    with house_style():
        drawn = draw_selection(FigureInput(tuple(made.given().runs.of_kind("published"))))
    lines = {str(line.get_label()): line for line in drawn.figure.axes[0].get_lines()}
    values = expected(final, 3)
    for rule, title in (("own", "Own rule"), ("oracle", "Oracle (best on test)")):
        assert list(lines[title].get_xdata()) == [values[rule] - values["last"]]
    with pytest.raises(SkippedFigure):
        draw_selection(FigureInput(()))


def test_an_empty_store_has_a_panel_without_rows(paper_input: MakeInput) -> None:
    table = selection_panel(paper_input())
    assert table.rows == () and table.notes == ("None in this store.",)


def test_the_control_is_every_method_on_both_draws_and_reuses_runs() -> None:
    cells = campaign_cells(CAMPAIGNS["control-validation"], ("cmnist", "umnist"), NO_DATA)
    assert len({cell.method for cell in cells}) == 10 and len(cells) == 20
    assert all([job.seed for job in cell.jobs] == [0, 1, 2] for cell in cells)
    assert {(cell.is_default, cell.jobs[0].protocol) for cell in cells} == {
        (True, "nominal"),
        (False, "biased_val"),
    }
    controls = campaign_cells(CAMPAIGNS["plus-controls"], ("cmnist",), NO_DATA)
    known = {job.run_id for cell in controls for job in cell.jobs}
    own = {job.run_id for c in cells if c.method in ("nct", "nct_plus") for job in c.jobs}
    assert own <= known


def test_the_control_prints_the_result_of_every_method(
    cli: Callable[..., Any], digits_root: Path, tmp_path: Path
) -> None:
    campaign = CAMPAIGNS["control-validation"]
    for cell in campaign_cells(campaign, ("cmnist",), digits_root, [0], quick=True):
        Store(tmp_path).write(record(cell.jobs[0], 70.0 if cell.is_default else 12.3))
    words = ("campaign", "control-validation", "--datasets", "cmnist", "--seeds", "1", "--quick")
    seen = cli(*words, "--data-root", digits_root, "--results", tmp_path)
    assert seen.code == 0 and "20 not to be run, 0 to run" in seen.err
    assert seen.out.count("12.3") == seen.out.count("70.0") == 10
    assert "exmap" in seen.out and "biased_val" in seen.out


def test_the_control_is_paired_by_seed_and_shows_tiers(paper_input: MakeInput) -> None:
    found = []
    for cell in campaign_cells(CAMPAIGNS["control-validation"], ("cmnist",), NO_DATA):
        if cell.method in ("jtt", "nct"):
            loss = 0.0 if cell.is_default else 10.0
            found += [record(job, 70.0 + job.seed - loss * job.seed) for job in cell.jobs]
    del found[-1]  # NCT on biased validation has two seeds: 70 and 61
    table = control_validation(paper_input(*found))
    rows = {row.header: row for row in table.rows}
    jtt, nct = rows["JTT", "no", "yes"], rows["NCT", "no", "no"]
    balanced, biased, lost, *average = nct.cells
    assert (balanced.mean, biased.mean, lost.mean) == (71.0, 65.5, -5.0)
    assert (balanced.n, biased.n, lost.n, lost.text()[0]) == (3, 2, 2, "-")
    assert [cell.mean for cell in average] == [73.0, 67.5, -5.0]  # two points above the worst
    assert jtt.cells[2].mean == -10.0 and jtt.section == "Group labels in validation"
    reasons = {
        cell.reason for header, row in rows.items() if header[0] == "ERM" for cell in row.cells
    }
    assert reasons == {"not run", "no shared seeds"} and len(rows) == 10


def test_the_control_counts_every_seed_once(paper_input: MakeInput) -> None:
    cells = [
        cell
        for name in ("control-validation", "plus-controls")
        for cell in campaign_cells(CAMPAIGNS[name], ("cmnist",), NO_DATA)
        if cell.method == "nct"
    ]
    made = {job.run_id: record(job, 70.0 + job.seed) for cell in cells for job in cell.jobs}
    rows = {row.header[0]: row for row in control_validation(paper_input(*made.values())).rows}
    assert [cell.n for cell in rows["NCT"].cells[:3]] == [5, 5, 5]
    assert rows["NCT"].cells[1].mean == 72.0


def test_the_control_is_of_one_version(paper_input: MakeInput) -> None:
    """Also where one campaign has today's runs of a method, and the other only earlier ones."""
    jobs = {
        name: [
            job
            for cell in campaign_cells(CAMPAIGNS[name], ("cmnist",), NO_DATA)
            if cell.method == "nct"
            for job in cell.jobs
        ]
        for name in ("control-validation", "plus-controls")
    }
    now = {job.run_id: record(job, 80.0) for job in jobs["control-validation"]}
    earlier = []
    for job in jobs["plus-controls"]:
        version = job.version - 1
        older = replace(job, version=version, identity={**job.identity, "version": version})
        earlier.append(record(older, 60.0))
    rows = {r.header[0]: r for r in control_validation(paper_input(*now.values(), *earlier)).rows}
    assert rows["NCT"].cells[1].mean == 80.0
