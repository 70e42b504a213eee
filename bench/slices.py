"""Slices of a finished run: which part of the data it fails on, how badly, and what that part is.

A slice is a part of the partition that a method found: a leaf, a cluster, an environment. For each
one the accuracy inside is compared with that of all other samples of the same split: the difference
with its interval first, then whether chance would make one as large (Fisher's exact test, Holm over
the slices). Slices are ranked on one split, validation where they reach it, by how much worse
they are at least; test samples, which had no part in it, then show whether that holds.

Some methods find slices in what a first model had learnt, and then train a robust model to fare
alike in all of them. There the first model is judged: it tells what the slices are. No test is
made of it, since slices were made of its own scores; the robust model, which was trained anew, is
tested in the same slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from bench.slice_accuracy import ALPHA, Accuracy, fisher, holm
from datasets.base import SPLITS

UNKNOWN = -1  # no slice, class, group or prediction
SHOWN_SAMPLES = 8  # of a slice: typical ones, and confidently wrong ones
SHOWN_TRAITS = 6
SHOWN_CONFUSIONS = 4
MIN_SHARE = 0.1  # of a slice, for a trait to be said of it
MIN_LIFT = 1.2
BINNED_FROM = 12  # different numbers from which on quartiles are compared
LABELS = ("class", "group")  # the columns that are no one else's
MAX_VALUES = 60  # different texts up to which a column is compared


@dataclass(frozen=True)
class Trait:
    """A value of a column, and how often it is met in a slice and in the whole split.

    Attributes:
        count: samples of the slice with the value.
        share: of the slice's samples that the column is known of.
        overall: the same share of the whole split.
        captured: of all samples with the value, the share that is in the slice.
        p_holm: one-sided Fisher test of its being more frequent, corrected for every value of
            every column in every slice.
        right: accuracy of those samples of the slice; none where predictions are not known.
    """

    column: str
    value: str
    count: int
    share: float
    overall: float
    captured: float
    p_holm: float = 1.0
    right: float | None = None

    @property
    def over(self) -> bool:
        """Whether it is over-represented by more than chance, and enough to be worth a word."""
        return self.p_holm < ALPHA and self.share >= MIN_SHARE and self.lift >= MIN_LIFT

    @property
    def apartness(self) -> float:
        """How much of the slice has the value that would not have it elsewhere."""
        return self.share - self.overall

    @property
    def lift(self) -> float:
        """How many times as frequent the value is in the slice as in the whole split."""
        return self.share / self.overall

    def to_json(self) -> dict[str, object]:
        """Return the figures."""
        return {**vars(self), "lift": self.lift}


@dataclass(frozen=True)
class SliceSample:
    """A sample that stands for a slice; confidence is that of the predicted class, of 1."""

    id: int
    y: str
    pred: str = ""
    confidence: float | None = None
    group: str = ""


@dataclass(frozen=True)
class Confusion:
    """Errors of a slice that are alike."""

    y: str
    pred: str
    count: int


@dataclass(frozen=True)
class Slice:
    """One slice.

    Attributes:
        sizes: its samples in each split in which samples are assigned.
        accuracy: on the split that slices are ranked on; none where predictions are not known.
        again: on test, where that is another one; p_holm is corrected for the slices that were
            found worse, and only they have one.
        own: where a first model is judged, how the run's own model fares in the slice.
        classes, groups: what it consists of, the most frequent first.
        traits: what is over-represented by more than chance in other columns, the most telling
            first.
        typical: drawn at random, with a fixed seed.
        wrong: the most confident errors first.
    """

    number: int
    name: str
    sizes: Mapping[str, int]
    accuracy: Accuracy | None = None
    again: Accuracy | None = None
    own: Accuracy | None = None
    classes: tuple[Trait, ...] = ()
    groups: tuple[Trait, ...] = ()
    traits: tuple[Trait, ...] = ()
    confusions: tuple[Confusion, ...] = ()
    typical: tuple[SliceSample, ...] = ()
    wrong: tuple[SliceSample, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether it is worse than the rest by more than chance.

        Of a first model, which is not tested: whether it is worse by the whole of the interval.
        """
        if self.accuracy is None or self.own is None:
            return self.accuracy is not None and self.accuracy.worse
        interval = self.accuracy.difference_interval
        return interval is not None and interval[1] < 0

    @property
    def confirmed(self) -> bool | None:
        """Whether test samples say the same; none where they were not asked."""
        if self.again is None or self.again.p_holm is None:
            return None
        return self.again.worse

    def leading_traits(self) -> tuple[Trait, ...]:
        """Return what says best what it is: one over-represented group, trait and class each."""
        kinds = (self.groups, self.traits, self.classes)
        over = ([trait for trait in kind if trait.over] for kind in kinds)
        found = [max(kind, key=lambda trait: trait.apartness) for kind in over if kind]
        same = len(found) > 1 and found[0].count == found[-1].count  # all of the class is the group
        return tuple(found[:-1] if same and found[-1].column == "class" else found)

    def to_json(self) -> dict[str, object]:
        """Return everything about it."""
        lists = ("classes", "groups", "traits")
        return {
            "slice": self.number,
            "name": self.name,
            "sizes": dict(self.sizes),
            "worse": self.worse,
            "confirmed": self.confirmed,
            "accuracy": self.accuracy.to_json() if self.accuracy else None,
            "test": self.again.to_json() if self.again else None,
            "own": self.own.to_json() if self.own else None,
            **{name: [trait.to_json() for trait in getattr(self, name)] for name in lists},
            "confusions": [vars(one) for one in self.confusions],
            "typical": [vars(one) for one in self.typical],
            "wrong": [vars(one) for one in self.wrong],
        }


@dataclass(frozen=True)
class Names:
    """What numbers in a table of samples are called; slices without a name go by their number."""

    classes: Sequence[str]
    groups: Sequence[str] = ()
    slices: Sequence[str] = ()

    def slice_name(self, number: int) -> str:
        """Return what a slice is called."""
        return self.slices[number] if number < len(self.slices) else f"slice {number}"


@dataclass(frozen=True)
class Analysis:
    """The slices of a run, the worst first.

    Attributes:
        split: the one they are ranked on.
        sizes: all samples of each split, assigned or not.
        assigned: the splits whose samples are assigned to slices.
        accuracy: of the whole split, by the model that is judged.
        own_accuracy: of the run's own model, where a first model is judged.
        left_out: columns that were not compared, with the reason.
    """

    split: str
    slices: tuple[Slice, ...]
    sizes: Mapping[str, int]
    assigned: tuple[str, ...]
    accuracy: float | None = None
    own_accuracy: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Slice | None:
        """The first slice, where it is worse than the rest by more than chance."""
        return self.slices[0] if self.slices and self.slices[0].worse else None

    @property
    def worse(self) -> tuple[Slice, ...]:
        """Every slice that is worse than the rest by more than chance."""
        return tuple(one for one in self.slices if one.worse)

    @property
    def by_first(self) -> bool:
        """Whether it is a first model that is judged."""
        return self.own_accuracy is not None

    @property
    def still_worse(self) -> tuple[Slice, ...]:
        """Where a first model is judged: the slices in which the run's own model is worse."""
        return tuple(one for one in self.slices if one.own is not None and one.own.worse)

    def named(self, name: str) -> Slice | None:
        """Return the slice of that name or number."""
        found = (one for one in self.slices if name in (one.name, str(one.number)))
        return next(found, None)


def analyse(
    samples: pd.DataFrame,
    names: Names,
    split: str,
    *,
    again: str | None = None,
    columns: pd.DataFrame | None = None,
    seed: int = 0,
) -> Analysis:
    """Compare every slice with the rest, and find out what distinguishes it.

    Args:
        samples: a row a sample: `id`, `split`, `slice`, `y`, `group`, `pred`, `confidence`; what is
            not known is `UNKNOWN`. Where there is a column `first`, the predictions of the model
            that slices were found from, that model is judged instead of `pred`.
        names: of classes, groups and slices.
        split: the one on which slices are ranked and described.
        again: another one, on which what was found is looked at again.
        columns: further columns of the samples, by id.
        seed: chooses the typical samples.
    """
    own = samples[samples["split"] == split].reset_index(drop=True)
    numbers = sorted({*samples["slice"].tolist()} - {UNKNOWN})
    robust = None
    if "first" in own:
        robust = accuracies(own, numbers), _share_right(own)
        own = own.assign(pred=own["first"], confidence=math.nan)
    found = accuracies(own, numbers)
    if robust:
        found = {number: replace(one, p=None, p_holm=None) for number, one in found.items()}
    worse = [number for number in numbers if number in found and found[number].worse]
    second = _again(samples[samples["split"] == again], numbers, worse) if again else {}
    described, left_out = _comparable(columns, own)
    described["class"] = _named(own["y"], names.classes)
    described["group"] = _named(own["group"], names.groups)
    right = (own["pred"] == own["y"]).where(own["pred"] != UNKNOWN).astype(float)
    traits = traits_of(described, own["slice"], numbers, right)
    by_number = {
        number: Slice(
            number,
            names.slice_name(number),
            _sizes(samples, number),
            found.get(number),
            second.get(number),
            robust[0].get(number) if robust else None,
            *_sorted_traits(traits.get(number, [])),
            *_pictured(own[own["slice"] == number], names, seed),
        )
        for number in numbers
    }
    return Analysis(
        split,
        tuple(sorted(by_number.values(), key=_rank)),
        {str(name): int(n) for name, n in samples["split"].value_counts().items()},
        tuple(s for s in SPLITS if s in set(samples["split"][samples["slice"] != UNKNOWN])),
        _share_right(own),
        robust[1] if robust else None,
        left_out,
    )


def _share_right(own: pd.DataFrame) -> float | None:
    known = own[own["pred"] != UNKNOWN]
    return float((known["pred"] == known["y"]).mean()) if len(known) else None


def _rank(one: Slice) -> tuple[bool, float, int]:
    """Order: worse than by chance first, then by how much worse it is at least, then the smallest.

    The near end of the interval, and not the difference itself, keeps a handful of samples that
    happen to be wrong from standing before hundreds.
    """
    interval = one.accuracy.difference_interval if one.accuracy is not None else None
    return not one.worse, interval[1] if interval else 2.0, sum(one.sizes.values())


def _sizes(samples: pd.DataFrame, number: int) -> dict[str, int]:
    """Count a slice in every split in which anything is assigned."""
    assigned = samples[samples["slice"] != UNKNOWN]
    mine = assigned[assigned["slice"] == number]["split"].value_counts()
    splits = assigned["split"].unique()
    return {split: int(mine.get(split, 0)) for split in SPLITS if split in splits}


def accuracies(own: pd.DataFrame, numbers: Sequence[int]) -> dict[int, Accuracy]:
    """Return the accuracy of every slice of one split, tested against the rest of that split."""
    known = own[own["pred"] != UNKNOWN]
    right = (known["pred"] == known["y"]).to_numpy()
    inside = {number: (known["slice"] == number).to_numpy() for number in numbers}
    counts = {n: (int(right[mine].sum()), int(mine.sum())) for n, mine in inside.items()}
    rest = {n: (int(right.sum()) - c, len(right) - size) for n, (c, size) in counts.items()}
    tested = [n for n in numbers if counts[n][1] and rest[n][1]]
    p = [fisher(counts[n], rest[n]) for n in tested]
    adjusted = dict(zip(tested, zip(p, holm(p), strict=True), strict=True))
    nothing = (None, None)
    found = [n for n in numbers if counts[n][1]]
    return {n: Accuracy(*counts[n], *rest[n], *adjusted.get(n, nothing)) for n in found}


def _again(own: pd.DataFrame, numbers: Sequence[int], worse: Sequence[int]) -> dict[int, Accuracy]:
    """Return accuracies on other samples; only slices that were found worse are tested there."""
    found = accuracies(own, numbers)
    tested = [(n, p) for n in worse if n in found and (p := found[n].p) is not None]
    adjusted = dict(zip((n for n, _ in tested), holm([p for _, p in tested]), strict=True))
    return {n: replace(a, p_holm=adjusted.get(n)) for n, a in found.items()}


Traits = tuple[Trait, ...]


def _sorted_traits(traits: Sequence[Trait]) -> tuple[Traits, Traits, Traits]:
    """Return all classes and all groups of a slice, and what of the rest is over-represented."""
    classes, groups = (
        tuple(sorted((t for t in traits if t.column == kind), key=lambda t: -t.count))
        for kind in LABELS
    )
    others = [t for t in traits if t.column not in LABELS and t.over]
    others.sort(key=lambda trait: -trait.apartness)
    return classes, groups, tuple(others[:SHOWN_TRAITS])


def _named(numbers: pd.Series, names: Sequence[str]) -> pd.Series:
    """Return names for numbers; none for what is not known."""
    return numbers.map(dict(enumerate(names))).astype(object)


def _pictured(
    mine: pd.DataFrame, names: Names, seed: int
) -> tuple[tuple[Confusion, ...], tuple[SliceSample, ...], tuple[SliceSample, ...]]:
    """Return a slice's most frequent confusions, its typical samples, and its confident errors."""
    wrong = mine[(mine["pred"] != UNKNOWN) & (mine["pred"] != mine["y"])]
    counts = wrong.groupby(["y", "pred"]).size().sort_values(ascending=False, kind="stable")
    alike = counts.head(SHOWN_CONFUSIONS).reset_index(name="count").to_dict("records")
    confusions = tuple(
        Confusion(_name(names.classes, c["y"]), _name(names.classes, c["pred"]), int(c["count"]))
        for c in alike
    )
    typical = mine.sample(min(SHOWN_SAMPLES, len(mine)), random_state=seed)
    ordered = wrong.sort_values(["confidence", "id"], ascending=[False, True])
    shown = ordered.head(SHOWN_SAMPLES)
    return confusions, _as_samples(typical, names), _as_samples(shown, names)


def _as_samples(rows: pd.DataFrame, names: Names) -> tuple[SliceSample, ...]:
    return tuple(
        SliceSample(
            int(row["id"]),
            _name(names.classes, row["y"]),
            _name(names.classes, row["pred"]),
            None if math.isnan(row["confidence"]) else float(row["confidence"]),
            _name(names.groups, row["group"]),
        )
        for row in rows.to_dict("records")
    )


def _name(names: Sequence[str], number: Any) -> str:
    return names[int(number)] if 0 <= int(number) < len(names) else ""


def _comparable(
    columns: pd.DataFrame | None, own: pd.DataFrame
) -> tuple[dict[str, pd.Series], dict[str, str]]:
    """Return the columns as texts, a row a sample of the split, and which are no good for it.

    Numbers of many values are put into quartiles. A text that nearly every sample has to itself, a
    file name or a remark, says nothing of a slice.
    """
    texts: dict[str, pd.Series] = {}
    left_out: dict[str, str] = {}
    for label, given in ({} if columns is None else columns.reindex(own["id"])).items():
        name = f"{label} (column)" if label in LABELS else str(label)
        values = given.reset_index(drop=True)
        is_number = pd.api.types.is_numeric_dtype(given) and not pd.api.types.is_bool_dtype(given)
        different = values.nunique()
        if different < 2:
            left_out[name] = "one value" if different else "empty"
        elif is_number and different > BINNED_FROM:
            texts[name] = quartiles(values)
        elif different > MAX_VALUES:
            left_out[name] = f"{different:,} different values"
        else:
            texts[name] = values.map(_as_text, na_action="ignore").astype(object)
    return texts, left_out


def _as_text(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def quartiles(values: pd.Series) -> pd.Series:
    """Return into which quarter each number falls, spelt by its bounds."""
    edges = sorted({*values.quantile([0.25, 0.5, 0.75]).tolist()})
    place = np.searchsorted(edges, values.to_numpy(dtype=float))
    spelt = [f"{edge:.4g}" for edge in edges]
    labels = [f"up to {spelt[0]}", *(f"{a} to {b}" for a, b in pairwise(spelt))]
    labels.append(f"over {spelt[-1]}")
    return pd.Series([labels[p] for p in place], index=values.index, dtype=object).where(
        values.notna(), None
    )


def traits_of(
    columns: Mapping[str, pd.Series], slices: pd.Series, numbers: Sequence[int], right: pd.Series
) -> dict[int, list[Trait]]:
    """Return, by slice, how often each value of each column is met in it, and how often right.

    Every value is tested in every slice, one-sided, and corrected for all of them by Holm.
    """
    from scipy.stats import hypergeom  # slow to import

    found: list[tuple[int, Trait]] = []
    p: list[float] = []
    for name, values in columns.items():
        known = values.notna()
        rights = right.groupby([values, slices]).mean().to_dict()
        totals = {str(value): int(n) for value, n in values[known].value_counts().items()}
        for number in numbers:
            counts = values[known & (slices == number)].value_counts().to_dict()
            size = sum(counts.values())
            for value, total in totals.items() if size else ():
                count = int(counts.get(value, 0))
                shares = (count / size, total / int(known.sum()), count / total)
                share = rights.get((value, number), math.nan)
                told = Trait(name, value, count, *shares)
                found.append((number, replace(told, right=None if math.isnan(share) else share)))
                p.append(float(hypergeom.sf(count - 1, int(known.sum()), total, size)))
    traits: dict[int, list[Trait]] = {}
    for (number, trait), adjusted in zip(found, holm(p), strict=True):
        if trait.count:
            traits.setdefault(number, []).append(replace(trait, p_holm=adjusted))
    return traits


def table(analysis: Analysis) -> pd.DataFrame:
    """Return a row a slice, the worst first: what the CSV has; accuracies in percent."""
    rows = []
    for one in analysis.slices:
        row: dict[str, object] = {"slice": one.number, "name": one.name, "split": analysis.split}
        row |= {f"n_{split}": one.sizes.get(split) for split in SPLITS}
        for prefix, accuracy in (("", one.accuracy), ("test_", one.again)):
            row |= {f"{prefix}{key}": value for key, value in _flat(accuracy).items()}
        leading = one.leading_traits()
        if analysis.by_first:
            row |= {f"own_{key}": value for key, value in _flat(one.own).items()}
        row |= {"worse": one.worse, "confirmed": one.confirmed}
        row["what"] = "; ".join(describe(trait) for trait in leading)
        rows.append(row)
    return pd.DataFrame(rows)


def _flat(accuracy: Accuracy | None) -> dict[str, object]:
    keys = Accuracy(1, 1, 1, 1).to_json()
    values = dict.fromkeys(keys) if accuracy is None else accuracy.to_json()
    flat: dict[str, object] = {}
    for key, value in values.items():
        if key.endswith("interval"):
            low, high = value if isinstance(value, list) else (None, None)
            prefix = key.removesuffix("interval")
            flat |= {f"{prefix}low": low, f"{prefix}high": high}
        else:
            flat[key] = value
    return flat


def describe(trait: Trait) -> str:
    """Return a trait in words."""
    joint = " " if trait.column in LABELS else " = "
    of = f"{trait.column}{joint}{trait.value}"
    return f"{100 * trait.share:.0f}% {of} ({trait.lift:.1f} times as frequent as overall)"
