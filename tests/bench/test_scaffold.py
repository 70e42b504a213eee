"""What `bench new` writes passes the contract tests as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.scaffold import new
from bench.testing import MethodContract
from datasets.catalogue import load_datasets
from datasets.errors import UsageError
from datasets.intake import AddOptions, add

sys.path.append(str(Path(__file__).parents[1]))
from planted import write_planted

HOUSE = Path(__file__).parents[2]


def bench_in(folder: Path, *words: str, path: tuple[Path, ...] = ()) -> Any:
    """Call the command line in a folder, with further packages to be found."""
    found = os.pathsep.join(map(str, (HOUSE, *path)))
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": found},
    )


@pytest.mark.parametrize(("kind", "name"), [("method", "my_own"), ("dataset", "my_birds")])
def test_file_passes_the_contract_as_it_stands(kind: str, name: str, tmp_path: Path) -> None:
    assert bench_in(tmp_path, "new", kind, name).returncode == 0
    code = (tmp_path / f"{name}.py").read_text()
    assert "xample" not in code, "something of the template's own name is left"
    tested = bench_in(tmp_path, "test", f"{name}.py")
    assert tested.returncode == 0, tested.stdout
    assert "passed" in tested.stdout and "failed" not in tested.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {f"{name}.py", "__pycache__"}


def test_own_data_is_not_among_what_a_method_is_tested_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "data"))
    write_planted(tmp_path / "pets", count=24)
    (tmp_path / "data").mkdir()
    add("pets", tmp_path / "pets", tmp_path / "data", AddOptions())
    assert "pets" in load_datasets()
    asked: dict[str, tuple[str, ...]] = {}
    wanted = SimpleNamespace(fixturenames=["any_dataset"], parametrize=asked.__setitem__)
    MethodContract().pytest_generate_tests(cast(pytest.Metafunc, wanted))
    assert "cmnist" in asked["any_dataset"] and "pets" not in asked["any_dataset"]


def test_broken_method_fails_the_contract(tmp_path: Path) -> None:
    new("method", "broken", tmp_path)
    file = tmp_path / "broken.py"
    code = file.read_text()
    assert "Supervision(train_groups=False" in code
    honest = "selected = Training("
    file.write_text(code.replace(honest, f"task.train.groups\n        {honest}"))
    tested = bench_in(tmp_path, "test", "broken.py")
    assert tested.returncode == 1
    assert "GroupLabelsHidden" in tested.stdout or "group labels" in tested.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages of a method and a dataset, installed by pip as they were written."""
    home = tmp_path_factory.mktemp("packages")
    new("method", "tidy", home, package=True)
    new("dataset", "shapes", home, package=True)
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    site = home / "site"
    packages = [str(home / "tidy_bench"), str(home / "shapes_bench")]
    subprocess.run([sys.executable, *words, "--target", str(site), *packages], check=True, cwd=home)
    return site


def test_installed_packages_are_known_to_every_command(site: Path, tmp_path: Path) -> None:
    listed = json.loads(bench_in(tmp_path, "list", "--json", path=(site,)).stdout)
    assert "tidy" in [method["name"] for method in listed["methods"]]
    assert "shapes" in [dataset["name"] for dataset in listed["datasets"]]
    assert "bench test" not in bench_in(tmp_path, "test", "tidyy", path=(site,)).stderr
    assert "did you mean 'tidy'" in bench_in(tmp_path, "test", "tidyy", path=(site,)).stderr


def test_package_brings_its_contract_test(site: Path) -> None:
    """The dataset's, which is the quicker one."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *words, str(site.parent / "shapes_bench" / "tests")],
        capture_output=True,
        text=True,
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HOUSE), str(site)])},
    )
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("method", "Smooth", "cannot be the name"),
        ("method", "all", "cannot be the name"),
        ("dataset", "mnist", "cannot be the name"),
        ("method", "erm", "there is a method 'erm' already"),
        ("dataset", "erm", "there is a method 'erm' already"),
        ("method", "json", "name of a Python module"),
        ("dataset", "there", "there already"),
    ],
)
def test_wrong_name_is_refused(kind: Any, name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=said):
        new(kind, name, tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_to_test_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    assert bench_in(tmp_path, "test", "missing.py").returncode == 2
    assert bench_in(tmp_path, "test", "no_such_method").returncode == 2
    found = bench_in(tmp_path, "test", "empty.py")
    assert found.returncode == 2 and "registers no method" in found.stdout
