"""Tuning: Optuna studies of one method on one dataset, under the method's own supervision tier.

`Tuning` says what is tuned; `tune` makes the trials here, `submit` has a cluster make them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.tuning.source import Tuning, submit, tune

__all__ = ["TRIALS", "WARM_UP", "Tuning", "submit", "tune"]

TRIALS = 50  # the budget of every method, unless another is asked for
WARM_UP = 20  # random trials before TPE takes over, as in the paper


def __getattr__(name: str) -> Any:
    """Import what is heavy when it is first used: `tune --help` needs only the numbers above."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bench.tuning import source

    return getattr(source, name)
