"""`bench perf`: its rows and files, that its arms do the same work, and that all of it is timed."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from bench.commands import perf as command
from bench.context import Spent
from bench.perf import cases, measure, ordinary, ours, stored, table
from bench.perf.measure import LIMIT, Case, Sample, summarise, take_turns
from bench.perf.subject import Effort, Subject
from bench.store import Store
from datasets.images import ImageBatch
from datasets.transforms import Transform

sys.path.append(str(Path(__file__).parent))
from report_records import jobs, record

TINY = Effort(split=160, trained=128, evaluated=64, grown=64)
EVALUATION = {LIMIT, "ours", "ours, first pass", "ordinary, 0 workers", "ordinary, 4 workers"}
TRAINING = EVALUATION - {"ours, first pass"} | {"ours, 4 seeds stacked"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let digits be measured on a few images only."""
    monkeypatch.setattr(cases, "LENET_EFFORT", TINY)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    places = ("--out", str(tmp_path / "perf"), "--results", str(tmp_path / "results"))
    return ["perf", "--datasets", "umnist", "--repeats", "1", *places]


@pytest.mark.usefixtures("tiny")
def test_rows_in_json_and_csv(words: list[str], tmp_path: Path, cli: Any) -> None:
    outcome = cli(*words, "--json")
    assert outcome.code == 0, outcome.err
    rows = outcome.json["rows"]
    arms: dict[str, set[str]] = {}
    for row in rows:
        arms.setdefault(row["case"], set()).add(row["arm"])
        assert {"images_per_cpu_second", "spread", "ratio"} <= set(row)
        assert row["images_per_cpu_second"] > 0 and row["ratio"] > 0
        assert row["arm"] != LIMIT or row["ratio"] == 1
    assert arms == {
        "umnist: training, batch 128": TRAINING,
        "umnist: training, batch 64": TRAINING,
        "umnist: evaluation": EVALUATION,
        "umnist: NCT, batch 64": {LIMIT, "ERM", "NCT phase 1", "NCT phase 2"},
    }
    assert outcome.json["machine"]["threads"] == 1
    (path,) = (tmp_path / "perf").iterdir()
    assert path.name == f"{table.machine_name()}.csv"
    kept = list(csv.DictReader(path.open()))
    assert tuple(kept[0]) == table.COLUMNS
    assert [(k["case"], k["arm"]) for k in kept] == [(r["case"], r["arm"]) for r in rows]
    assert float(kept[1]["ratio"]) == pytest.approx(rows[1]["ratio"], abs=1e-3)
    assert kept[0]["commit"] == table.commit()


def fake_case(name: str) -> Case:
    def turn() -> dict[str, Sample]:
        fast, slow = Spent(1.0, 0.5), Spent(1.0, 1.0)
        arms = {LIMIT: fast, "ours": fast, "ERM": slow, "NCT phase 1": fast, "NCT phase 2": slow}
        return {arm: Sample(10, spent) for arm, spent in arms.items()}

    return Case(name, lambda: [turn])


def test_table_and_what_is_kept_of_other_cases(
    words: list[str], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "first"):
        monkeypatch.setattr(command, "cases_of", lambda dataset, name=name: [fake_case(name)])
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
    assert "images per CPU-second" in outcome.out and "NCT phase 2" in outcome.out
    assert "phase 1 costs 0.50 of an ERM step, one of phase 2 1.00" in outcome.out
    (path,) = (tmp_path / "perf").iterdir()
    kept = [(row["case"], row["arm"]) for row in csv.DictReader(path.open())]
    assert len(kept) == len(set(kept)) == 10
    assert {case for case, _ in kept} == {"first", "second"}


def test_what_was_measured_survives_an_interruption(
    words: list[str], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    both = [fake_case("first"), Case("second", interrupted)]
    monkeypatch.setattr(command, "cases_of", lambda dataset: both)
    assert cli(*words).code == 130
    (path,) = (tmp_path / "perf").iterdir()
    assert {row["case"] for row in csv.DictReader(path.open())} == {"first"}


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--repeats", "0"], ["--repeats must be at least 1 but got 0", "-> e.g. --repeats 5"]),
        (["--repeats", "two"], ["--repeats: invalid int value: 'two'"]),
        (["--datasets", "umnits"], ["did you mean 'umnist'?", "-> choose from"]),
        (["--datasets", ","], ["an empty list of names", "-> choose from"]),
    ],
)
def test_wrong_use(
    words: list[str], more: list[str], parts: list[str], tmp_path: Path, cli: Any
) -> None:
    outcome = cli(*words, *more)
    assert outcome.code == 2 and outcome.out == ""
    assert all(part in outcome.err for part in parts), outcome.err
    assert not (tmp_path / "perf").exists()


def test_a_file_that_is_something_else_is_left_alone(
    words: list[str], tmp_path: Path, cli: Any
) -> None:
    path = tmp_path / "perf" / f"{table.machine_name()}.csv"
    path.parent.mkdir()
    path.write_text("a,b\n1,2\n")
    outcome = cli(*words)
    assert outcome.code == 2 and "-> delete it, or give another folder" in outcome.err
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("dataset", ["umnist", "cmnist", "waterbirds"])
def test_the_ordinary_arm_makes_the_images_that_ours_makes(dataset: str) -> None:
    subject = Subject(dataset, replace(TINY, split=6))
    transform = subject.facts.eval_transform
    theirs = ordinary.stored_images(subject, 6, transform)
    mine = transform(ImageBatch(_pixels(subject, theirs), torch.full((6, 2), _side(subject))))
    grey_level = 1 / 255 / min(transform.std)
    for place in range(6):  # PIL rounds to whole grey levels, once for each axis
        assert (theirs[place][0] - mine[place]).abs().max() < 1.6 * grey_level


def test_the_ordinary_arm_augments_as_ours_does() -> None:
    subject = Subject("waterbirds", TINY)
    for name in ("umnist", "cmnist", "waterbirds"):
        transform: Transform = Subject(name, TINY).facts.train_transform
        steps = str(ordinary.pipeline(transform, 28, of_tensors=False))
        assert "Normalize" in steps and "ToTensor" in steps
        assert ("RandomHorizontalFlip" in steps) == transform.hflip
        crop = "RandomResizedCrop" if name == "waterbirds" else "RandomCrop"
        assert crop in steps
    image, y = ordinary.stored_images(subject, 2, subject.facts.train_transform)[1]
    assert image.shape == (3, 224, 224) and y == 1


def _side(subject: Subject) -> int:
    return int(subject.pixels.shape[-1])


def _pixels(subject: Subject, theirs: ordinary.PerSample) -> Tensor:
    """The stored images as both read them; a JPEG file does not keep every pixel."""
    if not subject.is_photo:
        return subject.pixels[:6]
    from torchvision.transforms.functional import pil_to_tensor

    return torch.stack([pil_to_tensor(theirs.read(file)) for file in theirs.stored])


def burn(seconds: float) -> Callable[[Any], Tensor]:
    def read(stored: Tensor) -> Tensor:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return stored

    return read


def test_processor_time_of_workers_is_counted() -> None:
    subject = Subject("cmnist", TINY)
    plain = ordinary.stored_images(subject, 8, subject.facts.eval_transform)
    slow = replace(plain, read=burn(0.03))
    object.__setattr__(slow, "transformed", lambda image: image)
    loader = ordinary.Loader(slow, 2, workers=2, shuffled=None)
    for _ in range(2):
        before = time.process_time()
        sample = loader.timed(lambda: sum(len(y) for _, y in loader))
        here = time.process_time() - before
        assert sample.images == 8
    assert 8 * 0.03 <= sample.spent.cpu - here < 0.45


def test_our_arms_count_the_images_they_train_on() -> None:
    subject = Subject("umnist", TINY)
    with measure.one_thread():
        (sample,) = ours.training(subject, 64)().values()
        phases = ours.growing(subject, 64)()
        (erm,) = ours.erm_beside_nct(subject, 64)().values()
        (stacked,) = ours.stacked_training(subject, 64)().values()
    assert sample.images == TINY.trained
    assert stacked.images == 4 * TINY.trained
    assert {s.images for s in (*phases.values(), erm)} == {TINY.grown}  # one epoch after the first


def test_turns_alternate_and_the_first_is_dropped() -> None:
    order: list[str] = []
    threads: list[int] = []

    def arm(name: str) -> Callable[[], dict[str, Sample]]:
        def turn() -> dict[str, Sample]:
            order.append(name)
            threads.append(torch.get_num_threads())
            return {name: Sample(len(order), Spent(1.0, 1.0))}

        return turn

    before = torch.get_num_threads()
    turns = take_turns(Case("x", lambda: [arm("a"), arm("b")], most_repeats=2), repeats=9)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert [sorted(turn) for turn in turns] == [["a", "b"]] * 2
    assert turns[0]["a"].images == 3
    assert set(threads) == {1} and torch.get_num_threads() == before


def test_ratio_is_the_median_of_the_turns_own() -> None:
    """A machine that is half as fast for a while changes neither ratio nor median by that."""
    turns = [
        {LIMIT: Sample(100, Spent(1, pace)), "ours": Sample(80, Spent(1, pace * own))}
        for pace, own in ((1.0, 1.0), (2.0, 1.0), (4.0, 2.0))
    ]
    limit, own = summarise(Case("x", lambda: []), turns)
    assert (limit.arm, limit.ratio, limit.images_per_cpu_second) == (LIMIT, 1.0, 50.0)
    assert own.ratio == pytest.approx(0.8) and own.images_per_second == 80
    assert limit.spread == pytest.approx((75 - 37.5) / 50)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("AMD EPYC 7B13 64-Core Processor", "amd-epyc-7b13"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("", "unknown"),
    ],
)
def test_file_is_named_by_hardware(
    processor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"processor": processor, "libraries": {"torch": "2"}}
    monkeypatch.setattr(table, "environment", lambda: known)
    monkeypatch.setattr(table, "_cores", lambda: 2)
    assert table.machine_name() == f"{name}-2-cores-1-thread"


def test_stored_runs_are_added_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    history = pd.DataFrame({"stage": ["fit"], "epoch": [0], "seconds": [1.0]})
    history = history.assign(iteration=None, phase=None)
    spent = {"seconds_standalone": 30.0, "seconds_marginal": 30.0, "cpu_seconds": 20.0}
    stage = {"name": "fit", "reused": False, "image_passes": 1000, **spent}
    more = {"stages": [stage], "peak_memory_bytes": 1, "threads": 1}
    first, second, third, fourth = jobs("erm", "umnist")[:4]
    for job, changes in (
        (first, {}),
        (second, {"stages": [{**stage, "image_passes": 3000}]}),
        (third, {"standin": True}),
        (fourth, {"overrides": {"erm.lr": "1"}}),
    ):
        store.write(record(job, 90.0, **{**more, **changes}), history)
    (total,) = stored.totals(store)
    assert (total.runs, total.image_passes, total.seconds) == (2, 2000, 30)
    assert total.images_per_cpu_second == pytest.approx(100)
    assert stored.cells([total])[0][-1] == "100"
