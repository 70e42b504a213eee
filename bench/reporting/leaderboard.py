"""The answer in one picture: for each dataset with runs, methods ordered by their worst group.

A board is the first thing that the page and the document show. It is made of the cells of the main
table, so that both always say the same. Where nothing was published, as in a demo or a test, the
boards are of smoke runs, and say so. Runs on the user's own data have boards of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from bench.reporting import names
from bench.reporting.collection import ReportInput, Run, grouped, metric_by_seed, metric_values
from bench.reporting.main_table import Tier, measured_cell, tiers
from bench.reporting.statistics import Comparison, compare_with
from bench.reporting.table import Cell, CellKey, Table

STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 25.0, 50.0)
MOST_TICKS = 5
WITHOUT_GROUPS = ("worst_class", "avg")  # what a dataset without groups is judged by
FURTHER, PLAIN = "Further tables", "Tables"
LABELS = ("training and validation group labels", "validation group labels", "no group labels")
"""What a method sees, by the place of its tier."""


@dataclass(frozen=True)
class Entry:
    """One method on a board: what was measured and, where there is one, a paper's number."""

    tier: Tier
    cell: Cell
    paper: Cell | None = None
    featured: bool = False  # the reference is about it

    @property
    def title(self) -> str:
        """Return how the method is spelt."""
        return names.method_title(self.tier.method)

    @property
    def labels(self) -> int:
        """Return what the method sees, as a place in `LABELS`."""
        return (*self.tier.marks[:2], "yes").index("yes")

    @property
    def mean(self) -> float:
        """Return the number by which methods are ordered."""
        assert self.cell.mean is not None
        return self.cell.mean


@dataclass(frozen=True)
class Scale:
    """The axis of a board: from the lowest to the highest number that it shows."""

    low: float
    high: float
    ticks: tuple[float, ...]
    digits: int = 0

    @staticmethod
    def over(entries: Sequence[Entry], top: float) -> Scale:
        """Return an axis that holds every mean, and intervals unless they are far wider."""
        means = [entry.mean for entry in entries]
        means += [e.paper.mean for e in entries if e.paper and e.paper.mean is not None]
        room = max(max(means) - min(means), 0.02 * top)
        ends = [b for e in entries for b in (e.cell.ci_low, e.cell.ci_high) if b is not None]
        low = max(0.0, min(means) - room, min([*means, *ends]))
        high = min(top, max(means) + room, max([*means, *ends]))
        low = min(low, max(0.0, high - 0.02 * top))  # where all numbers are one
        step = next((s for s in STEPS if (high - low) / s <= MOST_TICKS), STEPS[-1])
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        ticks = tuple(round(step * place, 6) for place in range(first, last + 1))
        return Scale(ticks[0], ticks[-1], ticks, max(0, -math.floor(math.log10(step))))

    def at(self, value: float) -> float:
        """Return how far to the right a value lies, in percent; those beyond lie at the edge."""
        share = (value - self.low) / (self.high - self.low)
        return round(100 * min(1.0, max(0.0, share)), 2)


@dataclass(frozen=True)
class Board:
    """The methods of one dataset, the best first."""

    dataset: str
    title: str
    metric: str  # what is measured, in words
    entries: tuple[Entry, ...]
    scale: Scale
    mark: str = ""  # what keeps it from being a result
    unit: str = "%"
    not_run: tuple[str, ...] = ()  # titles of methods without a run here
    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # by method and seed

    @property
    def name(self) -> str:
        """Return a name that can be part of an address in the page."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())

    @property
    def seeds(self) -> str:
        """Return how many seeds the numbers average."""
        counts = sorted({entry.cell.n or 0 for entry in self.entries})
        many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return f"{many} seed" + ("s" if counts[-1] != 1 else "")

    def entry(self, method: str) -> Entry | None:
        """Return a method's entry, if it has one."""
        return next((one for one in self.entries if one.tier.method == method), None)

    def place(self, entry: Entry) -> int:
        """Return the place of an entry, from 1."""
        return 1 + self.entries.index(entry)

    def lead(self, first: str, second: str) -> Comparison | None:
        """Return one method less another on the seeds that both have."""
        both = {name: self.values.get(name, {}) for name in (first, second)}
        return next(iter(compare_with(both, (second,))), None)

    def text(self, entry: Entry) -> str:
        """Return the number of an entry with its unit."""
        return f"{entry.cell.number(entry.mean)}{self.unit}"


def leaderboard(given: ReportInput) -> tuple[Board, ...]:
    """Return a board for each dataset with published runs, else for each one with smoke runs.

    Boards of own data follow.
    """
    runs, chosen = given.runs, _chosen(given)
    boards = [_published(given, chosen, dataset) for dataset in names.dataset_names()]
    found = [board for board in boards if board is not None]
    own = [run for run in runs.runs if run.record.done and run.job.data_kind == "own"]
    smoke = [] if found else [run for run in runs.of_kind("smoke") if run not in own]
    for (dataset, mark), apart in grouped(chain(own, smoke), _place).items():
        found += _apart(chosen, dataset, mark, apart)
    return tuple(found)


def datasets_without_runs(given: ReportInput) -> list[str]:
    """Return the titles of registered datasets that have no published run."""
    shown = {run.job.dataset for run in given.runs.of_kind("published")}
    wanted = [name for name in names.dataset_names() if given.limits.admits("", name)]
    return [names.dataset_title(name) for name in wanted if name not in shown]


def _chosen(given: ReportInput) -> list[tuple[Tier, bool]]:
    known = [tier for tier in tiers(given.reference) if given.limits.admits(tier.method, "")]
    return [(tier, tier.method in given.reference.featured) for tier in known]


def _place(run: Run) -> tuple[str, str]:
    """Return the dataset of a run and what keeps the run from being a result."""
    words = {"own": "own data", "stand-in": "stand-in data", "quick": "quick run"}
    return run.job.dataset, ", ".join(words.get(label, label) for label in run.job.labels)


def _published(
    given: ReportInput, chosen: Sequence[tuple[Tier, bool]], dataset: str
) -> Board | None:
    metric = names.headline(dataset)
    entries, values, missing = [], {}, []
    for tier, featured in chosen:
        key = CellKey(tier.method, dataset, metric)
        cell = measured_cell(given.runs, key)
        if cell.mean is None:
            missing.append(names.method_title(tier.method))
            continue
        entries.append(Entry(tier, cell, given.reference.cell(key), featured))
        values[tier.method] = metric_by_seed(given.runs.published(tier.method, dataset), metric)
    return _board(dataset, metric, "", entries, values, missing)


def _apart(
    chosen: Sequence[tuple[Tier, bool]], dataset: str, mark: str, runs: Sequence[Run]
) -> list[Board]:
    """Return the board of runs that are no results, unless none of them has a metric."""
    metric = names.headline(dataset)
    if not metric_values(runs, metric):
        metric = next((m for m in WITHOUT_GROUPS if metric_values(runs, m)), metric)
    by_method = grouped(runs, lambda run: run.job.method)
    entries, values = [], {}
    for tier, featured in chosen:
        own = by_method.get(tier.method, [])
        if found := metric_values(own, metric):
            cell = CellKey(tier.method, dataset, metric).averaged(found)
            entries.append(Entry(tier, cell, None, featured))
            values[tier.method] = metric_by_seed(own, metric)
    board = _board(dataset, metric, mark, entries, values, [])
    return [] if board is None else [board]


def _board(
    dataset: str,
    metric: str,
    mark: str,
    entries: Sequence[Entry],
    values: Mapping[str, Mapping[int, float]],
    not_run: Sequence[str],
) -> Board | None:
    if not entries:
        return None
    is_auroc = CellKey(metric=metric).digits == 3
    words = {"wga": "worst-group accuracy", "worst_class": "worst-class accuracy"}
    return Board(
        dataset=dataset,
        title=names.dataset_title(dataset),
        metric=words.get(metric, names.metric_words(dataset, metric)),
        entries=tuple(sorted(entries, key=lambda one: (-one.mean, one.tier.method))),
        scale=Scale.over(entries, 1.0 if is_auroc else 100.0),
        mark=mark,
        unit="" if is_auroc else "%",
        not_run=tuple(not_run),
        values=values,
    )


@dataclass(frozen=True)
class Finding:
    """One sentence or two of what the numbers say, and the table that has them."""

    lead: str  # what it is about
    text: str
    table: str = ""  # label of the table that has the numbers


FindingBuilder = Callable[[ReportInput, Sequence[Board]], Sequence[Finding]]
"""Makes findings of a report's numbers; none where the numbers are not there."""


def in_words(titles: Sequence[str]) -> str:
    """Return titles as a list inside a sentence."""
    *others, last = titles
    return f"{', '.join(others)} and {last}" if others else last


def leaders(given: ReportInput, boards: Sequence[Board]) -> list[Finding]:
    """Return who is first on each dataset, who cannot be told from it, and who is last."""
    return [
        Finding(board.title, _leaders(board), "main_results")
        for board in boards
        if not board.mark and len(board.entries) > 1
    ]


def _leaders(board: Board) -> str:
    first, *others, last = board.entries
    near = [one.title for one in others if _tied(board, first, one)]
    text = f"{first.title} is first with {board.text(first)}"
    if len(near) > 3:
        text += f", though seeds do not separate it from {len(near)} others"
    elif near:
        text += f", though seeds do not separate it from {in_words(near)}"
    blind = next((one for one in board.entries if one.labels == 2), None)
    if blind is not None and blind is not first and blind is not last:
        text += f". Without group labels {blind.title} is first, {board.text(blind)}"
    return f"{text}. {last.title} is last, {board.text(last)}."


def _tied(board: Board, first: Entry, other: Entry) -> bool:
    """Return whether the interval of the paired difference contains zero."""
    found = board.lead(first.tier.method, other.tier.method)
    if found is None or found.low is None or found.high is None:
        return False
    return found.low <= 0 <= found.high


@dataclass(frozen=True)
class Guide:
    """What leads a reader through a report: its answer, its findings, and the tables by topic."""

    boards: Sequence[Board] = ()
    findings: Sequence[Finding] = ()
    topics: Mapping[str, Sequence[str]] = field(default_factory=dict)  # labels of tables
    links: Mapping[str, str] = field(default_factory=dict)  # the first ones, and their words


def by_topic(
    tables: Sequence[Table], topics: Mapping[str, Sequence[str]]
) -> list[tuple[str, list[Table]]]:
    """Return tables by topic, in the order of the topics; what none names comes last."""
    topic_of = {label: topic for topic, labels in topics.items() for label in labels}
    found: dict[str, list[Table]] = {topic: [] for topic in topics}
    for table in tables:
        found.setdefault(topic_of.get(table.label, FURTHER if topics else PLAIN), []).append(table)
    return [(topic, own) for topic, own in found.items() if own]
