"""Following submitted runs until they end, as one follows worker processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.launch.local import Watcher
from bench.launch.queue import claims
from bench.plan import Job
from bench.store import Store

POLL_SECONDS = 2.0
TICKS = 8  # how often the display is drawn in that time


def follow(jobs: Sequence[Job], store: Store, watcher: Watcher) -> list[dict[str, Any]]:
    """Wait until no launch has any of the runs left, and return their records as they came."""
    waiting = {job.run_id: job for job in jobs}
    shown: set[str] = set()
    records = []
    while waiting:
        claimed = claims(store)
        for run_id, job in list(waiting.items()):
            claim = claimed.get(run_id)
            record = store.record(run_id) if claim is None else None
            if (claim is None or claim.state == "running") and run_id not in shown:
                shown.add(run_id)
                watcher.started(job)
            if claim is None:
                del waiting[run_id]
                if record is not None:
                    watcher.finished(job, record)
                    records.append(record)
            elif run_id in shown:
                watcher.progressed(job, store.progress(run_id) or {"stage": claim.state})
        for _ in range(TICKS if waiting else 0):
            watcher.tick()
            time.sleep(POLL_SECONDS / TICKS)
    return records
