"""Showing and keeping what was measured: a table, and a CSV file for each kind of machine."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.files import atomic_file
from bench.perf.measure import THREADS, Row
from bench.perf.ours import ERM, PHASE_1, PHASE_2
from bench.provenance import environment, git_state
from datasets.errors import UsageError

COLUMNS = (
    *("case", "arm", "images_per_cpu_second", "images_per_second", "spread", "ratio"),
    "commit",
)
HEADINGS = ("case", "arm", "images per CPU-second", "spread", "of the limit", "images per second")
NOISE = r"\((?:r|tm)\)|\bcpu\b|\bprocessor\b|\bwith\b.*|@.*|\b\d+-core\b"


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Write rows for people; a case is named once."""
    written: list[tuple[str, ...]] = []
    last = ""
    for row in rows:
        case, last = row.case if row.case != last else "", row.case
        written.append(
            (
                case,
                row.arm,
                _number(row.images_per_cpu_second),
                f"{100 * row.spread:.0f}%",
                f"{row.ratio:.2f}",
                _number(row.images_per_second),
            )
        )
    return written


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def step_costs(rows: Sequence[Row]) -> list[str]:
    """Say what a step of NCT costs against one of ERM, in every case that has both."""
    ratios = {(row.case, row.arm): row.ratio for row in rows}
    return [
        f"{case}: a step of phase 1 costs {ratio / ratios[case, PHASE_1]:.2f} of an ERM step, "
        f"one of phase 2 {ratio / ratios[case, PHASE_2]:.2f}"
        for (case, arm), ratio in ratios.items()
        if arm == ERM
    ]


def machine() -> dict[str, Any]:
    """Describe what the numbers depend on."""
    known = environment()
    return {
        "processor": known["processor"] or "unknown processor",
        "cores": _cores(),
        "threads": THREADS,
        "torch": known["libraries"]["torch"],
        "commit": commit(),
    }


def machine_name() -> str:
    """Name the hardware for a file: `amd-epyc-2-cores-1-thread`."""
    known = machine()
    plain = re.sub(NOISE, " ", str(known["processor"]).lower())
    processor = re.sub("[^a-z0-9]+", "-", plain).strip("-") or "unknown"
    cores = f"{known['cores']}-core" + "s" * (known["cores"] != 1)
    return f"{processor}-{cores}-{THREADS}-thread"


def commit() -> str:
    """Name the measured code; a plus sign marks changes that are in no commit."""
    state = git_state()
    return "unknown" if not state["commit"] else state["commit"][:12] + "+" * bool(state["dirty"])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_csv(folder: Path, rows: Sequence[Row]) -> Path:
    """Put the rows into this machine's file; cases that were not measured now are kept."""
    path = folder / f"{machine_name()}.csv"
    measured = {row.case for row in rows}
    content = [line for line in read_csv(path) if line["case"] not in measured]
    content += [{**_rounded(row), "commit": commit()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(content)
    with atomic_file(path) as draft:
        draft.write_text(text.getvalue())
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read what an earlier measurement wrote, if there was one."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise UsageError(
                f"{path} is not a table of measurements: its columns are {reader.fieldnames}",
                "delete it, or give another folder with --out",
            )
        return list(reader)


def _rounded(row: Row) -> dict[str, Any]:
    digits = {"images_per_cpu_second": 1, "images_per_second": 1, "spread": 4, "ratio": 4}
    return {k: round(v, digits[k]) if k in digits else v for k, v in asdict(row).items()}
