"""Tuning: Optuna studies of one method on one dataset, under the method's own supervision tier.

The numbers that `tune --help` needs are here, for what tunes (`source.py`) is heavy to import.
"""

from __future__ import annotations

TRIALS = 50  # the budget of every method, unless another is asked for
WARM_UP = 20  # random trials before TPE takes over, as in the paper
