"""`data add` on large folders: time and memory grow with the files, and no faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

SMALL, LARGE = 10_000, 100_000
GROWTH = 12.0  # times the time, for ten times the files
SECONDS, MEMORY = 120.0, 2**30  # for the large folder
BYTES_A_FILE = 1000
MEASURED = """
import json, re, sys, time
from bench.cli import main
began = time.perf_counter()
code = main(sys.argv[1:])
# What getrusage says includes the process this one was forked from.
peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
sys.stderr.write("\\n" + json.dumps([code, time.perf_counter() - began, peak]))
"""


def write_images(folder: Path, count: int) -> None:
    """Write PNG images, each another one."""
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c", "d"):
        (folder / name).mkdir(parents=True)
    for number in range(count):
        image = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
        image.save(folder / "abcd"[number % 4] / f"{number:06d}.png", compress_level=1)


def added(folder: Path, root: Path) -> tuple[float, int]:
    """Return the seconds and the peak memory of `data add` in a process of its own."""
    words = ["data", "add", "large", str(folder), "--data-root", str(root)]
    command = [sys.executable, "-c", MEASURED, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    code, seconds, peak = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return seconds, peak


def test_time_and_memory_grow_with_the_files(tmp_path: Path, record_property: Any) -> None:
    found = {}
    for count in (SMALL, LARGE):
        folder = tmp_path / str(count)
        began = time.perf_counter()
        write_images(folder, count)
        record_property(f"written_{count}", time.perf_counter() - began)
        found[count] = added(folder, tmp_path / f"root-{count}")
        record_property(f"added_{count}", found[count])
    (few_seconds, few_bytes), (seconds, peak) = found[SMALL], found[LARGE]
    print(found)
    assert seconds < SECONDS and peak < MEMORY
    assert seconds < GROWTH * few_seconds
    assert peak - few_bytes < BYTES_A_FILE * (LARGE - SMALL)
