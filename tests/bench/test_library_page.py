"""The examples of docs/library.md and docs/slices.md run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
EXAMPLES = [code for kind, code in BLOCKS if kind == "python"]
COMMANDS = [
    line.split("#")[0].split()[3:]
    for kind, code in BLOCKS
    if kind == "sh"
    for line in code.splitlines()
]


def test_examples_run(
    digits_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BENCH_DATA", str(digits_root))
    assert len(EXAMPLES) >= 6
    names: dict[str, object] = {}
    for number, example in enumerate(EXAMPLES):
        exec(compile(example, f"example {number + 1} of {PAGE.name}", "exec"), names)
    assert (tmp_path / "digits.safetensors").is_file()
    said = capsys.readouterr().out
    assert "bootstrap over samples" in said and "seeds" in said
    assert names["model"].score(names["x"], names["y"]) > 0.7  # type: ignore[attr-defined]


def test_fitting_on_arrays_takes_ten_lines() -> None:
    (first,) = [example for example in EXAMPLES if 'bench.fit("nct"' in example]
    lines = [line for line in first.splitlines() if line.strip()]
    assert len(lines) <= 10
    assert all(len(line) <= 110 for line in lines), "one statement a line, not many"


def test_every_block_is_an_example_or_commands() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "sh"}
    assert [words[0] for words in COMMANDS] == ["new", "test", "new"]


def test_what_is_begun_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (words for words in COMMANDS if words[0] == "new"):
        assert main(words) == 0, words
    assert {path.name for path in tmp_path.iterdir()} == {"smooth.py", "birds_bench"}


@pytest.mark.slow
def test_commands_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in COMMANDS:
        assert main(words) == 0, words


def test_the_example_on_slices_runs() -> None:
    page = PAGE.with_name("slices.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "the example of slices.md", "exec"), names)
    assert names["worst"] is not None
