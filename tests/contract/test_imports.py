"""Imports go one way, only as far as they must; `bench` names no method and no dataset."""

from __future__ import annotations

import ast
import re
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
GUESTS = ("bench.cli", "bench.paper")
"""Rooms that know the rest of `bench`, and that the rest does not know."""
KNOWS_THE_PAPER = {"bench.api"}  # when `report` is called
NAMES_ALLOWED = ("bench/paper/", "bench/perf/")


def files(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((HOUSE / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts).removesuffix(".__init__")


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


@pytest.mark.parametrize("guest", GUESTS)
def test_nobody_knows_the_guests(guest: str) -> None:
    for path in files("bench"):
        name = module_of(path)
        if name.startswith(GUESTS) or name in KNOWS_THE_PAPER or name == "bench.__main__":
            continue
        met = {found for found in imported(path.read_text()) if found.startswith(guest)}
        assert not met, f"{path.relative_to(HOUSE)} imports {met}"


def test_bench_names_no_method_and_no_dataset() -> None:
    """What the harness needs to know of them comes with their registry entries."""
    from datasets.catalogue import load_datasets
    from methods.base import load_methods

    names = {*load_methods(), *load_datasets()}
    for path in files("bench"):
        where = str(path.relative_to(HOUSE))
        if where.startswith(NAMES_ALLOWED):
            continue
        for node in ast.walk(_without_docs(ast.parse(path.read_text()))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{where}:{node.lineno} names {node.value}"
        tree = imported(path.read_text())
        met = [m for m in tree if re.fullmatch(rf"(methods|datasets)\.({'|'.join(names)})", m)]
        assert not met, f"{where} imports {met}"


def _without_docs(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                entry
                for entry in body
                if not (isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant))
            ]
    return tree


def test_datasets_is_ours() -> None:
    """Hugging Face's package has the same name: every import must be of a module we have."""
    ours = {".".join(p.relative_to(HOUSE).with_suffix("").parts) for p in files("datasets")}
    ours |= {name.removesuffix(".__init__") for name in ours}
    for path in files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "datasets":
                assert node.module in ours, f"{path.relative_to(HOUSE)}: from {node.module}"
    import datasets

    assert Path(str(datasets.__file__)).is_relative_to(HOUSE)


def test_imports_are_seen() -> None:
    source = "import os.path\ndef f():\n    from bench.job import Job\n"
    assert set(imported(source)) == {"os.path", "bench.job", "bench.job.Job"}


def modules_after(statement: str) -> set[str]:
    report = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, cwd=HOUSE
    )
    return set(result.stdout.split())


def test_packages_import_nothing_heavy() -> None:
    loaded = modules_after("import bench, bench.cli, methods, datasets")
    assert "bench.cli" in loaded
    assert not loaded & {"torch", "numpy", "pandas", *EXTRAS}


def test_no_module_imports_an_extra_before_it_is_used() -> None:
    """Every module at once: what only some jobs need is imported by those jobs."""
    names = [
        module_of(path)
        for path in files(*PACKAGES)
        if path.name != "__main__.py" and module_of(path) != "bench.testing"
    ]
    loaded = modules_after("import " + ", ".join(names))
    assert {"torch", "methods.training", "bench.runner"} <= loaded
    assert not loaded & set(EXTRAS)
