"""What the tables about trees share: a value of each published NCT run, averaged over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.report.cells import About, Cell, averaged, empty
from bench.report.collection import Collection, Run

Tree = Mapping[str, Any]
"""The `nct` part of a record."""

Read = Callable[[Tree], float | None]
NO_PAPER = "not in the paper's table"


def tree_cell(
    runs: Collection, about: About, read: Read, digits: int, missing: str = "not reached"
) -> Cell:
    """Average a value over a dataset's published trees, or say why there is none.

    Args:
        runs: the store.
        about: what the cell is about; its method is NCT.
        read: takes the value from a tree's part of the record; None where the tree has none.
        digits: decimals shown.
        missing: the reason where there are trees but none has the value.
    """
    found = runs.published("nct", about.dataset)
    values = tree_values(found, read)
    if not values:
        return empty(about, missing if found else runs.absence("nct", about.dataset))
    return averaged(values, about, digits)


def tree_values(runs: Sequence[Run], read: Read) -> list[tuple[float, str]]:
    """Give the value of every tree that has it, with the run's id."""
    values = []
    for run in runs:
        value = read(run.record["nct"]) if "nct" in run.record else None
        if value is not None:
            values.append((float(value), run.run_id))
    return values


def iteration(tree: Tree, number: int) -> Mapping[str, Any] | None:
    """Find an iteration of a tree, if it was grown that far."""
    for entry in tree["iterations"]:
        if entry["t"] == number:
            found: Mapping[str, Any] = entry
            return found
    return None


def at_iteration(number: int, *path: str | int) -> Read:
    """Make a reader of one value of one iteration, by the keys that lead to it."""

    def read(tree: Tree) -> float | None:
        value: Any = iteration(tree, number)
        for key in path:
            if value is None or (isinstance(key, int) and key >= len(value)):
                return None
            value = value[key] if isinstance(key, int) else value.get(key)
        return None if value is None else float(value)

    return read
