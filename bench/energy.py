"""Energy of a fit, where codecarbon is installed (`pip install 'nct-bench[energy]'`).

An estimate: codecarbon reads power counters where the machine has them and otherwise multiplies
load by a typical power. The audit is within it. It is not kept across an interruption, so a run
that was resumed has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Energy:
    """What was used, once the measuring has ended; none where nothing could measure it."""

    kwh: float | None = None


@contextmanager
def measured_energy() -> Iterator[Energy]:
    """Measure what this process uses inside the block."""
    energy = Energy()
    try:
        from codecarbon import OfflineEmissionsTracker
    except ImportError:
        yield energy
        return
    logging.getLogger("codecarbon").setLevel(logging.ERROR)
    tracker = OfflineEmissionsTracker(
        country_iso_code="USA",  # it wants one; energy does not depend on it
        tracking_mode="process",
        save_to_file=False,
        allow_multiple_runs=True,
        log_level="error",
    )
    tracker.start()
    try:
        yield energy
    finally:
        tracker.stop()
        energy.kwh = float(tracker.final_emissions_data.energy_consumed)
