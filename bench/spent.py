"""What work took: the two clocks of a run's accounts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Spent:
    """Seconds by the wall and by the processor; on a busy machine only the second can be trusted.

    The processor's are those of all threads of this process and of the children that it had, so
    that whatever another thread does while its caller waits, the audit above all, is subtracted
    with the wait.
    """

    wall: float = 0.0
    cpu: float = 0.0

    @staticmethod
    def now() -> Spent:
        """Read both clocks."""
        had = os.times()
        children = had.children_user + had.children_system
        return Spent(time.perf_counter(), time.process_time() + children)

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall - other.wall, self.cpu - other.cpu)
