"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from datasets.errors import BenchError
from datasets.fetch import default_data_root
from datasets.mnist_source import ensure_mnist


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
