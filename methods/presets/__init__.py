"""Presets: every method's hyperparameters on a dataset, each value with its source.

`<dataset>.toml` has a table for each method and in it a line for each knob:
`lr = { value = 1e-3, source = "..." }`. A method with a first stage describes it in a table of its
own, `[cnc.erm]`, which may start from another method's (`like = "erm"`) and change some knobs. So
may a variant of a method: `[nct_plus]` starts from `[nct]`.

The preset `paper` is what the files here say. The preset `tuned` is what a study found, one file
for a method on a dataset: in the folder of presets that the user's studies wrote, else in `tuned/`
here. The others are for data that has no preset of its own, by its kind: one file each in `kinds/`,
in which one training recipe is every method's.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from datasets.base import DataKind
from datasets.config import build_config
from datasets.errors import UsageError
from methods.base import Method

KINDS = ("digits", "scratch", "pretrained", "features", "small")
PRESETS = ("paper", "tuned", *KINDS)


@dataclass(frozen=True)
class Sourced:
    """A value and where it comes from."""

    value: Any
    source: str


@cache
def read_presets(dataset: str) -> dict[str, dict[str, Sourced]]:
    """Read every method's preset for a dataset, or for a kind of data (`kinds/NAME`)."""
    path = Path(__file__).parent / f"{dataset}.toml"
    if not path.is_file():
        return {}
    tables = tomllib.loads(path.read_text())
    return {
        method: {
            knob: _sourced(entry, tables)
            for knob, entry in {**tables.get(table.get("like", ""), {}), **table}.items()
            if knob != "like"
        }
        for method, table in tables.items()
    }


def _sourced(entry: dict[str, Any], tables: dict[str, Any]) -> Sourced:
    """Read one knob, or the table of a first stage."""
    if "value" in entry:
        return Sourced(entry["value"], entry["source"])
    knobs = {**tables.get(entry.get("like", ""), {}), **entry}
    values = {name: knob["value"] for name, knob in knobs.items() if isinstance(knob, dict)}
    return Sourced(values, entry["source"])


def tuned_name(
    method: str, dataset: str, *, quick: bool, data_kind: DataKind, frozen: bool = False
) -> str:
    """Return the name of a tuned preset and its study.

    It says if they are no release's, and if they are of heads on frozen features.
    """
    other = f"-{data_kind}" if data_kind != "release" else ""
    return f"{method}-{dataset}{other}" + "-features" * frozen + "-quick" * quick


def read_tuned(method: str, name: str, folder: Path | None) -> dict[str, Sourced] | None:
    """Read a tuned preset, the user's own before the one that was shipped."""
    for place in (folder, Path(__file__).with_name("tuned")):
        path = place / f"{name}.toml" if place is not None else None
        if path is not None and path.is_file():
            tables = tomllib.loads(path.read_text())
            return {knob: _sourced(entry, tables) for knob, entry in tables[method].items()}
    return None


def preset_file(dataset: str, preset: str) -> str:
    """Return which file has a preset, as `read_presets` takes it."""
    return f"kinds/{preset}" if preset in KINDS else dataset


def has_preset(
    method: Method,
    dataset: str,
    preset: str = "paper",
    *,
    folder: Path | None = None,
    quick: bool = False,
    data_kind: DataKind = "release",
    frozen: bool = False,
) -> bool:
    """Return whether a preset has values of this method's own; arguments as of `preset_values`."""
    if preset == "paper" or preset in KINDS:
        return method.name in read_presets(preset_file(dataset, preset))
    name = tuned_name(method.name, dataset, quick=quick, data_kind=data_kind, frozen=frozen)
    return read_tuned(method.name, name, folder) is not None


def preset_values(
    method: Method,
    dataset: str,
    preset: str = "paper",
    *,
    folder: Path | None = None,
    quick: bool = False,
    data_kind: DataKind = "release",
    frozen: bool = False,
) -> dict[str, Any]:
    """Return the values of a preset; a method without one in the paper's runs on its defaults.

    Args:
        method: whose.
        dataset: on which.
        preset: `paper`, `tuned`, or a kind of data.
        folder: where the user's tuned presets are.
        quick: whether the preset is for smoke runs, which have tuned presets of their own.
        data_kind: what data it is for; a stand-in or rebuilt data has tuned presets of its own.
        frozen: whether it is for heads on frozen features, which have tuned presets of their own.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset '{preset}'", f"choose from {', '.join(PRESETS)}")
    if preset == "paper" or preset in KINDS:
        entries = read_presets(preset_file(dataset, preset)).get(method.name, {})
    else:
        name = tuned_name(method.name, dataset, quick=quick, data_kind=data_kind, frozen=frozen)
        found = read_tuned(method.name, name, folder)
        if found is None:
            smoke = " --quick" if quick else ""
            raise UsageError(
                f"there is no tuned preset '{name}'" + (f" in {folder}" if folder else ""),
                f"python -m bench tune --method {method.name} --dataset {dataset}{smoke}"
                + " --features" * frozen,
            )
        entries = found
    return {knob: entry.value for knob, entry in entries.items()}


def preset_config(method: Method, dataset: str) -> Any:
    """Build a method's configuration from a dataset's preset, or a kind's (`kinds/NAME`)."""
    return build_config(method.config_type, preset_values(method, dataset), method.name)
