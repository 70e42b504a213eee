"""Randomness for code that takes no generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def isolated_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Give code that can only draw from the global generator (dropout, initialisation) its own."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
