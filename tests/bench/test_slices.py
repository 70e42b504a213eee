"""Slices: intervals and tests by references; planted slices are found, chance is not."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from bench.slice_accuracy import Accuracy, fisher, holm, newcombe, wilson
from bench.slices import (
    UNKNOWN,
    Analysis,
    Names,
    accuracies,
    analyse,
    describe,
    quartiles,
    table,
    traits_of,
)

NAMES = Names(("cat", "dog"), ("cat, day", "cat, night", "dog, day", "dog, night"))


def made_up(seed: int = 0, size: int = 1200, bad: float = 0.6, good: float = 0.95) -> pd.DataFrame:
    """Two splits with six slices; of slice 3 only `bad` are right, and it is nine tenths night."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({"id": np.arange(2 * size), "split": ["val"] * size + ["test"] * size})
    frame["slice"] = draw.integers(0, 6, 2 * size)
    frame["y"] = draw.integers(0, 2, 2 * size)
    night = draw.random(2 * size) < np.where(frame["slice"] == 3, 0.9, 0.1)
    frame["group"] = 2 * frame["y"] + night
    right = draw.random(2 * size) < np.where(frame["slice"] == 3, bad, good)
    frame["pred"] = np.where(right, frame["y"], 1 - frame["y"])
    frame["confidence"] = draw.random(2 * size)
    return frame


def further(frame: pd.DataFrame, seed: int = 1) -> pd.DataFrame:
    """Columns by id: a camera that slice 3 has most of, and some that say nothing."""
    draw, count = np.random.default_rng(seed), len(frame)
    planted = draw.random(count) < np.where(frame["slice"] == 3, 0.8, 0.05)
    columns = {
        "camera": np.where(planted, "B", "A"),
        "bright": draw.random(count),
        "age": np.where(frame["slice"] == 3, 60, 30) + draw.normal(0, 5, count),
        "lucky": draw.random(count) < 0.5,
        "maker": "one",
        "remark": [f"remark {number}" for number in range(count)],
        "group": draw.integers(0, 3, count),
    }
    return pd.DataFrame(columns, index=frame["id"]).sample(frac=1, random_state=seed)


@pytest.fixture(scope="module")
def found() -> Analysis:
    frame = made_up()
    return analyse(frame, NAMES, "val", again="test", columns=further(frame))


@pytest.mark.parametrize(("count", "of"), [(0, 7), (7, 7), (3, 7), (950, 1000), (1, 1)])
def test_wilson_is_that_of_scipy(count: int, of: int) -> None:
    right = binomtest(count, of).proportion_ci(method="wilson")
    assert wilson(count, of) == pytest.approx((right.low, right.high), abs=1e-12)


def test_newcombe_is_that_of_his_paper() -> None:
    """Newcombe 1998, table II, method 10, its first two examples."""
    assert newcombe((56, 70), (48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert newcombe((9, 10), (3, 10)) == pytest.approx((0.1705, 0.8090), abs=5e-5)


def test_fisher_of_the_lady_tasting_tea() -> None:
    assert fisher((3, 4), (1, 4)) == pytest.approx(34 / 70)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_planted_slice_is_found_with_what_it_is(found: Analysis) -> None:
    worst = found.worst
    assert worst is not None and worst.number == 3 and found.worse == (worst,)
    own = worst.accuracy
    assert own is not None and own.difference is not None and own.difference_interval is not None
    low, high = own.difference_interval
    assert low < -0.35 < high < -0.25
    assert own.extra_errors == pytest.approx(0.35 * own.size, rel=0.2)
    assert worst.confirmed and worst.again is not None and worst.again.size != own.size
    assert worst.traits[0].column in ("camera", "age")
    camera = next(trait for trait in worst.traits if trait.column == "camera")
    assert camera.value == "B" and camera.share == pytest.approx(0.8, abs=0.06)
    assert camera.lift == pytest.approx(0.8 / (0.8 / 6 + 0.05 * 5 / 6), rel=0.15)
    assert any(t.column == "age" and t.value.startswith("over ") for t in worst.traits)
    assert {t.value for t in worst.groups if t.over} == {"cat, night", "dog, night"}
    assert sum(t.count for t in worst.groups) == own.size
    assert {t.column for one in found.slices for t in one.traits} <= {"camera", "age"}
    assert all(one.confirmed is None for one in found.slices if one is not worst)


def test_shares_and_accuracies_are_those_of_a_count_by_hand(found: Analysis) -> None:
    val = made_up().query("split == 'val'")
    for one in found.slices:
        mine = val[val["slice"] == one.number]
        rest = val[val["slice"] != one.number]
        own = one.accuracy
        assert own is not None and own.rest is not None
        assert own.share == (mine["pred"] == mine["y"]).mean()
        assert own.rest == pytest.approx((rest["pred"] == rest["y"]).mean())
        for trait in (*one.groups, *one.classes):
            column, names = {"group": ("group", NAMES.groups), "class": ("y", NAMES.classes)}[
                trait.column
            ]
            inside = mine[mine[column] == names.index(trait.value)]
            everywhere = val[val[column] == names.index(trait.value)]
            assert trait.count == len(inside) and trait.share == len(inside) / len(mine)
            assert trait.overall == pytest.approx(len(everywhere) / len(val))
            assert trait.captured == len(inside) / len(everywhere)
            assert trait.right == pytest.approx((inside["pred"] == inside["y"]).mean())


def test_samples_are_those_of_the_slice_and_errors_come_by_confidence(found: Analysis) -> None:
    frame = made_up().set_index("id")
    for one in found.slices:
        assert {frame["slice"][s.id] for s in (*one.typical, *one.wrong)} == {one.number}
        assert {frame["split"][s.id] for s in (*one.typical, *one.wrong)} == {"val"}
        assert all(s.y != s.pred for s in one.wrong)
        levels = [s.confidence for s in one.wrong]
        assert levels == sorted(levels, reverse=True)
        mine = frame.query("split == 'val' and slice == @one.number and y != pred")
        assert levels[0] == mine["confidence"].max()
        assert one.accuracy is not None
        wrong = one.accuracy.size - one.accuracy.correct
        assert sum(c.count for c in one.confusions) == wrong == len(mine)


def test_what_is_no_worse_than_chance_is_not_called_worse() -> None:
    """Of partitions that have nothing to do with errors, at most one in twenty has a "worse"."""
    draw, alarms, naive = np.random.default_rng(5), 0, 0
    for _ in range(200):
        slices = draw.choice(8, 600, p=[0.4, 0.3, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03])
        frame = pd.DataFrame({"slice": slices, "y": 0, "pred": draw.random(600) < 0.12})
        own = accuracies(frame.astype(int), range(8))
        alarms += any(one.worse for one in own.values())
        naive += any((one.difference or 0) < -0.1 for one in own.values())
    assert alarms <= 0.05 * 200
    assert naive > 0.25 * 200  # though ten points are often missing by chance


def test_columns_that_say_nothing_are_not_called_over_represented() -> None:
    draw, alarms, naive = np.random.default_rng(7), 0, 0
    for _ in range(60):
        colours = pd.Series(draw.choice(list("abcdef"), 300))
        slices, right = pd.Series(draw.integers(0, 6, 300)), pd.Series(np.ones(300))
        told = traits_of({"colour": colours}, slices, range(6), right)
        alarms += any(trait.over for own in told.values() for trait in own)
        naive += any(trait.lift > 1.3 for own in told.values() for trait in own)
    assert alarms <= 0.05 * 60
    assert naive > 0.9 * 60


def test_a_slice_that_is_worse_is_mostly_noticed() -> None:
    draw, noticed = np.random.default_rng(6), 0
    for _ in range(60):
        slices = draw.integers(0, 8, 1600)
        wrong = draw.random(1600) < np.where(slices == 2, 0.25, 0.08)
        own = accuracies(pd.DataFrame({"slice": slices, "y": 0, "pred": wrong * 1}), range(8))
        noticed += own[2].worse
    assert noticed >= 54


def test_a_handful_does_not_stand_before_hundreds() -> None:
    few, many = Accuracy(0, 5, 1140, 1200), Accuracy(100, 300, 900, 905)
    assert few.share < many.share
    frame = pd.DataFrame({"id": range(1205), "split": "val", "group": UNKNOWN, "confidence": 0.5})
    frame["slice"] = [0] * 5 + [1] * 300 + [2] * 900
    frame["y"], frame["pred"] = 0, [1] * 5 + [0] * 100 + [1] * 200 + [0] * 900
    ranked = analyse(frame, Names(("cat", "dog")), "val").slices
    assert [one.number for one in ranked] == [1, 0, 2]
    assert ranked[1].worse


def test_what_is_not_known_is_left_open() -> None:
    frame = made_up(size=200)
    training = frame.assign(id=frame["id"] + 1000, split="train", y=UNKNOWN, pred=UNKNOWN)
    training["confidence"], training["group"] = math.nan, UNKNOWN
    both = pd.concat([frame.assign(slice=UNKNOWN), training], ignore_index=True)
    found = analyse(both, NAMES, "train", again="test")
    assert found.accuracy is None and found.worst is None and found.assigned == ("train",)
    sizes = [sum(one.sizes.values()) for one in found.slices]
    assert sizes == sorted(sizes) and sum(sizes) == 400
    assert all(set(one.sizes) == {"train"} for one in found.slices)
    for one in found.slices:
        assert one.accuracy is None and one.again is None and not one.worse
        assert (one.classes, one.groups, one.wrong, one.confusions) == ((), (), (), ())
        assert len(one.typical) == 8 and one.typical[0].y == "" and one.typical[0].pred == ""
    written = table(found)
    assert written["accuracy"].isna().all() and len(written) == len(found.slices)


def test_one_slice_alone_has_nothing_to_be_compared_with() -> None:
    found = analyse(made_up(size=50).assign(slice=0), NAMES, "val")
    (one,) = found.slices
    assert one.accuracy is not None and one.accuracy.p is None and one.accuracy.difference is None
    assert not one.worse and found.worst is None


def test_a_slice_without_samples_in_the_split_has_no_accuracy() -> None:
    frame = made_up(size=200)
    frame.loc[(frame["split"] == "test") & (frame["slice"] == 5), "slice"] = 6
    found = {one.number: one for one in analyse(frame, NAMES, "val", again="test").slices}
    assert found[6].accuracy is None and found[6].sizes["val"] == 0
    assert found[6].again is not None and found[6].confirmed is None
    assert found[5].again is None and found[5].accuracy is not None


def test_columns_that_cannot_be_compared_are_named(found: Analysis) -> None:
    assert found.left_out == {"maker": "one value", "remark": "1,200 different values"}
    none = pd.DataFrame({"empty": np.full(2400, np.nan)}, index=range(2400))
    assert analyse(made_up(), NAMES, "val", columns=none).left_out == {"empty": "empty"}


def test_quartiles_hold_their_upper_bounds_and_leave_gaps_open() -> None:
    values = pd.Series([1, 2, 3, 4, np.nan])
    assert quartiles(values).tolist()[:4] == [
        "up to 1.75",
        "1.75 to 2.5",
        "2.5 to 3.25",
        "over 3.25",
    ]
    assert quartiles(values).isna().tolist() == [False] * 4 + [True]
    assert set(quartiles(pd.Series([0] * 9 + [7]))) == {"up to 0", "over 0"}


def test_the_table_has_a_row_a_slice_in_percent(found: Analysis) -> None:
    written = table(found)
    assert written["slice"].tolist() == [one.number for one in found.slices]
    first = written.iloc[0]
    assert (
        first["worse"] and first["confirmed"] and first["low"] < first["accuracy"] < first["high"]
    )
    assert 40 < first["accuracy"] < 75 < first["rest_accuracy"]
    assert first["difference_low"] < first["difference"] < first["difference_high"] < 0
    assert "camera = B" in first["what"] or "age" in first["what"]
    assert describe(found.slices[0].groups[0]).startswith(
        f"{100 * found.slices[0].groups[0].share:.0f}% group "
    )


def test_a_first_model_is_judged_and_the_runs_own_is_tested() -> None:
    """Slice 3 is where the first model fails; the run's own model mended it and spoilt slice 0."""
    frame = made_up(good=1.0, bad=0.5)
    spoilt = (frame["slice"] == 0) & (np.random.default_rng(2).random(len(frame)) < 0.3)
    own = np.where(spoilt, 1 - frame["y"], frame["y"])
    found = analyse(frame.assign(first=frame["pred"], pred=own), NAMES, "val")
    plain = analyse(frame, NAMES, "val")
    first, before = found.slices[0], plain.slices[0]
    assert found.by_first and not plain.by_first
    assert found.worst is first and first.number == before.number == 3
    assert first.accuracy is not None and before.accuracy is not None and first.own is not None
    assert first.accuracy.share == before.accuracy.share and first.accuracy.p_holm is None
    assert first.own.share == 1.0 and not first.own.worse and first.own.p_holm is not None
    assert [one.number for one in found.still_worse] == [0]
    assert [one.number for one in found.worse] == [3]
    assert found.own_accuracy == pytest.approx(1 - spoilt[frame["split"] == "val"].mean())
    assert all(math.isnan(s.confidence or math.nan) for s in first.wrong) and first.wrong
    row = table(found).iloc[0]
    assert row["own_accuracy"] == 100 and row["accuracy"] < 60 and row["p_holm"] is None
    assert "own_accuracy" not in table(plain)


def test_a_first_model_without_errors_has_no_worst_slice() -> None:
    frame = made_up()
    found = analyse(frame.assign(first=frame["y"]), NAMES, "val")
    assert found.by_first and found.worst is None and found.accuracy == 1.0
    assert [one.number for one in found.still_worse] == [3]
