"""Where published runs were made: what decides whether numbers are repeated exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.report.collection import Collection


def machines(runs: Collection) -> str:
    """Say on what the published runs were made, and what that means for repeating them."""
    counted = Counter(_machine(run.record) for run in runs.of_kind("published"))
    if not counted:
        return "Nothing was measured yet."
    places = "; ".join(f"{name} ({count} runs)" for name, count in counted.most_common())
    return (
        f"Measured on: {places}. The same processor type, thread count and libraries repeat these "
        "numbers exactly; others agree within the seed spread."
    )


def _machine(record: dict[str, Any]) -> str:
    environment = record["environment"]
    processor = environment.get("processor") or "unknown processor"
    device = processor if record["device"] == "cpu" else record["device"]
    threads = f"{record['threads']} thread" + ("s" if record["threads"] != 1 else "")
    return f"{device}, {threads}, torch {environment.get('libraries', {}).get('torch', 'unknown')}"
