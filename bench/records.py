"""What every record begins with, and what a failed one says."""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch

from bench.plan import Job
from bench.provenance import environment, git_state
from bench.store import SCHEMA_VERSION
from datasets.errors import BenchError

# Kinds of failure that say nothing about the run: it was stopped, and can simply go on.
INTERRUPTED = ("worker_died", "node_failure", "cancelled", "lost")


def base_record(job: Job) -> dict[str, Any]:
    """Give what is known of a run before it starts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": job.run_id,
        "status": "queued",
        "method": job.method,
        "method_version": job.method_version,
        "supervision": job.supervision,
        "dataset": job.dataset,
        "protocol": job.protocol,
        "data_fingerprint": job.fingerprint,
        "standin": job.standin,
        "quick": job.quick,
        "preset": job.preset,
        "overrides": job.overrides,
        "variant": job.variant,
        "config": job.config,
        "seed": job.seed,
        "seed_tree": {"root": job.seed, "rule": "sha256('root/name/...'), first 63 bits"},
        "command": job.command(),
        **({"stack": list(job.stack)} if job.stack else {}),
        "environment": environment(),
        "git": git_state(),
    }


def failed_record(
    job: Job, error: BaseException, started: float, places: str = ""
) -> dict[str, Any]:
    """Say what went wrong, what to do, and how to run this one job again.

    Args:
        job: the job that failed.
        error: what it failed with.
        started: when it was started.
        places: arguments that name its data root and results folder.
    """
    kind, remedy = getattr(error, "kind", "error"), getattr(error, "remedy", "")
    if _out_of_memory(error):
        kind, remedy = "out_of_memory", "use a smaller batch_size, fewer --workers, or more memory"
    message = error.message if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return {
        **base_record(job),
        "status": "failed",
        "failure": {
            "kind": kind,
            "message": message,
            "remedy": remedy or "see stderr_tail; if it looks like a defect, report it",
            "command": f"{job.command()} {places} --rerun failed".replace("  ", " "),
            "stderr_tail": trace[-4000:],
            "after_seconds": round(time.time() - started, 1),
        },
    }


def _out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out; on a CPU torch says so only in the text of a RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
