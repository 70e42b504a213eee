"""Tasks in another environment than the launcher's: another interpreter, and a container."""

from __future__ import annotations

import json
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from desk import Desk

pytestmark = pytest.mark.slurm

GRID = ("--methods", "erm", "--datasets", "cmnist", "--quick")
RUNTIME = """#!/bin/sh
# Does as a container's runtime would, but that everything is seen from inside.
echo "$@" >> {log}
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""


def other_python(folder: Path) -> Path:
    """Make an environment whose interpreter notes that it was started."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_paths()["purelib"]
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    note = f"import sys; open({str(folder / 'started')!r}, 'a').write(sys.prefix + chr(10))\n"
    (site / "sitecustomize.py").write_text(note)
    return python


def test_tasks_run_in_another_environment(desk: Desk, tmp_path: Path) -> None:
    python = other_python(tmp_path / "other env")
    assert Path(sys.prefix) != python.parents[1]
    desk.run(*GRID, "--seeds", "1", "--wait", profile=desk.profile(python=str(python)))
    started = (python.parents[1] / "started").read_text().splitlines()
    assert set(started) == {str(python.parents[1])}, "in the task and its workers"
    (record,) = desk.records().values()
    assert record["status"] == "done"

    runtime, log = tmp_path / "runtime", tmp_path / "log"
    runtime.write_text(RUNTIME.format(log=log))
    runtime.chmod(0o755)
    words = {"container": "image.sif", "container_command": f"{runtime} exec"}
    profile = desk.profile(**words, python=sys.executable)
    desk.run(*GRID, "--seeds", "1,", "--wait", profile=profile)
    assert [r["status"] for r in desk.records().values()] == ["done", "done"]
    launch = desk.launches()[-1]
    (line,) = log.read_text().splitlines()
    seen = f"{desk.digits},{desk.results},{desk.results}/launches/{launch['id']}"
    expected = f"exec --bind {seen},{launch['code']} image.sif {sys.executable} -u -m submitit"
    assert line.startswith(expected)
    assert json.loads((desk.results / "launches" / launch["id"] / "launch.json").read_text())
