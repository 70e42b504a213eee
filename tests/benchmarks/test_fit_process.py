"""What it costs that a fit has a process of its own: processor time beside the same fit inline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datasets import standins

pytestmark = pytest.mark.slow

# Measured 3.9 where every fit imports torch._dynamo, which building an optimiser does, and 0.1
# where the process that it is forked from has done so already.
MORE_CPU_SECONDS = 3.0
# As in a worker of the pool: everything imported, and nothing trained before the fit is forked.
# torch refuses to train in a fork of a process that has trained, so the inline fits come last.
FITS = """
import json
import multiprocessing
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from bench.job import Request, expand
from bench.launch.preload import preload
from bench.process import CpuClock
from bench.runner import WORKER, RunOptions, run_job

root, results, fits = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
multiprocessing.current_process().name = f"{WORKER}-0"
preload()
seeds = tuple(range(100, 101 + fits))
jobs = expand(Request(("erm",), ("umnist",), seeds, root, quick=True))
spent = {}
for mode in ("isolated", "inline"):
    options = RunOptions(root, results / mode, isolate=mode == "isolated")
    seconds = []
    for job in jobs:
        began = CpuClock.now()
        record = run_job(job, options, lambda progress: None)
        seconds.append((CpuClock.now() - began).cpu)
        assert record.done, record.failure
    spent[mode] = statistics.median(seconds[1:])  # the first warms up
print(json.dumps(spent))
"""
FITS_MEASURED = 3  # of either kind


def cpu_seconds(root: Path, results: Path) -> dict[str, float]:
    """Return what a small run takes, data and evaluation included, in either mode."""
    words = [sys.executable, "-c", FITS, str(root), str(results), str(FITS_MEASURED)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spent: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return spent


@pytest.mark.benchmark(group="a small run whose fit has a process of its own")
def test_a_process_for_the_fit_costs_little(benchmark: Any, tmp_path: Path) -> None:
    standins.write("mnist", tmp_path / "data", size=600)
    spent = benchmark.pedantic(cpu_seconds, (tmp_path / "data", tmp_path / "results"), rounds=1)
    more = spent["isolated"] - spent["inline"]
    benchmark.extra_info["isolated / inline"] = spent["isolated"] / spent["inline"]
    benchmark.extra_info["CPU-seconds more"] = more
    assert more <= MORE_CPU_SECONDS, spent
