"""When the audit looks, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bench
from bench.audit import default_interval, parse_interval
from bench.cli import main
from bench.context import RunContext, RunSettings, StageAccount
from bench.store import Store
from datasets.base import LabelledSplit, Labels, LoadedData
from datasets.errors import UsageError
from datasets.images import MappedImages


def looks(every: float, epochs: int) -> list[int]:
    seen: list[int] = []

    def audit(key: str, where: Any, outputs: torch.Tensor, module: nn.Module) -> None:
        seen.append(where["epoch"])

    settings = RunSettings("run", 0, torch.device("cpu"), {}, Path(), audit_every=every)
    ctx = RunContext(settings, StageAccount("run", Path()), [], audit=audit)
    for epoch in range(epochs):
        where = {"stage": "fit", "epoch": epoch}
        ctx.audit(where, torch.zeros(1), nn.Identity(), last=epoch == epochs - 1)
    return seen


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("all", list(range(12))), ("5", [4, 9, 11]), ("12", [11]), ("last", [11])],
)
def test_the_schedule_says_which_epochs(schedule: str, expected: list[int]) -> None:
    assert looks(parse_interval(schedule), 12) == expected


@pytest.mark.parametrize("wrong", ["0", "-1", "5.5", "²", "often", "inf", "nan", ""])
def test_what_is_no_schedule_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--audit must be all, last, off or a number"):
        parse_interval(wrong)
    assert main(["run", "--methods", "erm", f"--audit={wrong}"]) == 2
    assert "e.g. --audit 5" in capsys.readouterr().err


def test_photos_are_looked_at_every_fifth_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    none = torch.empty(0, dtype=torch.int64)
    mapped = MappedImages.__new__(MappedImages)
    for images, expected in ((mapped, 5), (object(), 1)):
        split = LabelledSplit(Labels(none, none, none), images)  # type: ignore[arg-type]
        data = LoadedData(None, {"train": split})  # type: ignore[arg-type]
        assert default_interval(data) == expected


@pytest.mark.parametrize("method", ["erm", "nct"])
def test_thinning_changes_nothing_but_the_audit(
    tmp_path: Path, digits_root: Path, method: str
) -> None:
    tables = {}
    for schedule in ("all", "last", "off"):
        results = tmp_path / schedule
        grid = bench.run(
            method,
            "umnist",
            1,
            quick=True,
            audit=schedule,
            isolate=False,
            results=results,
            data_root=digits_root,
        )
        (job,) = grid.jobs
        store = Store(results)
        record, history = store.record(job.run_id), store.history(job.run_id)
        assert record is not None and record.done and history is not None
        seen = 0 if schedule == "off" else int(history["audit_test_wga"].notna().sum())
        assert record.cost.audit is not None and record.cost.audit.looks == seen
        assert (record.cost.audit.cpu_seconds > 0) == (seen > 0)
        times = [name for name in history if name == "seconds" or name.startswith("audit_")]
        tables[schedule] = (history.drop(columns=times), store.predictions(job.run_id), seen)
    whole, last, off = (tables[schedule] for schedule in ("all", "last", "off"))
    assert whole[2] == len(whole[0]) and 0 < last[2] < whole[2] and off[2] == 0
    for other in (last, off):
        assert other[0].equals(whole[0]) and other[1].equals(whole[1])


def test_the_last_epoch_of_an_early_stop_is_known(tmp_path: Path, digits_root: Path) -> None:
    settings = {"erm.epochs": 6, "erm.patience": 1, "erm.lr": 1e-12}
    grid = bench.run(
        "erm",
        "umnist",
        1,
        settings=settings,
        audit="last",
        isolate=False,
        results=tmp_path,
        data_root=digits_root,
    )
    history = Store(tmp_path).history(grid.jobs[0].run_id)
    assert history is not None and 1 < len(history) < 6
    assert history["audit_test_wga"].notna().tolist() == [False] * (len(history) - 1) + [True]
    assert not math.isnan(history["audit_test_wga"].iloc[-1])
