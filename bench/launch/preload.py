"""What multiprocessing's fork server imports before it forks the first worker.

Workers then start with torch and all methods in memory, and with the code as it was when the server
started: an edit made while runs go on reaches none of them, and neither the commit nor the digest
that their records name. Nothing here may ask torch about GPUs: a process that has touched CUDA
cannot be forked for work on it.
"""

from __future__ import annotations

import contextlib


def preload() -> None:
    """Import what a run needs, and compute what it says of its origin."""
    import pyarrow.parquet  # noqa: F401
    import torch
    import torch._dynamo  # an optimiser's first step asks for it: seconds of every run otherwise

    import bench.runner  # noqa: F401
    from bench.provenance import code_digest, environment, git_state
    from datasets.catalogue import load_datasets
    from methods.base import load_methods

    git_state()
    code_digest()
    if not torch.backends.cuda.is_built():
        environment()
    load_methods()
    load_datasets()


# A file that is broken must not end the server: a worker meets it again, and can say so.
with contextlib.suppress(Exception, SystemExit):
    preload()
