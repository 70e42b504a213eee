"""How fast a run goes, and when its current stage should end."""

from __future__ import annotations

import time
from typing import Any


class Pace:
    """Watches the epochs of a stage go by."""

    def __init__(self) -> None:
        self._stage: Any = None
        self._since = 0.0
        self._first = 0

    def expect(self, progress: dict[str, Any]) -> dict[str, float]:
        """Say when the stage should end, once two of its epochs were seen."""
        epoch, epochs = progress.get("epoch"), progress.get("epochs")
        if not epoch or not epochs:
            return {}
        now = time.time()
        part = (progress.get("stage"), progress.get("iteration"), epochs)
        if part != self._stage or epoch <= self._first:
            self._stage, self._since, self._first = part, now, epoch
            return {}
        each = (now - self._since) / (epoch - self._first)
        return {"expected_end": now + each * max(0, epochs - epoch)}
