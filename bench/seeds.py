"""The seed tree: every random stream of a run is derived from the run's seed and a name.

Streams do not depend on the method or on the order in which they are asked for, so that a stage
shared by two methods is the same in both, and resuming needs no saved random state.
"""

from __future__ import annotations

import hashlib


def derive_seed(root: int, *names: str | int) -> int:
    """Derive a seed below 2^63 from a root seed and a path of names."""
    path = "/".join(str(name) for name in (root, *names))
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") >> 1
