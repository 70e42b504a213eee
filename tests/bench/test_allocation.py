"""Freed memory is kept: the kernel need not hand out the same pages again and again."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, sys, torch
from bench.allocation import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(3)
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.zeros(2**23).sum()
before = pages()
for _ in range(20):
    torch.zeros(2**23).sum()  # 32 MB
print(pages() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS, how], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_that_was_freed_is_used_again() -> None:
    assert faults("kept") * 4 < faults("as it comes")
