"""Presets: every method's hyperparameters on a dataset, each value with its source.

`<dataset>.toml` has a table for each method and in it a line for each knob:
`lr = { value = 1e-3, source = "..." }`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from datasets.config import build_config
from datasets.errors import UsageError
from methods.base import Method

PRESETS = ("paper",)


@dataclass(frozen=True)
class Sourced:
    """A value and where it comes from."""

    value: Any
    source: str


@cache
def read_presets(dataset: str) -> dict[str, dict[str, Sourced]]:
    """Read every method's preset for a dataset."""
    path = Path(__file__).with_name(f"{dataset}.toml")
    if not path.is_file():
        return {}
    tables = tomllib.loads(path.read_text())
    return {
        method: {knob: Sourced(entry["value"], entry["source"]) for knob, entry in table.items()}
        for method, table in tables.items()
    }


def preset_values(method: Method, dataset: str, preset: str = "paper") -> dict[str, Any]:
    """Give the values of a preset; a method without one runs on its defaults."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset '{preset}'", f"choose from {', '.join(PRESETS)}")
    return {knob: entry.value for knob, entry in read_presets(dataset).get(method.name, {}).items()}


def preset_config(method: Method, dataset: str, preset: str = "paper") -> Any:
    """Build a method's configuration from its preset for a dataset."""
    return build_config(method.config_type, preset_values(method, dataset, preset), method.name)
