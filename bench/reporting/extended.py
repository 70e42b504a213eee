"""The extended table: every method on every dataset that has runs, and what to try first.

It is apart from the main table, which stays as a paper has it. Methods may come in further rows,
under other settings (`Method.further_rows`). What it says of a user without group labels follows
from a rule that is printed with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from bench.reporting import names
from bench.reporting.collection import (
    FURTHER_ROWS,
    Collection,
    ReportInput,
    Run,
    metric_values,
)
from bench.reporting.main_table import TIERS, best_by_tier, machines, measured_cell, seeds_note
from bench.reporting.table import Cell, CellKey, Column, Row, Table, mark_best
from datasets.catalogue import get_dataset
from datasets.config import build_config, with_overrides
from methods.base import get_method
from methods.presets import preset_values

IN_TRAINING = "Group labels in training"
WITHOUT = TIERS[2]
SECTIONS = (TIERS[0], IN_TRAINING, TIERS[1], WITHOUT)
FEWEST_DATASETS = 6  # on which ranks over datasets say something
SMALL_PIXELS = 64**2
RULE = (
    "Rule: of the rows without group labels, on the datasets where more than half of those with "
    "any run have runs, the one whose headline figure falls short of the best of them by the "
    "fewest points, averaged over these datasets (of an AUROC, hundredths)."
)


@dataclass(frozen=True)
class FieldRow:
    """One row: a method under its presets, or under further settings.

    Attributes:
        further: the name of a further row; empty where the presets hold.
        marks: whether it uses group labels of training (T) and of validation (V), and whether it
            fits something to validation samples (F).
    """

    method: str
    further: str
    marks: tuple[bool, bool, bool]

    @property
    def section(self) -> str:
        """The title of its tier."""
        train, val, _ = self.marks
        return SECTIONS[{(True, True): 0, (True, False): 1, (False, True): 2}.get((train, val), 3)]

    @property
    def title(self) -> str:
        """How the table spells it."""
        return names.method_title(self.method) + (f", {self.further}" if self.further else "")

    def cell(self, runs: Collection, dataset: str, metric: str) -> Cell:
        """Return the mean over its runs, or why there is none."""
        key = CellKey(self.method, dataset, metric, self.further)
        if not self.further:
            return measured_cell(runs, key)
        values = metric_values(runs.further(self.method, self.further, dataset), metric)
        return key.averaged(values) if values else key.empty("not run")


def field_rows(datasets: Iterable[str]) -> list[FieldRow]:
    """Return the rows of all registered methods, tier by tier, in the order of tables."""
    shown = tuple(datasets)
    rows = [
        _row(name, further, shown)
        for name in names.all_methods()
        for further in ("", *get_method(name).further_rows)
    ]
    return sorted(rows, key=lambda row: SECTIONS.index(row.section))


def _row(name: str, further: str, datasets: Sequence[str]) -> FieldRow:
    """Return a row with the most that it asks for on any of the datasets."""
    method = get_method(name)
    settings = method.further_rows.get(further, {})
    configs = [
        build_config(
            method.config_type, with_overrides(preset_values(method, dataset), settings), name
        )
        for dataset in datasets
    ]
    tiers = [method.supervision(config) for config in configs]
    marks = (
        any(tier.train_groups for tier in tiers),
        any(tier.val_groups for tier in tiers),
        any(map(method.fits_on_validation, configs)),
    )
    return FieldRow(name, further, marks)


def extended_results(given: ReportInput) -> Table:
    """Show every method on every dataset that has runs, tier by tier."""
    shown = [run for run in given.runs.runs if _shown(run)]
    having = {run.job.dataset for run in shown}
    datasets = tuple(name for name in names.all_datasets() if name in having)
    found = field_rows(datasets) if datasets else []
    keys = [(name, metric) for name in datasets for metric in names.table_metrics(name)]
    headlines = {
        row: [row.cell(given.runs, name, names.headline(name)) for name in datasets]
        for row in found
    }
    ranks = _mean_ranks(headlines) if len(datasets) >= FEWEST_DATASETS else {}
    rows = [
        Row(
            (row.title, *("yes" if mark else "no" for mark in row.marks)),
            (*(row.cell(given.runs, *key) for key in keys), *ranks.get(row, ())),
            row.section,
        )
        for row in found
    ]
    columns = [
        Column(names.metric_title(name, metric), _group(name, metric)) for name, metric in keys
    ]
    if ranks:
        columns.append(Column("Mean rank", "Over datasets"))
    measured = [cell for row in rows for cell in row.cells if cell.key.dataset]
    return Table(
        label="extended_results",
        title="Extended results: the whole field",
        caption=(
            "Every registered method on every dataset with runs, test sets. T: uses training group "
            "labels; V: uses validation group labels; F: fits something to validation samples, "
            "beyond choosing by them."
        ),
        row_headers=("Method", "T", "V", "F"),
        columns=tuple(columns),
        rows=_with_best_ranks(best_by_tier(rows)) if ranks else best_by_tier(rows),
        notes=(
            advice(headlines, datasets),
            _rank_note(len(datasets), shown=bool(ranks)),
            seeds_note(measured),
            "Bold: best of its tier. Datasets without any run are left out.",
            machines(shown),
        ),
        in_paper=False,
        section_titles=True,
    )


def _shown(run: Run) -> bool:
    return run.kind == "published" or any(row[0] == FURTHER_ROWS for row in run.variants)


def _group(dataset: str, metric: str) -> str:
    kind = " (AUROC)" if metric.startswith("auroc") else ""
    return names.dataset_title(dataset) + kind


def _rank_note(count: int, *, shown: bool) -> str:
    if shown:
        return (
            "Mean rank: of the headline figures, averaged over datasets, among the rows that have "
            "runs on all of them; equal figures share their ranks."
        )
    return (
        f"Ranks over datasets are shown from {FEWEST_DATASETS} datasets on, since fewer can show "
        f"nothing; there {'is' if count == 1 else 'are'} {count}."
    )


def _mean_ranks(headlines: dict[FieldRow, list[Cell]]) -> dict[FieldRow, tuple[Cell]]:
    """Return each row's mean rank over datasets, among the rows that have a figure on all."""
    complete = _complete(headlines)
    by_dataset = list(zip(*complete.values(), strict=True))
    found: dict[FieldRow, tuple[Cell]] = {}
    for row in headlines:
        key = CellKey(row.method, "", "mean_rank", row.further)
        if row not in complete:
            found[row] = (key.empty("no runs on some dataset"),)
            continue
        ranks = [_rank(own, others) for own, others in zip(complete[row], by_dataset, strict=True)]
        mean = statistics.fmean(ranks)
        found[row] = (Cell("measured", key, mean=mean, n=len(ranks), interval="none"),)
    return found


def _rank(own: float, others: Sequence[float]) -> float:
    """Return the place of a figure, 1 the highest; equal ones share the mean of their places."""
    above = sum(other > own for other in others)
    return above + (1 + sum(other == own for other in others)) / 2


def _with_best_ranks(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Mark the lowest of the mean ranks, over all tiers, in place of the highest of each."""
    plain = [replace(row.cells[-1], best=False) for row in rows]
    marked = mark_best(plain, lowest=True)
    return tuple(
        replace(row, cells=(*row.cells[:-1], last)) for row, last in zip(rows, marked, strict=True)
    )


def _complete(headlines: dict[FieldRow, list[Cell]]) -> dict[FieldRow, list[float]]:
    """Return the headline figures, in points, of the rows that have one on every dataset."""
    found = {row: [_points(cell) for cell in cells] for row, cells in headlines.items()}
    return {
        row: [value for value in values if value is not None]
        for row, values in found.items()
        if None not in values
    }


def _points(cell: Cell) -> float | None:
    return None if cell.mean is None else cell.mean * _scale(cell)


def _scale(cell: Cell) -> float:
    return 100.0 if cell.key.metric.startswith("auroc") else 1.0


def advice(headlines: dict[FieldRow, list[Cell]], datasets: Sequence[str]) -> str:
    """Return which method a user without group labels should try first, by these numbers."""
    question = "Without group labels, which method first?"
    own, datasets = _where_most_have_runs(headlines, datasets)
    complete = _complete(own)
    if not datasets or not complete:
        return f"{question} Nothing can be said: too few runs. {RULE}"
    best = [max(values) for values in zip(*complete.values(), strict=True)]
    short = {
        row: statistics.fmean(most - value for most, value in zip(best, values, strict=True))
        for row, values in complete.items()
    }
    first, *others = sorted(short, key=lambda row: short[row])
    titles = ", ".join(map(names.dataset_title, datasets))
    text = [
        question,
        f"By these numbers {first.title}: on average over {titles} it falls short of the best row "
        f"without group labels by {short[first]:.1f} points"
        + (f", {others[0].title} by {short[others[0]]:.1f}." if others else "."),
    ]
    if first.marks[2]:
        unfitted = [row for row in others if not row.marks[2]]
        text.append(
            "It fits to validation samples (F), which helps where validation is less biased than "
            "training"
            + (
                f"; of the rows that do not, {unfitted[0].title} is first "
                f"({short[unfitted[0]]:.1f} points short)."
                if unfitted
                else "."
            )
        )
    reasons = _thin(first, others, own, datasets)
    if reasons:
        text.append(f"The evidence is thin: {'; '.join(reasons)}.")
    if left := [row.title for row in own if row not in complete]:
        text.append(f"Not compared, for want of runs on some dataset: {'; '.join(left)}.")
    return " ".join([*text, RULE])


def _where_most_have_runs(
    headlines: dict[FieldRow, list[Cell]], datasets: Sequence[str]
) -> tuple[dict[FieldRow, list[Cell]], list[str]]:
    """Return the rows without group labels on the datasets where most of them have runs."""
    own = {row: cells for row, cells in headlines.items() if row.section == WITHOUT}
    having = [cells for cells in own.values() if any(cell.mean is not None for cell in cells)]
    columns = zip(*having, strict=True)
    common = [2 * sum(cell.mean is not None for cell in column) > len(having) for column in columns]
    chosen = [name for name, most in zip(datasets, common, strict=bool(having)) if most]
    kept = {
        row: [cell for cell, most in zip(cells, common, strict=bool(having)) if most]
        for row, cells in own.items()
    }
    return kept, chosen


def _thin(
    first: FieldRow,
    others: Sequence[FieldRow],
    own: dict[FieldRow, list[Cell]],
    datasets: Sequence[str],
) -> list[str]:
    """Return what keeps the numbers from settling which row is first."""
    reasons = []
    if len(datasets) < FEWEST_DATASETS:
        reasons.append(f"{len(datasets)} datasets, of at least {FEWEST_DATASETS}")
    if all(map(_is_small, datasets)):
        reasons.append("all of them of small images")
    if not others:
        return [*reasons, "no other row to compare with"]
    lead, error = _lead(own[first], own[others[0]])
    if error is None:
        reasons.append(f"a lead of {lead:.1f} points over the next, of unknown spread over seeds")
    elif lead < 2 * error:
        reasons.append(
            f"a lead of {lead:.1f} points over the next is less than twice its standard error "
            f"over seeds ({error:.1f})"
        )
    return reasons


def _is_small(dataset: str) -> bool:
    known = get_dataset(dataset)
    facts = known.facts(known.config_type())
    return not facts.rows and facts.eval_transform.pixels <= SMALL_PIXELS


def _lead(first: Sequence[Cell], second: Sequence[Cell]) -> tuple[float, float | None]:
    """Return the mean lead over datasets, in points, and its standard error over seeds."""
    gaps, variance = [], 0.0
    spreads = []
    for one, other in zip(first, second, strict=True):
        assert one.mean is not None and other.mean is not None
        gaps.append((one.mean - other.mean) * _scale(one))
        spreads += [(cell.std, cell.n, _scale(cell)) for cell in (one, other)]
    for std, n, scale in spreads:
        if std is None or n is None:
            return statistics.fmean(gaps), None
        variance += (std * scale) ** 2 / n
    return statistics.fmean(gaps), sqrt(variance) / len(gaps)
