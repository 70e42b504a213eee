"""The arithmetic of fits on a processor: one instruction set, so that the same bits come out.

torch, oneDNN, MKL and the OpenBLAS of numpy and scipy choose their kernels by the processor they
find, and kernels of different widths add in different orders: two machines of one name then agree
in no run. Pinned to AVX2, which every x86 processor in use has (OpenBLAS calls it Haswell), they
agree. Each library reads its variable once, at its first use, so `bench` sets them when it is
itself imported, and child processes inherit them.

Nothing is imported here, since this runs before anything else does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHOICES = ("pinned", "native")
VARIABLE = "BENCH_NUMERICS"
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}

# What the user set; where it is our value, a process that had pinned it may have left it.
_chosen = {n: v for n in PINNED if (v := os.environ.get(n)) not in (None, PINNED[n])}
_at_torch_import: dict[str, str] | None = None
"""The settings as they were when torch was found imported: later ones may have no effect."""


def apply(choice: str) -> None:
    """Set the libraries' variables for this process and its children."""
    global _at_torch_import
    if "torch" in sys.modules and _at_torch_import is None:
        _at_torch_import = _settings()
    os.environ[VARIABLE] = choice
    for name in PINNED:
        os.environ.pop(name, None)
    os.environ.update(PINNED if choice != "native" and _has_avx2() else _chosen)


def in_effect() -> dict[str, str]:
    """Return the choice that holds in this process, and each library's setting."""
    settings = _settings() if _at_torch_import is None else _at_torch_import
    return {"choice": "pinned" if settings == PINNED else "native", **settings}


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in PINNED if name in os.environ}


def _has_avx2() -> bool:
    """Return whether the processor is known to have AVX2: forced without it, torch would crash."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
