"""Imports go one way, and only as far as they must."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
PACKAGES = ("datasets", "methods", "bench")
MAY_IMPORT = {
    "datasets": {"datasets"},
    "methods": {"datasets", "methods"},
    "bench": {"datasets", "methods", "bench"},
}
EXTRAS = ("timm", "torchvision", "sklearn", "optuna", "submitit", "seaborn", "matplotlib")
LONGEST = 300


def files(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((HOUSE / package).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would hide which way an import goes"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    known = list(files(package))
    assert known
    for path in known:
        roots = {name.split(".")[0] for name in imported(path.read_text())}
        wrong = (roots & set(PACKAGES)) - MAY_IMPORT[package]
        assert not wrong, f"{path.relative_to(HOUSE)} imports {wrong}"


def test_datasets_is_ours() -> None:
    """Hugging Face's package has the same name: every import must be of a module we have."""
    ours = {".".join(p.relative_to(HOUSE).with_suffix("").parts) for p in files("datasets")}
    ours |= {name.removesuffix(".__init__") for name in ours}
    for path in files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "datasets":
                assert node.module in ours, f"{path.relative_to(HOUSE)}: from {node.module}"
                if node.module == "datasets":
                    wanted = {f"datasets.{alias.name}" for alias in node.names}
                    assert wanted <= ours, f"{path.relative_to(HOUSE)}: {wanted - ours}"
    import datasets

    assert Path(str(datasets.__file__)).is_relative_to(HOUSE)


def test_imports_are_seen() -> None:
    source = "import os.path\ndef f():\n    from bench.plan import Job\n"
    assert set(imported(source)) == {"os.path", "bench.plan", "bench.plan.Job"}


def modules_after(statement: str) -> set[str]:
    report = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, cwd=HOUSE
    )
    return set(result.stdout.split())


def test_packages_import_nothing_heavy() -> None:
    """`--help` and a mistyped verb should answer at once."""
    loaded = modules_after("import bench, bench.cli, methods, datasets")
    assert "bench.cli" in loaded
    assert not loaded & {"torch", "numpy", "pandas", *EXTRAS}


def test_no_module_imports_an_extra_before_it_is_used() -> None:
    """Every module at once: what only some jobs need is imported by those jobs."""
    names = [
        ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")
        for path in files(*PACKAGES)
        if path.name != "__main__.py"
    ]
    loaded = modules_after("import " + ", ".join(names))
    assert {"torch", "methods.training", "bench.execute"} <= loaded
    assert not loaded & set(EXTRAS)


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in files(*PACKAGES)}
    long = {str(path.relative_to(HOUSE)): n for path, n in lengths.items() if n >= LONGEST}
    assert not long
