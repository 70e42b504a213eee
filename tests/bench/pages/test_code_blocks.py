"""Every code block of README and docs: commands parse, and what can run here is run.

Commands run in a folder of their own, on stand-in data, on one seed and with `--quick`. What is
only parsed is listed with the reason.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cli.parser import make_parser
from bench.pages.site import TREE
from datasets import standins
from methods.base import METHODS, load_methods

sys.path.append(str(TREE / "tests"))
from planted import write_planted

Cli = Callable[..., Any]
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (TREE / "docs").glob("*.md")))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^\n    (python -m bench [^\n]*)\n$", re.MULTILINE)
INLINE = re.compile(r"`(python -m bench[^`]*)`")
BENCH = "python -m bench"
NOT_COMMANDS = ("python -m bench run ...",)
ONLY_PARSED = {
    "--cluster": "submits to SLURM; tests/slurm does",
    "--help": "argparse ends there",
    "bench cancel": "needs a cluster",
    "bench demo": "two minutes; test_demo.py runs it",
    "bench perf": "minutes of measuring; tests/bench/perf",
    "bench new": "test_scaffold.py runs what it writes",
    "bench test": "test_scaffold.py runs the contract tests on it",
    "bench tune": "test_tune.py",
    "bench publish": "test_store_commands.py; it writes into the tree",
    "bench check submission": "a folder of the reader's own",
    "data get waterbirds": "a gigabyte from elsewhere",
    "data get weights": "from elsewhere",
    "data get mnist": "from elsewhere",
    "backbone.weights=FILE": "a file of the reader's own; test_features.py",
    "data get NAME": "a placeholder",
    "nct-celeba": "a run of the reader's own",
    "my.toml": "a profile of the reader's own",
    "campaign main": "planned below; hours to run",
    "report --published": "minutes; test_paper_committed_report.py",
    "check results/published": "half a minute; test_checking.py",
}
OTHER_TOOLS = (
    "pip",
    "python3 -m venv",
    ". .venv",
    "git",
    "export",
    "ruff",
    "mypy",
    "mkdocs",
    "eval",
)
OTHER_TOOLS += ("slurm/dev_cluster.sh", "python -m pytest", "cd")
"""What lines that are no command of ours begin with."""


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and text of every fenced block of a page."""
    return BLOCK.findall((TREE / page).read_text(encoding="utf-8"))


def commands(page: str) -> Iterator[str]:
    """Every command line of a page's shell blocks, joined, without comments, cut at && and |."""
    text = (TREE / page).read_text(encoding="utf-8")
    lines = [found.group(1) for found in INDENTED.finditer(text)]
    for language, block in blocks(page):
        if language in ("", "sh"):
            lines += block.replace("\\\n", " ").splitlines()
    for line in lines:
        plain = re.sub(r"\s#.*$", "", line).strip()
        if plain and plain not in NOT_COMMANDS:
            yield from (part.strip() for part in re.split(r"&&|\|", plain))


def bench_commands(page: str) -> list[str]:
    return [command for command in commands(page) if command.startswith(BENCH)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    text = (TREE / page).read_text(encoding="utf-8")
    inline = [found for found in INLINE.findall(text) if found != BENCH and "..." not in found]
    for command in (*bench_commands(page), *inline):
        words = shlex.split(command)[3:]
        if words and words[0] != "VERB" and "|" not in words[0]:
            make_parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES)
def test_other_lines_are_of_tools_that_are_known(page: str) -> None:
    for command in commands(page):
        assert command.startswith((BENCH, *OTHER_TOOLS)), f"{page}: {command}"


def test_python_blocks_compile() -> None:
    found = [
        (page, code) for page in PAGES for language, code in blocks(page) if language == "python"
    ]
    assert len(found) >= 10
    for page, code in found:
        compile(code, page, "exec")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: stand-in data under $BENCH_DATA, pictures at home, ours beside."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BENCH_DATA", str(tmp_path / "data"))
    standins.write("mnist", tmp_path / "data", size=600)
    write_planted(tmp_path / "home" / "pictures" / "pets", count=240)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Forget the methods that a block registers."""
    load_methods()
    before = dict(METHODS)
    try:
        yield
    finally:
        METHODS.clear()
        METHODS.update(before)
        sys.modules.pop("smooth", None)


@pytest.mark.slow
def test_the_readmes_python_runs(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [code for language, code in blocks("README.md") if language == "python"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "NCT - ERM: " in capsys.readouterr().out
    assert [*names["grid"].frame()["status"]] == ["done"]
    assert len(names["ours"]) > 200


@pytest.mark.slow
def test_the_method_in_the_docs_runs(reader: Path) -> None:
    method, use = [
        code for language, code in blocks("docs/add-a-method.md") if language == "python"
    ]
    (reader / "smooth.py").write_text(method)
    names: dict[str, Any] = {}
    with registered():
        exec(compile(use, "add-a-method.md", "exec"), names)
        frame = names["grid"].frame()
    assert [*frame["status"]] == ["done"] and [*frame["method"]] == ["smooth"]


def test_the_slices_page_runs(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [code for language, code in blocks("docs/slices.md") if language == "python"]
    exec(compile(code, "slices.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def as_tried(command: str) -> list[str]:
    """Return a command's words with one seed, quick, and the reader's home."""
    words = [str(Path(word).expanduser()) for word in shlex.split(command)[3:]]
    if "--seeds" in words:
        words[words.index("--seeds") + 1] = "1"
    return [*words, *(["--quick", "--workers", "1"] if words[0] == "run" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, reader: Path, cli: Cli) -> None:
    for command in bench_commands(page):
        if any(part in command for part in ONLY_PARSED) or "standins" in command:
            continue
        words = as_tried(command)
        told = cli(*words)
        assert told.code == 0, f"{command}\n{told.err}"


def test_what_is_only_parsed_is_there() -> None:
    text = "\n".join((TREE / page).read_text(encoding="utf-8") for page in PAGES)
    assert [part for part in ONLY_PARSED if part not in text] == []
