"""Keeping freed memory for the next step instead of handing it back to the system.

A training step allocates the same tensors again and again. glibc returns large ones to the kernel
at once, and the kernel clears every page anew: up to a quarter of a LeNet's step. What is computed
does not change.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # numbers of mallopt's parameters
KEPT = 2**31 - 1
LARGE = 2**28  # larger blocks, such as whole splits, still go back at once
AHEAD = 2**26


def keep_freed_memory() -> bool:
    """Tell the C library, if it is glibc; says whether it listened."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {MMAP_THRESHOLD: LARGE, TRIM_THRESHOLD: KEPT, TOP_PAD: AHEAD}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
