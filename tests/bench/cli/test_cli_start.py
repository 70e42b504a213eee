"""The command line starts at once, and notices another package called `datasets`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench import api
from bench.cli.parser import DEVELOPMENT_SEED, EXAMPLES, PURPOSES, RERUN, VERBS
from bench.job import FIRST_DEVELOPMENT_SEED

Cli = Callable[..., Any]
HOUSE = Path(__file__).parents[3]
HEAVY = {
    *("torch", "numpy", "pandas", "rich", "timm", "torchvision", "sklearn", "scipy", "optuna"),
    *("submitit", "matplotlib", "seaborn", "pyarrow", "PIL", "methods.base", "datasets.catalogue"),
}
CPU_SECONDS = 0.5
HELP = """
import sys, time
from bench.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
print("modules:", *sys.modules)
print("seconds:", time.process_time())
"""


def python(
    *words: str, path: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with a folder before all others in its search path."""
    folders = [str(path)] if path is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(HOUSE)])}
    command = [sys.executable, *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, **options
    )


@pytest.mark.parametrize(
    "words",
    [[], *([verb] for verb in VERBS), *(["data", sub] for sub in ("get", "verify", "standin"))],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    told = python("-c", HELP, *words, "--help")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage: python -m bench")
    *_, modules, seconds = told.stdout.splitlines()
    assert not HEAVY & set(modules.split())
    assert float(seconds.split()[1]) < CPU_SECONDS


def test_every_verb_has_a_file_and_an_example() -> None:
    files = {path.stem for path in (HOUSE / "bench" / "cli").glob("*.py")}
    halves = {"own_data"}  # of `data`
    assert files == {*VERBS, *halves, "__init__", "arguments", "hints", "output", "parser"}
    assert EXAMPLES.keys() == {*VERBS, ""}


def test_every_verb_has_one_purpose() -> None:
    listed = [name for names in PURPOSES.values() for name in names]
    assert sorted(listed) == sorted(VERBS)


def test_nothing_typed_shows_every_verb_by_purpose(cli: Cli) -> None:
    told = cli()
    assert (told.code, told.err) == (0, "")
    for purpose, names in PURPOSES.items():
        _, _, below = told.out.partition(f"to {purpose}:\n")
        part = below.partition("\n\n")[0].splitlines()
        assert [line.split()[0] for line in part] == [*names]
    assert cli("--help").out == told.out
    assert "python -m bench demo" in told.out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.cli import main

    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"nct-bench {version('nct-bench')}\n"


def test_constants_are_the_librarys() -> None:
    assert RERUN == api.RERUN
    assert DEVELOPMENT_SEED == FIRST_DEVELOPMENT_SEED


def test_the_verb_list_does_not_hide_the_built_in() -> None:
    """The module of the verb becomes an attribute of its package."""
    script = "from bench.cli import main; main(['list', '--json']); main(['list', '--json'])"
    told = python("-c", script)
    assert told.returncode == 0, told.stderr


def foreign_package(folder: Path) -> Path:
    """Another package of that name, which nobody should import."""
    package = folder / "datasets"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("# Copyright\nraise RuntimeError('imported')\n")
    return package


REMEDY = (
    "virtual environment",
    "pip uninstall datasets",
    "pip install --force-reinstall nct-bench",
)


@pytest.mark.parametrize("words", [["run", "--help"], ["list"], ["--version"]])
def test_another_package_is_named(words: list[str], tmp_path: Path) -> None:
    package = foreign_package(tmp_path / "site")
    told = python("-m", "bench", *words, path=tmp_path / "site", cwd=tmp_path)
    assert told.returncode == 2
    assert told.stdout == ""
    assert f"bench: another package called 'datasets' is found instead of ours: {package}" in (
        told.stderr
    )
    assert all(part in told.stderr for part in REMEDY)
    assert "Traceback" not in told.stderr


def test_a_module_of_that_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "datasets.py").write_text("raise RuntimeError('imported')\n")
    told = python("-m", "bench", "list", cwd=tmp_path)
    assert told.returncode == 2
    assert str(tmp_path / "datasets.py") in told.stderr


def test_a_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    told = python("-m", "bench", "--version", cwd=tmp_path)
    assert told.returncode == 0, told.stderr


def test_the_library_notices_it_too(tmp_path: Path) -> None:
    package = foreign_package(tmp_path)
    told = python("-c", "import bench; print('light'); bench.run", path=tmp_path, cwd=tmp_path)
    assert told.returncode == 1
    assert told.stdout == "light\n"
    assert (
        f"ImportError: another package called 'datasets' is found instead of ours: {package}"
        in (told.stderr)
    )


def test_a_package_installed_over_ours_is_named(tmp_path: Path) -> None:
    """Where both were installed into one folder, the later one has replaced files."""
    (tmp_path / "bench").mkdir()
    for name in ("__init__.py", "numerics.py"):  # all that `import bench` imports
        (tmp_path / "bench" / name).write_text((HOUSE / "bench" / name).read_text())
    package = foreign_package(tmp_path)
    check = "import bench; bench.check_datasets_package()"
    told = python("-c", check, path=tmp_path, cwd=tmp_path)
    assert told.returncode == 1
    assert f"another package called 'datasets' has overwritten ours in {package}" in told.stderr
    assert all(part in told.stderr for part in REMEDY)


def test_ours_is_recognised() -> None:
    assert (HOUSE / "datasets" / "__init__.py").read_text().startswith('"""')
    told = python("-c", "import bench; bench.check_datasets_package()")
    assert told.returncode == 0, told.stderr


def test_old_option_is_gone(cli: Cli) -> None:
    told = cli("run", "--stack-seeds")
    assert told.code == 2
    assert "unrecognized arguments: --stack-seeds" in told.err
