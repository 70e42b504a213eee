"""Errors a user can act on: what is wrong, and what to do about it.

They live in the package that imports no other, so that every layer can raise them. The command line
prints the message and the remedy and exits with code 2; inside a run they become one failed record.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence that suggests the nearest known name, if one is near.

    Upper and lower case count as the same here, and nowhere else.
    """
    spelled = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), spelled, n=1)
    return f"; did you mean '{prefix}{spelled[near[0]]}'?" if near else ""


def count_of(number: int, noun: str) -> str:
    """Return a number of things in words: `1 run`, `2 runs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class BenchError(Exception):
    """An error the user can mend: a sentence about the problem and one about the remedy."""

    kind = "error"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[BenchError], tuple[str, str]]:
        """Pickle with both parts, so that the remedy survives the way back from a worker."""
        return type(self), (self.message, self.remedy)

    def __str__(self) -> str:
        """One paragraph: the problem, then the remedy."""
        return f"{self.message}\n  -> {self.remedy}" if self.remedy else self.message


class UsageError(BenchError):
    """Wrong use of the command line or of a configuration value."""

    kind = "usage"


class DataMissing(BenchError):
    """Data or weights that are not on disk."""

    kind = "data_missing"


class DataCorrupt(BenchError):
    """Data that is on disk but is not what it should be."""

    kind = "data_corrupt"
