"""What the numbers say of the paper's method, in a few sentences: where it wins, where it loses.

Every sentence is made from the runs at hand, and is left out where they are not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.paper.selection import CONTROL, control_runs
from bench.reporting.collection import ReportInput, metric_by_seed
from bench.reporting.leaderboard import Board, Finding, in_words
from bench.reporting.names import dataset_title, headline, method_title
from bench.reporting.table import CellKey

METHOD, PLUS, USUAL = "nct", "nct_plus", "erm"
WHAT_IT_IS = "a tree grown from a network's own mistakes"
COLLAPSED = 10.0  # points of worst-group accuracy: at most this is a failure
SHOWN = 3  # methods that a sentence names


def findings(given: ReportInput, boards: Sequence[Board]) -> list[Finding]:
    """Return how the method does against plain training, and what biased validation does."""
    shown = [board for board in boards if not board.mark]
    return [*against_usual(shown), *biased_validation(given)]


def against_usual(boards: Sequence[Board]) -> list[Finding]:
    """Return by how much the method wins or loses against plain training, dataset by dataset."""
    won: list[str] = []
    lost: list[str] = []
    unclear: list[str] = []
    for board in boards:
        own, gap = board.entry(METHOD), board.lead(METHOD, USUAL)
        if own is None or gap is None:
            continue
        number = own.cell.number(abs(gap.difference))
        points = "" if board.unit == "" else " points"
        size = f"{number}{points} on {board.title}"
        if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
            unclear.append(size)
        else:
            (won if gap.difference > 0 else lost).append(size)
    title, usual = method_title(METHOD), method_title(USUAL)
    told = [f"beats {usual} by {in_words(won)}"] if won else []
    told += [f"loses to {usual} by {in_words(lost)}"] if lost else []
    told += [f"is within seed noise of {usual} ({in_words(unclear)})"] if unclear else []
    if not told:
        return []
    text = f"{title}, {WHAT_IT_IS}, {in_words(told)}."
    if better := _over_plain(boards):
        text += f" {better}"
    return [Finding(f"{title} against {usual}", text, "paired_tests")]


def _over_plain(boards: Sequence[Board]) -> str:
    """Return what the variant made here adds to the method."""
    gains = []
    for board in boards:
        own, gap = board.entry(PLUS), board.lead(PLUS, METHOD)
        if own is not None and gap is not None:
            sign = "+" if gap.difference >= 0 else "-"
            size = f"{sign}{own.cell.number(abs(gap.difference))}"
            unsure = gap.low is None or gap.high is None or gap.low <= 0 <= gap.high
            gains.append(f"{size} on {board.title}{' (seeds cannot tell)' if unsure else ''}")
    return f"{method_title(PLUS)}, a variant made here: {in_words(gains)}." if gains else ""


def biased_validation(given: ReportInput) -> list[Finding]:
    """Return which methods fail where validation data is as biased as training data."""
    (dataset,) = CONTROL.datasets
    metric = headline(dataset)
    both = control_runs(given)
    before, after = (
        {m: metric_by_seed([r for r in runs if r.job.method == m], metric) for m in CONTROL.methods}
        for runs in both
    )
    falls: list[tuple[float, float, str]] = []
    counted: set[int] = set()  # of seeds that were run both ways
    for method in CONTROL.methods:
        seeds = sorted(before[method].keys() & after[method].keys())
        if seeds:
            was, now = (
                sum(side[method][s] for s in seeds) / len(seeds) for side in (before, after)
            )
            falls.append((was, now, method))
            counted.add(len(seeds))
    title = f"Biased validation ({dataset_title(dataset)})"
    if not any(was > COLLAPSED for was, _, _ in falls):
        return []
    number = CellKey(metric=metric).empty("").number
    said = {m: f"{method_title(m)} from {number(b)} to {number(a)}" for b, a, m in falls}
    could = [(a, m) for b, a, m in falls if b > COLLAPSED]  # others fail anyway
    kept = [said[m] for a, m in sorted(could, reverse=True) if a > COLLAPSED]
    failed = sorted((m for a, m in could if a <= COLLAPSED), key=lambda m: m not in (METHOD, PLUS))
    listed = [said[m] for m in failed[:SHOWN]]
    listed += [f"{len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
    span = " to ".join(str(number) for number in sorted({min(counted), max(counted)}))
    text = f"Where validation is as biased as training (seeds: {span}), "
    if not failed:
        text += f"no worst group collapses; {kept[-1]} is the lowest."
    elif not kept:
        text += f"every worst group collapses: {in_words(listed)}."
    else:
        text += f"{len(failed)} of {len(could)} worst groups collapse: {in_words(listed)}. "
        text += f"Best: {in_words(kept[:2])}."
    lacking = [m for m in CONTROL.methods if m not in said]
    if len(lacking) > 1:
        text += f" The other {len(lacking)} methods were not run there yet."
    old = sorted({method_title(r.job.method) for runs in both for r in runs if r.outdated})
    if old:
        text += f" Of an earlier version so far: {in_words(old)}."
    return [Finding(title, text, CONTROL.table)]
