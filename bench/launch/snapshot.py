"""The code as it was submitted: queued jobs run a copy, so that later edits do not reach them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import bench
from bench.files import atomic_file, storage_errors, to_json
from bench.provenance import SOURCE, SUBMITTED, git_state


def take_snapshot(target: Path) -> Path | None:
    """Copy the source tree, edits and new files included, and note its commit.

    Returns None where there is no source tree but an installed package: that is what jobs run then.
    """
    root = Path(bench.__file__).parents[1]
    if (root / SUBMITTED).exists():  # a job that launches others: its own copy serves them as well
        return root
    if not (root / ".git").exists():
        return None
    state = git_state()
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard", "--", *SOURCE],
        capture_output=True,
        text=True,
        check=True,
    )
    with storage_errors(target):
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # one that was deleted but not committed is still listed
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target / name)
    with atomic_file(target / SUBMITTED) as draft:
        draft.write_text(to_json(state))
    return target
