from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import provenance
from bench.launch import snapshot
from bench.launch.snapshot import take_snapshot
from bench.provenance import SUBMITTED, git_state


def git(tree: Path, *words: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(
        ["git", *who, "-C", tree, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository in the place of ours."""
    root = tmp_path / "tree"
    for name in ("bench/__init__.py", "methods/a.py", "methods/gone.py", "results/runs/x.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("committed\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    for module in (snapshot, provenance):
        monkeypatch.setattr(module.bench, "__file__", str(root / "bench" / "__init__.py"))
    git_state.cache_clear()
    yield root
    git_state.cache_clear()


def test_edits_and_new_files_are_copied_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    (tree / "methods" / "a.py").write_text("edited\n")
    (tree / "methods" / "new.py").write_text("new\n")
    (tree / "methods" / "noise.log").write_text("ignored\n")
    (tree / "methods" / "gone.py").unlink()
    code = take_snapshot(tmp_path / "code")
    assert code is not None
    files = {str(p.relative_to(code)) for p in code.rglob("*") if p.is_file()}
    assert files == {"bench/__init__.py", "methods/a.py", "methods/new.py", SUBMITTED}
    assert (code / "methods" / "a.py").read_text() == "edited\n"
    state = {"commit": git(tree, "rev-parse", "HEAD"), "dirty": True}
    assert json.loads((code / SUBMITTED).read_text()) == state


def test_code_in_a_snapshot_knows_what_it_was_taken_from(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"commit": git(tree, "rev-parse", "HEAD"), "dirty": False}
    code = take_snapshot(tmp_path / "code")
    assert code is not None
    (tree / "methods" / "a.py").write_text("edited later\n")
    monkeypatch.setattr(provenance.bench, "__file__", str(code / "bench" / "__init__.py"))
    git_state.cache_clear()
    assert git_state() == expected
    assert take_snapshot(tmp_path / "again") == code  # a job that submits passes its own copy on


def test_an_installed_package_has_no_tree_to_copy(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "bench").mkdir(parents=True)
    monkeypatch.setattr(snapshot.bench, "__file__", str(tmp_path / "site/bench/__init__.py"))
    assert take_snapshot(tmp_path / "code") is None
    assert not (tmp_path / "code").exists()
