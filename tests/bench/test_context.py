from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bench.audit
from bench import numerics
from bench.audit import Auditor
from bench.context import (
    FitStopped,
    RunContext,
    RunSettings,
    StageAccount,
    derive_seed,
    stage_address,
    with_audit,
)
from bench.job import Request, expand
from bench.process import CpuClock
from bench.provenance import git_state
from bench.runner import load_data
from datasets.base import GroupLabelsHidden, LoadedData, Task
from datasets.files import append_line, read_lines
from methods.base import Context, Stage, StageResult, Supervision

names = st.lists(st.text(st.characters(exclude_characters="/", codec="utf-8")), max_size=3)


@dataclass(frozen=True)
class Recipe:
    """The configuration of a stage."""

    rate: float = 0.5


class NoTask:
    """A task that a stage narrows, and never looks at."""

    def narrowed(self, **granted: bool) -> Task:
        return self  # type: ignore[return-value]


TASK: Task = NoTask()  # type: ignore[assignment]


def make_context(
    folder: Path, *, seed: int = 0, run: str = "run", audit: Any = None, **settings: Any
) -> RunContext:
    known = {
        "run_id": run,
        "seed": seed,
        "device": torch.device("cpu"),
        "scope": {"dataset": "digits"},
        "stages": folder / "stages",
        **settings,
    }
    account = StageAccount(run, folder / "work" / run)
    return RunContext(RunSettings(**known), account, [], settings.pop("progress", None), audit)


def toy(recipe: Recipe | None = None, version: int = 1, **needs: bool) -> Stage:
    return Stage("toy", recipe or Recipe(), version, Supervision(**needs))


def three_epochs(task: Task, ctx: Context, stop_after: int = 3, pause: float = 0.0) -> StageResult:
    """A training in small: a checkpoint and a history row an epoch."""
    state = ctx.restore("toy") or {"epoch": 0, "total": torch.zeros(1)}
    for epoch in range(state["epoch"], 3):
        if epoch == stop_after:
            raise KeyboardInterrupt
        time.sleep(pause)
        generator = ctx.generator("toy", epoch)
        state = {"epoch": epoch + 1, "total": state["total"] + torch.rand(1, generator=generator)}
        ctx.count_passes(10)
        ctx.history({"stage": "toy", "epoch": epoch}, loss=float(epoch))
        ctx.save("toy", state)
    return StageResult({"total": state["total"]}, {"epochs": 3})


def test_a_stage_is_computed_once_and_its_cost_is_told_both_ways(tmp_path: Path) -> None:
    first, second = make_context(tmp_path, run="first"), make_context(tmp_path, run="second")
    one = first.stage(toy(), TASK, lambda task, ctx: three_epochs(task, ctx, pause=0.01))

    def never(task: Task, ctx: Context) -> StageResult:
        raise AssertionError("computed a second time")

    two = second.stage(toy(), TASK, never)
    assert torch.equal(one.tensors["total"], two.tensors["total"])
    assert one.facts == two.facts == {"epochs": 3}
    (paid,), (shared,) = first.stage_costs, second.stage_costs
    assert paid.seconds_marginal == paid.seconds_standalone >= 0.03
    assert not paid.reused
    assert shared.seconds_marginal == 0
    assert shared.reused
    for same in ("seconds_standalone", "image_passes", "key", "name"):
        assert getattr(shared, same) == getattr(paid, same)
    assert paid.image_passes == 30
    assert first.account.elapsed().wall < 0.03 + paid.seconds_standalone
    rows = [ctx.account.history() for ctx in (first, second)]
    assert rows[0] == rows[1]
    assert [row["epoch"] for row in rows[0]] == [0, 1, 2]


def test_a_stage_is_shared_only_if_it_means_the_same(tmp_path: Path) -> None:
    contexts = [
        (make_context(tmp_path), Recipe(), 1),
        (make_context(tmp_path, seed=1), Recipe(), 1),
        (make_context(tmp_path, scope={"dataset": "birds"}), Recipe(), 1),
        (make_context(tmp_path), Recipe(rate=0.25), 1),
        (make_context(tmp_path), Recipe(), 2),
    ]
    for ctx, recipe, version in contexts:
        ctx.stage(toy(recipe, version), TASK, three_epochs)
    records = [ctx.stage_costs[0] for ctx, _, _ in contexts]
    assert not any(record.reused for record in records)
    assert len({record.key for record in records}) == len(contexts)


STAGE_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_context import TASK, make_context, three_epochs, toy

folder, name, die_after = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def compute(task, ctx):
    (folder / f"computed-by-{name}").touch()
    if die_after < 0:
        time.sleep(1.0)  # long enough for the other to ask meanwhile
    try:
        return three_epochs(task, ctx, stop_after=die_after if die_after >= 0 else 3)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGKILL)

(folder / f"ready-{name}").touch()
while die_after < 0 and len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
ctx = make_context(folder, run=name)
result = ctx.stage(toy(), TASK, compute)
print(float(result.tensors["total"]), ctx.stage_costs[0].reused)
"""


def stage_process(folder: Path, name: str, die_after: int = -1) -> subprocess.Popen[str]:
    words = [str(Path(__file__).parent), str(folder), name, str(die_after)]
    return subprocess.Popen(
        [sys.executable, "-c", STAGE_SCRIPT, *words], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_that_ask_at_once_compute_once(tmp_path: Path) -> None:
    processes = [stage_process(tmp_path, name) for name in ("one", "two")]
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("computed-by-*"))) == 1
    assert answers[0][0] == answers[1][0]
    assert sorted(answer[1] for answer in answers) == ["False", "True"]


def test_another_run_takes_up_what_a_killed_one_left(tmp_path: Path) -> None:
    killed = stage_process(tmp_path, "killed", die_after=2)
    assert killed.wait(120) == -9
    ran: list[int] = []

    def compute(task: Task, ctx: Context) -> StageResult:
        saved = ctx.restore("toy")
        assert saved is not None
        ran.extend(range(saved["epoch"], 3))
        assert isinstance(ctx, RunContext)
        ctx.account.names.clear()  # the look above was this test's, not the stage's
        return three_epochs(task, ctx)

    ctx = make_context(tmp_path, run="other")
    result = ctx.stage(toy(), TASK, compute)
    assert ran == [2]
    fresh = make_context(tmp_path / "fresh").stage(toy(), TASK, three_epochs)
    assert torch.equal(result.tensors["total"], fresh.tensors["total"])
    record = ctx.stage_costs[0]
    assert record.image_passes == 30  # the killed process's passes are not lost
    assert not record.reused
    assert [row["epoch"] for row in ctx.account.history()] == [0, 1, 2]
    assert not list((tmp_path / "stages").glob("*.work"))


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def one_bit_flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def last_bit_flipped(file: Path) -> None:
    content = file.read_bytes()  # of tensors, the end is data: nothing but a checksum shows it
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def foreign(file: Path) -> None:
    file.write_text('{"some": "other file"}')


DAMAGE = pytest.mark.parametrize("damage", [torn, emptied, zeroed, one_bit_flipped, foreign])


@pytest.mark.parametrize("damage", [torn, emptied, zeroed, one_bit_flipped, last_bit_flipped])
@pytest.mark.parametrize("name", ["stage.json", "tensors.safetensors"])
def test_a_damaged_stage_is_set_aside_and_computed_again(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    first = make_context(tmp_path).stage(toy(), TASK, three_epochs)
    whole = first.tensors["total"].clone()  # the tensors are a view of the file
    (folder,) = (path.parent for path in (tmp_path / "stages").glob("*/stage.json"))
    damage(folder / name)
    said: list[Any] = []
    later = make_context(tmp_path, run="later")
    later._progress = said.append
    again = later.stage(toy(), TASK, three_epochs)
    assert torch.equal(again.tensors["total"], whole)
    assert not later.stage_costs[0].reused
    (note,) = read_lines(tmp_path / "damaged" / "notes.jsonl")
    assert note["was"] == str(folder) and note["reason"]
    assert (tmp_path / "damaged" / note["name"] / name).is_file()
    assert [folder.name in message["note"] for message in said] == [True]
    third = make_context(tmp_path, run="third")
    third.stage(toy(), TASK, three_epochs)
    assert third.stage_costs[0].reused


def test_a_stage_without_its_tensors_is_computed_again(tmp_path: Path) -> None:
    make_context(tmp_path).stage(toy(), TASK, three_epochs)
    (folder,) = (path.parent for path in (tmp_path / "stages").glob("*/stage.json"))
    (folder / "tensors.safetensors").unlink()
    again = make_context(tmp_path, run="later")
    again.stage(toy(), TASK, three_epochs)
    assert not again.stage_costs[0].reused


def half_a_training(folder: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        three_epochs(TASK, make_context(folder), stop_after=2)
    return folder / "work" / "run"


@DAMAGE
def test_a_damaged_checkpoint_costs_a_recomputation(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = half_a_training(tmp_path)
    file = folder / "toy.checkpoint"
    if damage is one_bit_flipped:
        # In the tensor: most of so small a file is padding, which means nothing.
        value = struct.pack("<f", float(torch.load(file)["state"]["total"]))
        changed = bytes((value[0] ^ 1, *value[1:]))
        file.write_bytes(file.read_bytes().replace(value, changed))
    else:
        damage(file)
    ctx = make_context(tmp_path)
    result = three_epochs(TASK, ctx)
    fresh = three_epochs(TASK, make_context(tmp_path / "fresh"))
    assert torch.equal(result.tensors["total"], fresh.tensors["total"])
    assert [row["epoch"] for row in ctx.account.history()] == [0, 1, 2]
    assert ctx.account.image_passes == 30
    (note,) = read_lines(folder / "damaged" / "notes.jsonl")
    assert note["was"] == str(file)


@DAMAGE
def test_a_damaged_history_is_mended_from_the_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = half_a_training(tmp_path)
    before = (folder / "history.jsonl").read_bytes()
    damage(folder / "history.jsonl")
    ctx = make_context(tmp_path)
    saved = ctx.restore("toy")
    assert saved is not None and saved["epoch"] == 2
    assert (folder / "history.jsonl").read_bytes() == before
    ctx.history({"stage": "toy", "epoch": 2}, loss=0.0)  # of an epoch that was not saved
    make_context(tmp_path).restore("toy")
    assert (folder / "history.jsonl").read_bytes().startswith(before + b"{")


def test_a_checkpoint_of_another_run_is_not_taken_up(tmp_path: Path) -> None:
    folder = half_a_training(tmp_path)
    for name in ("other", "third"):
        shutil.copytree(folder, tmp_path / "work" / name)
    assert make_context(tmp_path, run="other").restore("toy") is None
    os.replace(
        tmp_path / "work" / "third" / "toy.checkpoint",
        tmp_path / "work" / "run" / "another.checkpoint",
    )
    ctx = make_context(tmp_path)
    assert ctx.restore("another") is None
    assert ctx.restore("toy") is not None


def test_history_rows_are_unique_after_a_resume(tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    for epoch, loss in ((0, 3.0), (1, 2.0), (1, 1.5), (2, 1.0)):  # died before saving epoch 1
        ctx.history({"stage": "toy", "epoch": epoch}, loss=loss)
    ctx.history({"stage": "toy", "epoch": 2, "iteration": 1}, loss=0.5)
    rows = ctx.account.history()
    assert [(row["epoch"], row.get("iteration"), row["loss"]) for row in rows] == [
        (0, None, 3.0),
        (1, None, 1.5),
        (2, None, 1.0),
        (2, 1, 0.5),
    ]


def test_seconds_add_up_over_attempts(tmp_path: Path) -> None:
    first = make_context(tmp_path)
    first.account.earlier_attempts = CpuClock(100.0, 50.0)
    first.count_passes(5)
    first.save("toy", {"epoch": 1})
    second = make_context(tmp_path)
    assert second.restore("other") is None
    assert second.restore("toy") == {"epoch": 1}
    assert 100.0 <= second.account.elapsed().wall < 105.0
    assert second.account.image_passes == 5


@pytest.fixture
def digits(digits_root: Path) -> LoadedData:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), digits_root))
    return load_data(job, digits_root)


def test_audit_and_report_time_is_not_the_methods(
    tmp_path: Path, digits: LoadedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            time.sleep(0.2)
            return evaluate(*arguments)

        return slow

    monkeypatch.setattr(bench.audit, "evaluate", slowly(bench.audit.evaluate))
    audit = Auditor(digits, tmp_path / "audit").look
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    logits = torch.zeros(len(digits.splits["val"]), 5)

    def compute(task: Task, ctx: Context) -> StageResult:
        for epoch in range(2):
            where = {"stage": "toy", "epoch": epoch}
            ctx.history(where, loss=1.0)
            ctx.audit(where, logits, model)
        return StageResult({"weight": torch.zeros(1)})

    ctx = make_context(tmp_path, audit=audit)
    began = time.perf_counter()
    ctx.stage(toy(), TASK, compute)
    assert time.perf_counter() - began > 0.8  # two epochs, two splits each
    assert ctx.stage_costs[0].seconds_standalone < 0.4
    assert ctx.account.elapsed().wall < 0.4
    rows = with_audit(ctx.account.history(), tmp_path / "audit")
    assert [row["epoch"] for row in rows] == [0, 1]
    assert all(0 <= row["audit_test_wga"] <= row["audit_test_avg"] <= 100 for row in rows)


def test_processor_time_is_the_methods_own_and_adds_up(tmp_path: Path) -> None:
    def look(*_: Any) -> None:
        """Work hard in a thread while the fit waits for it."""
        thread = threading.Thread(target=burn, args=(0.3,))
        thread.start()
        thread.join()

    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            sum(range(1000))

    ctx = make_context(tmp_path, audit=look)
    ctx.audit({}, torch.zeros(1), nn.Identity())
    assert ctx.account.elapsed().cpu < 0.2
    burn(0.2)
    assert ctx.account.elapsed().cpu >= 0.2
    ctx.count_passes(1)
    ctx.save("half", {})
    again = make_context(tmp_path)
    again.restore("half")
    assert again.account.elapsed().cpu >= 0.2


def test_a_method_cannot_write_findings_of_the_audit(tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    for epoch in (0, 1):
        where = {"stage": "toy", "epoch": epoch, "audit_test_wga": 100.0}
        ctx.history(where, loss=0.5, audit_seconds=-1e6)
    looks = {"stage": "toy", "epoch": 0, "audit_test_wga": 12.5, "audit_seconds": 2.0}
    append_line(tmp_path / "audits" / "run.jsonl", looks)
    seen, unseen = with_audit(ctx.account.history(), tmp_path / "audits")
    assert (seen["audit_test_wga"], seen["audit_seconds"], seen["loss"]) == (12.5, 2.0, 0.5)
    assert not [name for name in unseen if name.startswith("audit_")]


@pytest.mark.parametrize("anyway", [False, True])
def test_looks_at_an_attempt_that_was_started_again_are_not_joined(
    tmp_path: Path, digits: LoadedData, anyway: bool
) -> None:
    """Other code starts again, and its audit, which is thinner, leaves most epochs out."""
    folder, model = tmp_path / "audits", nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))
    logits = torch.zeros(len(digits.splits["val"]), 5)

    def train(code: str, every: float, epochs: range) -> RunContext:
        audit = Auditor(digits, folder, code).look
        settings = {"code": code, "audit_every": every, "resume_anyway": anyway}
        ctx = make_context(tmp_path, audit=audit, **settings)
        for epoch in epochs:
            where = {"stage": "toy", "epoch": epoch}
            ctx.history(where, loss=0.0)
            ctx.audit(where, logits, model)
            ctx.save("toy", {"epoch": epoch})
        return ctx

    train("1111", 1, range(2))
    account = train("2222", 4, range(2 * anyway, 4)).account
    rows = with_audit(account.history(), folder, [account.cost("fit", "2222")])
    looked = [row["epoch"] for row in rows if "audit_test_wga" in row]
    assert looked == ([0, 1, 3] if anyway else [3])
    assert not any("audit_code" in row for row in rows)


def test_a_failing_audit_is_not_silent(tmp_path: Path, digits: LoadedData) -> None:
    ctx = make_context(tmp_path, audit=Auditor(digits, tmp_path / "audit").look)
    wrong = nn.Sequential(nn.Flatten(), nn.Linear(7, 5))
    logits = torch.zeros(len(digits.splits["val"]), 5)
    with pytest.raises(RuntimeError):
        ctx.audit({"stage": "toy", "epoch": 0}, logits, wrong)


@given(st.integers(0, 10_000), names, names)
def test_seeds_are_derived_by_name(root: int, first: list[str], second: list[str]) -> None:
    seed = derive_seed(root, *first)
    assert 0 <= seed < 2**63
    assert seed == derive_seed(root, *first)
    assert (seed == derive_seed(root, *second)) == (first == second)
    assert seed != derive_seed(root + 1, *first)


def test_seed_tree_is_pinned() -> None:
    # A changed rule would silently make every stored run irreproducible.
    assert derive_seed(0, "erm", "init") == 3_750_843_847_426_820_098


def test_streams_do_not_depend_on_the_order_of_asking(tmp_path: Path) -> None:
    one, two = make_context(tmp_path / "one"), make_context(tmp_path / "two")
    one.generator("a")
    drawn = torch.rand(3, generator=one.generator("b", 1))
    assert torch.equal(drawn, torch.rand(3, generator=two.generator("b", 1)))
    assert not torch.equal(drawn, torch.rand(3, generator=two.generator("b", 2)))


def test_stage_file_says_what_it_is(tmp_path: Path) -> None:
    ctx = make_context(tmp_path, seed=4)
    ctx.stage(toy(), TASK, three_epochs)
    key = ctx.stage_costs[0].key
    content = json.loads((tmp_path / "stages" / f"toy-{key}" / "stage.json").read_text())
    assert content["identity"]["seed"] == 4
    assert content["identity"]["config"] == {"rate": 0.5}
    assert content["identity"]["dataset"] == "digits"


def test_two_trainings_of_one_fit_may_not_share_a_name(tmp_path: Path) -> None:
    # The second would find the first one's finished checkpoint and train nothing.
    ctx = make_context(tmp_path)
    ctx.restore("train")
    with pytest.raises(RuntimeError, match="'train'"):
        ctx.restore("train")
    ctx.restore("other")


def test_a_rerun_of_everything_computes_stages_again(tmp_path: Path) -> None:
    first = make_context(tmp_path)
    first.stage(toy(), TASK, three_epochs)
    later = make_context(tmp_path, not_before=time.time() + 1)
    computed: list[int] = []

    def compute(task: Task, ctx: Context) -> StageResult:
        computed.append(1)
        return three_epochs(task, ctx)

    later.stage(toy(), TASK, compute)
    assert computed == [1]


def test_a_stage_says_which_code_made_it(tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    ctx.stage(toy(), TASK, three_epochs)
    assert ctx.stage_costs[0].git == git_state()


def test_a_stage_gets_a_task_narrowed_to_what_it_needs(tmp_path: Path, digits: LoadedData) -> None:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), tmp_path))
    task = digits.task(job.backbone(), train_groups=True, val_groups=True)
    tier = Supervision(train_groups=True, val_groups=True)

    def compute(seen: Task, ctx: Context) -> StageResult:
        assert torch.equal(seen.val.groups, task.val.groups)
        with pytest.raises(GroupLabelsHidden):
            _ = seen.train.groups
        return StageResult({"weight": torch.zeros(1)})

    ctx = make_context(tmp_path, supervision=tier)
    ctx.stage(toy(val_groups=True), task, compute)
    with pytest.raises(GroupLabelsHidden, match="does not grant"):
        make_context(tmp_path).stage(toy(val_groups=True), task, compute)


def test_what_a_stage_needs_is_part_of_its_address_where_it_needs_anything(
    digits_root: Path,
) -> None:
    (job,) = expand(Request(("erm",), ("cmnist",), (0,), digits_root))
    addresses = [
        stage_address(job, stage)
        for stage in (toy(), toy(val_groups=True), toy(val_groups=True, train_groups=True))
    ]
    assert len(set(addresses)) == 3
    assert stage_address(job, Stage("toy", Recipe(), 1)) == addresses[0]


def test_a_stage_of_other_labels_is_computed_again(tmp_path: Path) -> None:
    make_context(tmp_path, label_digest="one").stage(toy(), TASK, three_epochs)
    other = make_context(tmp_path, run="other", label_digest="two")
    other.stage(toy(), TASK, three_epochs)
    assert not other.stage_costs[0].reused


def test_a_stage_of_other_pixels_is_computed_again(tmp_path: Path) -> None:
    make_context(tmp_path, pixel_digest="one").stage(toy(), TASK, three_epochs)
    for pixels, reused in (("one", True), ("two", False)):
        other = make_context(tmp_path, run=f"other-{pixels}", pixel_digest=pixels)
        other.stage(toy(), TASK, three_epochs)
        assert other.stage_costs[0].reused is reused


def test_work_in_other_arithmetic_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a finished stage nor half a training: the record names one arithmetic."""
    begun = make_context(tmp_path, code="aaaa")
    begun.stage(toy(), TASK, three_epochs)
    begun.save("fit", {"epoch": 1})
    monkeypatch.setattr(numerics, "in_effect", lambda: {"choice": "native"})
    other = make_context(tmp_path, code="aaaa")
    other.stage(toy(), TASK, three_epochs)
    assert not other.stage_costs[0].reused
    assert other.restore("fit") is None


def test_checkpoints_of_other_code_are_not_taken_up(tmp_path: Path) -> None:
    """Half a training by one code and half by another would be a run of neither."""
    first = make_context(tmp_path, code="aaaa")
    first.history({"stage": "toy", "epoch": 0}, loss=1.0)
    first.save("toy", {"epoch": 1})
    assert make_context(tmp_path, code="aaaa").restore("toy") == {"epoch": 1}
    notes: list[Any] = []
    account = StageAccount("run", tmp_path / "work" / "run")
    settings = replace(first.settings, code="bbbb")
    changed = RunContext(settings, account, [], notes.append)
    assert changed.restore("toy") is None
    assert changed.account.history() == []
    assert "aaaa -> bbbb" in str(notes)


def test_progress_can_ask_the_fit_to_stop(tmp_path: Path) -> None:
    account = StageAccount("run", tmp_path)
    asked = RunContext(make_context(tmp_path).settings, account, [], lambda values: "too slow")
    with pytest.raises(FitStopped, match="too slow"):
        asked.report(stage="toy", epoch=1)


def with_code(folder: Path, code: str, *, anyway: bool = False) -> tuple[RunContext, list[Any]]:
    notes: list[Any] = []
    settings = replace(make_context(folder).settings, code=code, resume_anyway=anyway)
    account = StageAccount("run", folder / "work" / "coded")
    return RunContext(settings, account, [], lambda values: notes.append(values.get("note"))), notes


def test_unfinished_work_of_other_code_starts_again_and_names_both(tmp_path: Path) -> None:
    ctx, _ = with_code(tmp_path, "aaa")
    ctx.history({"stage": "fit", "epoch": 0}, loss=1.0)
    ctx.save("fit", {"epoch": 1})
    same, notes = with_code(tmp_path, "aaa")
    assert same.restore("fit") == {"epoch": 1} and notes == []
    other, notes = with_code(tmp_path, "bbb")
    assert notes == ["starting again: the code has changed (aaa -> bbb)"]
    assert other.restore("fit") is None and other.account.history() == []
    assert other.account.cost("fit", "bbb").resumed_from is None


def test_resumed_anyway_it_goes_on_and_the_cost_names_every_code(tmp_path: Path) -> None:
    ctx, _ = with_code(tmp_path, "aaa")
    ctx.save("fit", {"epoch": 1})
    other, notes = with_code(tmp_path, "bbb", anyway=True)
    assert notes == ["going on although the code has changed (aaa -> bbb)"]
    assert other.restore("fit") == {"epoch": 1}
    third, _ = with_code(tmp_path, "ccc", anyway=True)
    assert third.account.cost("fit", "ccc").resumed_from == ("aaa", "bbb")
    again, notes = with_code(tmp_path, "ccc")  # the same code, with what it took up before
    assert notes == [] and again.account.cost("fit", "ccc").resumed_from == ("aaa", "bbb")
    fresh, _ = with_code(tmp_path, "ddd")
    assert fresh.restore("fit") is None
    assert fresh.account.cost("fit", "ddd").resumed_from is None
