"""The examples of docs/library.md run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


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
