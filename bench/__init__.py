"""Robust image classification under spurious correlations: run, compare and cite methods.

    import bench

    grid = bench.plan(methods="nct,jtt", datasets="cmnist", seeds=3)   # what would be run
    grid = bench.run(methods="erm", datasets="cmnist", seeds=1)        # run what is missing
    table = bench.load_results("published")                            # results as a DataFrame
    model = bench.fit("nct", (images, labels), (val_images, val_labels))  # on arrays
    model = bench.load_model("nct-cmnist-s0")                          # a model that was kept
    scores = bench.evaluate("predictions.csv", "cmnist")               # what was made elsewhere
    gap = bench.compare("nct-cmnist", "erm-cmnist")                    # paired by seed
    page = bench.report("report", published=True)                      # tables, figures, one page
    found = bench.check("results", recompute=2)                        # are runs what they say?

The functions are loaded when they are first used, so that importing `bench` takes no time.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench import numerics

if TYPE_CHECKING:
    from bench.api import load_results, plan, report, run, tune
    from bench.checking import check
    from bench.library import fit
    from bench.models import load_model
    from bench.paired import compare
    from bench.scoring import evaluate

numerics.apply(os.environ.get(numerics.VARIABLE, numerics.CHOICES[0]))  # before torch is imported

__all__ = ["check", "compare", "evaluate", "fit", "load_model", "load_results", "plan", "report"]
__all__ += ["run", "tune"]

ELSEWHERE = {
    "check": "bench.checking",
    "compare": "bench.paired",
    "evaluate": "bench.scoring",
    "fit": "bench.library",
    "load_model": "bench.models",
}
"""The modules of the functions that are not in `bench.api`."""


def __getattr__(name: str) -> object:
    """Load one of the library's functions."""
    if name not in __all__:
        raise AttributeError(f"module 'bench' has no attribute '{name}'")
    check_datasets_package()
    return getattr(import_module(ELSEWHERE.get(name, "bench.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def check_datasets_package() -> None:
    """Raise `ImportError` if another package called `datasets`, Hugging Face's say, hides ours.

    Ours lies beside `bench`. Where both were installed into one place, the later one has
    overwritten files of the earlier: then `datasets/__init__.py` shows whose it is, since ours has
    no code in it.
    """
    ours = Path(__file__).resolve().parents[1] / "datasets"
    spec = find_spec("datasets")
    folders = [*(spec.submodule_search_locations or [])] if spec is not None else []
    found = folders[0] if folders else spec.origin if spec is not None else None
    if found is not None and Path(found).resolve() == ours:
        if (ours / "__init__.py").read_text(encoding="utf-8").startswith('"""'):
            return
        problem = f"another package called 'datasets' has overwritten ours in {ours}"
    elif found is not None:
        problem = f"another package called 'datasets' is found instead of ours: {found}"
    else:
        problem = f"our package 'datasets' is missing: it should be in {ours}"
    raise ImportError(
        f"{problem}\n  -> give nct-bench a virtual environment of its own, or run `pip uninstall "
        "datasets` and then `pip install --force-reinstall nct-bench`; a folder or file of your "
        "own that is called datasets has to be out of Python's search path"
    )
