"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bench  # noqa: F401, before anything imports torch: it sets the arithmetic that runs have
from datasets.errors import BenchError
from datasets.fetch import ROOT_VARIABLE, default_data_root
from datasets.mnist_source import ensure_mnist

# Before torch is imported, here and in what tests start. Their networks are tiny: a second thread
# gains nothing, and beside another test process it mostly waits, which costs a whole core.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_data_root_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test know the registered data of another."""
    monkeypatch.setenv(ROOT_VARIABLE, "")


@pytest.fixture(scope="session")
def mnist_root() -> Path:
    """The data root above the real MNIST files, which are fetched where they are not there yet.

    Every worker of a parallel run asks; the fetch takes a file lock, so one of them downloads. In
    continuous integration a skip would hide that the real splits were never checked, so there it
    is a failure.
    """
    root = default_data_root()
    try:
        ensure_mnist(root, print)
    except BenchError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must check the real MNIST: {error}")
        pytest.skip(f"MNIST could not be fetched: {error.message}")
    return root


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any]], Any]:
    """Poll until something is true, and return it."""

    def wait(ready: Callable[[], Any], seconds: float = 120.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := ready():
                return found
            time.sleep(0.02)
        pytest.fail(f"nothing happened within {seconds:.0f} s")

    return wait
