"""A user at a login node, and how to compare what two of them got."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 240.0


@dataclass
class Desk:
    """A user at a login node: a results folder, a profile, and the commands."""

    results: Path
    digits: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def profile(self, **changes: Any) -> Path:
        """Write a profile that differs from slurm/dev.toml."""
        keys = {"partition": "main", "minutes": 30, "signal_seconds": 10, "parallel": 2, **changes}
        path = self.results.parent / f"profile-{len(list(self.results.parent.iterdir()))}.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
        return path

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Start a command without waiting for it."""
        command = [sys.executable, "-m", "bench", *map(str, words)]
        process = subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.results.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def bench(self, *words: object, code: int = 0) -> tuple[str, str]:
        """Carry out a command, and check how it ends."""
        out, err = self.start(*words).communicate(timeout=PATIENCE * 3)
        assert self.started[-1].returncode == code, err
        return out, err

    def run(self, *words: object, code: int = 0, profile: Path | None = None) -> tuple[str, str]:
        """Run a grid, on the cluster if a profile is given."""
        return self.bench(*self.grid(*words, profile=profile), code=code)

    def grid(self, *words: object, profile: Path | None = None) -> list[object]:
        """Return the words of a run command."""
        places = ["--data-root", self.digits, "--results", self.results]
        return ["run", *words, *places, *(["--cluster", profile] if profile else [])]

    def slurm(self, *words: object) -> str:
        """Ask SLURM something."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    @contextmanager
    def nothing_starts(self) -> Iterator[None]:
        """Keep jobs in the queue: none is started."""
        for state in ("DOWN", "UP"):
            self.slurm("scontrol", "update", "PartitionName=main", f"State={state}")
            if state == "DOWN":
                yield

    def status(self) -> dict[str, Any]:
        """Return what `bench status` says."""
        out, _ = self.bench("status", "--results", self.results, "--json")
        content: dict[str, Any] = json.loads(out)
        return content

    def records(self) -> dict[str, dict[str, Any]]:
        """Read the records."""
        paths = self.results.glob("runs/[!.]*/record.json")
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    def launches(self) -> list[dict[str, Any]]:
        """Read the launches."""
        paths = sorted(self.results.glob("launches/*/launch.json"))
        return [json.loads(path.read_text()) for path in paths]

    def progress(self) -> dict[str, int]:
        """Return the epoch of every run that is not done."""
        found = {}
        for path in self.results.glob("work/*/progress.json"):
            try:
                found[path.parent.name] = int(json.loads(path.read_text()).get("epoch", 0))
            except (FileNotFoundError, ValueError):
                continue
        return found


def wait_until(ready: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Poll until something is true, and give it back."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.1)
    pytest.fail(f"nothing happened within {seconds:.0f} s")


def assert_same_results(ours: Path, theirs: Path, run_ids: Sequence[str]) -> None:
    """Compare runs bit for bit: metrics, history and every sample's scores."""
    for run_id in run_ids:
        mine, other = (folder / "runs" / run_id for folder in (ours, theirs))
        records = [json.loads((path / "record.json").read_text()) for path in (mine, other)]
        for name in ("status", "metrics", "selection", "seed", "config", "threads", "nct"):
            assert records[0].get(name) == records[1].get(name), (run_id, name)
        assert records[0]["status"] == "done"
        assert_same_tables(mine, other)


def assert_same_tables(ours: Path, theirs: Path) -> None:
    """Compare the history and every sample's scores of two runs."""
    for table in ("history", "predictions"):
        frames = [pd.read_parquet(path / f"{table}.parquet") for path in (ours, theirs)]
        first, second = (frame.drop(columns="seconds", errors="ignore") for frame in frames)
        pd.testing.assert_frame_equal(first, second, check_exact=True)
