"""What the terminal shows of running and finished jobs."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from bench.job import FIRST_DEVELOPMENT_SEED, NO_DATA, Job, Request, expand
from bench.launch import progress
from bench.launch.progress import LiveTable, Pace, PlainProgress, describe, result_line
from bench.record import Failure, Metrics, Outcome, Record, Selection, Status
from bench.runner import RunOptions, report_decoding, run_job
from bench.store import Store
from datasets.config import Values
from methods import training
from methods.base import Supervision

FIGURES = {"val": {"wga": 61.0, "avg": 71.0}, "test": {"wga": 62.0, "avg": 72.0}}


@pytest.fixture(scope="module")
def job() -> Job:
    (made,) = expand(Request(("erm",), ("umnist",), (0,), NO_DATA))
    return made


def done(
    job: Job,
    seed: int,
    *,
    val_groups: bool = True,
    figures: Mapping[str, Mapping[str, float]] = FIGURES,
) -> Record:
    metrics = {split: Metrics(values) for split, values in figures.items()}
    job = replace(job, seed=seed, supervision=Supervision(val_groups=val_groups))
    return Record(job, Status.DONE, outcome=Outcome(metrics))


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (4, "WGA 62.0, average 72.0"),
        (FIRST_DEVELOPMENT_SEED - 1, "WGA 62.0, average 72.0"),
        (FIRST_DEVELOPMENT_SEED, "validation WGA 61.0, average 71.0"),
    ],
)
def test_a_run_ends_with_the_figures_of_its_split(job: Job, seed: int, text: str) -> None:
    assert result_line(done(job, seed)) == text


def test_worst_groups_are_not_shown_where_the_tier_has_no_validation_groups(job: Job) -> None:
    record = done(job, 100, val_groups=False)
    assert result_line(record) == "validation average 71.0"
    assert record.outcome is not None
    chosen = replace(record.outcome, selection=Selection("pwga2", 0.81))
    assert result_line(replace(record, outcome=chosen)) == (
        "validation selection 0.81, average 71.0"
    )
    assert result_line(done(job, 0, val_groups=False)) == "WGA 62.0, average 72.0"


def test_aurocs_too(job: Job) -> None:
    figures = {"val": {"auroc": 0.9, "auroc_nonpatch": 0.7}, "test": {"auroc": 0.8}}
    assert result_line(done(job, 100, figures=figures)) == "validation AUROC 0.900, non-patch 0.700"
    assert result_line(done(job, 0, figures=figures)) == "AUROC 0.800"


def test_own_data_is_judged_by_groups_or_classes(job: Job) -> None:
    values = {"auroc": 0.9, "worst_class": 55.0, "avg": 72.0}
    own = replace(job, data_kind="own")
    assert result_line(done(own, 0, figures={"val": {}, "test": values})) == (
        "worst class 55.0, average 72.0"
    )
    assert result_line(done(own, 0, figures={"val": {}, "test": {"wga": 50.0, **values}})) == (
        "WGA 50.0, average 72.0"
    )


def test_a_run_that_did_not_end_well_says_why(job: Job) -> None:
    failed = Record(job, Status.FAILED, failure=Failure("error", "made to fail"))
    assert result_line(failed) == "made to fail"
    assert result_line(Record(job, Status.PRUNED, details={"reason": "behind"})) == "behind"


def test_progress_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe({}) == ""
    assert describe({"stage": "loading"}) == "loading"
    epoch = {"stage": "erm", "epoch": 3, "epochs": 20}
    assert describe({**epoch, "selection": 0.5}) == "erm epoch 3/20, selection 0.50"
    # Within an epoch, three are behind and this is the fourth.
    assert describe({**epoch, "step": 40, "steps": 80}) == "erm epoch 4/20, step 40/80"
    monkeypatch.setattr(time, "localtime", time.gmtime)
    assert describe({**epoch, "expected_end": 45_000.0}).endswith(", until about 12:30")


def test_the_expected_end_follows_from_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    pace = Pace()
    assert pace.expect({"stage": "loading"}) == {}
    assert pace.expect({"stage": "erm", "epoch": 5, "epochs": 20}) == {}  # resumed at the fifth
    now = 1010.0
    assert pace.expect({"stage": "erm", "epoch": 7, "epochs": 20}) == {"expected_end": 1075.0}
    assert pace.expect({"stage": "jtt", "epoch": 8, "epochs": 20}) == {}


def test_the_first_epoch_already_tells_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    pace = Pace()
    first = {"stage": "erm", "epoch": 0, "epochs": 2, "steps": 100}
    assert pace.expect({**first, "step": 10}) == {}
    now = 1010.0
    assert pace.expect({**first, "step": 30}) == {"expected_end": pytest.approx(1095.0)}


def test_plain_lines(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.StringIO()
    display = PlainProgress(3, Console(file=sink, width=40), done=1)
    display.started(job)
    display.progressed(job, {"stage": "erm", "epoch": 1, "epochs": 2})
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    display.progressed(job, {"stage": "erm", "epoch": 2, "epochs": 2})
    display.finished(job, done(job, 0))
    assert sink.getvalue().splitlines() == [
        f"[1/3] start  {job.run_id}",
        f"[1/3]   ...  {job.run_id}  erm epoch 2/2",
        f"[2/3] done   {job.run_id}  WGA 62.0, average 72.0  [0 s]",
    ]


def test_the_live_table_keeps_the_score_while_an_epoch_runs(job: Job) -> None:
    sink = io.StringIO()
    console = Console(file=sink, width=200, force_terminal=False)
    table = LiveTable(2, console, noun="trials")
    table.started(job)
    epoch = {"stage": "erm", "epoch": 1, "epochs": 4}
    table.progressed(job, {**epoch, "selection": 0.75, "expected_end": time.time() + 100})
    table.progressed(job, {**epoch, "step": 1, "steps": 2})
    console.print(table.live.get_renderable())
    shown = sink.getvalue()
    assert "0 of 2 trials finished" in shown
    assert all(text in shown for text in (job.run_id, "2/4, 50%", "0.75"))
    table.progressed(job, {"stage": "jtt", "epoch": 1, "epochs": 4, "step": 1, "steps": 2})
    table.finished(job, done(job, 0))
    table.finished(job, done(job, 0))  # two trials can be the same run
    assert table.done == 2
    assert "WGA 62.0" in sink.getvalue()


def test_what_a_run_is_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setattr(time, "time", lambda: 45_000.0 - 900)
    decoding = {"stage": "decoding birds train", "done": 500, "total": 4795}
    assert describe(decoding) == "decoding birds train 500/4795"
    epoch = {"stage": "erm", "epoch": 3, "epochs": 20, "step": 40, "steps": 80}
    now = {**epoch, "images_per_second": 131.62, "expected_end": 45_000.0}
    assert describe({**now, "activity": "training"}) == (
        "training erm epoch 4/20, step 40/80, 132 images/s, 15 min left, until about 12:30"
    )
    for activity in ("validating", "auditing"):
        assert describe({**epoch, "activity": activity}) == f"{activity} erm epoch 4/20"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (119, "119 s"), (120, "2 min"), (7300, "2 h")]
)
def test_times_in_units_of_which_there_are_two(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text


def test_a_run_reports_what_it_does(
    digits_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where epochs are long, here from the first step on, its end is told apart as well."""
    monkeypatch.setattr(training, "PROGRESS_SECONDS", 0.0)
    (job,) = expand(Request(("erm",), ("umnist",), (0,), digits_root, quick=True))
    seen: list[Values] = []
    options = RunOptions(digits_root, tmp_path, isolate=False)
    record = run_job(job, options, lambda values: seen.append(dict(values)))
    assert record.done
    doing = [str(values.get("activity", values["stage"])) for values in seen]
    assert [name for name, _ in groupby(doing)] == [
        "loading",
        *["training", "validating", "auditing"] * 2,
        "training",
        "evaluating",
    ]
    assert all(values["images_per_second"] > 0 for values in seen if "images_per_second" in values)
    assert Store(tmp_path).progress(job.run_id) == {}, "it has ended"


def test_decoding_is_reported_now_and_then() -> None:
    seen: list[Values] = []
    for done in range(1, 1201):
        report_decoding(lambda values: seen.append(values), "decoding train", done, 1200)
    assert [values["done"] for values in seen] == [500, 1000]
