"""Beginning a method or dataset of one's own, and testing it: what `bench new` and `test` do.

What is written are the modules of `bench.templates` under another name: they are checked like the
rest of this package, and pass the contract tests as they stand.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from datasets import dataset as dataset_registry
from datasets.catalogue import load_datasets
from datasets.errors import UsageError, did_you_mean
from datasets.files import atomic_file
from methods import base as method_registry
from methods.base import load_methods

Kind = Literal["method", "dataset"]

PROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "{dashed}-bench"
version = "0.1.0"
description = "{title}, for nct-bench"
requires-python = ">=3.11"
dependencies = ["nct-bench"]

# This makes it known to every command, as soon as the package is installed.
[project.entry-points."bench.{kind}s"]
{name} = "{package}.{name}"

[tool.setuptools]
packages = ["{package}"]
"""
TEST = '''\
"""The contract tests of nct-bench on {title}."""

from bench.testing import {contract}


class Test{camel}({contract}):
    """Add tests of what is particular to it."""

    {kind} = "{name}"
'''
RUNNER = """\
import sys

sys.path[:0] = {folders!r}
from bench.testing import contracts_of

globals().update(contracts_of({subject!r}))
"""
CONTRACTS = {"method": "MethodContract", "dataset": "DatasetContract"}


def new(kind: Kind, name: str, folder: Path, *, package: bool = False) -> list[Path]:
    """Write a method or dataset that passes the contract tests, and return the files.

    Args:
        kind: which.
        name: of the method or dataset, and of its file.
        folder: where to write.
        package: write a folder with an entry point, which pip can install, instead of one file.
    """
    _check_name(kind, name)
    words = {
        "kind": kind,
        "name": name,
        "dashed": name.replace("_", "-"),
        "package": f"{name}_bench",
        "title": name.replace("_", " ").title(),
        "camel": "".join(word.capitalize() for word in name.split("_")),
        "contract": CONTRACTS[kind],
    }
    template = Path(__file__).with_name("templates") / f"{kind}.py"
    code = template.read_text(encoding="utf-8")
    example = {"name": f"example_{kind}", "title": f"Example {kind.title()}"}
    example["camel"] = example["title"].replace(" ", "")
    for form, text in example.items():
        code = code.replace(text, words[form])
    files = {folder / f"{name}.py": code}
    if package:
        root = folder / words["package"]
        files = {
            root / "pyproject.toml": PROJECT.format(**words),
            root / words["package"] / "__init__.py": f'"""{words["title"]}, for nct-bench."""\n',
            root / words["package"] / f"{name}.py": code,
            root / "tests" / f"test_{name}.py": TEST.format(**words),
        }
    if there := [path for path in files if path.exists()]:
        raise UsageError(f"{there[0]} is there already", "choose another name or --out")
    for path, text in files.items():
        with atomic_file(path) as draft:
            draft.write_text(text, encoding="utf-8")
    return list(files)


def _check_name(kind: Kind, name: str) -> None:
    registry = method_registry if kind == "method" else dataset_registry
    if registry.NAME.fullmatch(name) is None or name in registry.RESERVED:
        raise UsageError(
            f"'{name}' cannot be the name of a {kind}",
            "use up to 40 lower-case letters, digits and underscores, beginning with a letter, and "
            f"none of {', '.join(registry.RESERVED)}",
        )
    for other, known in (("method", load_methods()), ("dataset", load_datasets())):
        if name in known:
            raise UsageError(f"there is a {other} '{name}' already", "choose another name")
    # A file of that name would hide the module from whoever starts Python beside it.
    if name in sys.stdlib_module_names or find_spec(name) is not None:
        raise UsageError(f"'{name}' is the name of a Python module", "choose another name")


def run_contract_tests(subject: str, *, verbose: bool = False) -> int:
    """Run the contract tests on a method, a dataset, or a file that registers some.

    They run by pytest in a process of their own, which prints; returns its exit code: 0 if all
    passed, 1 if some did not, another where there was nothing to run.
    """
    if find_spec("pytest") is None:
        raise UsageError("the contract tests need pytest", "pip install pytest")
    folders: list[str] = []
    path = Path(subject)
    if path.suffix == ".py":
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "give a file, or the name of a method")
        if not path.stem.isidentifier():
            raise UsageError(f"{path.name} cannot be imported", "use letters, digits, underscores")
        subject, folders = f"{path.stem}.py", [str(path.resolve().parent)]
    else:
        known = (*load_methods(), *load_datasets())
        if subject not in known:
            raise UsageError(
                f"there is no method or dataset '{subject}'{did_you_mean(subject, known)}",
                f"give a file that registers one, or choose from {', '.join(known)}",
            )
    # Where the tests run, nothing else is found: not the user's settings of pytest either.
    ours = str(Path(__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory(prefix="bench-test-") as folder:
        file = Path(folder) / "test_contract.py"
        runner = RUNNER.format(folders=[ours, *folders], subject=subject)
        file.write_text(runner, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        words = ["-p", "no:cacheprovider", "-v" if verbose else "-q", file.name]
        return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=folder).returncode
